"""Element-wise work in kernels of Triton, which every CUDA build of torch brings along."""
