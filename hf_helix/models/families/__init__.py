"""Model families, one file each; `dense` and `mixture` hold what several of them share."""
