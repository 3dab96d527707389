"""Model families: relatives share a file; `dense` and `mixture` hold what several of them share."""
