"""The columns of the benchmark: Weft's targets and what they are compared with, behind one small interface."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from bench_fp8 import Cudnn, Quantized
from bench_rows import Row
from bench_variants import LATENT_RANK, kept_as_weft, sink_logits, starts, torch_variant, weft_variant
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions

Tensor = torch.Tensor


class NotOffered(Exception):
    """The peer has no such variant, or is not installed; the text is shown in the report."""


@dataclass(frozen=True)
class Operands:
    """Leaves that require gradients, and the gradient of the output, [B, heads, S, head dim] of each."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor

    @property
    def device(self) -> str:
        return self.query.device.type

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


@dataclass(frozen=True)
class Fp8Operands(Operands):
    """The leaves are what the FP8 numbers stand for, in the dtype of other rows; they want no gradients."""

    quantized: Quantized


@dataclass(frozen=True)
class LatentOperands(Operands):
    """The key is a cache [B, 1, S, rank + shared], the value the weights [heads, rank, own + value dim] that expand it.

    Peers read `expanded` in their forward, so that they expand keys and values in each call, as Weft does.
    """

    shared: int  # columns of a key that all heads share

    @property
    def uk(self) -> Tensor:
        return self.value[..., : self.query.shape[3] - self.shared]

    @property
    def uv(self) -> Tensor:
        return self.value[..., self.query.shape[3] - self.shared :]

    def expanded(self) -> Operands:
        latent, shared = self.key.split((LATENT_RANK, self.shared), -1)
        shared = shared.expand(-1, self.query.shape[1], -1, -1)
        return Operands(self.query, torch.cat((latent @ self.uk, shared), -1), latent @ self.uv, self.grad_out)


def as_attended(operands: Operands) -> Operands:
    """Query, key and value as attention takes them."""
    return operands.expanded() if isinstance(operands, LatentOperands) else operands


@dataclass(frozen=True)
class Contender:
    """A column at work on one row."""

    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, Tensor, Tensor]  # what `forward` reads: query, key, value
    grad_out: Tensor  # in the layout of what `forward` returns
    seq_first: bool = False  # [B, S, H, D] instead of [B, H, S, D]
    packed: bool = False  # leaves have no batch dimension
    own_numbers: bool = False  # results depend on random numbers that no other column has: they are not compared
    setup: Callable[[], object] | None = None  # timed apart: Flex's mask build
    context: Callable[[], contextlib.AbstractContextManager[object]] = field(default=contextlib.nullcontext)
    learned: tuple[Tensor, ...] = ()  # what the score reads, whose gradients belong to the row's work
    trains: bool = True  # whether there is a backward
    by: str = ""  # the target that Weft chose, where none is named
    real: Callable[[Tensor], Tensor] = lambda out: out  # what the output of `forward` stands for

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (*self.leaves, *self.learned), self.grad_out, retain_graph=True)

    def results(self) -> tuple[Tensor, ...]:
        """Output and gradients, [B, H, S, D], for comparison; those of what is learned last."""
        with self.context():
            out = self.forward()
            gradients = self.backward(out) if self.trains else ()
            found = (self.real(out), *(g[None] if self.packed else g for g in gradients))
        return tuple((x.transpose(1, 2) if self.seq_first else x).detach() for x in found)


def make_operands(row: Row, device: str, dtype: torch.dtype = torch.bfloat16) -> Operands:
    generator = torch.Generator(device).manual_seed(0)
    if row.variant == "latent":
        return _latent_operands(row, device, dtype, generator)
    sizes = ((row.heads, row.dim), (row.kv_heads, row.dim), (row.kv_heads, row.value_dim), (row.heads, row.value_dim))
    query, key, value, grad_out = (
        torch.randn(row.batch, heads, row.length, width, generator=generator, device=device, dtype=dtype)
        for heads, width in sizes
    )
    if row.fp8:
        quantized = Quantized.of(row, (query, key, value))
        return Fp8Operands(*quantized.real(dtype), grad_out, quantized)
    return Operands(query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), grad_out)


def _latent_operands(row: Row, device: str, dtype: torch.dtype, generator: torch.Generator) -> LatentOperands:
    shared = row.parameter
    sizes = (
        (row.batch, row.heads, row.length, row.dim),
        (row.batch, 1, row.length, LATENT_RANK + shared),
        (row.heads, LATENT_RANK, row.dim - shared + row.value_dim),
        (row.batch, row.heads, row.length, row.value_dim),
    )
    query, cache, weights, grad_out = (
        torch.randn(size, generator=generator, device=device, dtype=dtype) for size in sizes
    )
    weights = weights / math.sqrt(LATENT_RANK)
    return LatentOperands(query.requires_grad_(), cache.requires_grad_(), weights.requires_grad_(), grad_out, shared)


