"""The language: what expressions are written, how they print, read back, and when two variants are the same."""

import enum
import pickle

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.ir import functions as fn
from weft.ir.attention import Attention, Latent
from weft.ir.canonical import canonical
from weft.ir.expr import Call, Const, Expr, call, expression, scalar, symbol, tensor
from weft.ir.operators import OPERATORS, function_names
from weft.ir.parse import parse, parse_attention
from weft.ir.walk import loads, nodes, rewrite, scalars, substitute, symbols, tensors

q_pos, kv_pos, head, score, batch = (symbol(n) for n in ("q_pos", "kv_pos", "head", "score", "batch"))
window, cap = scalar("window", int), scalar("cap", float)
slopes, doc, allowed = tensor("slopes", 1), tensor("doc", 2, int), tensor("allowed", 1, bool)
OPERANDS = {"window": window, "cap": cap, "slopes": slopes, "doc": doc, "allowed": allowed}

# -- random expressions, made with Python's own operators ------------------------------------------

INT_LEAVES = st.sampled_from([q_pos, kv_pos, head, batch, window]) | st.integers(-(2**31) + 1, 2**31 - 1).map(
    expression
)
FLOAT_LEAVES = st.sampled_from([score, cap, slopes[head]]) | st.floats(allow_nan=False).map(expression)


def not_constants(*args: Expr) -> bool:
    """Python computes `-3` by itself; only operators with a node among their operands are ever written."""
    return not all(isinstance(a, Const) for a in args)


def binary(ops: list[str], left: st.SearchStrategy[Expr], right: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    written = st.tuples(st.sampled_from(ops), left, right).filter(lambda t: not_constants(*t[1:]))
    return written.map(lambda t: call(*t))


def unary(ops: list[str], operand: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    return st.tuples(st.sampled_from(ops), operand.filter(not_constants)).map(lambda t: call(*t))


def numbers(leaves: st.SearchStrategy[Expr], ops: list[str], functions: list[str]) -> st.SearchStrategy[Expr]:
    return st.recursive(leaves, lambda e: binary(ops, e, e) | unary(functions, e), max_leaves=8)


FLOAT_FUNCTIONS = [name for name in function_names() if OPERATORS[name].computes_floats]
INTS = numbers(INT_LEAVES, ["add", "sub", "mul", "floordiv", "mod", "minimum", "maximum"], ["neg", "abs"])
FLOATS = numbers(
    FLOAT_LEAVES | INTS,
    ["add", "sub", "mul", "div", "minimum", "maximum"],
    [
        "neg",
        "abs",
        "exp",
        "exp2",
        "log",
        "log2",
        "tanh",
        "sigmoid",
        "softplus",
        "logsigmoid",
        "sqrt",
        "rsqrt",
        "sin",
        "cos",
    ],
)
COMPARISONS = binary(["lt", "le", "gt", "ge", "eq", "ne"], INTS, INTS) | INTS.map(lambda i: doc[batch, i] == i)
BOOLS = st.recursive(
    COMPARISONS | st.booleans().map(expression),
    lambda e: binary(["and", "or", "xor", "eq", "ne"], e, e) | unary(["not"], e),
    max_leaves=6,
)
SELECTIONS = st.tuples(BOOLS, FLOATS, FLOATS).map(lambda t: fn.where(*t))
EXPRESSIONS = INTS | FLOATS | BOOLS | SELECTIONS


@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS)
def test_str_reads_back(e: Expr) -> None:
    assert str(parse(str(e), OPERANDS)) == str(e)


@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS)
def test_python_reads_the_same_tree(e: Expr) -> None:
    """The text means the same to Python; canonical, since Python turns `3 < x` into `x > 3` by itself."""
    names = {"q_pos": q_pos, "kv_pos": kv_pos, "head": head, "batch": batch, "score": score, "inf": float("inf")}
    functions = {n: getattr(fn, n) for n in function_names()}
    if not isinstance(e, Const):
        again = eval(str(e), {**names, **functions, **OPERANDS})
        assert str(canonical(again)) == str(canonical(e))


@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS)
def test_canonical_form_is_a_fixed_point_and_reads_back(e: Expr) -> None:
    form = canonical(e)
    assert str(canonical(form)) == str(form)
    assert str(canonical(parse(str(form), OPERANDS))) == str(form)
    assert not any(isinstance(n, Call) and n.op in ("gt", "ge") for n in nodes(form))


