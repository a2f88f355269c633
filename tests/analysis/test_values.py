"""What lies in tensors: positions, and ints that are computed with, on the host always and on a device on request."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import weft
from tests import fresh
from weft import WeftError, batch, head, kv_pos, masks, q_pos, score
from weft.runtime import settings
from weft.runtime.call import SLOTS
from weft.runtime.check import sizes, values

doc, table, block = weft.tensor("doc", 1, int), weft.tensor("table", 1), weft.tensor("block", 1, int)
CAUSAL = weft.Attention(mask=masks.causal, name="causal")
PACKED = weft.Attention(mask=masks.causal & masks.document(doc), name="packed")
BIASED = weft.Attention(score + table[q_pos], masks.causal, name="biased")
FAR = weft.Attention(mask=4 * q_pos > kv_pos, name="far")
BLOCKS = weft.Attention(mask=kv_pos // weft.maximum(block[batch], 1) < 4, name="blocks")
ids = torch.zeros(8, dtype=torch.int32)


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 1, 4, 16), torch.randn(2, 1, 8, 16), torch.randn(2, 1, 8, 16)


def offsets(*given: int) -> Tensor:
    return torch.tensor(given, dtype=torch.int32)


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Offsets count as those on a GPU do: nobody knows them unless a check is asked for."""

    def known(offset: int | Tensor) -> tuple[int, int] | None:
        if isinstance(offset, Tensor) and not settings.checks_values():
            return None
        return values_known(offset)

    values_known = values.known_offsets
    for module in (values, sizes):
        monkeypatch.setattr(module, "known_offsets", known)
    yield


# -- q_offset on the host ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("target", ["cpu", "interpret"])
def test_positions_stay_inside_what_they_index(target: str) -> None:
    q, k, v = qkv()
    for sound in (offsets(0, 4), offsets(4, 4), offsets(2, 1)):
        out = PACKED(q, k, v, doc=ids, q_offset=sound, target=target)
        torch.testing.assert_close(out, PACKED.reference(q, k, v, doc=ids, q_offset=sound), atol=1e-3, rtol=1e-3)
    match = r"packed: q_offset\[1\] is 5: `doc\[q_pos\]`: index 0, `q_pos`, ranges from 5 to 8 .* but doc has 8 entries"
    with pytest.raises(WeftError, match=match):
        PACKED(q, k, v, doc=ids, q_offset=offsets(4, 5), target=target)
    with pytest.raises(
        WeftError, match=r"packed: q_offset\[0\] is -5: `doc\[q_pos\]`: .* ranges from -5 to -2 in this"
    ):
        PACKED(q, k, v, doc=ids, q_offset=offsets(-5, 0), target=target)
    with pytest.raises(WeftError, match=r"biased: q_offset\[0\] is -1: `table\[q_pos\]`: .* ranges from -1 to 2"):
        BIASED(q, k, v, table=torch.zeros(8), q_offset=offsets(-1, 0), target=target)


def test_the_backward_is_checked_too() -> None:
    q, k, v = qkv()
    offset = offsets(0, 4)
    out = PACKED(q.requires_grad_(), k, v, doc=ids, q_offset=offset)
    with torch.no_grad():
        offset.data[1] = 5  # behind autograd's back
    with pytest.raises(WeftError, match=r"packed: q_offset\[1\] is 5"):
        out.sum().backward()


def test_a_compiled_graph_is_checked_too() -> None:
    arguments = (
        *qkv(),
        None,
        [ids],
        [],
        [],
        0,
        offsets(0, 5),
        *[None] * (len(SLOTS) - 1),
        16,
        PACKED.canonical.text,
        "target=cpu",
    )
    with pytest.raises(WeftError, match=r"packed: q_offset\[1\] is 5"):
        torch.ops.weft.attention(*arguments)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(("given", "row"), [((0, 2**30), 1), ((-(2**31), 0), 0)])
def test_positions_fit_31_bits(prepared: bool, given: tuple[int, int], row: int) -> None:
    q, k, v = qkv()
    if prepared:
        CAUSAL(q, k, v, q_offset=offsets(0, 4))
        CAUSAL(q, k, v, q_offset=0)
    match = rf"causal: q_offset\[{row}\]: integer overflow: expected a value within 31 bits, got {given[row]}"
    with pytest.raises(WeftError, match=match):
        CAUSAL(q, k, v, q_offset=offsets(*given))
    for number in (2**30, -(2**40), 10**30):
        with pytest.raises(WeftError, match=f"causal: q_offset: integer overflow: .* got {number}"):
            CAUSAL(q, k, v, q_offset=number)


@pytest.mark.parametrize("target", ["cpu", "interpret"])
def test_arithmetic_with_positions_fits_32_bits(target: str) -> None:
    q, k, v = qkv()
    sound = offsets(2**28, -(2**28))
    out = FAR(q, k, v, q_offset=sound, target=target)
    torch.testing.assert_close(out, FAR.reference(q, k, v, q_offset=sound), atol=1e-3, rtol=1e-3)
    match = r"far: q_offset\[1\] is 1073741723: integer overflow: `4 \* q_pos` reaches 42949669\d\d in this call"
    with pytest.raises(WeftError, match=match):
        FAR(q, k, v, q_offset=offsets(0, 2**30 - 101), target=target)


