"""What a declaration, a call or a question takes no notice of is refused, and every refusal is a WeftError."""

import functools
import inspect
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

import weft
from weft import WeftError, head, kv_pos, masks, q_pos, score, scores
from weft.ir.expr import CALL_OPTIONS
from weft.ir.verify import MOST_DEEP
from weft.ir.walk import extent
from weft.runtime.ops import dispatch

window, cap = weft.scalar("window", int), weft.scalar("cap")
doc, bias = weft.tensor("doc", 1, int), weft.tensor("bias", 1)
CAUSAL = weft.Attention(mask=masks.causal, name="causal")
LOCAL = weft.Attention(cap * weft.tanh(score / cap), masks.causal & (q_pos - kv_pos < window), name="local")
PACKED = weft.Attention(score + bias[head], masks.document(doc), name="packed")
MLA = weft.Attention(mask=masks.causal, latent=weft.Latent(rank=16, rope=4), name="mla")
SHAPE = weft.shape(heads=2, q_len=64, head_dim=16)

NESTED = torch.nested.nested_tensor([torch.zeros(2, 8, 16)], layout=torch.jagged)
META = torch.empty(2, dtype=torch.int32, device="meta")


def qkv() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16)


# -- plan, explain, source ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["plan", "explain", "source"])
@pytest.mark.parametrize(
    ("variant", "given", "match"),
    [
        (LOCAL, {"windw": 3}, "local: windw: unknown operand or option; .*: cap, window; did you mean window?"),
        (CAUSAL, {"is_causal": True}, r"causal: is_causal: unknown operand or option; .* declare it: weft.Attention"),
        (LOCAL, {"path": "x.png"}, "local: path: unknown operand .*; what is called here does not take it$"),
        (LOCAL, {"normalizer": "relu"}, "local: normalizer: unknown .*; declare it: weft.Attention.normalizer=...."),
        (LOCAL, {"window": 3.5}, "local: window: expected an int, got 3.5"),
        (LOCAL, {"window": True}, "local: window: expected an int, got True"),
        (LOCAL, {"window": 2**70}, "local: window: integer overflow"),
        (LOCAL, {"window": torch.tensor(3)}, "local: window: expected a Python number, got a tensor"),
        (LOCAL, {"cap": "x"}, "local: cap: expected a number, got 'x'"),
        (PACKED, {"bias": "x"}, "packed: bias: expected a tensor of float with 1 dimension, got str"),
        (PACKED, {"bias": torch.zeros(2, 2)}, r"packed: bias: expected 1 dimension, as .*, got shape \[2, 2\]"),
        (PACKED, {"bias": torch.zeros(1)}, r"packed: `bias\[head\]`: index 0, `head`, ranges from 0 to 1"),
        (PACKED, {"doc": torch.zeros(63, dtype=torch.int32)}, "`doc.kv_pos.`: .* ranges from 0 to 63 .* 63 entries"),
        (CAUSAL, {"q_offset": 1.5}, r"q_offset: expected an int or an int32 tensor \[1\], got 1.5"),
        (CAUSAL, {"q_offset": torch.zeros(2, dtype=torch.int32)}, r"expected an int or an int32 tensor \[1\], got"),
        (CAUSAL, {"return_lse": "yes"}, "causal: return_lse: expected True or False, got 'yes'"),
        (CAUSAL, {"deterministic": 1}, "causal: deterministic: expected True or False, got 1"),
        (CAUSAL, {"train": None}, "causal: train: expected True or False, got None"),
        (CAUSAL, {"uk": torch.zeros(3)}, "causal: uk: uk, uv and form belong to variants declared with latent="),
        (CAUSAL, {"form": "absorbed"}, "causal: form: uk, uv and form belong to variants"),
        (MLA, {"form": "folded"}, "mla: form: expected 'expanded' or 'absorbed', got 'folded'"),
        (CAUSAL, {"target": []}, r"causal: target: expected hopper, triton, interpret, cpu or None, got \[\]"),
        (CAUSAL, {"target": "gpu"}, "target: expected one of hopper, triton, interpret, cpu, got 'gpu'"),
        (CAUSAL, {"schedule": []}, "schedule: expected a name, a Schedule or its text, got list"),
        (CAUSAL, {"form": np.ones(2)}, "causal: form: expected 'expanded' or 'absorbed', got an ndarray|form: uk, uv"),
        (CAUSAL, {"block_table": NESTED}, "block_table: expected a dense tensor|block_table: expected"),
        (CAUSAL, {"cu_seqlens_q": META, "cu_seqlens_kv": META}, "cu_seqlens_q: expected a tensor with values, which a"),
        (CAUSAL, {"device": 3}, "hardware: expected one of a100, .* got 3"),
    ],
)  # fmt: skip
def test_questions(method: str, variant: weft.Attention, given: Mapping[str, Any], match: str) -> None:
    with pytest.raises(WeftError, match=match):
        getattr(variant, method)(SHAPE, **given)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"batch": torch.zeros(2)}, r"shape: batch: expected a positive int, got a tensor \[2\] of float32"),
        ({"q_len": None}, "shape: q_len: expected a positive int, got None"),
        ({"dtype": 3}, "shape: dtype: expected one of bf16, .*, got 3"),
        ({"kv_dtype": []}, r"shape: kv_dtype: expected one of bf16, .*, got \[\]"),
    ],
)
def test_shapes_that_a_caller_made(given: Mapping[str, Any], match: str) -> None:
    sizes: dict[str, Any] = {"batch": 1, "heads": 2, "kv_heads": 2, "q_len": 8, "kv_len": 8, "head_dim": 16}
    with pytest.raises(WeftError, match=match):
        CAUSAL.plan(weft.Shape(**{**sizes, "value_dim": 16, **given}))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"algorithm": None}, "Schedule: algorithm: expected .*flash.*, got None"),
        ({"algorithm": []}, r"Schedule: algorithm: expected .*flash.*, got \[\]"),
        ({"kernels": None}, "Schedule: kernels: expected a target and a form for each kernel, .*, got None"),
        (
            {"kernels": {"flash_forward": 1}},
            "Schedule: kernels: expected a target and a form .*, got {'flash_forward': 1}",
        ),
    ],
)
def test_schedules_that_a_caller_made(given: Mapping[str, Any], match: str) -> None:
    with pytest.raises(WeftError, match=match):
        weft.Schedule(**{"algorithm": "flash", "kernels": {}, **given})


