"""Continuous batching: `Server` puts requests of different lengths through one cache, a step at a time.

`Graphed` is a model whose steps of one token a sequence are CUDA graphs.
"""

from .graphed import Graphed, Model
from .server import Request, Server, State, Totals

__all__ = ["Graphed", "Model", "Request", "Server", "State", "Totals"]
