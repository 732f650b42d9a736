"""The executor on CUDA: one packed array per step, Triton kernels, CUDA graphs, sampling on the device."""