def test_questions_about_no_call() -> None:
    q, k, v = qkv()
    for operands, got in (
        ((), "nothing"),
        ((q, k), "Tensor, Tensor"),
        (("h100",), "str"),
        ((SHAPE, SHAPE), "Shape, Shape"),
    ):
        with pytest.raises(WeftError, match=rf"causal: expected weft.shape\(.*\) or 3 tensors \(.*\), got {got}"):
            CAUSAL.plan(*operands)
    with pytest.raises(WeftError, match="source: direction: expected 'forward' or 'backward', got 'back'"):
        CAUSAL.source(SHAPE, direction="back")
    assert CAUSAL.plan(q, k, v, return_lse=True, q_offset=np.int64(0), deterministic=False).shape.q_len == 8


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"kv_heads": 0}, "shape: kv_heads: expected a positive int, got 0"),
        ({"kv_len": 0}, "shape: kv_len: expected a positive int, got 0"),
        ({"value_dim": 0}, "shape: value_dim: expected a positive int, got 0"),
        ({"dtype": "fp8"}, "shape: dtype: expected 'bf16', 'fp16', 'fp32', 'e4m3' or 'e5m2', got 'fp8'$"),
        ({"dtype": []}, r"shape: dtype: expected 'bf16', .*, got \[\]$"),
        ({"dtype": torch.float16}, "shape: dtype: expected 'bf16', .*, got torch.float16; write 'fp16'"),
        ({"dtype": torch.float64}, "shape: dtype: expected 'bf16', .*, got torch.float64$"),
        ({"kv_dtype": torch.float8_e5m2}, "shape: kv_dtype: expected .*, got torch.float8_e5m2; write 'e5m2'"),
        ({"kv_dtype": "fp16"}, "shape: kv_dtype: expected 'bf16' as the query has, or FP8, got 'fp16'"),
        ({"descale": "head"}, "shape: descale: expected None, as nothing is FP8, got 'head'; name kv_dtype='e4m3'"),
        ({"dtype": "e4m3", "descale": "row"}, "descale: expected 'tensor', 'head', 64, 128 or 'token', got 'row'"),
        ({"dtype": "e4m3", "descale": []}, r"descale: expected 'tensor', 'head', 64, 128 or 'token', got \[\]"),
        ({"dtype": "e4m3", "descale": np.ones(2)}, r"descale: expected 'tensor', .*, got an ndarray \[2\] of float64"),
        ({"heads": None}, "shape: heads: expected a positive int, got None"),
        ({"kv_dtype": "e4m3", "descale": True}, "descale: expected 'tensor', 'head', 64, 128 or 'token', got True"),
    ],
)
def test_shapes(given: Mapping[str, Any], match: str) -> None:
    with pytest.raises(WeftError, match=match):
        weft.shape(**{"heads": 2, "q_len": 4, "head_dim": 8, **given})


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"q_len": 0}, "show_mask: q_len: expected an int of at least 1, got 0"),
        ({"kv_len": 64.0}, "show_mask: kv_len: expected an int of at least 1, got 64.0"),
        ({"block_q": 0}, "show_mask: block_q: expected an int of at least 1, got 0"),
        ({"block_kv": "32"}, "show_mask: block_kv: expected an int of at least 1, got '32'"),
        ({"head": -1}, "show_mask: head: expected an int of at least 0, got -1"),
        ({"head": 2}, r"packed: `bias\[head\]`: index 0, `head`, ranges from 2 to 2 in this call, but bias has 2"),
        ({"batch": True}, "show_mask: batch: expected an int of at least 0, got True"),
        ({"q_offset": 1.5}, "q_offset: expected an int, got 1.5"),
        ({"q_offset": torch.zeros(1, dtype=torch.int32)}, "q_offset: expected an int, got a tensor; a picture"),
        ({"path": ""}, "picture: expected a file that ends in .png or .svg"),
        ({"path": 3}, "show_mask: path: expected the name of a picture"),
        ({"docs": 3}, "packed: docs: unknown operand or option; .*: bias, doc; did you mean doc?"),
        ({"doc": [0] * 64}, "packed: doc: expected a tensor of int with 1 dimension, got list"),
    ],
)  # fmt: skip
def test_pictures(given: Mapping[str, Any], match: str) -> None:
    sound = {"q_len": 64, "kv_len": 64, "doc": torch.zeros(64, dtype=torch.int32), "bias": torch.zeros(2)}
    assert "tile 128 queries" in PACKED.show_mask(**sound)
    with pytest.raises(WeftError, match=match):
        PACKED.show_mask(**{**sound, **given})