# -- operators and types ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "text", "dtype"),
    [
        (q_pos + 1, "q_pos + 1", "int"),
        (1 - q_pos, "1 - q_pos", "int"),
        (2.0 * q_pos, "2.0 * q_pos", "float"),
        (q_pos / 2, "q_pos / 2", "float"),
        (q_pos // 2 % 3, "q_pos // 2 % 3", "int"),
        (7 // q_pos, "7 // q_pos", "int"),
        (7 % q_pos, "7 % q_pos", "int"),
        (1 / score, "1 / score", "float"),
        (q_pos // (2 % kv_pos), "q_pos // (2 % kv_pos)", "int"),
        (q_pos - (kv_pos - 1), "q_pos - (kv_pos - 1)", "int"),
        (-q_pos + kv_pos, "-q_pos + kv_pos", "int"),
        (-(q_pos + kv_pos), "-(q_pos + kv_pos)", "int"),
        (q_pos * -1, "q_pos * (-1)", "int"),
        (+q_pos, "q_pos", "int"),
        (abs(q_pos - kv_pos), "abs(q_pos - kv_pos)", "int"),
        (q_pos > kv_pos, "q_pos > kv_pos", "bool"),
        (3 > kv_pos, "kv_pos < 3", "bool"),
        ((q_pos >= 1) == (kv_pos >= 1), "(q_pos >= 1) == (kv_pos >= 1)", "bool"),
        ((q_pos < 1) & (kv_pos < 1) | (head != 0), "(q_pos < 1) & (kv_pos < 1) | (head != 0)", "bool"),
        ((q_pos < 1) & ((kv_pos < 1) | (head != 0)), "(q_pos < 1) & ((kv_pos < 1) | (head != 0))", "bool"),
        (~(q_pos < 1) ^ True, "~(q_pos < 1) ^ True", "bool"),
        (False | (q_pos < 1), "False | (q_pos < 1)", "bool"),
        (fn.where(q_pos < 1, 0.0, score), "where(q_pos < 1, 0.0, score)", "float"),
        (fn.where(q_pos < 1, q_pos, 2), "where(q_pos < 1, q_pos, 2)", "int"),
        (fn.where(q_pos < 1, kv_pos < 2, True), "where(q_pos < 1, kv_pos < 2, True)", "bool"),
        (fn.floor(score), "floor(score)", "int"),
        (fn.minimum(q_pos, 4), "minimum(q_pos, 4)", "int"),
        (fn.maximum(q_pos, 4.5), "maximum(q_pos, 4.5)", "float"),
        (slopes[head] * score, "slopes[head] * score", "float"),
        (doc[batch, q_pos] == doc[batch, kv_pos], "doc[batch, q_pos] == doc[batch, kv_pos]", "bool"),
        (allowed[kv_pos] & (kv_pos < 9), "allowed[kv_pos] & (kv_pos < 9)", "bool"),
        (score - float("inf"), "score - inf", "float"),
        (score * float("-inf"), "score * (-inf)", "float"),
    ],
)
def test_operators(written: Expr, text: str, dtype: str) -> None:
    assert (str(written), written.dtype) == (text, dtype)
    assert str(parse(text, OPERANDS)) == text


@pytest.mark.parametrize(
    "name", [n for n in function_names() if n not in ("abs", "floor", "minimum", "maximum", "where")]
)
def test_functions_give_floats(name: str) -> None:
    assert getattr(fn, name)(q_pos).dtype == "float"
    assert str(getattr(fn, name)(score / 2)) == f"{name}(score / 2)"


def test_every_function_of_the_table_is_public_and_documented() -> None:
    assert all(getattr(fn, n).__doc__ for n in function_names())


def test_number_subclasses_print_as_plain_numbers() -> None:
    sizes = enum.IntEnum("sizes", {"small": 3})
    assert str(score * numpy.float64(2.5)) == "score * 2.5"
    assert str(q_pos < sizes.small) == "q_pos < 3"


def test_nodes_keep_the_line_that_wrote_them() -> None:
    written = q_pos < kv_pos
    assert written.where.startswith(f"{__file__}:")
    inner = substitute(written & (head > 0), {"q_pos": kv_pos + 1})
    assert inner.where.startswith(f"{__file__}:")


def test_expressions_survive_pickling() -> None:
    e = fn.where(doc[batch, q_pos] < window, 50.0 * fn.tanh(score / cap), slopes[head])
    assert str(pickle.loads(pickle.dumps(e))) == str(e)


# -- reading text ----------------------------------------------------------------------------------


def test_parse_accepts_qualified_names_and_space() -> None:
    assert str(parse(" weft.tanh(weft.score / 2.0) ")) == "tanh(score / 2.0)"


def test_attention_reads_back() -> None:
    variant = Attention(
        score=50.0 * fn.tanh(score / cap) + slopes[head] * (kv_pos - q_pos),
        mask=(kv_pos <= q_pos) & (q_pos - kv_pos < window) & allowed[kv_pos],
        scale=0.125,
        latent=Latent(rank=32, rope=8),
        name="everything",
    )
    again = parse_attention(str(variant))
    assert str(again) == str(variant)
    assert again == variant
    assert hash(again) == hash(variant)


# -- walking ---------------------------------------------------------------------------------------


def test_walking_finds_what_is_in_an_expression() -> None:
    e = fn.where(doc[batch, q_pos] < window, slopes[head] * cap, slopes[head])
    assert symbols(e) == {"batch", "q_pos", "head"}
    assert [s.name for s in scalars(e)] == ["cap", "window"]
    assert [t.name for t in tensors(e)] == ["doc", "slopes"]
    assert [str(x) for x in loads(e)] == ["doc[batch, q_pos]", "slopes[head]"]


def test_rewriting_nothing_keeps_the_very_same_nodes() -> None:
    e = (q_pos + 1) * 2 < kv_pos
    assert rewrite(e, lambda node: None) is e


# -- canonical form and equality -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (kv_pos <= q_pos, q_pos >= kv_pos),
        (kv_pos + 1 <= q_pos, q_pos >= 1 + kv_pos),
        ((kv_pos < 3) & (q_pos < 5), (q_pos < 5) & (kv_pos < 3)),
        (~~(kv_pos < 3), kv_pos < 3),
        ((kv_pos < 3) & True, kv_pos < 3),
        ((kv_pos < 3) | True, expression(True)),
        ((kv_pos < 3) & (kv_pos < 3), kv_pos < 3),
        (kv_pos * 1 + 0 < 3, kv_pos < 3),
    ],
)
def test_equal_masks_have_one_canonical_form(a: Expr, b: Expr) -> None:
    assert str(canonical(a)) == str(canonical(b))
    assert Attention(mask=a) == Attention(mask=b)
    assert Attention(mask=a).canonical.digest == Attention(mask=b).canonical.digest
    assert len({Attention(mask=a), Attention(mask=b)}) == 1


