"""Mistakes in declarations: each is refused where it is written, and the message says what to write instead."""

import math
import re
from collections.abc import Callable

import pytest
import torch

import weft
from weft.ir import functions as fn
from weft.ir.attention import Attention, Latent
from weft.ir.errors import InternalError, UnavailableError, WeftError, collected
from weft.ir.expr import Call, Const, call, print_expr, scalar, symbol, tensor
from weft.ir.parse import parse, parse_attention
from weft.ir.walk import children

q_pos, kv_pos, head, batch, score = (symbol(n) for n in ("q_pos", "kv_pos", "head", "batch", "score"))
window, slopes, doc = scalar("window", int), tensor("slopes", 1), tensor("doc", 2, int)


def refused(make: Callable[[], object], match: str) -> str:
    """The message of the WeftError that `make` raises; it must match, and name a line of this file."""
    with pytest.raises(WeftError, match=match) as caught:
        make()
    message = str(caught.value)
    assert f"{__file__}:" in message
    return message


# -- Python's words that cannot be written down ----------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: (kv_pos <= q_pos) and (q_pos < 4),
        lambda: (kv_pos <= q_pos) or (q_pos < 4),
        lambda: not (kv_pos <= q_pos),
        lambda: 1 if kv_pos <= q_pos else 2,
        lambda: 0 < kv_pos < 4,
        lambda: bool(score),
        lambda: q_pos in [kv_pos],
        lambda: max(q_pos, kv_pos),
    ],
)
def test_python_control_flow_is_refused_with_what_to_write(make: Callable[[], object]) -> None:
    message = refused(make, "no truth value while it is being declared")
    for instead in ("a & b", "a | b", "~a", "weft.where(c, a, b)", "(a < b) & (b < c)"):
        assert instead in message


def test_the_message_names_the_line_that_wrote_it() -> None:
    message = refused(lambda: 0 < kv_pos < 4, "truth value")
    line = test_the_message_names_the_line_that_wrote_it.__code__.co_firstlineno + 1
    assert f"{__file__}:{line}" in message


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: score**2, r"`\*\*` is not part of the language; write x \* x"),
        (lambda: 2**score, r"`\*\*` is not part of the language"),
        (lambda: float(score), "not a number yet"),
        (lambda: range(4)[q_pos], "not a number yet"),
        (lambda: len(score), "no length; use weft.q_len or weft.kv_len"),
        (lambda: list(slopes), "slopes: a tensor operand is read by index expressions, not iterated"),
    ],
)
def test_python_operations_without_a_meaning(make: Callable[[], object], match: str) -> None:
    refused(make, match)


def test_expressions_are_no_containers() -> None:
    with pytest.raises(TypeError, match="not iterable"):
        list(score)
    with pytest.raises(TypeError, match="argument of type|not a container"):
        _ = 3 in score


