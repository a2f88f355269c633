"""Whatever a model does to its mask gives what it gives to sdpa's mask of bools, or is refused with words."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad, scaled_dot_product_attention

from weft import UnavailableError

masking_utils = pytest.importorskip("transformers.masking_utils")  # the extra weft-attention[transformers]
from weft.integrations import masking  # noqa: E402
from weft.integrations.masking import Mask  # noqa: E402
from weft.integrations.rules import mask  # noqa: E402
from weft.integrations.transformers import attention  # noqa: E402

LOWEST = torch.finfo(torch.float32).min
SCORES = torch.randn(2, 4, 7, 9, generator=torch.Generator().manual_seed(0))
BOOLS = SCORES[:, :1] > 0


def given() -> dict[str, Any]:
    """Seven queries from position 2 on, nine keys, and padding before one sequence and behind the other."""
    seen = torch.tensor([[False] * 2 + [True] * 7, [True] * 8 + [False]])
    return {"batch_size": 2, "q_length": 7, "kv_length": 9, "q_offset": 2, "attention_mask": seen,
            "mask_function": masking_utils.sliding_window_causal_mask_function(5)}  # fmt: skip


def ours() -> Mask:
    made = mask(**given())
    assert isinstance(made, Mask)
    return made


def theirs() -> Tensor:
    return masking_utils.sdpa_mask(**given(), allow_is_causal_skip=False)


@pytest.fixture(autouse=True)
def _told() -> Any:
    """What is told once in a process is told to nobody here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="weft: the model computes with its mask itself")
        yield


def written_to(m: Any, *at: Any) -> Any:
    m[at] = True
    return m


def stored(m: Any) -> Any:
    file = io.BytesIO()
    torch.save(m, file)
    file.seek(0)
    return torch.load(file)


def in_scores(m: Any) -> Tensor:
    scores = SCORES.clone()
    scores += torch.where(m, 0.0, LOWEST)
    return scores


