"""Normalizers as finished text: the lines that kernels place where scores become weights, for each family of templates.

What the lines find and what they must leave, besides LN_2 and LOG2_E (a forward of family triton has LN_2 alone)

  triton    forward: qk [BLOCK_Q, BLOCK_KV], and `terms.score`, -inf for hidden pairs; the weights are left in p.
            backward: `terms.score` of pairs of which some are hidden, cleared later; p, and the gradient dp of it;
            row_lse2 and row_delta of a normalizer that saves lse, shaped to broadcast; under `terms.far` also
            row_shift, the row's maximum, and then row_lse2 is that of scores less this
  cpu       `cut(powers)`, powers of 2 that come to nothing replaced by -inf (see the templates), and `steep`, whether
            that is worth its time where the score is linear; in a backward `rows.cut` does it where it is
            forward: a class (`define`) whose objects (`init`) add up tiles: `add(scores, values)`, scores [N, keys,
            queries], which may be overwritten, and values [N, keys, Dv]; `bias`, [N, queries] or None, that a product
            of a linear score is to have; `finish()` -> (sums [N, Dv, queries], what is saved [N, queries]), or None
            for both where no tile was added. With `again`, `hold()` says whether that need not be done again with it.
            Under `terms.drops`, `add` takes a third tensor, kept [N, keys, queries], by which weights are multiplied
            for the sum over values and for nothing else.
            backward: `terms.score`, [N, keys, queries], -inf for hidden pairs; weights and dscore are left, the
            latter from values [N, keys, Dv] and douts [N, queries, Dv]; log_total and minus_delta [N, queries] of a
            normalizer that saves lse, under `terms.less_lse` taken off the score before; under `terms.drops` kept
            [N, keys, queries], by which the gradient of a weight is multiplied
  hopper    forward: `terms.score`, -inf for hidden pairs, of which `scale` is above 0; in a softmax's also acc, sums of
            weighted values, and all that parts/softmax.py.jinja has. The weights are left in p, and what is `running`.
            backward, of a normalizer that saves nothing: `terms.score`, -inf for hidden pairs and for rows that do not
            exist; p, and what else of it is `kept`; dp, whose dP of such pairs may be anything finite

Scores are in units of log 2, so that exp2 serves, but for `terms.far`; gradients of scores are per natural unit.
"""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..ir.errors import InternalError
from ..ir.normalizer import RELU, SIGMOID, SOFTMAX, Normalizer


@dataclass(frozen=True)
class Terms:
    """What of a variant, and of a direction, the texts of a normalizer depend on."""

    linear: bool  # the score is a scale times q.k; in a forward of family triton that scale is positive
    masked: bool  # the mask is not True
    score: str  # the scores of a tile, an expression
    sums: tuple[str, ...]  # running sums of weighted values, by name (family triton)
    far: bool = False  # scores may lie far from 0 and are in natural units; only where a normalizer saves lse
    less_lse: bool = False  # cpu, backward: the score of a pair is less log_total already
    drops: bool = False  # weights are dropped: of families triton and hopper the templates do that
    boxed: bool = False  # hopper, forward: a slot is still held that what pairs read was loaded from (`release_read`)
    narrow: bool = False  # hopper, forward: tiles are so narrow that special units are busy longer than products
    by_tiles: bool = False  # hopper, fp8: values of each tile have a descale
    shared: bool = False  # triton, forward: warps share the rows of a tile, so that a sum over its keys crosses them
    fp8: bool = False  # operands are FP8. hopper, forward: products of a tile are not added to others by their unit