def contender(column: str, row: Row, operands: Operands) -> Contender:
    """Raises NotOffered, or whatever the peer raises, where the column cannot do the row."""
    if row.fp8 and column not in FP8_COLUMNS:
        raise NotOffered("its operands are of 16 bits")
    if column not in BF16_COLUMNS and not row.fp8:
        raise NotOffered("for operands in FP8")
    made = COLUMNS[column](row, operands)
    return replace(made, trains=False) if row.fp8 else made


def _contender(operands: Operands, forward: Callable[[], Tensor], learned: tuple[Tensor, ...] = ()) -> Contender:
    return Contender(forward, operands.leaves, operands.grad_out, learned=learned)


MOST_DENSE = 1 << 16  # tokens of a row of which some columns make a mask of all pairs


def _refuse_dense(row: Row) -> None:
    if row.lens and row.length > MOST_DENSE:
        raise NotOffered("a mask of all pairs of tokens is too large")


# --- plain torch --------------------------------------------------------------------------------------------------


def _math(row: Row, operands: Operands) -> Contender:
    _refuse_dense(row)
    variant = torch_variant(row, operands.device)
    scale = 1 / math.sqrt(row.dim)

    def index(size: int, axis: int) -> Tensor:
        shape = [1, 1, 1, 1]
        shape[axis] = size
        return torch.arange(size, device=operands.device).view(shape)

    where = index(row.batch, 0), index(row.heads, 1), index(row.length, 2), index(row.length, 3)

    def forward() -> Tensor:
        query, key, value = as_attended(operands).leaves
        key, value = (x.repeat_interleave(row.heads // row.kv_heads, 1) for x in (key, value))
        scores = query @ key.mT * scale
        if variant.score_mod:
            scores = variant.score_mod(scores, *where).to(scores.dtype)
        if variant.mask_mod:
            scores = scores.masked_fill(~variant.mask_mod(*where), float("-inf"))
        if variant.sinks is not None:
            more = variant.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            return torch.cat([scores, more], -1).softmax(-1)[..., :-1] @ value
        weights = scores.sigmoid() if variant.sigmoid else scores.softmax(-1)
        if variant.dropout:
            weights = weights * kept_as_weft(row, variant.dropout, operands.device).to(weights.dtype)
        return weights @ value

    return _contender(operands, forward, variant.learned)


# --- SDPA ---------------------------------------------------------------------------------------------------------


def _sdpa(backend: SDPBackend) -> Callable[[Row, Operands], Contender]:
    def build(row: Row, operands: Operands) -> Contender:
        if row.lens and backend == SDPBackend.FLASH_ATTENTION:
            return _varlen(row, operands)
        if row.variant not in ("full", "causal", "dropout", "bias", "latent") or row.lens:
            raise NotOffered("SDPA has no such variant")
        if row.variant == "bias" and backend == SDPBackend.FLASH_ATTENTION:
            raise NotOffered("FA2 takes no bias")
        causal = row.variant in ("causal", "dropout", "latent")
        variant = torch_variant(row, operands.device)

        def forward() -> Tensor:
            return F.scaled_dot_product_attention(
                *as_attended(operands).leaves, variant.bias, variant.dropout, causal,
                enable_gqa=row.kv_heads < row.heads,
            )  # fmt: skip

        return Contender(
            forward,
            operands.leaves,
            operands.grad_out,
            own_numbers=variant.dropout > 0,
            context=lambda: sdpa_kernel(backend),
            learned=variant.learned,
        )

    return build


def _varlen(row: Row, operands: Operands) -> Contender:
    """torch's kernels of FlashAttention 2 for packed sequences."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise NotOffered(f"torch.nn.attention.varlen cannot be imported: {error}") from error
    cu, longest = starts(row, operands.device), max(row.lens)
    known = inspect.signature(varlen_attn).parameters
    causal = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    dropout = row.parameter / 100 if row.variant == "dropout" else 0.0

    def forward() -> Tensor:
        rows = [x[0].transpose(0, 1) for x in as_attended(operands).leaves]
        if dropout:  # which the function for people leaves out
            of = torch.ops.aten._flash_attention_forward
            return of(*rows, cu, cu, longest, longest, dropout, True, False)[0].transpose(0, 1)[None]
        return varlen_attn(*rows, cu, cu, longest, longest, **causal).transpose(0, 1)[None]

    return Contender(forward, operands.leaves, operands.grad_out, own_numbers=dropout > 0)


def _cudnn_fp8(row: Row, operands: Operands) -> Contender:
    assert isinstance(operands, Fp8Operands)
    try:
        import cudnn  # noqa: F401
    except Exception as error:  # it opens libraries, which may be others than it was made for
        raise NotOffered(f"nvidia-cudnn-frontend cannot be imported: {error}") from error
    if row.variant not in ("full", "causal"):
        raise NotOffered("cuDNN's FP8 attention has no such variant")
    if row.fp8_per != "tensor":
        raise NotOffered("cuDNN's FP8 attention has one descale a tensor")
    made = Cudnn(row, operands.quantized)
    return Contender(made.forward, operands.leaves, operands.grad_out, real=made.real)


# --- FlexAttention ------------------------------------------------------------------------------------------------


def start_row() -> None:
    """Forget compiled code between rows, so that no limit on recompilation sends a row down the eager path."""
    import torch._functorch.config as functorch_config

    torch._dynamo.reset()
    functorch_config.donated_buffer = False  # a donated buffer forbids retain_graph


def flex(backend: Literal["FLASH"] | None, compiled: bool = True) -> Callable[[Row, Operands], Contender]:
    def build(row: Row, operands: Operands) -> Contender:
        from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

        if backend == "FLASH":
            _import_fa4()
            if row.variant in ("full", "causal", "sink"):
                raise NotOffered("the kernels of FA4, which has its own column here")
        _refuse_dense(row)
        variant = torch_variant(row, operands.device)
        if variant.sigmoid:
            raise NotOffered("FlexAttention takes a softmax of what score_mod gives, and no other weights")
        if variant.dropout:
            raise NotOffered("FlexAttention has no dropout")

        def build_mask() -> BlockMask | None:
            if variant.mask_mod is None:
                return None
            return create_block_mask(variant.mask_mod, None, None, row.length, row.length, operands.device)

        block_mask = build_mask()
        options: FlexKernelOptions | None = {"BACKEND": backend} if backend else None
        attend = torch.compile(flex_attention, fullgraph=True, dynamic=False) if compiled else flex_attention

        def forward() -> Tensor:
            query, key, value = as_attended(operands).leaves
            grouped = row.kv_heads < row.heads
            if variant.sinks is None:
                return attend(
                    query, key, value, variant.score_mod, block_mask, kernel_options=options, enable_gqa=grouped
                )  # fmt: skip
            # Flex has no sinks: models scale its output by what they leave to the keys
            out, rows = attend(
                query, key, value, variant.score_mod, block_mask, kernel_options=options, enable_gqa=grouped,
                return_aux=AuxRequest(lse=True),
            )  # fmt: skip
            return (out * torch.sigmoid(rows.lse - variant.sinks[:, None])[..., None]).to(out.dtype)

        setup = build_mask if variant.mask_mod else None
        return Contender(forward, operands.leaves, operands.grad_out, setup=setup, learned=variant.learned)

    return build


# --- FA4 ----------------------------------------------------------------------------------------------------------


def _import_fa4() -> Callable[..., Tensor | tuple[Tensor, ...]]:
    try:
        from flash_attn.cute import flash_attn_func
    except Exception as error:  # a package that is there may fail in many ways
        raise NotOffered(f"flash_attn.cute cannot be imported: {error}") from error
    return flash_attn_func


def _fa4(row: Row, operands: Operands) -> Contender:
    attend = _import_fa4()
    if row.variant == "dropout":
        raise NotOffered("FA4 has no dropout")
    if isinstance(operands, LatentOperands):
        return _fa4_latent(row, operands)
    if row.lens:
        return _fa4_varlen(row, operands)
    if row.variant not in ("full", "causal", "sink"):
        raise NotOffered("FA4 takes variants through FlexAttention: see Flex (FLASH)")
    query, key, value = (
        x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (operands.query, operands.key, operands.value)
    )
    grad_out = operands.grad_out.transpose(1, 2).contiguous()
    options: dict[str, Tensor] = {}
    if row.variant == "sink":  # in bf16, and without a gradient of its own there
        options["learnable_sink"] = sink_logits(row.heads, operands.device).detach().to(torch.bfloat16)

    def forward() -> Tensor:
        out = attend(query, key, value, causal=row.variant in ("causal", "sink"), **options)
        return out[0] if isinstance(out, tuple) else out

    return Contender(forward, (query, key, value), grad_out, seq_first=True)


def _fa4_packed(row: Row, operands: Operands) -> Callable[..., Tensor]:
    """FA4 of packed query, key and value [tokens, heads, width], causal."""
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except ImportError as error:
        raise NotOffered(f"flash_attn.cute has no varlen function: {error}") from error
    cu, known = starts(row, operands.device), inspect.signature(flash_attn_varlen_func).parameters
    longest = {n: max(row.lens) for n in ("max_seqlen_q", "max_seqlen_k") if n in known}

    def attend(*rows: Tensor) -> Tensor:
        out = flash_attn_varlen_func(*rows, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, **longest)
        return out[0] if isinstance(out, tuple) else out

    return attend


def _fa4_latent(row: Row, operands: LatentOperands) -> Contender:
    dense, packed = _import_fa4(), _fa4_packed(row, operands) if row.lens else None

    def forward() -> Tensor:
        rows = [x.transpose(1, 2) for x in operands.expanded().leaves]
        if packed is not None:
            return packed(*(x[0] for x in rows))[None].transpose(1, 2)
        out = dense(*rows, causal=True)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return _contender(operands, forward)


def _fa4_varlen(row: Row, operands: Operands) -> Contender:
    attend = _fa4_packed(row, operands)
    query, key, value = (
        x.detach()[0].transpose(0, 1).contiguous().requires_grad_()
        for x in (operands.query, operands.key, operands.value)
    )
    grad_out = operands.grad_out.transpose(1, 2).contiguous()

    def forward() -> Tensor:
        return attend(query, key, value)[None]

    return Contender(forward, (query, key, value), grad_out, seq_first=True, packed=True)


LEARNS = ("bias", "bias_fp32", "t5", "bias_by_key", "factor_by_query")  # variants whose operands' gradients are timed


# --- Weft ---------------------------------------------------------------------------------------------------------


def _weft(target: str | None, deterministic: bool | None = None) -> Callable[[Row, Operands], Contender]:
    def build(row: Row, operands: Operands) -> Contender:
        declared, arguments = weft_variant(row, operands.device)
        options = {"target": target, "deterministic": deterministic, **arguments}

        if isinstance(operands, Fp8Operands):
            data, options = operands.quantized.data, {**operands.quantized.options, **options}
            made = _contender(operands, lambda: declared(*data, **options))
            by = "" if target else declared.plan(*data, **options).kernels[-1].target
            return replace(made, by=by)

        def forward() -> Tensor:
            if isinstance(operands, LatentOperands):
                own = {"uk": operands.uk, "uv": operands.uv, "form": "expanded"}
                return declared(operands.query, operands.key, **own, **options)
            return declared(operands.query, operands.key, operands.value, **options)

        # of a sink the peers have no gradient
        learned = [x for x in arguments.values() if row.variant in LEARNS and isinstance(x, Tensor)]
        return _contender(operands, forward, tuple(learned))

    return build


COLUMNS: dict[str, Callable[[Row, Operands], Contender]] = {
    "math": _math,
    "fa2": _sdpa(SDPBackend.FLASH_ATTENTION),
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "flex": flex(None),
    "flex_flash": flex("FLASH"),
    "fa4": _fa4,
    "weft_triton": _weft("triton"),
    "weft_hopper": _weft("hopper"),
    "weft_repeats": _weft("hopper", deterministic=True),
    "cudnn_fp8": _cudnn_fp8,
    "weft_chosen": _weft(None),
}
BF16_COLUMNS = tuple(column for column in COLUMNS if column not in ("cudnn_fp8", "weft_chosen"))
FP8_COLUMNS = ("math", "cudnn_fp8", "weft_chosen", "weft_triton", "weft_hopper")  # those of rows whose operands are FP8
TITLES = {
    "math": "plain torch",
    "fa2": "FA2 (SDPA)",
    "cudnn": "cuDNN (SDPA)",
    "flex": "Flex (Triton)",
    "flex_flash": "Flex (FLASH)",
    "fa4": "FA4",
    "weft_triton": "Weft triton",
    "weft_hopper": "Weft hopper",
    "weft_repeats": "Weft hopper, deterministic",
    "cudnn_fp8": "cuDNN FP8",
    "weft_chosen": "Weft, no target named",
}
# what results are compared with: the first of these that worked on the row
REFERENCES = ("cudnn", "flex", "fa2", "math")