WAYS: dict[str, Callable[[Any], Any]] = {
    # what is asked of it
    "shape": lambda m: m.shape,
    "size": lambda m: m.size(),
    "size of a dimension": lambda m: m.size(-1),
    "shape of a dimension": lambda m: m.shape[-1],
    "ndim": lambda m: m.ndim,
    "dim": lambda m: m.dim(),
    "len of shape": lambda m: len(m.shape),
    "len": lambda m: len(m),
    "numel": lambda m: m.numel(),
    "dtype": lambda m: m.dtype,
    "device": lambda m: m.device,
    "type of device": lambda m: m.device.type,
    "is_cuda": lambda m: m.is_cuda,
    "is_cpu": lambda m: m.is_cpu,
    "get_device": lambda m: m.get_device(),
    "is_floating_point": lambda m: m.is_floating_point(),
    "torch.is_floating_point": torch.is_floating_point,
    "requires_grad": lambda m: m.requires_grad,
    "is None": lambda m: m is None,
    "is not None": lambda m: m is not None,
    "isinstance Tensor": lambda m: isinstance(m, Tensor),
    "isinstance BlockMask": lambda m: isinstance(m, BlockMask),
    "isinstance dict": lambda m: isinstance(m, dict),
    "torch.is_tensor": torch.is_tensor,
    "hasattr dtype": lambda m: hasattr(m, "dtype"),
    "callable": callable,
    # copies and casts
    "contiguous": lambda m: m.contiguous(),
    "clone": lambda m: m.clone(),
    "detach": lambda m: m.detach(),
    "to a device": lambda m: m.to("cpu"),
    "to a device by name": lambda m: m.to(device=torch.device("cpu")),
    "to floats": lambda m: m.to(torch.float32),
    "to floats by name": lambda m: m.to(dtype=torch.float16),
    "to bools": lambda m: m.to(torch.bool),
    "to both": lambda m: m.to("cpu", torch.int64),
    "to another's": lambda m: m.to(SCORES),
    "to another's, of bools": lambda m: m.to(BOOLS),
    "cpu": lambda m: m.cpu(),
    "bool": lambda m: m.bool(),
    "float": lambda m: m.float(),
    "long": lambda m: m.long(),
    "int": lambda m: m.int(),
    "half": lambda m: m.half(),
    "type_as": lambda m: m.type_as(SCORES),
    "type": lambda m: m.type(torch.float32),
    "tolist": lambda m: m.tolist(),
    "numpy": lambda m: torch.from_numpy(m.numpy()),
    "data": lambda m: m.data,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "saved and loaded": stored,
    "new_ones": lambda m: m.new_ones(3),
    "new_zeros": lambda m: m.new_zeros((2, 2)),
    "zeros_like": torch.zeros_like,
    "ones_like, of floats": lambda m: torch.ones_like(m, dtype=torch.float32),
    "full_like": lambda m: torch.full_like(m, 2.0, dtype=torch.float32),
    # shapes
    "its first keys": lambda m: m[:, :, :, :5],
    "its first keys, in short": lambda m: m[..., :5],
    "more keys than it has": lambda m: m[:, :, :, :20],
    "all of it": lambda m: m[:, :, :, :],
    "all but the last key": lambda m: m[..., :-1],
    "its last keys": lambda m: m[:, :, :, 4:],
    "every other key": lambda m: m[..., ::2],
    "its last queries": lambda m: m[:, :, -3:, :],
    "one batch row": lambda m: m[0],
    "no heads": lambda m: m[:, 0],
    "one query": lambda m: m[:, :, 2],
    "a new dimension": lambda m: m[:, :, None],
    "by a tensor": lambda m: m[:, :, torch.tensor([1, 3])],
    "by bools": lambda m: m[BOOLS],
    "as an index": lambda m: SCORES[:, :1][m],
    "iterated": lambda m: list(m),
    "expand": lambda m: m.expand(2, 4, 7, 9),
    "expand_as": lambda m: m.expand_as(SCORES),
    "repeat": lambda m: m.repeat(1, 4, 1, 1),
    "repeat_interleave": lambda m: m.repeat_interleave(3, dim=0),
    "unsqueeze": lambda m: m.unsqueeze(2),
    "squeeze": lambda m: m.squeeze(1),
    "view": lambda m: m.view(2, 7, 9),
    "reshape": lambda m: m.reshape(-1, 9),
    "transpose": lambda m: m.transpose(2, 3),
    "mT": lambda m: m.mT,
    "permute": lambda m: m.permute(1, 0, 2, 3),
    "flip": lambda m: m.flip(-1),
    "narrow": lambda m: m.narrow(3, 1, 4),
    "index_select": lambda m: m.index_select(0, torch.tensor([1, 1])),
    "chunk": lambda m: m.chunk(2, dim=-1),
    "split": lambda m: torch.split(m, 4, dim=-1),
    "gather": lambda m: m.gather(3, torch.zeros(2, 1, 7, 2).long()),
    "unbind": lambda m: m.unbind(0),
    "tril": lambda m: m.tril(),
    "flatten": lambda m: m.flatten(),
    "cat": lambda m: torch.cat([m, m], dim=-1),
    "cat with another": lambda m: torch.cat((m, BOOLS), dim=1),
    "stack": lambda m: torch.stack([m, BOOLS]),
    "pad": lambda m: pad(m, (0, 3)),
    "pad with ones": lambda m: pad(m, (2, 0), value=True),
    "roll": lambda m: m.roll(1, -1),
    # logic, comparisons and numbers
    "~": lambda m: ~m,
    "&": lambda m: m & BOOLS,
    "& from the right": lambda m: BOOLS & m,
    "|": lambda m: m | m,
    "^": lambda m: m ^ BOOLS,
    "logical_not": lambda m: m.logical_not(),
    "logical_and": lambda m: torch.logical_and(BOOLS, m),
    "== 0": lambda m: m == 0,
    "!= 0": lambda m: m != 0,
    "== another": lambda m: m == BOOLS,
    "< 1": lambda m: m < 1,
    "> 0": lambda m: m > 0,
    ">= 1": lambda m: m >= 1,
    "eq": lambda m: m.eq(False),
    "ne": lambda m: torch.ne(m, 1),
    "torch.equal": lambda m: torch.equal(m, theirs()),
    "isinf": lambda m: torch.isinf(m.float()),
    "* floats": lambda m: SCORES * m,
    "* a number": lambda m: m * 2.0,
    "/": lambda m: m / 2,
    "+ bools": lambda m: m + BOOLS,
    "sum": lambda m: m.sum(-1),
    "any": lambda m: m.any(),
    "all": lambda m: m.all(dim=-1),
    "max": lambda m: m.max(),
    "amin": lambda m: m.amin(-1),
    "cumsum": lambda m: m.cumsum(-1),
    "argmax": lambda m: m.int().argmax(-1),
    "minimum": lambda m: torch.minimum(m, BOOLS),
    "torch.min": lambda m: torch.min(m.float(), dim=-1).values,
    "nonzero": lambda m: m.nonzero(),
    "where": lambda m: torch.where(m, 0.0, LOWEST),
    "Tensor.where": lambda m: SCORES.where(m, LOWEST),
    "masked_fill": lambda m: SCORES.masked_fill(~m, LOWEST),
    "masked_fill by it": lambda m: SCORES.masked_fill(m, 0.0),
    "its own masked_fill": lambda m: m.masked_fill(BOOLS, False),
    "masked_select": lambda m: SCORES[:, :1].masked_select(m),
    "added in place": in_scores,
    "einsum": lambda m: torch.einsum("bhqk,bhqk->bq", m.float(), SCORES[:, :1]),
    "matmul": lambda m: m.float() @ SCORES.mT,
    "softmax": lambda m: torch.where(m, SCORES, LOWEST).softmax(-1),
    "scaled_dot_product_attention": lambda m: scaled_dot_product_attention(
        SCORES, torch.ones(2, 4, 9, 9).tril(), torch.eye(9).expand(2, 4, 9, 9), attn_mask=m
    ),
    "vmap": lambda m: torch.vmap(torch.logical_not)(m),
    "f-string of a sum": lambda m: f"{m.sum()}",
    "if any": lambda m: 1 if m.any() else 0,
    "item": lambda m: m[0, 0, 0, 0].item(),
    "bool()": lambda m: bool(m[0, 0, 3, 5]),
    # writes
    "written to": lambda m: written_to(m, slice(None), slice(None), 0),
    "written to by bools": lambda m: written_to(m, BOOLS),
    "masked_fill_": lambda m: m.masked_fill_(BOOLS, True),
    "&=": lambda m: m.__iand__(BOOLS),
    "fill_": lambda m: m.fill_(True),
    "copy_": lambda m: m.copy_(BOOLS),
    "copied from": lambda m: torch.empty_like(BOOLS).copy_(m),
    "out": lambda m: torch.logical_or(BOOLS, BOOLS, out=m),
    "zero_": lambda m: m.zero_(),
}