def test_different_variants_differ() -> None:
    causal = Attention(mask=kv_pos <= q_pos)
    others = [
        Attention(),
        Attention(mask=kv_pos < q_pos),
        Attention(mask=kv_pos <= q_pos, scale=1.0),
        Attention(mask=kv_pos <= q_pos, name="causal"),
        Attention(mask=kv_pos <= q_pos, latent=Latent(16, 8)),
        Attention(score=score * 2.0, mask=kv_pos <= q_pos),
    ]
    assert all(causal != other for other in others)
    assert len({v.canonical.digest for v in (causal, *others)}) == 7


def test_operand_types_are_part_of_the_identity() -> None:
    """`x < n` with an int or a float n prints the same, but is not the same kernel."""
    as_int, as_float = (Attention(mask=q_pos - kv_pos < scalar("n", kind)) for kind in (int, float))
    assert as_int != as_float


def test_int_and_float_constants_are_not_confused() -> None:
    assert str(canonical(score * 1)) == "score"
    assert str(canonical(q_pos * 1.0)) == "1.0 * q_pos"  # a float: the `1.0` may not vanish
    assert str(canonical(expression(2) == expression(2.5))) == "False"


def test_folding_never_overflows_or_makes_nan() -> None:
    assert str(canonical(expression(2**31 - 1) + 1)) == "1 + 2147483647"
    assert str(canonical(expression(float("inf")) - float("inf"))) == "inf - inf"


def test_attention_defaults_and_replace() -> None:
    plain = Attention()
    assert (str(plain.canonical.folded_score), plain.canonical.is_masked, plain.name) == (
        "qk * rsqrt(head_dim)",
        False,
        "attention",
    )
    causal = plain.replace(mask=kv_pos <= q_pos, name="causal")
    assert causal.canonical.is_masked and causal.name == "causal" and not plain.canonical.is_masked
    assert str(causal) == 'weft.Attention(score=score, mask=kv_pos <= q_pos, name="causal")'


def test_a_sink_is_part_of_the_variant() -> None:
    learned = Attention(mask=kv_pos <= q_pos, sink=slopes[head] + 1, name="learned")
    assert str(learned).endswith('sink=slopes[head] + 1, name="learned")')
    for same in (
        parse_attention(str(learned)), parse_attention(learned.canonical.text), pickle.loads(pickle.dumps(learned)),
        Attention(mask=q_pos >= kv_pos, sink=1 + slopes[head], name="learned"),
    ):  # fmt: skip
        assert same == learned and same.canonical.digest == learned.canonical.digest
    plain = learned.replace(sink=None)
    assert (
        plain != learned and plain.canonical.tensors == () and [t.name for t in learned.canonical.tensors] == ["slopes"]
    )
    assert (
        "sink" not in plain.canonical.text
        and plain.canonical.digest == Attention(mask=kv_pos <= q_pos, name="learned").canonical.digest
    )
    assert plain.replace(sink=-float("inf")) == plain  # none, and no kernel of its own
    assert plain.replace(sink=0) == plain.replace(sink=0.0) != plain
    assert plain.replace(sink=head).canonical.text.endswith('sink=1.0 * head, name="learned")')
    latent = Attention(latent=Latent(32, 8), sink=slopes[symbol("kv_head")])
    assert str(latent.canonical.folded_sink) == "slopes[head]"
    assert Attention(sink=0.0 * slopes[head]).canonical.unread <= {"slopes"}


def test_operands_of_a_variant_are_listed_by_name() -> None:
    variant = Attention(score=score * cap + slopes[head], mask=(q_pos - kv_pos < window) & allowed[kv_pos])
    assert [s.name for s in variant.canonical.scalars] == ["cap", "window"]
    assert [t.name for t in variant.canonical.tensors] == ["allowed", "slopes"]
    assert [str(x) for x in variant.canonical.gradient_loads] == ["slopes[head]"]
