"""Process groups: the mesh of ranks, the pipeline as one of its ranks sees it, and what ranks agree on."""
