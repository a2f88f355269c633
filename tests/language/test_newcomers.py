"""What people bring along from torch, numpy, SDPA and FlexAttention: taken where it means something, else refused with
what to write instead."""

import copy
import math
import pickle
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

import weft
from tests import fresh
from weft import WeftError, head, kv_pos, masks, q_pos, score, scores
from weft.ir import foreign
from weft.ir.expr import NoAttributeError

slopes = weft.tensor("slopes", 1)
window, cap = weft.scalar("window", int), weft.scalar("cap")
CAUSAL = weft.Attention(mask=masks.causal, name="causal")
CAPPED = weft.Attention(cap * weft.tanh(score / cap), masks.causal & (q_pos - kv_pos < window), name="capped")


def qkv(heads: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(1, heads, 8, 16), torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16)


def refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises(WeftError, match=match) as caught:
        make()
    assert f"{__file__}:" in str(caught.value)


# -- functions of torch, numpy and math --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: torch.tanh(score), r"`torch.tanh` computes numbers, .* write weft.tanh\(x\)"),
        (lambda: torch.exp(slopes[head]), r"`torch.exp` .* write weft.exp\(x\)"),
        (lambda: torch.where(kv_pos < 4, score, 0.0), r"`torch.where` .* write weft.where\(condition, a, b\)"),
        (lambda: torch.minimum(q_pos, kv_pos), r"write weft.minimum\(a, b\)"),
        (lambda: torch.clamp(q_pos, 0, 3), r"write weft.minimum\(weft.maximum\(x, low\), high\)"),
        (lambda: torch.relu(score), r"write weft.maximum\(x, 0.0\)"),
        (lambda: torch.nn.functional.silu(score), r"write x \* weft.sigmoid\(x\)"),
        (lambda: torch.logical_and(kv_pos < 4, q_pos < 4), "write a & b"),
        (lambda: torch.add(score, 1), r"write a \+ b"),
        (lambda: torch.cumsum(score, 0), r"cumsum looks at many pairs, .* in torch, .* as x\[weft.batch, weft.head"),
        (lambda: torch.erf(score), "the language has no erf; its functions are those of weft: abs cos exp"),
        (lambda: torch.tanh(slopes), r"write weft.tanh\(x\)"),
        (lambda: np.tanh(score), r"`numpy.tanh` computes numbers, .* write weft.tanh\(x\)"),
        (lambda: np.maximum(score, 0.0), r"write weft.maximum\(a, b\)"),
        (lambda: np.where(kv_pos < 4, score, 0.0), r"`numpy.where` .* write weft.where\(condition, a, b\)"),
        (lambda: np.logical_and(kv_pos < 4, q_pos < 4), "write a & b"),
        (lambda: np.clip(q_pos, 0, 3), r"write weft.minimum\(weft.maximum\(x, low\), high\)"),
        (lambda: math.tanh(score), r"not a number yet.* write weft.tanh\(x\) for math.tanh\(x\)"),
        (lambda: math.floor(score), r"write weft.floor\(x\)"),
        (lambda: math.ceil(score), r"write -weft.floor\(-x\)"),
        (lambda: math.trunc(score), r"write weft.where\(x < 0, -weft.floor\(-x\), weft.floor\(x\)\)"),
        (lambda: round(score), r"write weft.floor\(x\) \+ weft.where\(x - weft.floor\(x\) < 0.5, 0, 1\)"),
        (lambda: int(score), r"write weft.where\(x < 0, -weft.floor\(-x\), weft.floor\(x\)\), which is an int"),
        (lambda: complex(score), "not a number yet"),
        (lambda: divmod(q_pos, 2), "write x // y and x % y"),
        (lambda: q_pos >> 1, "write x // 2"),
        (lambda: 1 << q_pos, r"write x \* 2"),
        (lambda: score @ score, "is not part of the language: weft.score is scale"),
        (lambda: masks.causal(), r"`kv_pos <= q_pos` is an expression and takes no arguments"),
        (lambda: score[0], "`score` is one number .* has no index"),
        (lambda: score.tanh(), r"an expression has no .tanh; write weft.tanh\(x\)"),
        (lambda: q_pos.clamp(0), r"an expression has no .clamp; write weft.minimum\(weft.maximum"),
        (lambda: score.float(), "write x as it is"),
        (lambda: slopes.shape, "has no .shape; write weft.q_len"),
        (lambda: torch.ones(4)[head], r'shape \[4\] cannot .* x = weft.tensor\("x", 1, float\), read x\[head\]'),
        (lambda: torch.ones(4, 8).int()[head, q_pos], r'weft.tensor\("x", 2, int\), read x\[head, q_pos\]'),
        (lambda: [1.0, 2.0][head], r'lists and arrays cannot .* for table\[x\] declare table = weft.tensor'),
    ],
)  # fmt: skip
def test_functions_of_others(make: Callable[[], object], match: str) -> None:
    refused(make, match)


