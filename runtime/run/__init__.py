"""From a call to a launch.

    variant.py      finds what is prepared for a call, checks it, and launches: forward, backward
    key.py          what of a call the prepared kernels depend on
    prepared.py     what is prepared for calls of one kind, and the longer way of a call
    gradients.py    what no kernel computes: gradients of operands from sums of reads, calls without pairs
    kept.py         what was measured of tiles, kept for calls with the same tensors
    first_key.py    what is said of queries before the first key

The fast ways, which a call tries first, are codegen/launch/fast.
"""