# -- options of a call -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"return_lse": "yes"}, "causal: return_lse: expected True or False, got 'yes'"),
        ({"return_lse": 0}, "causal: return_lse: expected True or False, got 0"),
        ({"return_lse": None}, "causal: return_lse: expected True or False, got None"),
        ({"deterministic": "no"}, "causal: deterministic: expected True or False, got 'no'"),
        ({"target": "gpu"}, "target: expected one of hopper, triton, interpret, cpu, got 'gpu'"),
        ({"target": ""}, "target: expected one of hopper, triton, interpret, cpu, got ''"),
        ({"target": []}, r"causal: target: expected hopper, triton, interpret, cpu or None, got \[\]"),
        ({"target": False}, "causal: target: expected hopper, triton, interpret, cpu or None, got False"),
        ({"schedule": []}, r"causal: schedule: expected a name such as 'flash', .* got \[\]"),
        ({"schedule": 3}, "causal: schedule: expected a name such as 'flash', .* got 3"),
        ({"schedule": ""}, "schedule: expected standard, streaming, flash, split_kv, or text like"),
        ({"q_offset": True}, r"q_offset: expected an int or an int32 tensor \[1\], got True"),
        ({"q_offset": 1.0}, r"q_offset: expected an int or an int32 tensor \[1\], got 1.0"),
        ({"q_offset": [1]}, r"q_offset: expected an int or an int32 tensor \[1\], got \[1\]"),
        ({"q_offset": torch.tensor(1)}, r"got torch.int64 \[\]; pass int\(x\)"),
        ({"form": np.ones(2)}, r"causal: form: expected 'expanded' or 'absorbed', got an ndarray \[2\] of float64"),
        ({"out_dtype": np.ones(2)}, "causal: out_dtype: expected torch.bfloat16, .*, got an ndarray"),
        ({"q_offset": torch.zeros(1).to(torch.float8_e4m3fn)}, "q_offset: expected an int or an int32 tensor"),
        ({"seed": NESTED}, "causal: seed: expected a dense tensor, got a nested one"),
        ({"k_descale": NESTED}, "causal: k_descale: expected None, as key is torch.float32"),
        ({"q_offset": torch.tensor([1])}, r"got torch.int64 \[1\]; pass x.to\(torch.int32\)"),
    ],
)
def test_options(given: Mapping[str, Any], match: str, prepared: bool) -> None:
    q, k, v = qkv()
    if prepared:
        CAUSAL(q, k, v)
    with pytest.raises(WeftError, match=match):
        CAUSAL(q, k, v, **given)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"return_lse": "yes"}, "causal: return_lse: expected True or False, got 'yes'"),
        ({"q_offset": 1.5}, "q_offset: expected an int or an int32 tensor"),
        ({"q_offset": True}, "q_offset: expected an int or an int32 tensor"),
        ({"target": "cpu"}, "causal: target: unknown operand or option"),
        ({"target": "cpu", "query": None}, "causal: target: unknown operand or option"),
    ],
)
def test_options_of_the_reference(given: Mapping[str, Any], match: str) -> None:
    with pytest.raises(WeftError, match=match):
        CAUSAL.reference(**{**dict(zip(("query", "key", "value"), qkv())), **given})