# -- types -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: score // 2, r"`//`: expected int, got float `score` \(weft.floor gives an int\)"),
        (lambda: q_pos % 2.0, r"`%`: expected int, got float `2.0` \(weft.floor gives an int\)"),
        (lambda: (q_pos < 1) + 1, "`[+]`: expected int or float, got bool `q_pos < 1`"),
        (lambda: True * score, r"`\*`: expected int or float, got bool `True`"),
        (lambda: (q_pos < 1) & 1, "`&`: expected bool, got int `1`"),
        (lambda: q_pos | kv_pos, "`[|]`: expected bool, got int `q_pos`"),
        (lambda: ~q_pos, "`~`: expected bool, got int `q_pos`"),
        (lambda: (q_pos < 1) == 1, "`==`: cannot mix bool and int"),
        (lambda: (q_pos < 1) < (kv_pos < 1), "`<`: expected int or float, got bool"),
        (lambda: fn.where(score, 1, 2), "where: expected a bool condition, got float `score`"),
        (lambda: fn.where(q_pos < 1, True, 2), "`where`: cannot mix bool and int"),
        (lambda: fn.exp(q_pos < 1), "`exp`: expected int or float, got bool"),
        (lambda: score + "1", "expected an expression or a number, got str"),
        (lambda: score + None, "expected an expression or a number, got NoneType"),
        (lambda: score + slopes, r"slopes is a tensor: index it, e.g. slopes\[head\]"),
        (lambda: score + doc, r"doc is a tensor: index it, e.g. doc\[head, head\]"),
        (lambda: slopes[head, q_pos], "slopes: expected 1 index, got 2"),
        (lambda: doc[q_pos], "doc: expected 2 indices, got 1"),
        (lambda: slopes[score], r"slopes\[score\]: expected an int index, got float; weft.floor gives an int"),
        (lambda: slopes[q_pos < 1], "expected an int index, got bool"),
        (lambda: slopes[1:2], "slopes: expected an int for each dimension, got a slice, .*; one entry is read"),
        (lambda: doc[head, None], "doc: expected an int for each dimension, got a slice, None or `...`"),
        (lambda: q_pos < 2**31, "integer overflow: the constant 2147483648 does not fit in 32 bits"),
        (lambda: q_pos < -(2**31), "integer overflow: the constant -2147483648 does not fit in 32 bits"),
        (lambda: score + float("nan"), "expected a number, got NaN"),
        (lambda: call("tanh", score, score), "tanh: expected 1 operand, got 2"),
    ],
)
def test_types_are_checked_where_they_are_written(make: Callable[[], object], match: str) -> None:
    refused(make, match)


# -- names -----------------------------------------------------------------------------------------

HOSTILE = [
    "x; import os", "a b", "", "1x", "x)\n    pass", "def", "None", "ünicode", "x.y", "x\n", "__class__", "_x", "ﬁ",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_names_that_must_never_reach_generated_source(name: str) -> None:
    match = "expected a Python identifier as a name|starts with an underscore"
    refused(lambda: scalar(name), match)
    refused(lambda: tensor(name, 1), match)
    refused(lambda: Attention(name=name), match)


@pytest.mark.parametrize("name", [3, b"x", ("x",)])
def test_names_are_strings(name: object) -> None:
    refused(lambda: scalar(name), f"expected a Python identifier as a name, got {re.escape(repr(name))}")
    refused(lambda: Attention(name=name), f"expected a Python identifier as a name, got {re.escape(repr(name))}")


def test_a_variant_may_have_the_name_of_a_function() -> None:
    """So that a function that is added to the language breaks no variant."""
    for name in ("softplus", "tanh", "where"):
        assert parse_attention(str(Attention(name=name))) == Attention(name=name)


@pytest.mark.parametrize(
    "name", ["q_pos", "score", "head_dim", "qk", "q_first", "tanh", "where", "return_lse", "block_table", "uk", "query"]
)
def test_reserved_names(name: str) -> None:
    match = f"the name '{name}' is reserved for a symbol, function or call option; choose another"
    refused(lambda: scalar(name), match)
    refused(lambda: tensor(name, 1), match)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: scalar("n", bool), "scalar 'n': expected dtype int or float, got <class 'bool'>"),
        (lambda: scalar("n", "int"), "scalar 'n': expected dtype int or float, got 'int'"),
        (lambda: tensor("t", 1, str), "tensor 't': expected dtype float, int or bool, got <class 'str'>"),
        (lambda: tensor("t", -1), "tensor 't': expected a rank from 0 to 4, got -1"),
        (lambda: tensor("t", 5), "tensor 't': expected a rank from 0 to 4, got 5"),
        (lambda: tensor("t", True), "tensor 't': expected a rank from 0 to 4, got True"),
        (lambda: tensor("t", 1.0), "tensor 't': expected a rank from 0 to 4, got 1.0"),
    ],
)
def test_declarations_of_operands(make: Callable[[], object], match: str) -> None:
    refused(make, match)


