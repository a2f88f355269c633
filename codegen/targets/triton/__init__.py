"""Target triton, and interpret: portable kernels."""