@dataclass(frozen=True)
class Blocks:
    """The texts of one normalizer: lines from column 0 on, "" for none, or expressions where that is said."""

    # before the loop over tiles; cpu: an expression; hopper: the weights of the first tile, "" where they are as others
    init: str = ""
    again: str = ""  # cpu: an expression like `init`, of an object that is slower and holds always
    refer: str = ""  # hopper, products apart: what a tile's scores are compared with, before its weights
    weigh: str = ""  # the weights of a visited tile
    accumulate: str = ""  # what runs along, brought up to date, and sums rescaled
    finish: str = ""  # after the loop, before the output is stored
    factor: str = ""  # triton: what follows a tile of sums where it is stored, as " * weight[:, None]"
    save: str = ""  # triton: row_lse [BLOCK_Q], natural log, of a normalizer that saves lse
    backward_weight: str = ""  # the weights again, from scores and what was saved
    backward_score: str = ""  # triton, hopper: the gradient of the score, an expression of p and dp; cpu: lines
    scaled_backward_score: str = ""  # triton: the same times `scale`, where that is no plain product
    define: str = ""  # functions and classes of a forward's module
    backward_define: str = ""  # the same of a backward's
    # hopper: what a consumer keeps of its rows from tile to tile, by its names there and where a tile ends
    running: tuple[tuple[str, str], ...] = ()
    kept: str = ""  # hopper: a tile besides p that `backward_weight` leaves, and `backward_score` reads
    in_one_piece: str = ""  # cpu: out and lse of a small call from all its `logits`; without it such calls have tiles

    @property
    def scaled(self) -> str:
        return self.scaled_backward_score or f"({self.backward_score}) * scale"


# What holds the scores of a tile, by family, direction and whether the score is linear in q.k
SCORES = {
    ("triton", "forward", True): "qk * scale",
    ("triton", "forward", False): "qk",
    ("triton", "backward", True): "qk * scale",
    ("triton", "backward", False): "scores(qk, q_pos, kv_pos, {env})",
    ("hopper", "forward", True): "score * scale",
    ("hopper", "forward", False): "score",
    ("hopper", "backward", True): "score",
    ("hopper", "backward", False): "score",
    **{("cpu", "forward", linear): "scores_tile" for linear in (True, False)},
    **{("cpu", "backward", linear): "logits" for linear in (True, False)},
}

Texts = Callable[[Terms], Blocks]
_texts: dict[tuple[str, str], Texts] = {}


def register(normalizer: Normalizer, family: str, texts: Texts) -> None:
    """Give the texts of a normalizer in one family of templates, "triton" (of interpret too), "hopper" or "cpu".

    Those of family hopper are of normalizers that save nothing: statistics of rows are there those of a softmax.
    """
    _texts[normalizer.name, family] = texts


def digest(name: str) -> str:
    """A mark of the texts of a normalizer, for the key of what is generated from them; "" for Weft's own."""
    if name in _OWN:
        return ""
    terms = [Terms(linear, masked, "scores", ("o0",)) for linear in (True, False) for masked in (True, False)]
    texts = [repr(texts(t)) for (of, _), texts in sorted(_texts.items()) if of == name for t in terms]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def unregister(normalizer: Normalizer) -> None:
    """Take the texts of a normalizer away again."""
    for key in [key for key in _texts if key[0] == normalizer.name]:
        del _texts[key]


def lacks(normalizer: Normalizer, family: str) -> str | None:
    """What a family has instead, in words, where it has no texts of a normalizer; None where it has them."""
    if (normalizer.name, family) in _texts:
        return None
    return _only([name for name, known in _texts if known == family])


def softmax_only(normalizer: Normalizer) -> str | None:
    """The same of what computes a softmax and nothing else."""
    return None if normalizer == SOFTMAX else _only([SOFTMAX.name])


def _only(names: list[str]) -> str:
    return f"has the normalizer{'s' if len(names) > 1 else ''} {', '.join(names)} only"


def blocks_of(normalizer: Normalizer, family: str, terms: Terms) -> Blocks:
    """The texts of a normalizer for one variant and direction."""
    if (normalizer.name, family) not in _texts:
        raise InternalError(f"normalizers: {family} has no texts of {normalizer.name}")
    return _texts[normalizer.name, family](terms)


def with_sink(blocks: Blocks, far: bool, env: str) -> Blocks:
    """The texts of a forward of family triton whose rows have one more logit: `with_sink` of its parts joins it."""
    statistics = "row_max, row_log_sum" if far else "row_lse"
    joined = f"{statistics}, keys_weight = with_sink({statistics}, sink_logit({env}))"
    finish = "\n".join(filter(None, [blocks.finish, blocks.save, joined]))
    return replace(blocks, finish=finish, save="", factor=f"{blocks.factor} * keys_weight[:, None]")


