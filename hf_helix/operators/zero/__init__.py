"""ZeRO: data-parallel replicas shard weights, gradients and optimizer states.

flat_parameter  the parameters of a unit in a flat buffer, sharded over ranks
grouping        the parameters of each flat parameter
host_shard      a shard on the host, and its copy on the device (`offload="optimizer"`)
zero1           every rank keeps the full weights and updates a shard (`shard_optimizer`)
zero3           every rank keeps a shard; operators run on full weights (`shard_parameters`)
"""
