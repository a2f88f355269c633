"""What `torch.utils.flop_counter` counts of Weft's ops."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

import weft
from tests import fresh
from tests.gallery import SECTIONS
from weft import head, kv_pos, masks, q_pos
from weft.compiler.analysis.tiles.facts import facts_of
from weft.compiler.analysis.tiles.pairs import MOST_ROWS, visible_pairs
from weft.ir.reference import dense_mask
from weft.ir.walk import tensors

FORWARD, BACKWARD = torch.ops.weft.attention, torch.ops.weft.attention_backward
CAUSAL = weft.Attention(mask=masks.causal, name="causal")
window = weft.scalar("window", int)


def counted(call):
    with FlopCounterMode(display=False) as counter, torch.enable_grad():
        call()
    return {op: n for op, n in counter.get_flop_counts().get("Global", {}).items() if op in (FORWARD, BACKWARD)}


def forward_pairs(call, columns):
    """Pairs of a forward, whose query and value have so many columns together."""
    flops = counted(call)[FORWARD]
    assert flops % (2 * columns) == 0
    return flops // (2 * columns)


def operands(q_len=10, kv_len=13, dim=16, value_dim=16, batch=2, heads=4, kv_heads=4):
    sizes = (heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, value_dim)
    return [torch.randn(batch, *size, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("sizes", [{}, {"kv_heads": 2}, {"value_dim": 32}, {"batch": 1, "q_len": 1, "kv_heads": 1}])
def test_without_a_mask_they_are_those_of_torchs_own_attention(sizes):
    tensors = operands(**sizes)
    shapes = [t.shape for t in tensors]
    out = torch.empty(*shapes[0][:3], shapes[2][3])
    found = counted(lambda: weft.Attention(name="full")(*tensors).sum().backward())
    assert found == {FORWARD: sdpa_flop_count(*shapes), BACKWARD: sdpa_backward_flop_count(out.shape, *shapes)}


def test_pairs_that_a_mask_hides_are_not_counted():
    tensors = operands(q_len=10, kv_len=13)
    pairs = 2 * 4 * sum(range(4, 14))
    found = counted(lambda: CAUSAL(*tensors).sum().backward())
    assert found == {FORWARD: 2 * 32 * pairs, BACKWARD: 2 * 80 * pairs}
    sliding = weft.Attention(mask=masks.causal & (q_pos - kv_pos < window), name="sliding")
    assert forward_pairs(lambda: sliding(*tensors, window=3), 32) == 2 * 4 * 10 * 3
    assert forward_pairs(lambda: CAUSAL(*tensors, q_offset=0), 32) == 2 * 4 * sum(range(1, 11))
    offsets = torch.tensor([0, 3], dtype=torch.int32)
    assert forward_pairs(lambda: CAUSAL(*tensors, q_offset=offsets), 32) == 4 * (sum(range(1, 11)) + sum(range(4, 14)))


def test_heads_of_windows_of_their_own_are_counted_one_by_one():
    windows = weft.tensor("windows", 1, int)
    own = weft.Attention(mask=masks.causal & (q_pos - kv_pos < windows[head]), name="own")
    tensors = operands(10, 10, batch=1)
    wide = torch.tensor([1, 2, 10, 3])
    seen = sum(min(w, row + 1) for w in wide.tolist() for row in range(10))
    assert forward_pairs(lambda: own(*tensors, windows=wide), 32) == seen


def test_only_products_that_lead_to_a_wanted_gradient_are_counted():
    query, key, value = (t.detach() for t in operands(8, 8, value_dim=32))
    pairs = 2 * 4 * sum(range(1, 9))

    def columns(*names):
        given = {"query": query, "key": key, "value": value}
        given |= {n: given[n].clone().requires_grad_() for n in names}
        found = counted(lambda: CAUSAL(*given.values()).sum().backward())[BACKWARD]
        return found / (2 * pairs)

    assert columns("query") == 16 + 32 + 16
    assert columns("query", "key") == 16 + 32 + 16 + 16
    assert columns("value") == 16 + 32
    assert columns("query", "key", "value") == 3 * 16 + 2 * 32


def test_lengths_are_those_of_sequences():
    tensors = operands(10, 10, batch=2)
    lens = torch.tensor([10, 4])
    assert forward_pairs(lambda: CAUSAL(*tensors, q_lens=lens, kv_lens=lens), 32) == 4 * (55 + 10)
    packed = operands(14, 14, batch=1)
    starts = torch.tensor([0, 10, 14])
    assert forward_pairs(lambda: CAUSAL(*packed, cu_seqlens_q=starts), 32) == 4 * (55 + 10)
    rows = torch.nested.nested_tensor([torch.randn(n, 4, 16) for n in (10, 4)], layout=torch.jagged).transpose(1, 2)
    assert forward_pairs(lambda: CAUSAL(rows, rows, rows), 32) == 4 * (55 + 10)


def test_pages_behind_a_length_are_not_counted():
    query, pools = torch.randn(2, 4, 1, 16), torch.randn(2, 6, 4, 8, 16)
    table = torch.tensor([[3, 0, 5], [1, -1, -1]], dtype=torch.int32)
    lens = torch.tensor([20, 7], dtype=torch.int32)
    assert forward_pairs(lambda: CAUSAL(query, *pools, block_table=table, kv_lens=lens), 32) == 4 * 27
    mixed, starts = torch.randn(1, 4, 6, 16), torch.tensor([0, 5, 6], dtype=torch.int32)
    seen = forward_pairs(lambda: CAUSAL(mixed, *pools, block_table=table, kv_lens=lens, cu_seqlens_q=starts), 32)
    assert seen == 4 * (sum(range(16, 21)) + 7)


def test_both_forms_of_latent_attention():
    variant = weft.Attention(mask=masks.causal, latent=weft.Latent(16, 8), name="of_latent")
    query, cache = torch.randn(1, 2, 6, 24, requires_grad=True), torch.randn(1, 1, 6, 24, requires_grad=True)
    uk, uv = torch.randn(2, 16, 16, requires_grad=True), torch.randn(2, 16, 32, requires_grad=True)
    expanded = counted(lambda: variant(query, cache, uk=uk, uv=uv, form="expanded").sum().backward())
    assert expanded == {FORWARD: 2 * (24 + 32) * 42, BACKWARD: 2 * (3 * 24 + 2 * 32) * 42}
    given = [t.detach() for t in (query, cache, uk, uv)]
    absorbed = counted(lambda: variant(*given[:2], uk=given[2], uv=given[3], form="absorbed"))
    assert absorbed == {FORWARD: 2 * (24 + 16) * 42}


def test_dropout_and_scores_change_nothing_and_modules_have_their_own():
    class Layer(torch.nn.Module):
        def forward(self, x):
            biased = weft.Attention(weft.tanh(weft.score), masks.causal, sink=0.0, dropout=0.5, name="biased")
            return biased(x, x, x)

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Layer(), Layer()

        def forward(self, x):
            return self.second(self.first(x))

    with FlopCounterMode(display=False) as counter:
        Two()(torch.randn(1, 2, 8, 16))
    found = counter.get_flop_counts()
    each = 2 * 32 * 2 * sum(range(1, 9))
    assert found["Two.first"][FORWARD] == found["Two.second"][FORWARD] == each and found["Two"][FORWARD] == 2 * each


def test_what_is_not_known_while_tracing_counts_as_visible():
    with FakeTensorMode():
        tensors = [torch.empty(2, 4, 10, 16) for _ in range(3)]
        assert forward_pairs(lambda: CAUSAL(*tensors), 32) == 2 * 4 * 55
        lens = torch.empty(2, dtype=torch.int32)
        assert forward_pairs(lambda: CAUSAL(*tensors, kv_lens=lens), 32) == 2 * 4 * 100


def test_sizes_that_torch_knows_as_symbols_stay_such():
    graph = make_fx(lambda x: CAUSAL(x, x, x), tracing_mode="symbolic")(torch.randn(2, 4, 10, 16)).graph
    assert FORWARD.default in [node.target for node in graph.nodes]
    (node,) = [node for node in graph.nodes if node.target is FORWARD.default]
    given = torch.fx.node.map_arg(node.args, lambda each: each.meta["val"])
    batch, heads, rows, dim = given[0].shape
    found = flop_registry[FORWARD](*given)
    if isinstance(rows, torch.SymInt):
        assert str(found) == str(4 * dim * batch * heads * rows * rows) and not rows.node.shape_env.guards


def test_programs_that_were_exported_are_counted():
    class Layer(torch.nn.Module):
        def forward(self, x):
            return CAUSAL(x, x, x)

    x = torch.randn(1, 2, 8, 16)
    exported = torch.export.export(Layer(), (x,)).module()
    assert counted(lambda: exported(x)) == {FORWARD: 64 * 2 * 36}


@pytest.mark.parametrize("entry", [e for _, entries in SECTIONS for e in entries], ids=lambda entry: entry.title)
def test_no_pair_that_is_visible_is_left_out_and_closed_forms_are_exact(entry):
    facts = facts_of(entry.variant)
    if any(line.value.text.count("[") for line in facts.kv_tiles.body):
        pytest.skip("its tiles follow from what tensors hold")
    numbers = {n: v for n, v in entry.operands.items() if not isinstance(v, torch.Tensor)}
    sizes = {"q_len": entry.q_len, "kv_len": entry.kv_len}
    for number in range(2):
        env = {"batch": 0, "head": number, "kv_head": number, "group": 1, "head_dim": 16, **numbers}
        found = visible_pairs(facts.kv_tiles, q_offset=entry.kv_len - entry.q_len, env=env, **sizes)
        if tensors(entry.variant.canonical.folded_mask):
            assert 0 <= found <= entry.q_len * entry.kv_len
            continue
        rows = torch.arange(entry.q_len).view(1, 1, -1, 1) + entry.kv_len - entry.q_len
        at = {**env, **sizes, "q_pos": rows, "kv_pos": torch.arange(entry.kv_len).view(1, 1, 1, -1)}
        shape = (1, 1, entry.q_len, entry.kv_len)
        seen = int(dense_mask(entry.variant, at, shape, torch.float32, torch.device("cpu")).sum())
        assert found == seen if facts.kv_bounds.closed_form else found >= seen


@pytest.mark.parametrize("length", [MOST_ROWS, MOST_ROWS + 1, 1_000_003])
def test_long_sequences_are_exact_where_rows_grow_evenly(length):
    program = facts_of(CAUSAL).kv_tiles
    seen = visible_pairs(program, q_len=length, kv_len=length, q_offset=0, env={})
    assert seen == length * (length + 1) // 2


@pytest.mark.parametrize("first", ["weft", "torch.utils.flop_counter"])
def test_formulas_are_there_whoever_is_imported_first(first):
    program = f"""
import {first}, sys
assert {first != "weft"} or "torch.utils.flop_counter" not in sys.modules
import weft, torch.utils.flop_counter
assert torch.ops.weft.attention in torch.utils.flop_counter.flop_registry
assert torch.ops.weft.attention_backward in torch.utils.flop_counter.flop_registry
assert not any(type(finder).__name__ == "_Imported" for finder in sys.meta_path)
"""
    fresh.run(program, check=True)
