"""ZeRO: data-parallel replicas shard weights, gradients and optimizer states.

grouping  the parameters of each flat parameter
zero1     every rank keeps the full weights and updates a shard (`shard_optimizer`)
zero3     every rank keeps a shard; operators run on full weights (`shard_parameters`)
"""