def alike(got: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        if isinstance(got, Mask):
            got = masking.tensor_of(got)
        assert type(got) is Tensor
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    elif isinstance(expected, (list, tuple)) and not isinstance(expected, torch.Size):
        assert len(got) == len(expected)
        for one, other in zip(got, expected):
            alike(one, other)
    else:
        assert got == expected and type(got) is type(expected)


@pytest.mark.parametrize("way", WAYS)
def test_a_way_to_use_a_mask(way: str) -> None:
    alike(WAYS[way](ours()), WAYS[way](theirs()))


LENDS_ITSELF = (
    "its first keys",
    "its first keys, in short",
    "more keys than it has",
    "all of it",
    "contiguous",
    "clone",
    "detach",
    "to a device",
    "to a device by name",
    "to bools",
    "to another's, of bools",
    "bool",
    "written to",
    "written to by bools",
    "masked_fill_",
    "&=",
    "fill_",
    "copy_",
    "out",
    "zero_",
)


@pytest.mark.parametrize("way", LENDS_ITSELF)
def test_what_comes_of_it_and_the_mask_itself_are_computed_under(way: str) -> None:
    """Those that stay a rule, and those that are written to."""
    own, dense = ours(), theirs()
    for got, expected in ((WAYS[way](own), WAYS[way](dense)), (own, dense)):
        keys = expected.shape[3]
        seen = pairs(got, keys)
        torch.testing.assert_close(seen, expected[:, 0])


def pairs(given: Any, keys: int) -> Tensor:
    """bool [batch, queries, keys]: what an attention under this mask sees."""
    query, key = torch.zeros(2, 1, 7, 4), torch.zeros(2, 1, keys, 4)
    value = torch.eye(keys).expand(2, 1, -1, -1).contiguous()
    return attention(nn.Module(), query, key, value, given, is_causal=False)[0][:, :, 0] > 0


def test_a_mask_stays_a_rule_where_nothing_computes_with_it() -> None:
    for way in LENDS_ITSELF[:12]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert isinstance(WAYS[way](ours()), Mask), way
    own = ours()
    pairs(own, 9)
    assert own.made is None


def test_writes_through_what_was_cut_off_are_seen() -> None:
    for cut in (lambda m: m[..., :9], lambda m: m[:, :, :, :6], lambda m: m[:, :, 1:3], lambda m: m.expand(2, 1, 7, 9)):
        own = ours()
        part = cut(own)
        part[..., 0] = True
        dense = theirs()
        cut(dense)[..., 0] = True
        assert torch.equal(pairs(own, 9), dense[:, 0])
    own, dense = ours(), theirs()
    cut_before, kept = own[..., :6], own.clone()
    own[:, :, 0] = True
    assert torch.equal(pairs(kept, 9), dense[:, 0])
    dense[:, :, 0] = True
    assert torch.equal(pairs(cut_before, 6), dense[:, 0, :, :6])


def _by_numpy(mask: Tensor) -> None:
    mask.numpy()[..., :2] = False


def _by_data(mask: Tensor) -> None:
    mask.data[..., :2] = False


def _as_data(mask: Tensor) -> None:
    mask.data = theirs() & (torch.arange(9) > 1)


@pytest.mark.parametrize("write", [_by_numpy, _by_data, _as_data])
def test_writes_that_torch_does_not_count_are_seen(write: Any) -> None:
    own, dense = ours(), theirs().clone()
    part = own[..., :6]
    write(own)
    write(dense)
    assert torch.equal(pairs(own, 9), dense[:, 0])
    if write is not _as_data:  # which leaves what was cut before with the old memory
        assert torch.equal(pairs(part, 6), dense[:, 0, :, :6])


def test_other_memory_is_refused() -> None:
    with pytest.raises(UnavailableError, match="gives its mask other memory"):
        ours().set_(theirs())


def test_a_mask_that_is_added_to_floats_hides() -> None:
    """As models want it that compute attention themselves, and know of masks of floats alone."""
    additive = torch.where(theirs(), 0.0, LOWEST)
    for added in (
        lambda m: SCORES + m, lambda m: m + SCORES, lambda m: torch.add(SCORES, m), lambda m: SCORES.add(m),
        lambda m: SCORES.clone().add_(m), lambda m: SCORES.clone().__iadd__(m),
    ):  # fmt: skip
        torch.testing.assert_close(added(ours()), SCORES + additive)
    halves = SCORES.half() + ours()
    assert halves.dtype is torch.float16 and torch.equal(halves.softmax(-1) > 0, theirs().expand(2, 4, 7, 9))


def test_a_mask_that_is_subtracted_is_refused() -> None:
    for computed in (lambda m: 1.0 - m, lambda m: m - 1, lambda m: -m, lambda m: torch.sub(1, m), lambda m: SCORES - m):
        with pytest.raises(
            UnavailableError, match=r'subtracts its mask.*load the model with attn_implementation="eager"'
        ):
            computed(ours())


def test_it_is_told_once_that_a_mask_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_warn_that_it_is_made", masking._warn_that_it_is_made.__wrapped__)
    with pytest.warns(RuntimeWarning, match=r"computes with its mask itself \(where\).*as under sdpa"):
        torch.where(ours(), 0.0, LOWEST)


@pytest.mark.parametrize("way", ["where", "cat", "its first keys", "~", "masked_fill", "dtype", "shape", "expand",
                                 "isinstance BlockMask", "to floats", "written to", "to a device", "pad"])  # fmt: skip
def test_ways_are_compiled(way: str) -> None:
    torch.compiler.reset()

    def inside(scores: Tensor) -> Any:
        m = mask(**given())
        return WAYS[way](m), pairs(m, 9), scores + 1

    def outside(scores: Tensor, m: Any) -> Any:
        return WAYS[way](m), pairs(m, 9), scores + 1

    for compiled, args in ((inside, ()), (outside, (ours(),))):
        found = torch.compile(compiled, fullgraph=True, backend="eager")(SCORES, *args)
        dense = theirs()
        alike(found[0], WAYS[way](dense))
        assert torch.equal(found[1], dense[:, 0])