def test_an_attribute_that_is_none_is_an_attribute_error() -> None:
    assert not hasattr(score, "tanh") and getattr(slopes, "shape", None) is None
    with pytest.raises(NoAttributeError, match=r"write weft.exp\(x\)"):
        score.exp()
    assert str(copy.deepcopy(score + 1)) == str(pickle.loads(pickle.dumps(score + 1))) == "score + 1"


def test_functions_over_keys_are_none_of_weft() -> None:
    with pytest.raises(AttributeError, match="weft has no 'topk', .* function; topk looks at many pairs"):
        weft.topk  # noqa: B018


def test_every_function_of_the_language_is_named_for_torch_and_numpy() -> None:
    for name in weft.ir.functions.__all__:
        assert f"write weft.{name}(" in foreign.instead_of(name)


def test_a_tensor_operand_is_indexed_before_it_is_computed_with() -> None:
    for make in (
        lambda: slopes + 1, lambda: 2 * slopes, lambda: slopes * slopes, lambda: -slopes, lambda: slopes < 1,
        lambda: slopes == 3, lambda: slopes != 3.0, lambda: abs(slopes), lambda: slopes(head), lambda: bool(slopes),
        lambda: np.float32(2) * slopes, lambda: torch.ones(()) * slopes, lambda: slopes == torch.ones(3),
    ):  # fmt: skip
        refused(make, r"slopes is a tensor: index it, e.g. slopes\[head\]")
    assert slopes == weft.tensor("slopes", 1) and slopes != weft.tensor("slopes", 2) and slopes in {slopes}


# -- numbers of numpy and of 0-d tensors -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: score * np.float32(0.5), "score * 0.5"),
        (lambda: np.float32(0.5) * score, "0.5 * score"),
        (lambda: np.float64(0.5) - score, "0.5 - score"),
        (lambda: q_pos + np.int64(3), "q_pos + 3"),
        (lambda: np.int64(3) // kv_pos, "3 // kv_pos"),
        (lambda: np.int32(3) < q_pos, "3 < q_pos"),
        (lambda: np.True_ & (q_pos < 3), "True & (q_pos < 3)"),
        (lambda: (q_pos < 3) | np.False_, "(q_pos < 3) | False"),
        (lambda: np.array(3) - q_pos, "3 - q_pos"),
        (lambda: slopes[np.int64(1)], "slopes[1]"),
        (lambda: score * torch.tensor(0.5), "score * 0.5"),
        (lambda: torch.tensor(0.5) * score, "0.5 * score"),
        (lambda: torch.tensor(3) - q_pos, "3 - q_pos"),
        (lambda: torch.tensor(3) // q_pos, "3 // q_pos"),
        (lambda: torch.tensor(0.5) / score, "0.5 / score"),
        (lambda: torch.tensor(3) % q_pos, "3 % q_pos"),
        (lambda: torch.tensor(3) >= q_pos, "3 >= q_pos"),
        (lambda: torch.tensor(True) & (q_pos < 3), "True & (q_pos < 3)"),
        (lambda: weft.tanh(np.float32(0.5)), "tanh(0.5)"),
        (lambda: weft.minimum(torch.tensor(3), q_pos), "minimum(3, q_pos)"),
    ],
)
def test_numbers_of_numpy_and_torch_are_constants(make: Callable[[], object], text: str) -> None:
    assert str(make()) == text


