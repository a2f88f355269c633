"""Modules around variants, for models: projections, rotary embeddings, caches.

A module trains, prefills and decodes with the same weights; with `cache=` it appends the rows of a step of `weft.kv`,
and attends to all that the step's sequences have.
"""

from .attention import Attention
from .latent import AbsorbedLatentAttention, LatentAttention
from .rotary import DynamicNtkScaling, LinearScaling, Llama3Scaling, NtkScaling, Rotary, YarnScaling

__all__ = [
    "AbsorbedLatentAttention", "Attention", "DynamicNtkScaling", "LatentAttention", "LinearScaling", "Llama3Scaling",
    "NtkScaling", "Rotary", "YarnScaling",
]  # fmt: skip