def _lines(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


# -- softmax, family triton --------------------------------------------------------------------------------------------
SHARED_COLUMNS = 32  # that lie so far apart are one thread's, where four warps share the rows of a tile of products


def _softmax_of_triton(terms: Terms) -> Blocks:
    """Running maximum and sum; of raw products where the score is linear, which saves a product a score."""
    scaled = " * scale" if terms.linear else ""
    exponent = "qk * scale - (reference * scale)[:, None]" if terms.linear else "qk - reference[:, None]"
    shrink = "(row_max - reference) * scale" if terms.linear else "row_max - reference"
    if terms.far:
        exponent, shrink = f"({exponent}) * LOG2_E", f"({shrink}) * LOG2_E"
    weigh = f"""
        new_max = tl.maximum(row_max, tl.max(qk, 1))
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)  # nothing seen yet: -inf - -inf would be NaN
        p = tl.exp2({exponent})
        rescale = tl.exp2({shrink})
    """
    rescaled = [f"{name} = {name} * rescale[:, None]" for name in terms.sums]
    zeros, summed, joined, joined_late = "[BLOCK_Q]", "row_sum = row_sum * rescale + tl.sum(p, 1)", "", ""
    if terms.shared:
        zeros = f"[BLOCK_Q, min(BLOCK_KV, {SHARED_COLUMNS})]"
        joined_late = f"  # of keys {SHARED_COLUMNS} apart, which are one thread's: they are joined once, at the end"
        summed = _lines("""
            added = tl.sum(tl.reshape(p, [BLOCK_Q, BLOCK_KV // row_sum.shape[1], row_sum.shape[1]]), 1)
            row_sum = row_sum * rescale[:, None] + added
        """)
        joined = "row_sum = tl.sum(row_sum, 1)\n"
    return Blocks(
        init=_lines(f"""
            row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
            row_sum = tl.zeros({zeros}, tl.float32){joined_late}
        """),
        weigh=_lines(weigh),
        accumulate="\n".join([summed, "row_max = new_max", *rescaled]),
        finish=f"{joined}safe_sum = tl.where(row_sum == 0.0, 1.0, row_sum)"
        "  # a row that saw nothing has sum 0, maximum -inf, output 0\nweight = 1.0 / safe_sum",
        factor=" * weight[:, None]",
        save="row_log_sum = tl.log2(safe_sum) * LN_2"
        if terms.far
        else f"row_lse = (row_max{scaled} + tl.log2(safe_sum)) * LN_2",
        backward_weight=_weights_of_far_scores(terms) if terms.far else f"p = tl.exp2({terms.score} - row_lse2)",
        backward_score="p * (dp - row_delta)",
        scaled_backward_score="p * (dp * scale - row_delta * scale)",
    )


def _weights_of_far_scores(terms: Terms) -> str:
    return _lines(f"""
        power = ({terms.score} - row_shift) * LOG2_E - row_lse2
        p = tl.exp2(tl.minimum(power, 0.0))  # where roundings are large, this score may be above the forward's
    """)


# -- softmax, family hopper --------------------------------------------------------------------------------------------
def _softmax_of_hopper(terms: Terms) -> Blocks:
    """Functions of parts/softmax.py.jinja, in an order that is tuned. Statistics of rows are the templates' own."""
    highest, released = "row_maximum(score, scale)", ["reference = row_maximum(score, scale)"]
    raised = ["moved = raised(reference, row_maximum(score, scale))"]
    if terms.boxed:
        release = "release_read(FIRST_FREE_KEY, count, {})"
        released += [release.format("reference")]
        raised = [f"highest = {highest}", release.format("highest"), "moved = raised(reference, highest)"]
    if terms.fp8:
        return _softmax_of_products_apart(raised, terms.by_tiles)
    return Blocks(
        init="\n".join([*released, "p = gl.exp2(exponent(score, finite(reference), scale))", "sums = thread_sums(p)"]),
        weigh="\n".join(
            [
                *raised,
                "subtract = finite(moved)",
                "factor = gl.exp2(in_base_2(reference - subtract))",
                "p = gl.exp2(exponent(score, subtract, scale))",
                "sums = sums * gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout))[:, None]"
                " + thread_sums(p)",
            ]
        ),
        accumulate="acc = rescale(acc, factor)",
        running=(("reference", "moved"), ("sums", "sums")),
    )


def _softmax_of_products_apart(raised: list[str], by_tiles: bool) -> Blocks:
    """The same where products of a tile, `product`, join the sums by a multiply-add.

    Sums are in units of the reference before, so that one instruction also rescales them. by_tiles: those of values are
    also in units of the descale of the tile before, `unit`; that of this tile is `descale`.
    """
    refer = [*raised, "subtract = finite(moved)", "shrunk = gl.exp2(in_base_2(reference - subtract))"]
    first = [
        "reference = row_maximum(score, scale)",
        "p = gl.exp2(exponent(score, finite(reference), scale))",
        "sums = one_each(gl.zeros([ROWS, SUM_COLUMNS], gl.float32, SUM))",
        "factor = gl.zeros([ROWS], gl.float32, ROW)  # of sums that are 0",
    ]
    of_values = "value_factor" if by_tiles else "factor"
    joined = [f"acc = with_product(acc, {of_values}, product)", "sums = with_sums(sums, factor, added)"]
    running = [("reference", "moved"), ("sums", "sums"), ("factor", "shrunk")]
    if by_tiles:
        first += ["value_factor, unit = factor, descale"]
        refer += [
            "least = unit * 2.0**-80  # so that sums stay finite; NaN stays NaN",
            "descale = gl.where(descale < least, least, descale)",
            "value_shrunk = shrunk * (unit / descale)",
        ]
        running += [("value_factor", "value_shrunk"), ("unit", "descale")]
    return Blocks(
        init="\n".join(first), refer="\n".join(refer), weigh="p = gl.exp2(exponent(score, subtract, scale))",
        accumulate="\n".join(joined), running=tuple(running),
    )  # fmt: skip


# -- softmax, family cpu -----------------------------------------------------------------------------------------------
_SOFTMAX_CLASS = '''
class Softmax:
    """Running softmax-weighted sum over tiles of keys (online softmax, Milakov and Gimelshein 2018).

    Once every query has seen a key, its maximum so far stays the reference: whatever it is, it cancels. Only where a
    sum leaves LARGEST are the tiles added up again, by an object with the maximum of all keys so far.
    """

    LARGEST = 2.0**60

    def __init__(self{steep_argument}, exact=False):
{keep_steep}        self.exact = exact  # whether the reference is always the maximum so far
        self.bias = None  # less the reference, [N, queries], once it stays: {who} adds it to scores
        self.top = self.total = self.weighted = None  # reference and sum of exponentials of each query; sum over values

    def add(self, scores, values{kept_argument}):
        """One more tile of scores [N, keys, queries] in {unit}, overwritten, and values [N, keys, Dv]{kept_text}."""
        if self.bias is not None:
            weights = {cut}(scores{less_reference}).exp2_()
            self.total.add_(weights.sum(1))
            add_product(self.weighted, values.mT, weights{dropped}.mT)
            return
        top = scores.amax(1)
        if self.top is not None:
            top = torch.maximum(top, self.top)
        reference = top.masked_fill(top == -math.inf, 0.0)  # of a query that saw nothing yet
        weights = {cut}(scores.sub_(reference[:, None]){scaled}).exp2_()
        if self.top is None:
            self.total, self.weighted = weights.sum(1), product(values.mT, weights{dropped}.mT)
        else:
            shrink = torch.exp2({shrink})
            self.total.mul_(shrink).add_(weights.sum(1))
            self.weighted.mul_(shrink[:, None])
            add_product(self.weighted, values.mT, weights{dropped}.mT)
        self.top = top
        if not self.exact and math.isfinite(top.min()):
            self.bias = -top

    def hold(self):
        """Whether no sum grew so large that digits may be lost."""
        return self.bias is None or bool(self.total.amax() < self.LARGEST)

    def finish(self):
        """The weighted mean of the values, [N, Dv, queries], {and_what}.

        0 and -inf for a query that saw no key; None where there was no tile.
        """
        if self.top is None:
            return None, None
        mean = self.weighted.div_(self.total.masked_fill(self.total == 0.0, 1.0)[:, None])
        {statistics}
'''


def _kept(terms: Terms) -> dict[str, str]:
    """What `add` is told of dropped weights."""
    if not terms.drops:
        return {"kept_argument": "", "kept_text": "", "dropped": ""}
    return {
        "kept_argument": ", kept", "kept_text": ", whose weights count `kept` times", "dropped": ".mul_(kept)",
    }  # fmt: skip


def _softmax_of_cpu(terms: Terms) -> Blocks:
    """A class that weighs and adds up at once."""
    parts = {
        "who": "the product" if terms.linear else "`add`", "unit": "units of log 2", "scaled": "",
        "steep_argument": "", "keep_steep": "", "cut": "cut",
        "less_reference": "" if terms.linear else ".add_(self.bias[:, None])", "shrink": "self.top - reference",
        **_kept(terms), "and_what": "and the log of the sum of exponentials",
        "statistics": """mantissa, exponent = torch.frexp(self.total)  # the reference may be far below the maximum
        return mean, (self.top + exponent + mantissa.log2()) * LN_2""",
    }  # fmt: skip
    if terms.linear:
        parts |= {
            "steep_argument": ", steep", "cut": "self.cut",
            "keep_steep": "        self.cut = cut if steep else lambda powers: powers\n",
        }  # fmt: skip
    weights = "" if terms.less_lse else ".sub_(log_total[:, None])"
    if terms.far:
        parts |= {
            "unit": "natural units", "scaled": ".mul_(LOG2_E)", "shrink": "(self.top - reference) * LOG2_E",
            "less_reference": ".add_(self.bias[:, None]).mul_(LOG2_E)",
            "and_what": "the maximum, and the log of the sum",
            "statistics": "return mean, torch.stack([self.top, self.total.log()], -1)",
        }  # fmt: skip
        # where roundings are large, a score may come out above the forward's
        weights = ".sub_(shift[:, None]).mul_(LOG2_E).sub_(log_total[:, None]).clamp_(max=0.0)"
    steep = "steep" if terms.linear else ""
    return Blocks(
        define=_lines(_SOFTMAX_CLASS.format(**parts)),
        # the maximum of scores that lie far from 0 is saved, so that no other will do
        init="Softmax(exact=True)" if terms.far else f"Softmax({steep})",
        again="" if terms.far else f"Softmax({steep}, exact=True)" if steep else "Softmax(exact=True)",
        in_one_piece="" if terms.drops else _softmax_in_one_piece(terms),
        backward_weight=f"weights = {'rows.cut' if terms.linear else 'cut'}({terms.score}{weights}).exp2_()",
        backward_score="dscore = product(values, douts).mul_(kept).add_(minus_delta[:, None]).mul_(weights)"
        if terms.drops
        else "dscore = product(values, douts, minus_delta).mul_(weights)",
    )


_WEIGHED_IN_ONE_PIECE = _lines("""
    values = value.to(dtype).reshape(batch * kv_heads, kv_len, -1)
    if out.dtype == dtype and out.is_contiguous():
        torch.bmm(weights, values, out=out.view(batch * kv_heads, -1, values.shape[-1]))
    else:
        out.copy_(torch.bmm(weights, values).view(out.shape))
""")


def _softmax_in_one_piece(terms: Terms) -> str:
    """Not torch.softmax, whose exponentials have 20 bits on some processors."""
    scaled = ".mul_(LOG2_E)" if terms.far else ""
    saved = "torch.add(total.log_().view(lse.shape), top.view(lse.shape), alpha=LN_2, out=lse)"
    if terms.far:
        saved = "torch.stack([top.view(out.shape[:3]), total.log_().view(out.shape[:3])], out=lse)"
    powers = f"logits.sub_(reference){scaled}"
    powers = powers if terms.linear else f"cut({powers})"
    return (
        _lines(f"""
        top = logits.amax(-1, keepdim=True)
        reference = top.masked_fill(top == -math.inf, 0.0)  # a row that sees nothing, or scores of -inf alone
        weights = {powers}.exp2_()
        total = weights.sum(-1, keepdim=True)
        weights.div_(total.masked_fill(total == 0.0, 1.0))
    """)
        + f"\n{_WEIGHED_IN_ONE_PIECE}\n{saved}"
    )


# -- sigmoid and relu: a weight depends on its pair alone, so that nothing runs along ----------------------------------
def _sigmoid_of_triton(terms: Terms) -> Blocks:
    weigh = f"p = 1.0 / (1.0 + tl.exp2(-({terms.score})))"
    return Blocks(weigh=weigh, backward_weight=weigh, backward_score="p * (1.0 - p) * dp")


def _relu_of_triton(terms: Terms) -> Blocks:
    """Comparisons that let NaN through."""
    lines = f"logit = {terms.score}\np = tl.where(logit <= 0.0, 0.0, logit * LN_2)"
    return Blocks(weigh=lines, backward_weight=lines, backward_score="tl.where(logit <= 0.0, 0.0, dp)")


_SIGMOIDS = '''
def _sigmoids_asm():
    """PTX of the sigmoids of eight powers, four of each of a thread's two rows: a / (1 + a) of a = 2 ** power.

    The four of a row share one reciprocal, of the product of their divisors: each costs 1.25 instructions of the
    special units in place of 2, and 3.5 others more. No weight is lost in that: 2 ** 30 / (1 + 2 ** 30) is 1 in
    float32, and the product of four such divisors is finite; small ones are as exact as large ones, that of -inf is 0.
    """
    lines = [".reg .f32 a<8>, d<8>, x, y, r;"]
    for i in range(8):
        lines += [f"min.NaN.f32 a{i}, ${8 + i}, 0f41F00000;", f"ex2.approx.ftz.f32 a{i}, a{i};"]
        lines += [f"add.f32 d{i}, a{i}, 0f3F800000;"]
    for i, j, k, l in ((0, 1, 4, 5), (2, 3, 6, 7)):  # of a row
        lines += [f"mul.f32 x, d{i}, d{j};", f"mul.f32 y, d{k}, d{l};", "mul.f32 r, x, y;"]
        lines += ["rcp.approx.ftz.f32 r, r;", "mul.f32 y, r, y;", "mul.f32 x, r, x;"]  # 1 / (di dj), 1 / (dk dl)
        for one, other, both in ((i, j, "y"), (k, l, "x")):
            lines += [f"mul.f32 d{other}, d{other}, {both};", f"mul.f32 d{one}, d{one}, {both};"]
            lines += [f"mul.f32 ${one}, a{one}, d{other};", f"mul.f32 ${other}, a{other}, d{one};"]
    return "{ " + " ".join(lines) + " }"


SIGMOIDS_ASM = gl.constexpr(_sigmoids_asm())
SIGMOIDS_OPERANDS = gl.constexpr(",".join(["=f"] * 8 + ["f"] * 8))


@gluon.jit
def sigmoids(powers):
    """The sigmoid of scores in base-2 units, in the layout of a product."""
    return gl.inline_asm_elementwise(SIGMOIDS_ASM, SIGMOIDS_OPERANDS, [powers], dtype=gl.float32, is_pure=True, pack=8)
'''

_SIGMOIDS_EACH = '''
@gluon.jit
def sigmoids(powers):
    """The sigmoid of scores in base-2 units, 0 of -inf. In lines of its own a sign costs no instruction."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 x; neg.f32 x, $1; ex2.approx.ftz.f32 x, x; add.f32 x, x, 0f3F800000; rcp.approx.ftz.f32 $0, x; }",
        "=f,f", [powers], dtype=gl.float32, is_pure=True, pack=1)
'''


def _sigmoid_of_hopper(terms: Terms) -> Blocks:
    """An exponential and a reciprocal; tanh has no digits for the small weights of many keys.

    Sharing a reciprocal pays where tiles are narrow. Not in a backward, where a row of a tile has several queries, of
    which one that is NaN must not make others so.
    """
    weigh = f"p = sigmoids({terms.score})"
    return Blocks(
        define=_lines(_SIGMOIDS if terms.narrow else _SIGMOIDS_EACH),
        weigh=weigh,
        backward_define=_lines(_SIGMOIDS_EACH),
        backward_weight=weigh,
        backward_score="(p - p * p) * dp",
    )


_POSITIVE = '''
@gluon.jit
def positive(x):
    """x where it is above 0 or NaN, else 0."""
    return gl.inline_asm_elementwise(
        "max.NaN.f32 $0, $1, 0f00000000;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
'''


def _relu_of_hopper(terms: Terms) -> Blocks:
    """Its derivative is found from p in place of the score, which would take registers to be kept."""
    factor = "(scale * LN2)" if terms.linear else "LN2"
    return Blocks(
        define=_lines(_POSITIVE),
        weigh=f"p = positive(score) * {factor}",
        backward_define=_lines(_POSITIVE),
        backward_weight="p = positive(score) * LN2",
        backward_score="gl.where(p <= 0.0, 0.0, dp)",
    )


_WEIGHTS_OF_CPU = {
    "sigmoid": '''
def weights_of(scores):
    """Their sigmoid, of scores in units of log 2, overwritten; 0 where that comes to nothing.

    Products of denormal numbers are a hundred times slower.
    """
    return torch.nn.functional.threshold_(scores, LEAST_POWER, -math.inf).mul_(LN_2).sigmoid_()
''',
    "relu": '''
def weights_of(scores):
    """The positive ones of scores in units of log 2, overwritten."""
    return scores.relu_().mul_(LN_2)
''',
}
_SUM_OF_CPU = '''
class WeightedSum:
    """Sum of values over tiles of keys, each with the weight of its score alone."""

    bias = None  # nothing belongs to a query

    def __init__(self):
        self.weighted = None

    def add(self, scores, values{kept_argument}):
        """One more tile of scores [N, keys, queries], overwritten, and values [N, keys, Dv]{kept_text}."""
        weights = weights_of(scores){dropped}
        if self.weighted is None:
            self.weighted = product(values.mT, weights.mT)
        else:
            add_product(self.weighted, values.mT, weights.mT)

    def finish(self):
        """The sum, [N, Dv, queries], or None where there was no tile; nothing else is saved."""
        return self.weighted, None
'''


def _pairs_of_cpu(name: str, slope: str) -> Texts:
    """The texts of a normalizer whose weights are weights_of(scores). slope: lines that give dscore their slope."""
    weigh = _lines(_WEIGHTS_OF_CPU[name])

    def blocks(terms: Terms) -> Blocks:
        kept = _kept(terms)
        return Blocks(
            define=f"{weigh}\n\n\n{_lines(_SUM_OF_CPU.format(**kept))}",
            backward_define=weigh,
            init="WeightedSum()",
            in_one_piece="" if terms.drops else f"weights = weights_of(logits)\n{_WEIGHED_IN_ONE_PIECE}",
            backward_weight=f"weights = weights_of({terms.score})",
            backward_score=f"dscore = product(values, douts){kept['dropped']}\n{slope}",
        )

    return blocks


register(SOFTMAX, "triton", _softmax_of_triton)
register(SOFTMAX, "hopper", _softmax_of_hopper)
register(SOFTMAX, "cpu", _softmax_of_cpu)
register(SIGMOID, "triton", _sigmoid_of_triton)
register(SIGMOID, "hopper", _sigmoid_of_hopper)
register(SIGMOID, "cpu", _pairs_of_cpu("sigmoid", "dscore.mul_(weights).mul_(1.0 - weights)"))
register(RELU, "triton", _relu_of_triton)
register(RELU, "hopper", _relu_of_hopper)
register(RELU, "cpu", _pairs_of_cpu("relu", "dscore.masked_fill_(weights == 0.0, 0.0)"))
_OWN = frozenset(name for name, _ in _texts)  # the key of what is generated knows the sources of this package
