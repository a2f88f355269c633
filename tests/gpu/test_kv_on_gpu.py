"""Caches of keys and values on a GPU: the kernel, that nothing waits for the device, swapping, and graphs."""

from __future__ import annotations

import time

import pytest
import torch

import weft
from weft.kv import DenseCache, PagedCache
from weft.runtime.ops.append import append_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("width, value_width", [(128, 128), (80, 24), (3, 5), (576, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("page", [1, 16, 100])
def test_the_kernel_writes_what_torch_writes(width, value_width, dtype, page):
    torch.manual_seed(0)
    batches, length, heads, blocks = 5, 70, 3, 700
    slots = torch.randperm(blocks * page)[: batches * length].to(torch.int32).view(batches, length)
    slots[2, 9:] = -1
    key = torch.randn(batches, length, heads, width).to(dtype).transpose(1, 2)
    value = torch.randn(batches, heads, length, value_width).to(dtype) if value_width else None
    key[2, :, 9:] = torch.nan
    found = []
    for device in ("cpu", "cuda"):
        keys = torch.zeros(blocks, heads, page, width, dtype=dtype, device=device)
        values = torch.zeros(blocks, heads, page, value_width, dtype=dtype, device=device) if value_width else None
        append_rows(key.to(device), None if value is None else value.to(device), keys, values, slots.to(device))
        found.append([keys.cpu(), None if values is None else values.cpu()])
    assert torch.equal(found[0][0], found[1][0])
    assert value is None or torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("dense", [False, True])
def test_steps_wait_for_nothing(dense, no_waiting):
    """torch refuses whatever would wait, after a first step that compiles."""
    sizes = {"layers": 2, "kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16, "device": "cuda"}
    cache = DenseCache(4, 64, **sizes) if dense else PagedCache(64, page=4, **sizes)
    sequences = [cache.allocate() for _ in range(3)]
    rows = torch.randn(3, 2, 9, 64, dtype=torch.bfloat16, device="cuda")
    cache.append(sequences, [rows] * 2, [rows] * 2, lengths=[9, 3, 5])
    with no_waiting():
        for turn in range(20):
            with cache.extend(sequences, [1, 1, 1]) as step:
                for layer in range(2):
                    step.append(layer, rows[:, :, turn % 9 :][:, :, :1], rows[:, :, :1])
        fork = cache.fork(sequences[0])
        cache.append([sequences[0]], [rows[:1, :, :1]] * 2, [rows[:1, :, :1]] * 2)  # copies a block of the paged cache
        cache.swap_out(fork)
        cache.swap_in(fork)
    assert [cache.length(s) for s in sequences] == [30, 23, 25]
    step = cache.view(sequences[1:2])
    if not dense:
        read = cache.keys(1)[step.block_table[0].long()].transpose(0, 1).flatten(1, 2)[:, :23]
    else:
        read = step.keys(1)[0, :, :23]
    assert torch.equal(read, torch.cat([rows[1, :, :3], *(rows[1, :, s % 9 : s % 9 + 1] for s in range(20))], 1))


def test_swapped_pages_come_back_as_they_were():
    cache = PagedCache(40, page=16, layers=2, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device="cuda")
    a = cache.allocate()
    rows = [torch.randn(1, 2, 500, 64, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    cache.append([a], rows[:2], rows[2:])
    cache.swap_out(a)
    b = cache.allocate()
    noise = torch.randn_like(rows[0])
    cache.append([b], [noise] * 2, [noise] * 2)
    cache.free(b)
    cache.swap_in(a)
    for pool, held in zip(cache._pools, rows):
        assert torch.equal(pool[list(cache.blocks(a))].transpose(0, 1).flatten(1, 2)[:, :500], held[0])


def test_appending_in_a_graph():
    """Replayed with other places and rows in the same tensors."""
    keys, values = torch.zeros(2, 8, 2, 16, 64, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(4, 2, 1, 64, device="cuda", dtype=torch.bfloat16)
    slots = torch.tensor([[3], [40], [17], [-1]], device="cuda", dtype=torch.int32)
    append_rows(rows, rows, keys, values, slots)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append_rows(rows, rows, keys, values, slots)
    keys.zero_()
    slots.copy_(torch.tensor([[-1], [5], [127], [64]], device="cuda"))
    rows.normal_()
    graph.replay()
    expected = torch.zeros_like(keys)
    for row, slot in ((1, 5), (2, 127), (3, 64)):
        expected[slot // 16, :, slot % 16] = rows[row, :, 0]
    assert torch.equal(keys, expected)


def test_an_append_costs_the_host_little():
    """Of the 15 us that a decode step may take for one; the fastest tenth, with room for a busy machine."""
    cache = PagedCache(1024, layers=1, kv_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda")
    sequences = [cache.allocate() for _ in range(64)]
    rows = torch.randn(64, 8, 1, 128, dtype=torch.bfloat16, device="cuda")
    with cache.extend(sequences, [1] * 64) as step:
        step.append(0, rows, rows)
        times = []
        for _ in range(300):
            torch.cuda.synchronize()
            start = time.perf_counter()
            step.append(0, rows, rows)
            times.append(time.perf_counter() - start)
    print(f"append: {sorted(times)[30] * 1e6:.1f} us")
    assert sorted(times)[30] < 40e-6


def test_other_devices_are_refused():
    cache = PagedCache(4, kv_heads=1, head_dim=8, dtype=torch.float32, device="cuda")
    step = cache.extend([cache.allocate()], [1])
    with pytest.raises(weft.WeftError, match="key: expected device cuda:0 as the cache has, got cpu"):
        step.append(0, *torch.zeros(2, 1, 1, 1, 8, device="cpu"))