def test_numbers_as_fields_of_a_variant() -> None:
    made = weft.Attention(mask=np.True_, scale=np.float32(0.5))
    assert made == weft.Attention(mask=torch.tensor(True), scale=torch.tensor(0.5)) == weft.Attention(scale=0.5)
    assert scores.softcap(np.float32(2))(score).text == "2.0 * tanh(score / 2.0)"


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: score * torch.ones(4), r'got a tensor of shape \[4\]; declare x = weft.tensor\("x", 1, float\)'),
        (lambda: torch.ones(4).int() + q_pos, r'a tensor of shape \[4\]; declare x = weft.tensor\("x", 1, int\)'),
        (lambda: np.ones((2, 3)) * score, r'an ndarray of shape \[2, 3\]; declare x = weft.tensor\("x", 2, float\)'),
        (lambda: masks.causal & torch.ones(4, 4).bool(), r'declare x = weft.tensor\("x", 2, bool\)'),
        (
            lambda: score * torch.tensor(0.5, requires_grad=True),
            r'a tensor of shape \[\]; declare x = weft.tensor\("x"',
        ),
        (lambda: score * [1.0, 2.0], r"got list; numbers in a row are a tensor operand"),
        (lambda: score + np.float32("nan"), "expected a number, got NaN"),
        (lambda: score + torch.tensor(torch.nan), "expected a number, got NaN"),
        (lambda: q_pos < np.int64(2**31), "integer overflow: the constant 2147483648 does not fit in 32 bits"),
        (lambda: q_pos < 10**5000, "integer overflow: the constant an int of 16610 bits does not fit in 32 bits"),
        (lambda: score * torch.tensor(0.5, requires_grad=True), r'x = weft.tensor\("x", 0, float\), read x as it is'),
        (lambda: max(score, 0.0), r"and `weft.maximum\(a, b\)` for `max\(a, b\)`"),
        (lambda: score * torch.tensor(0.5, device="meta"), r"expected an expression or a number, got a tensor"),
        (lambda: score * np.complex64(1), "expected an expression or a number, got"),
    ],
)
def test_arrays_and_other_numbers_are_refused(make: Callable[[], object], match: str) -> None:
    refused(make, match)


def test_numbers_of_numpy_are_scalar_operands() -> None:
    q, k, v = qkv()
    exact = CAPPED(q, k, v, window=4, cap=2.0)
    for given in (np.int64(4), np.int16(4), np.array(4)):
        assert torch.equal(CAPPED(q, k, v, window=given, cap=np.float32(2)), exact)
    torch.testing.assert_close(CAPPED.reference(q, k, v, window=np.int32(4), cap=np.int64(2)), exact)
    assert torch.equal(CAUSAL(q, k, v, q_offset=np.int64(0)), CAUSAL(q, k, v))
    assert CAPPED.plan(q, k, v, window=np.int64(4), cap=np.float32(2)) == CAPPED.plan(q, k, v, window=4, cap=2.0)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"window": torch.tensor(4), "cap": 1.0}, r'pass window=int\(window\), .* weft.tensor\("window", 0, int\)'),
        (
            {"window": 4, "cap": torch.tensor(1.0)},
            r"cap: expected a Python number, got a tensor; pass cap=float\(cap\)",
        ),
        ({"window": np.float32(4), "cap": 1.0}, r"window: expected an int, got np.float32\(4.0\)"),
        ({"window": np.True_, "cap": 1.0}, r"window: expected an int, got np.True_"),
        ({"window": 4, "cap": np.True_}, r"cap: expected a number, got np.True_"),
        ({"window": 4, "cap": 10**400}, r"cap: float overflow: .* got an int of 1329 bits"),
        ({"window": 10**5000, "cap": 1.0}, r"window: integer overflow: .* got an int of 16610 bits"),
    ],
)
def test_scalar_operands_that_are_none(given: dict[str, object], match: str) -> None:
    q, k, v = qkv()
    for call in (CAPPED, CAPPED.reference):
        with pytest.raises(WeftError, match=match):
            call(q, k, v, **given)


