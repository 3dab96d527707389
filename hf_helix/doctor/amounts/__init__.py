"""The work and the memory of a rank, counted on the meta device.

meter       counts kernels, transfers and live bytes of operators on the meta device
made        runs operators on the meta device, with a cache of the shapes of results
mesh        the mesh of one rank, whose axes send nothing
amounts     kernels, bytes sent and live memory of every operator of a rank
lifetimes   lifetimes of the memory that operators leave allocated
"""