# -- names -------------------------------------------------------------------------------------------------------------
def test_names_of_all_parameters_are_reserved() -> None:
    """An operand of such a name could never be given by keyword, or would be taken for the option."""
    methods = (
        weft.Attention.__call__, weft.Attention.reference, weft.Attention.plan, weft.Attention.explain,
        weft.Attention.source, weft.Attention.show_mask, weft.Attention.__init__,
    )  # fmt: skip
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = {p.name for m in methods for p in inspect.signature(m).parameters.values() if p.kind not in variadic}
    symbols = {"q_len", "kv_len", "head", "batch", "score"}
    parameters = {name for name in parameters if not name.startswith("_")}  # no caller gives those
    assert parameters - symbols <= CALL_OPTIONS
    for name in sorted(parameters | {"seed", "train"}):
        with pytest.raises(WeftError, match=f"the name '{name}' is reserved for a symbol, function or call option"):
            weft.scalar(name, int)
        with pytest.raises(WeftError, match=f"the name '{name}' is reserved"):
            weft.tensor(name, 1)


def test_names_of_variadic_parameters_are_free() -> None:
    own, options, more = weft.scalar("own"), weft.scalar("options"), weft.scalar("more")
    variant = weft.Attention(score * own + options + more)
    given = {"own": 1.0, "options": 0.0, "more": 0.0}
    q, k, v = qkv()
    torch.testing.assert_close(variant(q, k, v, **given), variant.reference(q, k, v, **given))
    assert variant.plan(q, k, v, **given) is not None


