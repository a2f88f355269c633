"""Attention over several devices: plans of who owns which rows, and calls on the rows that a rank holds."""

from .context import ContextParallel
from .shardplan import Links, Predicted, ShardPlan, Task, plan

__all__ = ["ContextParallel", "Links", "Predicted", "ShardPlan", "Task", "plan"]
