"""Plans that others are compared with: one strand, two strands in turn, the paper, tiles of one strand."""
