"""Weft: an attention variant is one Python expression; forward and backward kernels are generated from it."""