# -- the variant as a whole ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Attention(mask=0.5), r"mask: expected a bool expression \(a comparison\), got float `0.5`"),
        (lambda: Attention(mask=1), r"mask: expected a bool expression \(a comparison\), got int `1`"),
        (lambda: Attention(mask=q_pos - kv_pos), "mask: expected a bool expression .* got int `q_pos - kv_pos`"),
        (lambda: Attention(mask=score > 0), r"mask: `score` cannot be used inside a mask; use where\(...\) in score="),
        (lambda: Attention(score=q_pos < kv_pos), "score: expected a number, got a bool; a mask goes into mask="),
        (lambda: Attention(score="score"), "score: expected an expression, got str"),
        (lambda: Attention(score=slopes), r"slopes is a tensor: index it"),
        (
            lambda: Attention(scale=score),
            "scale: expected lengths, heads and operands, got `score`; write it into score=",
        ),
        (lambda: Attention(scale=1.0 / (1 + q_pos)), "scale: expected lengths, heads and operands, got `q_pos`"),
        (lambda: Attention(scale=q_pos < 1), "scale: expected a number, got a bool"),
        (
            lambda: Attention(score=slopes[fn.floor(score)]),
            r"score: `slopes\[floor\(score\)\]` is indexed by the score",
        ),
        (lambda: Attention(sink=True), "sink: expected a number, got a bool"),
        (
            lambda: Attention(sink=head < 2),
            r"sink: expected a number, got a bool; write weft.where\(c, 0.0, -math.inf\)",
        ),
        (lambda: Attention(sink=float("inf")), "sink: expected a finite number, or -inf for none, got inf"),
        (lambda: Attention(sink=float("nan")), "expected a number, got NaN"),
        (lambda: Attention(sink=slopes[q_pos]), "sink: expected lengths, heads, batch and operands, got `q_pos`"),
        (lambda: Attention(sink=0.1 * kv_pos), "sink: expected lengths, heads, batch and operands, got `kv_pos`"),
        (lambda: Attention(sink=score), "got `score`; a row has one sink, whatever it sees: index its operand by"),
        (lambda: Attention(sink=slopes), r"slopes is a tensor: index it, e.g. slopes\[head\]"),
        (
            lambda: Attention(sink=torch.zeros(4)),
            r'declare sinks = weft.tensor\("sinks", 1, float\) and weft.Attention\(sink=sinks\[weft.head\]\)',
        ),
        (
            lambda: Attention(dropout=1.0),
            r"dropout: expected a number from 0 on and below 1, or weft.scalar\(name, float\)",
        ),
        (lambda: Attention(dropout=-0.1), "dropout: expected a number from 0 on and below 1, .* got -0.1"),
        (lambda: Attention(dropout=math.nan), "dropout: expected a number from 0 on and below 1, .* got nan"),
        (lambda: Attention(dropout=True), "dropout: expected a number from 0 on and below 1, .* got True"),
        (lambda: Attention(dropout="0.1"), "dropout: expected a number from 0 on and below 1, .* got '0.1'"),
        (lambda: Attention(dropout=torch.ones(2)), r"dropout: expected a number .*, got a tensor \[2\] of float32"),
        (
            lambda: Attention(name=torch.ones(2)),
            r"name: expected a Python identifier .*, got a tensor \[2\] of float32",
        ),
        (lambda: scalar([]), r"expected a Python identifier as a name, got \[\]"),
        (lambda: tensor({}, 1), "expected a Python identifier as a name, got {}"),
        (lambda: scalar(torch.tensor(1)), r"expected a Python identifier as a name, got a tensor \[\] of int64"),
        (lambda: Attention(dropout=slopes), "dropout: expected a number from 0 on and below 1"),
        (lambda: Attention(dropout=scalar("n", int)), "dropout: expected a float scalar, got n, an int"),
        (
            lambda: Attention(score=score * scalar("n", int), dropout=scalar("n", float)),
            "operand 'n' is declared twice: as scalar int and as scalar float",
        ),
        (
            lambda: Attention(score=score * scalar("n") + scalar("n", int)),
            "operand 'n' is declared twice: as scalar float",
        ),
        (
            lambda: Attention(score=score + tensor("t", 1)[head], mask=tensor("t", 2)[batch, kv_pos] > 0),
            "operand 't' is declared twice: as tensor of rank 1, float and as tensor of rank 2, float",
        ),
        (
            lambda: Attention(score=score + tensor("n", 1)[head] * scalar("n")),
            "operand 'n' is declared twice: as tensor of rank 1, float and as scalar float",
        ),
    ],
)
def test_the_verifier(make: Callable[[], object], match: str) -> None:
    refused(make, match)


