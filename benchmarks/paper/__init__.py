"""The paper's tables and figures, by simulation, beside what the paper printed.

published   the paper's own numbers: models, layouts, results
models      its models, on the meta device
runs        its methods: what each of them is here, and a row under each
ring        the ring of context parallelism that these methods run, in the place of ours
ablation    the steps of its figure 15
throughput  figures 11 to 15 and tables 6 and 7: speeds
inside      figures 3, 4, 5, 10, 16, table 1 and section 6.5: shares, pairs, memory, plans
plain       the best layout that one strand has, beside the paper's
bounds      every rule's plan beside what no plan can beat
fit         the few constants of the clusters, fitted
ablate      graphs, profiles and runners that leave plans less freedom
artifacts   all of them by number
table       a table as text, with its picture, and the page with all of them
draw        their pictures
"""
