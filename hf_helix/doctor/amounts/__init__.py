"""What a rank computes, moves and keeps: counted on the meta device.

kernels     the words in which amounts are counted                                          (no torch)
meter       counts kernels and live bytes of what runs on the meta device
made        runs operators on the meta device, each once for arguments of the same shapes
mesh        one rank of a layout, whose axes send nothing
amounts     what every operator of a rank computes, moves and keeps
lifetimes   how long memory lives that an operator leaves
kept        weights that ranks keep whole and each step a part of: which lie in one piece
"""
