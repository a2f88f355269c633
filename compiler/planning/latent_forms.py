"""Which of two orders computes latent attention with fewer multiplications."""

from __future__ import annotations

from typing import Literal

from ...ir.attention import Latent
from .records import Shape

Form = Literal["expanded", "absorbed"]


def cheaper_form(latent: Latent, sizes: Shape) -> Form:
    """The form with fewer multiplications.

    Expanded multiplies each key vector by uk and uv once, then attends over nope + rope and Dv columns; absorbed
    multiplies each query instead and attends over rank + rope and rank columns.
    """
    nope = sizes.head_dim - latent.rope
    projected = latent.rank * (nope + sizes.value_dim)
    expanded = sizes.kv_len * projected + sizes.q_len * sizes.kv_len * (sizes.head_dim + sizes.value_dim)
    absorbed = sizes.q_len * projected + sizes.q_len * sizes.kv_len * (2 * latent.rank + latent.rope)
    return "expanded" if expanded <= absorbed else "absorbed"