def test_all_problems_are_reported_at_once_each_with_its_line() -> None:
    def make() -> Attention:
        return Attention(
            score=q_pos < kv_pos,
            mask=score * 2.0,
            scale=q_pos * 0.5,
            dropout=1.5,
            name="several",
        )

    message = refused(make, r"several \(declared at ")
    first = make.__code__.co_firstlineno + 2
    assert [line.split(":")[0] for line in message.splitlines() if line.startswith("  - ")] == [
        "  - score", "  - mask", "  - mask", "  - scale", "  - dropout",
    ]  # fmt: skip
    for line in (first, first + 1, first + 2):
        assert f"{__file__}:{line}" in message


def test_one_mistake_is_reported_once() -> None:
    bad = slopes[fn.floor(score)]
    assert refused(lambda: Attention(score=bad * bad), "indexed by the score").count("indexed by the score") == 1


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Latent(rank=0, rope=64), "Latent: expected rank to be an int of at least 1, got 0"),
        (lambda: Latent(rank=512, rope=-1), "Latent: expected rope to be an int of at least 0, got -1"),
        (lambda: Latent(rank=512.0, rope=64), "Latent: expected rank to be an int of at least 1, got 512.0"),
        (lambda: Latent(rank=True, rope=64), "Latent: expected rank to be an int of at least 1, got True"),
        (lambda: Attention().replace(masks=True), r"replace: expected some of .*'mask'.*, got masks"),
    ],
)
def test_latent_and_replace(make: Callable[[], object], match: str) -> None:
    with pytest.raises(WeftError, match=match):
        make()


# -- text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("q_pos <", "not an expression of the language: 'q_pos <'"),
        ("q_pos\0", "not an expression of the language"),
        ("unknown + 1", r"unknown name 'unknown': expected a symbol \(q_pos, .*\) or a declared operand"),
        ("qpos + 1", r"unknown name 'qpos': did you mean q_pos\? expected a symbol \(q_pos, "),
        ("qk + 1", "unknown name 'qk'"),
        ("kv_idx <= q_idx", r"unknown name 'kv_idx': did you mean kv_pos\? "),
        ("h", r"unknown name 'h': did you mean head\? "),
        ("kv_pos <= q_pos & head < 2", r"`kv_pos <= q_pos & head < 2`: & \| \^ bind more tightly than comparisons"),
        ("table[head]", "unknown name 'table'"),
        ("q_pos[head]", r"not part of the language: q_pos\[head\]"),
        ("q_pos < 1 and kv_pos < 1", "`q_pos < 1 and kv_pos < 1`: .* write `a & b` for `and`"),
        ("not q_pos < 1", "write .*`~a` for `not`"),
        ("0 < q_pos < 1", r"write .*`\(a < b\) & \(b < c\)` for `a < b < c`"),
        ("1 if q_pos < 1 else 2", r"write .*`weft.where\(c, a, b\)` for `if`"),
        ("score ** 2", r"not part of the language: score \*\* 2"),
        ("__import__('os').system('true')", "not part of the language: __import__"),
        ("os.exp(score)", r"not part of the language: os.exp\(score\)"),
        ("exp(score, score)", "exp: expected 1 operand, got 2"),
        ("exp(x=score)", "not part of the language"),
        ("'text'", "not part of the language: 'text'"),
        ("[score]", "not part of the language"),
        ("lambda: 0", "not part of the language"),
        ("(x := score)", "not part of the language"),
        ("head[0]", r"not part of the language: head\[0\]"),
        ("slopes[0, 1]", "slopes: expected 1 index, got 2"),
        ("slopes", "slopes is a tensor: index it"),
        ("99999999999", "integer overflow: the constant 99999999999 does not fit in 32 bits"),
    ],
)
def test_text_outside_the_language(text: str, match: str) -> None:
    with pytest.raises(WeftError, match=match):
        parse(text, {"slopes": slopes})


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", r"expected declarations followed by weft.Attention\(...\)"),
        ("x = 1", r"expected declarations followed by weft.Attention\(...\)"),
        ("print(1)", r"expected weft.Attention\(...\), got print\(1\)"),
        ("weft.Attention(score)", r"expected weft.Attention\(...\), got weft.Attention\(score\)"),
        ("import os\nweft.Attention()", "expected a declaration of a scalar or tensor, got import os"),
        ('n = weft.scalar("n", complex)\nweft.Attention()', "expected a declaration of a scalar or tensor, got n ="),
        ('t = weft.tensor("t", 9, int)\nweft.Attention()', "tensor 't': expected a rank from 0 to 4, got 9"),
        ("weft.Attention(colour=1)", "weft.Attention: cannot read colour=1"),
        ("weft.Attention(**x)", r"weft.Attention: cannot read \*\*x"),
        ("weft.Attention(name=score)", "weft.Attention: cannot read name=score"),
        ("weft.Attention(latent=weft.Latent(rank=q_pos, rope=1))", "weft.Attention: cannot read latent="),
        ("weft.Attention(", "not a variant: 'weft.Attention\\('"),
    ],
)
def test_text_that_is_no_variant(text: str, match: str) -> None:
    with pytest.raises(WeftError, match=match):
        parse_attention(text)