# -- score= and mask= --------------------------------------------------------------------------------------------------
seen = torch.ones(6, 6, dtype=torch.bool)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: weft.Attention(mask=lambda b, h, q, k: q >= k), r"mask: .* got a function; .*: mask=q_pos >= kv_pos"),
        (lambda: weft.Attention(mask=lambda q, k: q >= k), r"mask=q_pos >= kv_pos"),
        (lambda: weft.Attention(lambda s, b, h, q, k: s + (q - k)), r"score: .*: score=score \+ \(q_pos - kv_pos\)"),
        (lambda: weft.Attention(lambda s: s * 2), r"score: .*: score=score \* 2"),
        (
            lambda: weft.Attention(mask=lambda b, h, q, k: seen[q, k]),
            r"write what it computes of weft.batch, weft.head",
        ),
        (lambda: weft.Attention(lambda s, *rest: torch.tanh(s)), r"score: .* such as score=50.0 \* weft.tanh"),
        (
            lambda: weft.Attention(score_mod=lambda s, b, h, q, k: s * 2),
            r"score_mod: unknown field, .*score=score \* 2",
        ),
        (
            lambda: weft.Attention(mask_mod=lambda b, h, q, k: q >= k),
            r"mask_mod: unknown field, .*mask=q_pos >= kv_pos",
        ),
        (lambda: weft.Attention(scores.softcap), r"call it: weft.scores.softcap\(...\)\(weft.score\)"),
        (lambda: weft.Attention(scores.softcap(5.0)), r"call it: weft.scores.softcap\(...\)\(weft.score\)"),
        (lambda: weft.Attention(mask=masks.sliding_window), r"call it: weft.masks.sliding_window\(...\)"),
        (lambda: masks.causal & masks.prefix_lm, r"got function; weft.masks.prefix_lm\(...\)"),
        (lambda: weft.Attention(mask=seen), r"mask=seen\[weft.q_pos, weft.kv_pos\]\), .*; a causal mask is mask="),
        (lambda: weft.Attention(mask=seen[None, None]), r"mask=seen\[0, 0, weft.q_pos, weft.kv_pos\]"),
        (
            lambda: weft.Attention(mask=seen[:4].numpy()),
            r"seen\[weft.q_pos - \(weft.kv_len - weft.q_len\), weft.kv_pos\]",
        ),
        (lambda: weft.Attention(mask=seen.float()), r"score=weft.score \+ bias\[weft.q_pos, weft.kv_pos\]"),
        (
            lambda: weft.Attention(torch.zeros(2, 6, 6)),
            r"score=weft.score \+ bias\[weft.head, weft.q_pos, weft.kv_pos\]",
        ),
        (lambda: weft.Attention(scale=torch.ones(3)), r"scale: expected an expression, got a tensor of shape \[3\]"),
        (lambda: weft.Attention(scale=math.inf), "scale: expected a finite number, got inf"),
        (lambda: weft.Attention(mask="causal"), r"mask: .* got str; weft.parse\('causal', ...\) .* weft.masks.causal"),
        (lambda: weft.Attention(score=None), "score: expected an expression, got None; leave it out"),
        (lambda: weft.Attention(mask=None), "mask: expected an expression, got None; leave it out"),
        (lambda: weft.Attention(latent=(512, 64)), r"latent: expected weft.Latent\(rank=..., rope=...\) or None, got"),
        (lambda: CAUSAL.replace(mask="x"), "got str"),
    ],
)
def test_scores_and_masks_of_others(make: Callable[[], object], match: str) -> None:
    refused(make, match)


def test_the_mask_that_the_message_suggests_works() -> None:
    q, k, v = qkv()
    given = torch.rand(1, 1, 8, 8) < 0.7
    with pytest.raises(WeftError, match="declare seen") as caught:
        weft.Attention(mask=given)
    written = re.search(r"declare seen = (.*) and (weft.Attention\(.*\]\))", str(caught.value))
    assert written is not None
    operand = eval(written[1])
    out = eval(written[2], {"seen": operand, "weft": weft})(q, k, v, seen=given)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=given)
    visible = given.any(-1, keepdim=True)
    torch.testing.assert_close(out, torch.where(visible, exact, 0.0))


