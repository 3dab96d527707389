"""Units: the operators of a decoder layer, the embedding or the head, and the rows of their parameters."""
