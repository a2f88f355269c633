"""Rooms of the kernels of target triton: one a kernel, or a few that belong together."""