OPTIONS = {
    "is_causal": (True, r"weft.Attention\(mask=weft.kv_pos <= weft.q_pos\)"),
    "attn_mask": (None, r"a mask is declared, weft.Attention\(mask=...\)"),
    "dropout_p": (0.0, r"declare it: weft.Attention\(dropout=0.1\), and give train=False"),
    "enable_gqa": (True, "leave it out: heads are grouped wherever key and value have fewer heads"),
    "block_mask": (None, "a mask is declared"),
    "score_mod": (None, r"a score is declared, weft.Attention\(score=...\)"),
    "softmax_scale": (0.1, r"weft.Attention\(scale=0.125\)"),
    "window_size": ((4, 0), r"weft.q_pos - weft.kv_pos < n"),
    "kv_indptr": (None, "write block_table="),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_others(name: str) -> None:
    q, k, v = qkv()
    value, match = OPTIONS[name]
    for take in (CAUSAL, CAUSAL.reference):
        with pytest.raises(WeftError, match=f"causal: {name}: unknown operand or option; .*{match}"):
            take(q, k, v, **{name: value})
    with pytest.raises(WeftError, match=f"{name}: unknown field, expected some of score, mask.*; .*{match}"):
        weft.Attention(**{name: value})


def test_names_of_others_for_symbols() -> None:
    for name, symbol in foreign.SYMBOL_NAMES.items():
        assert symbol in weft.ir.expr.SYMBOLS and not hasattr(weft, name)
        with pytest.raises(AttributeError, match=f"it is weft.{symbol}$"):
            getattr(weft, name)


def test_a_misspelt_option_is_named() -> None:
    with pytest.raises(WeftError, match=r"block_tables: unknown operand .*; did you mean block_table\?"):
        CAUSAL(*qkv(), block_tables=None)


def test_what_is_wrong_with_tensors_and_with_options_is_told_together() -> None:
    q, k, v = qkv()
    for query in (q.half(), q.numpy()):
        with pytest.raises(WeftError, match=r"(?s)capped:\n.*(key|query): expected.*windw: unknown.*cap: missing"):
            CAPPED(query, k, v, windw=4)


def test_a_tensor_operand_of_another_rank_names_its_declaration() -> None:
    shifted = weft.Attention(score + slopes[head], name="shifted")
    with pytest.raises(WeftError, match=r"slopes: expected 1 dimension, as declared at .*, got shape \[2, 1\]"):
        shifted(*qkv(), slopes=torch.ones(2, 1))


def test_every_hint_is_for_a_name_that_is_no_option_of_the_call() -> None:
    known = {"mask", "score", "scale", "sink", "dropout", "device"}  # of a variant's fields and of other methods
    assert not (foreign.OPTIONS.keys() & weft.ir.expr.CALL_OPTIONS) - known


def test_arguments_by_position() -> None:
    q, k, v = qkv()
    for take in (CAUSAL, CAUSAL.reference):
        with pytest.raises(
            WeftError, match=r"causal: expected query, key and value by position, got 1 more \(Tensor\)"
        ):
            take(q, k, v, seen)


# -- tensors -----------------------------------------------------------------------------------------------------------
def nested(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([x[0], x[0, :, :4]], layout=torch.jagged if x.shape[1] == 1 else torch.strided)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda q, k, v: (q.numpy(), k, v), r"query: expected a tensor, got ndarray; torch.from_numpy\(x\) makes one"),
        (lambda q, k, v: (q, k, v.tolist()), r"value: expected a tensor, got list; torch.tensor\(x\) makes one"),
        (lambda q, k, v: (q, None, v), "key: expected a tensor, got NoneType"),
        (lambda q, k, v: (q.to_sparse(), k, v), r"query: expected a dense tensor, got layout .*; call x.to_dense\(\)"),
        (lambda q, k, v: (q, k, v.to_sparse()), r"value: expected a dense tensor, got layout"),
        (lambda q, k, v: (nested(q), k, v), r"query: expected a dense tensor, got a nested one; pad it"),
        (lambda q, k, v: (q, nested(k), v), r"key: expected a dense tensor, got a nested one; pad it"),
        (lambda q, k, v: (q, k, nested(v)), r"value: expected a dense tensor, got a nested one; pad it"),
        (lambda q, k, v: (q + 0j, k + 0j, v + 0j), r"query: expected bfloat16, .* got torch.complex64; cast it"),
        (lambda q, k, v: (q.to(torch.float8_e4m3fnuz), k, v), r"query: expected bfloat16, .* got .*_e4m3fnuz"),
        (lambda q, k, v: (q.to("meta"), k, v), "key: expected device meta as in query, got cpu"),
        (lambda q, k, v: (q, k.half(), v), r"cast one of them, key.to\(query.dtype\)"),
        (lambda q, k, v: (q[:, :1], k, v), r"a multiple of the key's 2 heads, got 1 .*; dimensions are \[batch, heads"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("prepared", [False, True])
def test_tensors_that_kernels_cannot_read(change, match: str, prepared: bool) -> None:
    q, k, v = qkv()
    if prepared:  # what is prepared for sound operands takes no others
        CAUSAL(q, k, v)
    with pytest.raises(WeftError, match=match):
        CAUSAL(*change(q, k, v))
    with pytest.raises(WeftError, match=match):
        CAUSAL.reference(*change(q, k, v))


@pytest.mark.filterwarnings("ignore:.*quantiz:UserWarning", "ignore:.*quantiz:DeprecationWarning")
def test_quantized_tensors() -> None:
    q, k, v = qkv()
    with pytest.raises(WeftError, match=r"query: expected a tensor of floats, got a quantized one .*x.dequantize\(\)"):
        CAUSAL(torch.quantize_per_tensor(q, 0.1, 0, torch.qint8), k, v)


@pytest.mark.parametrize("prepared", [False, True])
def test_operands_that_kernels_cannot_read(prepared: bool) -> None:
    q, k, v = qkv()
    alibi = weft.Attention(score + slopes[head], name="alibi_like")
    ids = weft.tensor("ids", 1, int)
    packed = weft.Attention(mask=masks.document(ids), name="packed")
    if prepared:
        alibi(q, k, v, slopes=torch.zeros(2))
        packed(q, k, v, ids=torch.zeros(8, dtype=torch.int32))
    with pytest.raises(WeftError, match=r"slopes: expected a dense tensor, got layout torch.sparse_coo"):
        alibi(q, k, v, slopes=torch.zeros(2).to_sparse())
    with pytest.raises(WeftError, match=r"slopes: expected a tensor of float, got torch.float8_e4m3fn"):
        alibi(q, k, v, slopes=torch.zeros(2, dtype=torch.float8_e4m3fn))
    with pytest.raises(WeftError, match=r"slopes: .* got list; torch.as_tensor\(x\) makes one"):
        alibi(q, k, v, slopes=[0.0, 0.0])
    with pytest.raises(WeftError, match=r"ids: expected a dense tensor, got layout torch.sparse_coo"):
        packed(q, k, v, ids=torch.zeros(8, dtype=torch.int32).to_sparse())


ROWS = torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"q_offset": ROWS.to(torch.complex64)},
            r"q_offset: expected an int or an int32 tensor \[2\], got torch.complex64",
        ),
        ({"q_offset": ROWS.to_sparse()}, r"q_offset: expected a dense tensor, got layout .*; call x.to_dense\(\)"),
        ({"kv_lens": ROWS.to_sparse()}, "kv_lens: expected a dense tensor, got layout"),
        ({"q_lens": ROWS.to_sparse(), "kv_lens": ROWS}, "q_lens: expected a dense tensor, got layout"),
        (
            {"kv_lens": ROWS, "block_table": torch.stack([ROWS, ROWS]).to_sparse()},
            "block_table: expected a dense tensor",
        ),
    ],
)
def test_lengths_and_offsets_that_have_no_strides(given: dict[str, torch.Tensor], message: str) -> None:
    q, pool = torch.zeros(2, 2, 8, 16), torch.zeros(4, 2, 16, 16)
    with pytest.raises(WeftError, match=message):
        keys = pool if "block_table" in given else q
        weft.Attention(mask=weft.kv_pos <= weft.q_pos)(q, keys, keys, **given)


