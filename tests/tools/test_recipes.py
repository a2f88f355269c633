"""Recipes of the examples against plain torch in float64, with gradients of all that they take."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import weft

EXAMPLES = Path(__file__).parents[2] / "examples"
Function = Callable[..., Tensor]
B, H, G, D = 2, 4, 2, 16  # batch rows, heads, key heads, columns


@pytest.fixture(autouse=True)
def _examples_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture(params=["cpu", "interpret"])
def target(request: pytest.FixtureRequest) -> str:
    return request.param


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def agree(target: str, ours: Function, by_hand: Function, tensors: Sequence[Tensor], near: float = 2e-4) -> None:
    """Output and the gradient of each tensor, of a loss that weighs outputs differently."""
    single = [t.clone().requires_grad_() for t in tensors]
    double = [t.double().requires_grad_() for t in tensors]
    with weft.settings(target=target):
        out = ours(*single)
        exact = by_hand(*double)
        weights = drawn(*out.shape, seed=99)
        (out * weights).sum().backward()
    (exact * weights).sum().backward()
    torch.testing.assert_close(out.double(), exact, atol=near, rtol=near)
    for n, (one, other) in enumerate(zip(single, double)):
        assert one.grad is not None and other.grad is not None and other.grad.abs().max() > 0, n
        assert torch.allclose(one.grad.double(), other.grad, atol=near * 4, rtol=near * 4), f"gradient of tensor {n}"


def test_differential_attention(target: str) -> None:
    module = load("differential")
    query, key = drawn(B, 2 * H, 20, D, seed=0), drawn(B, 2 * G, 20, D, seed=1)
    value, share = drawn(B, G, 20, 2 * D, seed=2), drawn(H, 1, 1, seed=3)
    agree(target, module.differential, module.by_hand, (query, key, value, share))


def test_differential_attention_of_version_2(target: str) -> None:
    """Two queries of one key head are subtracted, also where a key head has several pairs."""
    module = load("differential")
    for groups in (1, 2, 4):
        query, key, value = (drawn(B, n, 19, D, seed=n) for n in (2 * H, groups, groups))
        agree(target, module.differential_v2, module.by_hand_v2, (query, key, value, drawn(B, H, 19, seed=3)))


def test_native_sparse_attention(target: str) -> None:
    module = load("nsa")
    length, size = 40, 8
    query, key, value = (drawn(B, n, length, D, seed=n + m) for m, n in enumerate((H, G, G)))
    gates, pool = torch.rand(B, H, length, 3, generator=torch.Generator().manual_seed(7)), drawn(size, seed=8) / 3

    def ours(*tensors: Tensor) -> Tensor:
        return module.attend(*tensors, size, 3, 11)

    agree(target, ours, lambda *t: module.by_hand(*t, size, 3, 11), (query, key, value, gates, pool))


@pytest.mark.parametrize("length", [40, 37])
def test_mixture_of_block_attention(target: str, length: int) -> None:
    module = load("moba")
    query, key, value = (drawn(B, n, length, D, seed=n + m) for m, n in enumerate((H, G, G)))
    agree(target, lambda *t: module.attend(*t, 8, 3), lambda *t: module.by_hand(*t, 8, 3), (query, key, value))


@pytest.mark.parametrize(("length", "total"), [(12, 30), (17, 17), (1, 9)])
def test_transformer_xl(target: str, length: int, total: int) -> None:
    module = load("transformer_xl")
    query, key, value = (drawn(B, H, n, D, seed=m) for m, n in enumerate((length, total, total)))
    r, u, v = drawn(H, total + length - 1, D, seed=4), drawn(H, D, seed=5), drawn(H, D, seed=6)
    agree(target, module.attend, module.by_hand, (query, key, value, r, u, v))


def test_the_sinusoids_of_transformer_xl_are_of_distances() -> None:
    found = load("transformer_xl").sinusoids(torch.tensor([0.0, 3.0, -1.0]), 4)
    rates = torch.tensor([1.0, 0.01])
    for row, distance in zip(found, (0.0, 3.0, -1.0)):
        torch.testing.assert_close(row, torch.cat([(distance * rates).sin(), (distance * rates).cos()]))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_registers(target: str, count: int) -> None:
    """Rows of tokens are those of a text without registers; a register is one more query behind its tokens."""
    module = load("multi_token")
    query, key, value = (drawn(B, H, 10 * (count + 1), D, seed=m) for m in range(3))

    def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = []
        for row in range(query.shape[2]):
            token = row // (count + 1)
            seen = [n * (count + 1) for n in range(token + 1)] + ([row] if row % (count + 1) else [])
            weights = (query[:, :, row, None] @ key[:, :, seen].mT / D**0.5).softmax(-1)
            rows.append(weights @ value[:, :, seen])
        return torch.cat(rows, 2)

    agree(target, lambda *t: module.mutor(*t, registers=count), by_hand, (query, key, value))


def test_positions_of_registers_are_those_before_what_they_predict() -> None:
    found = load("multi_token").positions(4, 3, torch.device("cpu"))
    assert found.tolist() == [0, 2, 1, 3, 2, 4, 3, 5]


@pytest.mark.parametrize(("queries", "keys"), [(20, 12), (9, 30)])
def test_cross_attention(target: str, queries: int, keys: int) -> None:
    module = load("cross_attention")
    query, key, value = (drawn(B, H, n, D, seed=m) for m, n in enumerate((queries, keys, keys)))
    lengths = torch.tensor([keys, 5], dtype=torch.int32)
    valid = torch.arange(keys) < lengths[:, None]
    places = torch.arange(queries, dtype=torch.float64)[:, None] * keys / queries
    near = ((torch.arange(keys) - places).abs() <= 3)[None, None]

    def padded(*tensors: Tensor) -> Tensor:
        return module.by_hand(*tensors, valid[:, None, None])

    agree(target, lambda *t: module.everything(*t, kv_lens=lengths), padded, (query, key, value))
    agree(target, lambda *t: module.where_valid(*t, valid=valid), padded, (query, key, value))
    agree(target, lambda *t: module.aligned(*t, near=3, q_offset=0), lambda *t: module.by_hand(*t, near),
          (query, key, value))  # fmt: skip


# -- torch's module ----------------------------------------------------------------------------------------------------
LENGTH, WIDTH = 13, 32
HIDDEN = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.4
HIDDEN.fill_diagonal_(False)
PADDED = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [9]])
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
OPTIONS: dict[str, dict] = {
    "no mask": {},
    "bool": {"attn_mask": HIDDEN},
    "float": {"attn_mask": drawn(LENGTH, LENGTH, seed=2)},
    "of each head": {"attn_mask": drawn(B * H, LENGTH, LENGTH, seed=3)},
    "bool of each head": {"attn_mask": HIDDEN.repeat(B * H, 1, 1)},
    "minus infinity": {"attn_mask": torch.zeros(LENGTH, LENGTH).masked_fill(CAUSAL, -torch.inf)},
    "causal": {"attn_mask": CAUSAL, "is_causal": True},
    "padding": {"key_padding_mask": PADDED},
    "padding by a float": {"key_padding_mask": torch.zeros(B, LENGTH).masked_fill(PADDED, -torch.inf)},
    "both": {"attn_mask": CAUSAL, "key_padding_mask": PADDED},
}


def same_modules(**made: object) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    """torch's module in float64, and ours with its weights."""
    torch.manual_seed(0)
    theirs, ours = (nn.MultiheadAttention(WIDTH, H, **made) for _ in range(2))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) / 4)
    ours.load_state_dict(theirs.state_dict())
    return theirs.double(), load("multihead").MultiheadAttention.of(ours)