# -- the families ----------------------------------------------------------------------------------


def test_collected_problems() -> None:
    assert str(collected("alibi", ["one"])) == "alibi: one"
    assert str(collected("alibi", ["one", "two"])) == "alibi:\n  - one\n  - two"


def test_unavailable_is_the_users_to_handle() -> None:
    assert issubclass(UnavailableError, WeftError) and not issubclass(InternalError, WeftError)


def test_defects_of_ours_are_internal_errors() -> None:
    with pytest.raises(InternalError, match="unknown operator frobnicate"):
        call("frobnicate", score)
    with pytest.raises(InternalError, match="unknown node object"):
        children(object())
    with pytest.raises(InternalError, match="printer: unknown node object"):
        print_expr(object())
    assert print_expr(Call("neg", (Const(1),), "int")) == "-1"


def test_errors_are_those_that_users_catch() -> None:
    """A model that catches ValueError or NotImplementedError catches ours, which keep their own text."""
    x = torch.randn(1, 2, 8, 16)
    causal = weft.Attention(mask=weft.masks.causal, name="causal")
    with pytest.raises(ValueError, match="causal: key: expected"):
        causal(x, x[..., :8], x)
    with pytest.raises(NotImplementedError, match="target"):
        causal(x, x, x, target="hopper")
    assert issubclass(weft.UnavailableError, weft.WeftError) and not issubclass(weft.InternalError, ValueError)


def test_dir_shows_what_is_public_and_all_of_it_is_there() -> None:
    assert dir(weft) == sorted(weft.__all__)
    assert all(hasattr(weft, name) for name in weft.__all__)
    assert {"Normalizer", "tune", "build", "calibrate"} <= {*weft.__all__}


def test_a_variant_shows_its_fields_its_methods_and_one_property_of_its_canonical_form() -> None:
    assert [name for name in dir(weft.Attention) if not name.startswith("_")] == [
        "canonical", "dropout", "explain", "latent", "mask", "name", "normalizer", "plan", "reference", "replace",
        "scale", "show_mask", "sink", "source",
    ]  # fmt: skip
    causal, again = (weft.Attention(mask=mask) for mask in (weft.kv_pos <= weft.q_pos, weft.q_pos >= weft.kv_pos))
    assert causal == again and causal.canonical.text == again.canonical.text
    assert causal.canonical.digest == again.canonical.digest
