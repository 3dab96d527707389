"""Plans: the order in which a rank issues operators; rules, search and files of plans."""