def with_doubles(options: dict) -> dict:
    return {n: o.double() if isinstance(o, Tensor) and o.is_floating_point() else o for n, o in options.items()}


def compare_modules(target: str, made: dict, options: dict, inputs: Sequence[Tensor]) -> None:
    theirs, ours = same_modules(**made)

    def attend(module: nn.MultiheadAttention, options: dict, *tensors: Tensor) -> Tensor:
        return module(*tensors, need_weights=False, **options)[0]

    agree(target, lambda *t: attend(ours, options, *t), lambda *t: attend(theirs, with_doubles(options), *t), inputs)
    for (name, one), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.allclose(one.grad.double(), other.grad, atol=2e-3, rtol=2e-3), f"gradient of {name}"


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_masks_of_torchs_module(target: str, options: dict) -> None:
    inputs = [drawn(B, LENGTH, WIDTH, seed=n) for n in range(3)]
    compare_modules(target, {"batch_first": True}, options, inputs)


@pytest.mark.parametrize(
    "made", [{}, {"bias": False}, {"add_zero_attn": True}, {"kdim": 24, "vdim": 20}], ids=str
)  # fmt: skip
def test_forms_of_torchs_module(target: str, made: dict) -> None:
    """Keys of another length and width, in the layout [L, B, width]."""
    sizes = (LENGTH, WIDTH), (21, made.get("kdim", WIDTH)), (21, made.get("vdim", WIDTH))
    inputs = [drawn(length, B, width, seed=n) for n, (length, width) in enumerate(sizes)]
    compare_modules(target, made, {}, inputs)
    mask = torch.rand(LENGTH, 21, generator=torch.Generator().manual_seed(4)) < 0.3
    compare_modules(target, made, {"attn_mask": mask}, inputs)


def test_torchs_module_without_a_batch() -> None:
    inputs = [drawn(LENGTH, WIDTH, seed=n) for n in range(3)]
    for batch_first in (True, False):
        options = {"attn_mask": HIDDEN, "key_padding_mask": PADDED[1]}
        compare_modules("cpu", {"batch_first": batch_first}, options, inputs)


def test_the_module_drops_weights_in_training_alone() -> None:
    _, ours = same_modules(batch_first=True, dropout=0.5)
    x = drawn(B, LENGTH, WIDTH, seed=0)
    with torch.no_grad():
        assert not torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])
        ours.eval()
        assert torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])


def test_an_encoder_calls_the_module_once_torchs_own_kernel_is_off() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, H, 64, batch_first=True).eval()
    load("multihead").MultiheadAttention.of(layer.self_attn)
    calls: list[int] = []
    layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    x = drawn(B, LENGTH, WIDTH, seed=0)
    with torch.no_grad():
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            layer(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert calls == [1]


def test_what_the_module_has_not_is_refused() -> None:
    _, ours = same_modules()
    x = drawn(LENGTH, B, WIDTH, seed=0)
    with pytest.raises(ValueError, match="need_weights=True: weights are never in memory"):
        ours(x, x, x, need_weights=True)
    with pytest.raises(ValueError, match="is_causal=True: torch's module wants attn_mask too"):
        ours(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match="add_bias_kv=True: a key that is not in the sequence"):
        load("multihead").MultiheadAttention.of(nn.MultiheadAttention(WIDTH, H, add_bias_kv=True))