def test_latent_attention() -> None:
    mla = weft.Attention(mask=masks.causal, latent=weft.Latent(rank=16, rope=4), name="mla")
    query, cache = torch.randn(1, 2, 8, 12), torch.randn(1, 1, 8, 20)
    uk, uv = torch.randn(2, 16, 8), torch.randn(2, 16, 8)
    for change, match in (
        ({"uk": [1], "uv": uv}, "uk: expected a tensor, got list"),
        ({"uk": uk.numpy(), "uv": uv}, "uk: expected a tensor, got ndarray"),
        ({"uk": uk, "uv": uv.to_sparse()}, "uv: expected a dense tensor, got layout"),
        ({"uk": uk, "uv": uv[..., :0]}, "uv: expected a width of at least 1, got 0"),
        ({"uk": uk[..., :0], "uv": uv}, "uk: expected width 8"),
    ):
        with pytest.raises(WeftError, match=match):
            mla(query, cache, **change)
    with pytest.raises(WeftError, match="query: expected dim above 4, the latent's rope, got 4"):
        mla(query[..., :4], cache, uk=uk, uv=uv)
    with pytest.raises(WeftError, match="causal: uk, form: uk, uv and form belong to variants declared with latent="):
        CAUSAL(*qkv(), uk=uk, form="expanded")
    with pytest.raises(WeftError, match="causal: uk: uk, uv and form belong to variants"):
        CAUSAL.reference(*qkv(), uk=uk)


