"""Plans: the order in which a rank issues operators, and how it is found."""
