"""ZeRO: weights, gradients and optimizer states that data-parallel ranks shard.

flat_parameter  parameters of a unit in one flat buffer, of which each rank has a shard
grouping        which parameters share a flat parameter
zero1           every rank keeps the full weights and updates a shard (`shard_optimizer`)
zero3           every rank keeps a shard; operators get full weights while they run (`shard_parameters`)
"""