# -- first programs of a stranger: each says what to do ----------------------------------------------------------------
PRELUDE = """
import math
import torch
import weft
from weft import head, kv_pos, q_pos, score
B, L, H, D = 2, 16, 4, 8
q, k, v = torch.randn(3, B, H, L, D)
causal = weft.Attention(mask=kv_pos <= q_pos, name="causal")
seen = weft.tensor("seen", 2, bool)
masked = weft.Attention(mask=seen[q_pos, kv_pos], name="masked")
"""
PROGRAMS = [
    ("causal(*torch.randn(3, B, L, H * D))", r"or pass x.unflatten\(2, \(heads, dim\)\).transpose\(1, 2\) of \[batch"),
    ("causal(*torch.randn(3, L, D))", r"query: expected 4 dim.* \[16, 8\]; add a batch dimension with \[None\]"),
    ("causal(torch.randn(B, 6, L, D), k, v)", r"multiple of the key's 4 heads, got 6 \(grouped heads"),
    ("causal(torch.randn(B, 10, H, D), torch.randn(B, 12, H, D), torch.randn(B, 12, H, D))", r"x.transpose\(1, 2\) of"),
    ("causal(q.half(), k, v)", r"key: expected dtype torch.float16 as in query, .* key.to\(query.dtype\)"),
    ("causal(q.long(), k.long(), v.long())", r"got torch.int64; cast it, query.to\(torch.float32\)"),
    ("with torch.autocast('cpu', torch.bfloat16): causal(q, k, v.double())", r"value: expected dtype torch.bfloat16"),
    ("masked(q, k, v)", r"seen: missing; pass seen=... \(a tensor of bool with 2 dimensions, declared at .*\)"),
    ("masked(q, k, v, torch.ones(L, L).bool())", r"got 1 more \(Tensor\); .*, operands too \(seen=...\)"),
    ("masked(q, k, v, seen=torch.ones(L, L))", r"seen: expected a tensor of bool, got torch.float32; cast it"),
    ("masked(q, k, v, seen=torch.ones(L, L).int())", r"seen: expected a tensor of bool, got torch.int32; cast it"),
    ("masked(q, k, v, seen=torch.ones(4, 4).bool())", r"`seen\[q_pos, kv_pos\]`: index 0, .* but seen has 4 entries"),
    ("weft.Attention(q, k, v)", r"tensors are given to the variant: causal = .*, then causal\(query, key, value\)"),
    ("weft.Attention(mask=kv_pos <= q_pos & q_pos - kv_pos < 4)", r"& \| \^ bind more tightly than comparisons: write"),
    ("weft.tensor('bits', 1, int)[q_pos] & 1", r"bits of an int are x % 2, x // 2 % 2, x // 4 % 2"),
    ("weft.tensor('bits', 1, int)[q_pos] >> kv_pos", r"write x // 2, .* powers of 2 .*; weft.masks.bit_packed reads"),
    ("weft.Attention(score + (kv_pos > q_pos) * -1e9)", r"write weft.where\(c, a, 0\) for c \* a; .* goes into mask="),
    ("weft.Attention(scale=weft.head_dim**-0.5)", r"weft.sqrt\(x\) for x\*\*0.5, weft.rsqrt\(x\) for x\*\*-0.5"),
    ("weft.Attention(scale=1 / math.sqrt(weft.head_dim))", r"write weft.tanh\(x\) for math.tanh\(x\), and so"),
    ("weft.Attention(score.masked_fill(kv_pos > q_pos, -1e9))", r"write weft.where\(condition, value, x\), or a mask="),
    ("weft.scalar('window', 4)", r"expected dtype int or float, got 4; its value is given at each call, window=4"),
    ("weft.tensor('m', (4, 4), bool)", r"expected a rank from 0 to 4, got \(4, 4\); the rank is the number of dim"),
    ("weft.tensor(torch.ones(3), 1)", r"expected a Python identifier as a name, got a tensor.*is given at each call"),
    ("weft.causal", r"weft has no 'causal'.*; it is weft.masks.causal"),
    ("weft.alibi", r"it is weft.scores.alibi"),
    ("weft.min(q_pos, 3)", r"write weft.minimum\(a, b\)"),
    ("weft.flex_attention(q, k, v)", r"weft.Attention\(score=..., mask=...\) declares a variant"),
    ("weft.masks.window(4)", r"weft.masks has no 'window'; it has bigbird, bit_packed, block_causal, .*sliding_window"),
    ("weft.scores.cap(4)", r"weft.scores has no 'cap'; it has alibi, compose"),
    ("causal(q, k, v, device='cuda')", r"device: unknown operand or option; .*leave it out: the operands'"),
    ("causal(q, k, v, target='triton')", r"target triton: needs a GPU, the operands are on the CPU; use target='cpu'"),
    (
        "t = weft.scalar('t'); weft.Attention(score * t)(q, k, v, t=torch.nn.Parameter(torch.tensor(1.0)))",
        r"t: expected a Python number, got a tensor; declare it with weft.tensor .* given as t=t",
    ),
]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="one of the programs asks for what only a GPU has")
@pytest.mark.parametrize(("program", "match"), PROGRAMS)
def test_first_programs(program: str, match: str) -> None:
    with pytest.raises((WeftError, AttributeError), match=f"(?s){match}"):
        exec(compile(PRELUDE + program, "first.py", "exec"), {"__name__": "first"})