def test_a_divisor_between_the_offsets_of_two_rows_is_no_problem() -> None:
    between = weft.Attention(mask=kv_pos // (q_pos - 10) <= 4, name="between")
    q, k, v = qkv()
    torch.testing.assert_close(
        between(q, k, v, q_offset=offsets(0, 20)), between.reference(q, k, v, q_offset=offsets(0, 20))
    )
    with pytest.raises(WeftError, match=r"between: q_offset\[0\] is 8: .* the divisor `q_pos - 10` can be 0"):
        between(q, k, v, q_offset=offsets(8, 20))


def test_no_rows_have_no_offsets() -> None:
    q, k, v = (x[:0] for x in qkv())
    assert PACKED(q, k, v, doc=ids, q_offset=offsets()).shape == (0, 1, 4, 16)


# -- on a device -------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("on_a_device")
def test_unknown_offsets_are_promised_for_an_index_and_anything_for_arithmetic() -> None:
    q, k, v = qkv()
    assert PACKED(q, k, v, doc=ids, q_offset=offsets(0, 4)).shape == q.shape
    match = (
        r"far: integer overflow: `4 \* q_pos` .*; q_offset is a tensor on the device, .* weft.settings\(check=True\)"
    )
    with pytest.raises(WeftError, match=match):
        FAR(q, k, v, q_offset=offsets(0, 4))
    alibi = weft.Attention(score + table[head] * (kv_pos - q_pos), (q_pos - kv_pos < 4) & (kv_pos // 2 <= q_pos // 2))
    alibi(q, k, v, table=torch.ones(1), q_offset=offsets(0, 4))


@pytest.mark.usefixtures("on_a_device")
def test_a_check_looks_at_offsets() -> None:
    q, k, v = qkv()
    with weft.settings(check=True):
        FAR(q, k, v, q_offset=offsets(0, 4))
        with pytest.raises(WeftError, match=r"far: q_offset\[1\] is 1073741723: integer overflow"):
            FAR(q, k, v, q_offset=offsets(0, 2**30 - 101))
        with pytest.raises(WeftError, match=r"packed: q_offset\[1\] is 5: `doc\[q_pos\]`: .* ranges from 5 to 8"):
            PACKED(q, k, v, doc=ids, q_offset=offsets(4, 5))
        with pytest.raises(WeftError, match=r"causal: q_offset\[1\]: integer overflow"):
            CAUSAL(q, k, v, q_offset=offsets(4, 2**30))


def test_a_check_looks_at_ints_that_are_computed_with() -> None:
    q, k, v = qkv()
    sound, wrong = torch.tensor([1, 2**30 - 1]), torch.tensor([1, -(2**30)])
    BLOCKS(q, k, v, block=sound)
    with weft.settings(check=True):
        BLOCKS(q, k, v, block=sound)
        match = r"blocks: block\[1\]: integer overflow: expected entries below 2\*\*30 in size, .* got -1073741824"
        with pytest.raises(WeftError, match=match):
            BLOCKS(q, k, v, block=wrong)
        PACKED(q, k, v, doc=torch.full((8,), 2**40))  # compared, and nothing else
    assert values.computed_with(BLOCKS) == ("block",) and values.computed_with(PACKED) == ()


def test_the_environment_asks_for_a_check() -> None:
    code = """
        import torch, weft
        q = torch.ones(2, 1, 4, 16)
        block = weft.tensor("block", 1, int)
        variant = weft.Attention(mask=weft.kv_pos // weft.maximum(block[weft.batch], 1) < 4)
        variant(q, q, q, block=torch.tensor([1, 2**40]))
    """
    lines = "\n".join(line.strip() for line in code.splitlines())
    for text, message in (("1", "block[1]: integer overflow"), ("yes", "(WEFT_CHECK): expected 0 or 1, got 'yes'")):
        found = fresh.run(lines, env={"WEFT_CHECK": text})
        assert found.returncode == 1 and message in found.stderr


# -- the reference -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("given", [-5, offsets(0, -5)])
def test_the_reference_reads_nothing_from_the_end(given: int | Tensor) -> None:
    q, k, v = qkv()
    with pytest.raises(WeftError, match=r"packed: `doc\[q_pos\]`: index 0, `q_pos`, is -5 in this call, but doc has 8"):
        PACKED.reference(q, k, v, doc=ids, q_offset=given)


def test_the_reference_reads_nothing_behind_the_end() -> None:
    q, k, v = qkv()
    with pytest.raises(
        WeftError, match=r"packed: `doc\[kv_pos\]`: index 0, `kv_pos`, is 7 in this call, but doc has 7"
    ):
        PACKED.reference(q, k, v, doc=ids[:7], q_offset=0)
    with pytest.raises(WeftError, match=r"biased: `table\[q_pos\]`: index 0, `q_pos`, is 7 .* table has 7 entries"):
        BIASED.reference(q, k, v, table=torch.zeros(7))
    hidden = weft.Attention(score + table[kv_pos], kv_pos < 4, name="hidden")
    assert hidden.reference(q, k, v, table=torch.zeros(4)).shape == q.shape  # a hidden pair reads nothing