# -- settings ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "match"),
    [
        (
            {"target": "gpu"},
            r"setting target \(WEFT_TARGET\): expected one of hopper, triton, interpret, cpu, got 'gpu'",
        ),
        ({"target": ""}, r"setting target \(WEFT_TARGET\): expected one of .* got ''"),
        ({"target": 3}, r"setting target \(WEFT_TARGET\): expected the name of a target, got 3"),
        ({"debug": True}, r"setting debug \(WEFT_DEBUG\): expected a whole number from 0 to 4, got True"),
        ({"debug": 1.0}, r"setting debug \(WEFT_DEBUG\): expected a whole number from 0 to 4, got 1.0"),
        ({"debug": "2"}, r"setting debug \(WEFT_DEBUG\): expected a whole number from 0 to 4, got '2'"),
        ({"cache_dir": 3}, r"setting cache_dir \(WEFT_CACHE_DIR\): expected a folder, got 3"),
        ({"cache_dir": ""}, r"setting cache_dir \(WEFT_CACHE_DIR\): expected a folder, got ''"),
        ({"check": 1}, r"setting check \(WEFT_CHECK\): expected True or False, got 1"),
        ({"keep_tiles": 1}, r"setting keep_tiles \(WEFT_KEEP_TILES\): expected True or False, got 1"),
        ({"colour": 1}, "settings: colour: unknown setting, expected some of debug, cache_dir, target, check"),
    ],
)
def test_settings_are_refused_where_they_are_written(given: Mapping[str, Any], match: str) -> None:
    with pytest.raises(WeftError, match=match):
        weft.settings(**given)  # before the block begins


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("WEFT_TARGET", "gpu", "WEFT_TARGET: expected one of hopper, triton, interpret, cpu, got 'gpu'"),
        ("WEFT_CHECK", "yes", r"WEFT_CHECK\): expected 0 or 1, got 'yes'"),
        ("WEFT_KEEP_TILES", "yes", r"WEFT_KEEP_TILES\): expected 0 or 1, got 'yes'"),
        ("WEFT_DEBUG", "loud", "WEFT_DEBUG.*: expected a whole number from 0 to 4, got 'loud'"),
        ("WEFT_EDITED_DIR", "/no/such/folder", "WEFT_EDITED_DIR: expected a folder of edited modules, got '/no/such"),
    ],
)
def test_the_environment(monkeypatch: pytest.MonkeyPatch, name: str, value: str, match: str) -> None:
    fresh = weft.Attention(score + float(len(name)) * 0.125, name="of_the_environment")
    monkeypatch.setenv(name, value)
    with pytest.raises(WeftError, match=match):
        fresh(*qkv())


# -- ready masks and scores --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: masks.sliding_window(0), "masks.sliding_window: expected size to be at least 1, got 0"),
        (lambda: masks.sliding_window(4, ahead=-1), "masks.sliding_window: expected ahead to be at least 1, got -1"),
        (lambda: masks.sliding_window((3, 0)), r"size: expected one number, got \(3, 0\); .*ahead=right \+ 1"),
        (lambda: masks.sliding_window("2"), "expected an expression or a number, got str"),
        (lambda: masks.sliding_window(masks.causal), "masks.sliding_window: expected size to be a number"),
        (lambda: masks.dilated(np.int64(0), 3), "masks.dilated: expected step to be at least 1, got 0"),
        (lambda: masks.dilated("2", 3), "expected an expression or a number, got str"),
        (lambda: masks.prefix_lm(-1), "masks.prefix_lm: expected size to be at least 0, got -1"),
        (lambda: masks.natten_2d(3, -1), "masks.natten_2d: expected row_radius to be at least 0, got -1"),
        (lambda: masks.block_diffusion(0, 4), "masks.block_diffusion: expected length to be at least 1, got 0"),
        (lambda: masks.document(window), "masks.document: expected a tensor operand such as weft.tensor"),
        (lambda: masks.document(torch.zeros(3)), "masks.document: expected a tensor operand .*, got Tensor"),
        (lambda: masks.document(bias), "masks.document: expected bias to be of dtype int, got float"),
        (lambda: scores.softcap(0.0), "scores.softcap: expected cap to be above 0 and finite, got 0.0"),
        (lambda: scores.softcap(np.float32(0)), "scores.softcap: expected cap to be above 0 and finite, got 0.0"),
        (lambda: scores.softcap("50"), "expected an expression or a number, got str"),
        (lambda: scores.temperature(True), "scores.temperature: expected value to be above 0 and finite, got True"),
        (lambda: scores.alibi(torch.zeros(2)), "scores.alibi: expected a tensor operand such as .*, got Tensor"),
        (lambda: scores.relative_bias("table", 3), "scores.relative_bias: expected a tensor operand .*, got str"),
        (lambda: scores.alibi(weft.tensor("b", 1, bool)), "scores.alibi: expected b to hold numbers, got bools"),
        (lambda: scores.compose(3), r"scores.compose: expected scores such as scores.softcap\(30.0\), got 3"),
        (lambda: scores.compose(score), "scores.compose: expected scores such as .* got score"),
        (lambda: scores.compose(scores.softcap)(score), r"got function; weft.scores.softcap\(...\)\(weft.score\)"),
    ],
)  # fmt: skip
def test_ready_masks_and_scores(make: Callable[[], object], match: str) -> None:
    with pytest.raises(WeftError, match=match):
        make()