SOUND_PROGRAMS = (
    "causal(q.half(), k.half(), v.half())",
    "causal(q.double(), k.double(), v.double())",
    "with torch.autocast('cpu', torch.bfloat16): assert causal(q, k, v).dtype == torch.bfloat16",
    "x = torch.randn(3, B, L, H, D).transpose(2, 3); causal(*x)",
    "causal(q, k[:, :2], v[:, :2])",
    "masked(q, k, v, seen=torch.ones(L, L).bool().tril())",
    "weft.Attention(mask=0 <= q_pos - kv_pos)(q, k, v)",
)


@pytest.mark.parametrize("program", SOUND_PROGRAMS)
def test_first_programs_that_work(program: str) -> None:
    exec(compile(PRELUDE + program, "first.py", "exec"), {"__name__": "first"})


def test_parts_that_the_documents_name_are_there_after_one_import() -> None:
    code = "import weft; weft.serving.Server, weft.kv.PagedCache, weft.nn.Attention, weft.integrations.transformers"
    fresh.run(code, check=True)


def test_the_lists_of_names_are_whole() -> None:
    for part in (masks, scores):
        public = {n for n, value in vars(part).items() if getattr(value, "__module__", "") == part.__name__}
        assert {n for n in public if not n.startswith("_")} <= set(part.__all__) and set(part.__all__) <= {*vars(part)}


def test_a_compiled_call_names_its_operands() -> None:
    q, k, v = qkv()
    with pytest.raises(Exception, match=r"capped: winow: unknown operand or option; window: missing; pass window=..."):
        torch.compile(lambda x: CAPPED(x, k, v, winow=4, cap=1.0), backend="eager", fullgraph=True)(q)
