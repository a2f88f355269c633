"""What type checkers know of calls. `python -m tests.options` writes it from runtime/options.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat, overload

import torch
from torch import Tensor

from ..compiler.planning.schedule import Schedule
from ..runtime.options import Form

Result = Tensor | tuple[Tensor, Tensor]
Own = Tensor | SupportsFloat  # an operand of the variant's own: a tensor, or a number of Python or numpy


class Methods:
    """`weft.Attention` as type checkers see its calls."""

    if TYPE_CHECKING:

        @overload
        def __call__(
            self, query: Tensor, key: Tensor, value: Tensor | None = None, *,
            return_lse: Literal[False] = False, q_offset: int | Tensor | None = None,
            target: str | None = None, schedule: str | Schedule | None = None,
            deterministic: bool | None = None, uk: Tensor | None = None, uv: Tensor | None = None,
            rope: Tensor | None = None, form: Form | None = None, kv_lens: Tensor | None = None,
            q_lens: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
            cu_seqlens_kv: Tensor | None = None, block_table: Tensor | None = None,
            seed: int | Tensor | None = None, train: bool = True, q_descale: float | Tensor | None = None,
            k_descale: float | Tensor | None = None, v_descale: float | Tensor | None = None,
            out_dtype: torch.dtype | None = None, operands: Mapping[str, Any] | None = None, **own: Own,
        ) -> Tensor: ...  # fmt: skip
        @overload
        def __call__(
            self, query: Tensor, key: Tensor, value: Tensor | None = None, *, return_lse: Literal[True],
            q_offset: int | Tensor | None = None, target: str | None = None,
            schedule: str | Schedule | None = None, deterministic: bool | None = None,
            uk: Tensor | None = None, uv: Tensor | None = None, rope: Tensor | None = None,
            form: Form | None = None, kv_lens: Tensor | None = None, q_lens: Tensor | None = None,
            cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
            block_table: Tensor | None = None, seed: int | Tensor | None = None, train: bool = True,
            q_descale: float | Tensor | None = None, k_descale: float | Tensor | None = None,
            v_descale: float | Tensor | None = None, out_dtype: torch.dtype | None = None,
            operands: Mapping[str, Any] | None = None, **own: Own,
        ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
        @overload
        def __call__(
            self, query: Tensor, key: Tensor, value: Tensor | None = None, *, return_lse: bool,
            q_offset: int | Tensor | None = None, target: str | None = None,
            schedule: str | Schedule | None = None, deterministic: bool | None = None,
            uk: Tensor | None = None, uv: Tensor | None = None, rope: Tensor | None = None,
            form: Form | None = None, kv_lens: Tensor | None = None, q_lens: Tensor | None = None,
            cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
            block_table: Tensor | None = None, seed: int | Tensor | None = None, train: bool = True,
            q_descale: float | Tensor | None = None, k_descale: float | Tensor | None = None,
            v_descale: float | Tensor | None = None, out_dtype: torch.dtype | None = None,
            operands: Mapping[str, Any] | None = None, **own: Own,
        ) -> Result: ...  # fmt: skip
        def __call__(self, *given: Any, **own: Any) -> Any: ...
        @overload
        def reference(
            self, query: Tensor, key: Tensor, value: Tensor | None = None, *,
            return_lse: Literal[False] = False, q_offset: int | Tensor | None = None,
            uk: Tensor | None = None, uv: Tensor | None = None, rope: Tensor | None = None,
            kv_lens: Tensor | None = None, q_lens: Tensor | None = None,
            cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
            block_table: Tensor | None = None, seed: int | Tensor | None = None, train: bool = True,
            q_descale: float | Tensor | None = None, k_descale: float | Tensor | None = None,
            v_descale: float | Tensor | None = None, out_dtype: torch.dtype | None = None,
            operands: Mapping[str, Any] | None = None, **own: Own,
        ) -> Tensor: ...  # fmt: skip
        @overload
        def reference(
            self, query: Tensor, key: Tensor, value: Tensor | None = None, *, return_lse: Literal[True],
            q_offset: int | Tensor | None = None, uk: Tensor | None = None, uv: Tensor | None = None,
            rope: Tensor | None = None, kv_lens: Tensor | None = None, q_lens: Tensor | None = None,
            cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
            block_table: Tensor | None = None, seed: int | Tensor | None = None, train: bool = True,
            q_descale: float | Tensor | None = None, k_descale: float | Tensor | None = None,
            v_descale: float | Tensor | None = None, out_dtype: torch.dtype | None = None,
            operands: Mapping[str, Any] | None = None, **own: Own,
        ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
        @overload
        def reference(
            self, query: Tensor, key: Tensor, value: Tensor | None = None, *, return_lse: bool,
            q_offset: int | Tensor | None = None, uk: Tensor | None = None, uv: Tensor | None = None,
            rope: Tensor | None = None, kv_lens: Tensor | None = None, q_lens: Tensor | None = None,
            cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
            block_table: Tensor | None = None, seed: int | Tensor | None = None, train: bool = True,
            q_descale: float | Tensor | None = None, k_descale: float | Tensor | None = None,
            v_descale: float | Tensor | None = None, out_dtype: torch.dtype | None = None,
            operands: Mapping[str, Any] | None = None, **own: Own,
        ) -> Result: ...  # fmt: skip
        def reference(self, *given: Any, **own: Any) -> Any: ...
