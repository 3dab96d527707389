"""Plans to compare with: two strands in turn, the plans of the DHelix paper, and one strand with tiled collectives."""
