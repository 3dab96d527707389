"""Units: the operators of a decoder layer, the embedding or the head."""
