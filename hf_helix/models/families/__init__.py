"""Model families: one file each, which declares what a decoder layer of the family computes."""
