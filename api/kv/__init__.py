"""Caches of keys and values for prefill and decode: `PagedCache`, in blocks that sequences share, and `DenseCache`.

Both have the same face: sequences are allocated, extended a step at a time, forked, truncated, swapped and freed;
lengths and blocks are kept on the host, rows on the device.
"""

from .blocks import OutOfBlocksError
from .cache import Cache, Usage
from .dense import DenseCache
from .paged import PagedCache
from .step import Step

__all__ = ["Cache", "DenseCache", "OutOfBlocksError", "PagedCache", "Step", "Usage"]