def test_ready_masks_take_numbers_of_numpy() -> None:
    assert masks.sliding_window(np.int64(4), ahead=np.int32(1)).text == masks.sliding_window(4, ahead=1).text
    assert scores.relative_bias(weft.tensor("table", 2), np.int64(4))(score).text.endswith("-4) + 4]")


# -- expressions that are too large ------------------------------------------------------------------------------------
def test_deep_expressions_are_refused_with_what_to_write() -> None:
    listed = functools.reduce(operator.or_, [kv_pos == n for n in range(2000)])
    summed = functools.reduce(operator.add, [score, *(0.5 * head for _ in range(2000))])
    with pytest.raises(
        WeftError, match=r"mask: expected at most 100 operators .* got 2001; .*mask=seen\[weft.kv_pos\]"
    ):
        weft.Attention(mask=listed)
    with pytest.raises(WeftError, match="score: expected at most 100 operators inside one another, got 2002"):
        weft.Attention(summed)
    with pytest.raises(WeftError, match=f"(?s)too deep to be printed; read what differs.*{re.escape(__file__)}"):
        str(listed)
    for read in (weft.parse, weft.parse_attention):
        with pytest.raises(WeftError, match=r"that is too deep: 'score\+1.*'\.\.\.; read what differs from a tensor"):
            read("score" + "+1" * 5000)
    doubled = functools.reduce(lambda x, _: x * x, range(40), score)
    assert extent(doubled) == (41, 2**41 - 1)
    with pytest.raises(WeftError, match="score: expected at most 10000 operators when written out"):
        weft.Attention(doubled)


@pytest.mark.slow
def test_what_is_as_deep_as_allowed_compiles() -> None:
    q, k, v = qkv()
    deep = weft.Attention(functools.reduce(lambda x, _: weft.tanh(x), range(MOST_DEEP - 1), score), name="deep")
    torch.testing.assert_close(deep(q.requires_grad_(), k, v), deep.reference(q, k, v))
    deep(q, k, v).sum().backward()
    assert "deep" in deep.explain(SHAPE, device="h100")


@pytest.mark.parametrize("read", [weft.parse, weft.parse_attention])
def test_only_text_is_read(read: Callable[[object], object]) -> None:
    with pytest.raises(WeftError, match="expected text of .*, got int"):
        read(3)


# -- what Python says while a call is computed -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("error", "match"),
    [
        (
            ZeroDivisionError("float division by zero"),
            r"local: .* no value for cap=0.0, window=4 \(float division by zero",
        ),
        (ValueError("math domain error"), r"local: .* \(math domain error\); give other numbers, or guard them"),
        (RecursionError("maximum recursion depth"), "local: too deep to be compiled from here; read what differs"),
    ],
)
def test_errors_of_python_become_ours(monkeypatch: pytest.MonkeyPatch, error: Exception, match: str) -> None:
    def run(variant: object, call: object, wants_lse: bool) -> None:
        raise error

    monkeypatch.setattr(dispatch, "run", run)
    with pytest.raises(WeftError, match=match):
        LOCAL(*qkv(), window=4, cap=0.0)


def test_errors_of_torch_that_are_not_the_users_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(variant: object, call: object, wants_lse: bool) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(dispatch, "run", run)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        CAUSAL(*qkv())
