"""Target hopper: warp-specialised kernels for sm_90."""
