"""Rooms of the kernels of target hopper: one a kernel."""
