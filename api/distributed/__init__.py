"""Attention over several devices: plans of who owns which rows, calls on the rows that a rank holds, and caches."""

from .asked import Links
from .context import ContextParallel
from .decode import ShardedDenseCache, ShardedPagedCache
from .planner import plan
from .shardplan import Predicted, ShardPlan, Task

__all__ = [
    "ContextParallel", "Links", "Predicted", "ShardPlan", "ShardedDenseCache", "ShardedPagedCache", "Task", "plan",
]  # fmt: skip
