"""Parameters on ranks: cuts along a dimension, flat parameters, and shards on the host."""
