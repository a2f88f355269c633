"""Caches of keys and values: the kernel that writes rows, what is shared when, and what is refused in which words."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

import weft
from weft import kv_pos, q_pos
from weft.kv import DenseCache, OutOfBlocksError, PagedCache
from weft.kv.blocks import start_of
from weft.runtime.ops.append import append_rows

SIZES = {"kv_heads": 2, "head_dim": 8, "dtype": torch.float32}
CAUSAL = weft.Attention(mask=kv_pos <= q_pos, name="causal")


def rows(batches, length, heads=2, width=8, **more):
    return torch.randn(batches, heads, length, width, **more)


# -- the kernel ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("page", "heads", "width", "value_width", "dtype"),
    [
        (1, 1, 3, 5, torch.float32), (16, 2, 64, 32, torch.float16), (256, 3, 80, 80, torch.float32),
        (8, 1, 24, 0, torch.float32),
    ],
)  # fmt: skip
def test_the_kernel_writes_what_torch_writes(page, heads, width, value_width, dtype):
    """In Triton's interpreter: any order of slots, padding, strides, and nothing written besides."""
    torch.manual_seed(0)
    blocks, batches, length = 5 if page < 256 else 2, 3, 7
    places = torch.randperm(blocks * page)[: batches * length] if page > 1 else torch.full((21,), -1)
    if page == 1:
        places[[3, 8, 20]] = torch.tensor([4, 0, 2])
    slots = places.to(torch.int32).view(batches, length).contiguous()
    slots[1, 4:] = -1
    key = torch.randn(batches, length, heads, width).to(dtype).transpose(1, 2)  # a view of [B, L, H, D]
    value = torch.randn(batches, heads, length, value_width).to(dtype) if value_width else None
    for tensor in (key, value):
        if tensor is not None:
            tensor[1, :, 4:] = torch.nan  # padding goes nowhere
    found = []
    for target in (None, "interpret"):
        keys = torch.zeros(blocks, heads, page, width, dtype=dtype)
        values = torch.zeros(blocks, heads, page, value_width, dtype=dtype) if value_width else None
        with weft.settings(target=target) if target else weft.settings():
            append_rows(key, value, keys, values, slots)
        found.append((keys, values))
    (keys, values), (own_keys, own_values) = found
    assert torch.equal(keys, own_keys) and (values is None or torch.equal(values, own_values))
    number = int((slots >= 0).sum())
    assert int(keys.any(-1).any(1).sum()) == number  # these places and no others
    batch, row = (slots >= 0).nonzero()[-1].tolist()
    slot = int(slots[batch, row])
    assert torch.equal(keys[slot // page, :, slot % page], key[batch, :, row])


def test_writing_is_an_op_that_compiles():
    """In a graph of torch.compile, which knows what it changes."""
    key, value, slots = rows(2, 3), rows(2, 3), torch.tensor([[4, 0, -1], [9, 2, 3]], dtype=torch.int32)
    pools = [torch.zeros(3, 2, 4, 8) for _ in range(4)]

    def step(keys, values):
        append_rows(key * 2, value, keys, values, slots)
        return keys.sum() + values.sum()

    expected = step(*pools[:2])
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(*pools[2:])
    assert torch.equal(pools[0], pools[2]) and torch.equal(pools[1], pools[3]) and torch.equal(found, expected)
    torch.library.opcheck(torch.ops.weft.append_rows, (key, value, *pools[:2], slots))


# -- what is shared ------------------------------------------------------------------------------------------------
def test_a_fork_copies_one_block_when_it_is_written_and_no_more():
    cache = PagedCache(4, page=4, **SIZES)
    a = cache.allocate()
    cache.append([a], rows(1, 6), rows(1, 6))
    b, c = cache.fork(a), cache.fork(a)
    assert (cache.usage.used, cache.usage.shared) == (2, 2)
    cache.append([a, b, c], rows(3, 1), rows(3, 1))  # two copy, for whom there is just room, and one keeps the block
    assert (cache.usage.used, cache.usage.shared, cache.usage.tokens) == (4, 1, 4 + 3 * 3)
    assert len({cache.blocks(s)[0] for s in (a, b, c)}) == 1 and len({cache.blocks(s)[1] for s in (a, b, c)}) == 3
    assert "1 shared" in repr(cache) and "18.8% fragmentation" in repr(cache)


def test_full_pages_are_found_again_until_they_are_taken_or_overwritten():
    cache = PagedCache(6, page=4, **SIZES)
    prompt = list(range(10))
    a = cache.allocate(prompt)
    assert cache.length(a) == 0
    with cache.extend([a], [10], [prompt]) as step:
        assert cache.length(cache.allocate(prompt)) == 0  # not before it is committed
        step.append(0, rows(1, 10), rows(1, 10))
    b, other = cache.allocate(prompt[:9]), cache.allocate([*prompt[:4], 77, 77, 77, 77, 8])
    assert cache.length(b) == 8 and cache.blocks(b) == cache.blocks(a)[:2]
    assert cache.length(other) == 4  # the same as far as the tokens before are the same
    assert cache.length(cache.allocate(prompt[:8])) == 4  # one token is left to be computed
    assert cache.length(cache.allocate(prompt[4:])) == 0  # and nothing from the middle
    for sequence in range(cache._next):
        cache.free(sequence)
    assert cache.usage.used == 0 and cache.usage.kept == 2 and "2 of them kept" in repr(cache)
    c = cache.allocate(prompt)
    assert cache.length(c) == 8 and cache.usage.used == 2
    cache.truncate(c, 6)
    cache.append([c], rows(1, 2), rows(1, 2), tokens=[[50, 51]])  # writes into what was published
    assert cache.length(cache.allocate(prompt)) == 4
    assert cache.length(cache.allocate([*prompt[:6], 50, 51, 0])) == 8
    for sequence in (c, *range(cache._next)):
        if sequence in cache:
            cache.free(sequence)
    d = cache.allocate()
    cache.append([d], rows(1, 24), rows(1, 24))  # takes all blocks
    cache.free(d)
    assert cache.length(cache.allocate(prompt)) == 0 and cache.usage.kept == 0


def test_pages_behind_tokens_that_are_not_known_are_not_found():
    cache = PagedCache(6, page=2, **SIZES)
    a = cache.allocate()
    cache.append([a], rows(1, 2), rows(1, 2), tokens=[[1, 2]])
    cache.append([a], rows(1, 2), rows(1, 2))
    cache.append([a], rows(1, 2), rows(1, 2), tokens=[[5, 6]])
    assert cache.length(cache.allocate([1, 2, 5, 6, 7, 8, 9])) == 2


def test_out_of_blocks_changes_nothing():
    cache = PagedCache(4, page=4, **SIZES)
    a, b = cache.allocate(), cache.allocate()
    cache.append([a, b], rows(2, 6), rows(2, 6))
    before = cache.usage, cache.blocks(a), [p.clone() for p in cache._pools]
    with pytest.raises(OutOfBlocksError, match=r"expected 1 free blocks, got 0 of 4; nothing was changed. Free a"):
        cache.extend([a, b], [2, 3])
    assert before[:2] == (cache.usage, cache.blocks(a))
    assert all(torch.equal(x, y) for x, y in zip(before[2], cache._pools))
    cache.swap_out(b)
    assert (cache.usage.free, cache.usage.swapped, cache.usage.host_bytes) == (2, 2, 2 * 2 * 2 * 4 * 8 * 4)
    cache.append([a], rows(1, 7), rows(1, 7))
    with pytest.raises(OutOfBlocksError, match="swap_in: expected 2 free blocks, got 0"):
        cache.swap_in(b)
    cache.free(a)
    cache.swap_in(b)
    assert torch.equal(cache.keys()[list(cache.blocks(b))].transpose(0, 1).flatten(1, 2)[:, :6],
                       before[2][0][[2, 3]].transpose(0, 1).flatten(1, 2)[:, :6])  # fmt: skip


@pytest.mark.parametrize(
    "cache",
    [PagedCache(8, page=4, layers=3, **SIZES), DenseCache(2, 16, layers=3, **SIZES)],
    ids=lambda c: type(c).__name__,
)
def test_a_step_that_forgets_a_layer_does_not_commit(cache):
    """Its rows would be garbage, and garbage be found again by their tokens."""
    sequence = cache.allocate()
    step = cache.extend([sequence], [3])
    step.append(1, rows(1, 3), rows(1, 3))
    with pytest.raises(weft.WeftError, match=r"commit: nothing was appended to layer 0, 2 of 3.*or cancel\(\)"):
        step.commit()
    step.append(0, rows(1, 3), rows(1, 3))
    step.append(2, rows(1, 3), rows(1, 3))
    step.commit()
    with pytest.raises(weft.WeftError, match="nothing was appended to layer 1"), cache.extend([sequence], [2]) as step:
        step.append(0, rows(1, 2), rows(1, 2))
        step.append(2, rows(1, 2), rows(1, 2))
    assert step.state == "cancelled" and cache.length(sequence) == 3
    with cache.extend([sequence], [1]) as step:  # written otherwise: by a graph, or through its slots
        pass
    with cache.extend([sequence], [2]) as step:  # drafts of the first layers, which are taken away again
        step.append(0, rows(1, 2), rows(1, 2))
        step.commit(partial=True)
    cache.truncate(sequence, 4)
    with cache.extend([sequence], [0]) as step:  # no row, and so no garbage
        step.append(0, rows(1, 0), rows(1, 0))
    assert cache.length(sequence) == 4


def test_an_append_that_fails_does_not_count(monkeypatch):
    cache = PagedCache(2, page=16, layers=2, **SIZES)
    step = cache.extend([cache.allocate()], [3])
    step.append(0, rows(1, 3), rows(1, 3))
    with monkeypatch.context() as patched:
        patched.setattr("weft.kv.step.append_rows", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            step.append(1, rows(1, 3), rows(1, 3))
    with pytest.raises(weft.WeftError, match="nothing was appended to layer 1"):
        step.commit()


def test_an_error_in_a_step_takes_its_room_away():
    cache = PagedCache(4, page=4, **SIZES)
    a = cache.allocate()
    with pytest.raises(ZeroDivisionError), cache.extend([a], [9]):
        raise ZeroDivisionError
    assert cache.usage.used == 0 and cache.length(a) == 0


@pytest.mark.parametrize("parts", [2, 5])
def test_a_device_without_memory_loses_nothing(monkeypatch, parts):
    """Where the copy of a shared block fails, and where the tensors of the step do."""
    cache = PagedCache(8, page=4, **SIZES)
    a = cache.allocate()
    cache.append([a], rows(1, 6), rows(1, 6))
    b = cache.fork(a)
    read = cache.keys()[list(cache.blocks(b))].clone()

    def full(given, device):
        if len(given) == parts:
            raise torch.OutOfMemoryError
        return [part.to(device) for part in given]

    monkeypatch.setattr("weft.kv.cache.on_device", full)
    with pytest.raises(torch.OutOfMemoryError):
        cache.extend([a], [9])
    monkeypatch.undo()
    assert cache.length(a) == 6 and len(cache.blocks(a)) == 2
    assert cache.usage.used == (2 if parts == 2 else 3)  # a copy that was made is a's own now
    assert torch.equal(cache.keys()[list(cache.blocks(a))], read)
    cache.append([a, b], rows(2, 3), rows(2, 3))
    assert cache.usage.used == 5


@pytest.mark.parametrize("kind", ["paged", "dense"])
def test_a_device_without_memory_for_what_was_swapped_loses_nothing(monkeypatch, kind):
    cache = PagedCache(3, page=4, **SIZES) if kind == "paged" else DenseCache(1, 12, **SIZES)
    a = cache.allocate()
    cache.append([a], rows(1, 9), rows(1, 9))
    cache.swap_out(a)
    before = cache.usage

    def full(given, device):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("weft.kv.cache.on_device", full)
    with pytest.raises(torch.OutOfMemoryError):
        cache.swap_in(a)
    monkeypatch.undo()
    assert cache.usage == before and cache.is_swapped(a)
    cache.swap_in(a)
    assert cache.length(a) == 9 and cache.usage.free == 0


# -- what a call takes ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["paged", "dense"])
def test_prefill_and_decode_read_what_was_appended(kind):
    """Steps of different lengths, against each sequence alone in one piece."""
    torch.manual_seed(1)
    sizes = {**SIZES, "layers": 2}
    cache = PagedCache(20, page=4, **sizes) if kind == "paged" else DenseCache(3, 30, **sizes)
    sequences = [cache.allocate() for _ in range(3)]
    totals = [13, 5, 21]
    query, key, value = (torch.randn(3, heads, 21, 8) for heads in (4, 2, 2))
    whole = [
        CAUSAL.reference(*(x[b : b + 1, :, :n].double() for x in (query, key, value))) for b, n in enumerate(totals)
    ]
    done = [0, 0, 0]
    for lengths in ([9, 3, 14], [3, 1, 6], [1, 1, 1]):
        with cache.extend(sequences, lengths) as step:
            behind = [(0, 0, 0, step.length - n) for n in lengths]
            mine = [[x[b, :, s : s + n] for b, (s, n) in enumerate(zip(done, lengths))] for x in (query, key, value)]
            part = [torch.stack([torch.nn.functional.pad(x, p, value=9e9) for x, p in zip(m, behind)]) for m in mine]
            for layer in range(2):
                step.append(layer, *part[1:])
            out = CAUSAL(part[0], step.keys(1), step.values(1), **step.options)
        assert ("q_lens" in step.options) == (lengths != [1, 1, 1])
        assert ("block_table" in step.options) == (kind == "paged")
        for b, (s, n) in enumerate(zip(done, lengths)):
            assert step.positions[b, :n].tolist() == list(range(s, s + n))
            torch.testing.assert_close(out[b, :, :n].double(), whole[b][0, :, s : s + n], atol=1e-5, rtol=1e-5)
        done = [s + n for s, n in zip(done, lengths)]
    assert [cache.length(s) for s in sequences] == totals


def test_latent_caches_have_one_vector_a_token():
    latent = weft.Latent(rank=8, rope=4)
    mla = weft.Attention(mask=kv_pos <= q_pos, latent=latent, name="mla")
    cache = PagedCache(6, page=4, latent=latent, dtype=torch.float32)
    a, b = cache.allocate(), cache.allocate()
    vectors, query = torch.randn(2, 1, 7, 12), torch.randn(2, 3, 7, 10)
    step = cache.append([a, b], vectors)
    uk, uv = torch.randn(3, 8, 6), torch.randn(3, 8, 5)
    assert cache.keys().shape == (6, 1, 4, 12)
    out = mla(query, step.keys(), uk=uk, uv=uv, **step.options)
    torch.testing.assert_close(out, mla.reference(query, vectors, uk=uk, uv=uv), atol=1e-4, rtol=1e-4)
    with pytest.raises(weft.WeftError, match="a latent cache has no values"):
        cache.values()


def test_rows_of_a_dense_cache_are_a_view():
    cache = DenseCache(4, 6, **SIZES)
    a, b, c, d = (cache.allocate() for _ in range(4))
    with pytest.raises(OutOfBlocksError, match="DenseCache.allocate: expected 1 free blocks"):
        cache.allocate()
    step = cache.append([b, d], rows(2, 2), rows(2, 2))
    assert step.keys().data_ptr() == cache.keys()[1].data_ptr() and step.keys().shape == (2, 2, 6, 8)
    with pytest.raises(
        weft.WeftError, match=r"rows lie evenly apart, in order, got rows \[0, 1, 3\]; take all of them"
    ):
        cache.extend([a, b, d], [1, 1, 1])
    with pytest.raises(weft.WeftError, match=f"sequence {b}: expected at most 6 tokens, the capacity, got 7"):
        cache.extend([b], [5])
    cache.free(c)
    assert cache.length(cache.fork(b)) == 2 and torch.equal(cache.keys()[2, :, :2], cache.keys()[1, :, :2])
    assert "4 of 4 rows of 6 used" in repr(cache)


# -- what is refused -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PagedCache(4, page=12, **SIZES), "page: expected a power of two from 1 to 256, got 12"),
        (lambda: PagedCache(4, page=512, **SIZES), "page: expected a power of two from 1 to 256, got 512"),
        (lambda: PagedCache(0, **SIZES), "blocks: expected a positive int, got 0"),
        (lambda: PagedCache(4, kv_heads=2, dtype=torch.float32), "head_dim: expected a positive int, got None"),
        (lambda: PagedCache(4, **{**SIZES, "head_dim": 257}), "head_dim: expected 1 to 256, got 257; wider heads are"),
        (lambda: DenseCache(4, 8, **SIZES, value_dim=300), "value_dim: expected 1 to 256, got 300; wider heads are"),
        (lambda: PagedCache(4, kv_heads=2, head_dim=8, dtype=torch.int8), "dtype: expected one of torch.bfloat16"),
        (
            lambda: PagedCache(4, kv_heads=2, head_dim=8, dtype=np.ones(2)),
            "dtype: expected .*, got an ndarray .2. of float64",
        ),
        (lambda: PagedCache(4, **SIZES, scale=np.ones(2)), "scale: expected 'head' or 'token', got an ndarray"),
        (lambda: PagedCache(4, **SIZES, layers=2**40), r"PagedCache: expected at most 2\*\*45 numbers, got"),
        (lambda: PagedCache(4, **{**SIZES, "kv_heads": 10**30}), r"PagedCache: expected at most 2\*\*45 numbers"),
        (lambda: PagedCache(4, **SIZES, page=True), "page: expected a power of two from 1 to 256, got True"),
        (lambda: PagedCache(4, **SIZES, device=10**30), "device: expected a device, got 1000"),
        (lambda: PagedCache(4, page=1, kv_heads=2, head_dim=8, dtype=[]), "dtype: expected one of torch.bfloat16"),
        (
            lambda: DenseCache(4, 8, kv_heads=2, head_dim=8, dtype=[], scale="head"),
            r"scale: expected None.* dtype is \[\]",
        ),
        (
            lambda: PagedCache(4, latent=weft.Latent(8, 4), dtype={}, rope_dtype=torch.half),
            "rope_dtype: expected one of",
        ),
        (lambda: PagedCache(4, latent=weft.Latent(8, 4), **SIZES), "a latent cache has one vector a token"),
        (lambda: PagedCache(2**28, **SIZES), r"at most 2\*\*30 rows"),
        (lambda: PagedCache(4, device="nowhere", **SIZES), "device: expected a device, got 'nowhere'"),
        (lambda: DenseCache(4, 0, **SIZES), "capacity: expected a positive int, got 0"),
        *[(lambda: PagedCache(4, device="cuda", **SIZES), "device: expected one that torch can use here, got 'cuda'")]
        * (not torch.cuda.is_available()),
    ],
)
def test_sizes_that_no_cache_has(make, words):
    with pytest.raises(weft.WeftError, match=words):
        make()


def test_token_ids_of_numpy_and_torch_are_those_of_a_list():
    cache = PagedCache(6, page=2, **SIZES)
    cache.append([cache.allocate()], rows(1, 4), rows(1, 4), tokens=[np.array([1, 2, 3, 4])])
    for prompt in ([1, 2, 3, 4, 5], np.arange(1, 6), [*np.arange(1, 6)], torch.arange(1, 6)):
        assert cache.length(cache.allocate(prompt)) == 4


def test_ids_lengths_and_tokens_that_do_not_fit():
    cache = PagedCache(8, page=4, **SIZES)
    a, b, freed = cache.allocate(), cache.allocate(), cache.allocate()
    cache.free(freed)
    for call, words in {
        lambda: cache.extend([freed], [1]): f"sequence {freed}, which was freed",
        lambda: cache.view([99]): r"got 99, which allocate\(\) never gave",
        lambda: cache.free(torch.tensor(0)): "never gave",
        lambda: cache.extend([a, a], [1, 1]): "two writers: expected each sequence once",
        lambda: cache.extend([], []): "expected the ids of some sequences, got none",
        lambda: cache.extend([a, b], [1]): "lengths: expected 2 ints from 0 on",
        lambda: cache.extend([a], [-1]): "lengths: expected 1 ints from 0 on",
        lambda: cache.extend([a], torch.tensor([1])): "those on a device are not read",
        lambda: cache.extend([a], [2], [[1]]): r"tokens: expected the ids of \[2\] new tokens, got \[1\]",
        lambda: cache.allocate([1.5]): r"tokens: expected ints, got \[1.5\]",
        lambda: cache.extend([a], [2**30 + 1]): r"expected at most 2\*\*30 tokens",
        lambda: cache.swap_in(a): "sequence 0 is not swapped out",
    }.items():
        with pytest.raises(weft.WeftError, match=words):
            call()
    cache.swap_out(a)
    for call in (
        lambda: cache.extend([a], [1]),
        lambda: cache.fork(a),
        lambda: cache.swap_out(a),
        lambda: cache.view([a]),
    ):
        with pytest.raises(weft.WeftError, match=r"sequence 0 is swapped out; swap_in\(0\) first"):
            call()
    assert cache.usage.used == 0


def test_rows_that_do_not_fit():
    cache = PagedCache(8, page=4, **SIZES)
    step = cache.extend([cache.allocate()], [3])
    good = rows(1, 3)
    for key, value, words in [
        (rows(1, 2), good, r"key: expected \[1, 2, 3, 8\], got \[1, 2, 2, 8\]"),
        (good.double(), good, "key: expected torch.float32 as the cache has, got torch.float64"),
        (good, None, r"value: expected a tensor \[1, 2, 3, 8\], got NoneType"),
        (good, good.to("meta"), "value: expected device cpu as the cache has, got meta"),
        (good.mT.contiguous().mT, good, "key: expected a contiguous last dimension"),
        (good.clone().requires_grad_(), good, r"a cache keeps no gradients; call the model under torch.no_grad\(\)"),
    ]:
        with pytest.raises(weft.WeftError, match=words):
            step.append(0, key, value)
    with pytest.raises(weft.WeftError, match="layer: expected 0 to 0, got 1"):
        step.append(1, good, good)
    with pytest.raises(weft.WeftError, match=r"free: two writers: sequence 0 belongs to a step that is open"):
        cache.free(0)
    step.append(0, good, good)
    step.commit()
    with pytest.raises(weft.WeftError, match="append: this step is committed"):
        step.append(0, good, good)
    with pytest.raises(weft.WeftError, match="append: this step is read only"):
        cache.view([0]).append(0, good, good)
    with pytest.raises(weft.WeftError, match=r"expected key and value of each of 1 layer, got 2 and 1"):
        cache.append([0], [good, good], good)


# -- packed steps ------------------------------------------------------------------------------------------------------
def test_a_packed_step_writes_and_reads_what_padded_ones_do():
    """A chunk, nothing and a single token, behind sequences that are there."""
    news = [9, 0, 1]
    caches = [PagedCache(20, page=4, **SIZES) for _ in range(2)]
    sequences = [[cache.allocate() for _ in news] for cache in caches]
    old_keys, old_values = rows(3, 5), rows(3, 5)
    for cache, own in zip(caches, sequences):
        cache.append(own, old_keys, old_values)
    keys, values, queries = rows(3, 9), rows(3, 9), rows(3, 9, heads=4)

    def packed_of(tensor):
        return torch.cat([tensor[b : b + 1, :, :n] for b, n in enumerate(news)], 2)

    with caches[0].extend(sequences[0], news) as padded:
        padded.append(0, keys, values)
        wanted = CAUSAL(queries, padded.keys(), padded.values(), **padded.options)
    with caches[1].extend(sequences[1], news, packed=True) as packed:
        assert packed.cu_seqlens_q.tolist() == [0, 9, 9, 10] and packed.length == 10
        assert packed.positions.tolist() == [[*range(5, 14), 5]] and packed.last.tolist() == [8, 8, 9]
        assert packed.options.keys() == {"kv_lens", "cu_seqlens_q", "block_table"}
        for target in ("cpu", "interpret"):
            with weft.settings(target=target):
                packed.append(0, packed_of(keys), packed_of(values))
                found = CAUSAL(packed_of(queries), packed.keys(), packed.values(), **packed.options)
            torch.testing.assert_close(found, packed_of(wanted))
    assert [caches[1].length(s) for s in sequences[1]] == [14, 5, 6]
    assert padded.last.tolist() == [8, -1, 0] and padded.cu_seqlens_q is None


def test_what_a_packed_step_refuses():
    cache = PagedCache(20, page=4, **SIZES)
    sequences = [cache.allocate() for _ in range(2)]
    with cache.extend(sequences, [3, 1], packed=True) as step:
        with pytest.raises(weft.WeftError, match=r"key: expected \[1, 2, 4, 8\], got \[2, 2, 3, 8\]"):
            step.append(0, rows(2, 3), rows(2, 3))
        fixed = cache.fixed_step(2, 4, pages=4)
        with pytest.raises(weft.WeftError, match="fill: expected a padded step, as a fixed one is, got a packed one"):
            fixed.fill(step)
        module = weft.nn.Attention(32, 4, 2, head_dim=8, variant=CAUSAL)
        with pytest.raises(weft.WeftError, match=r"nn: x: expected \[1, 4, width\], as the step is packed, got 2 rows"):
            module(torch.randn(2, 3, 32), cache=step)
        scaling = weft.nn.DynamicNtkScaling(2.0, original_length=4)
        rope = weft.nn.Rotary(8, scaling=scaling)
        with pytest.raises(weft.WeftError, match="Rotary: lengths: expected 1, one for each row of positions, got 2"):
            rope(step.positions, step.kv_lens)
        with torch.no_grad():
            assert module(torch.randn(1, 4, 32), cache=step).shape == (1, 4, 32)
    dense = DenseCache(2, 8, **SIZES)
    with pytest.raises(weft.WeftError, match="extend: packed: DenseCache takes padded rows; a PagedCache takes packed"):
        dense.extend([dense.allocate()], [1], packed=True)


def test_caches_are_the_same_whatever_torchs_default_device():
    """What stays on the host, and what a step brings, is nobody's default."""
    key, value, query = rows(2, 9), rows(2, 9), rows(2, 1, heads=4)

    def used():
        store = PagedCache(32, page=4, **SIZES)
        a, b = store.allocate([1, 2, 3, 4, 5]), store.allocate()
        store.append([a, b], key, value, lengths=[5, 9], tokens=[[1, 2, 3, 4, 5], None])
        fork = store.fork(a)
        store.append([a, b], key[:, :, :1], value[:, :, :1])
        store.swap_out(b)
        store.swap_in(b)
        store.truncate(b, 7)
        step = store.view([fork, b])
        fixed = store.fixed_step(2, pages=4)
        with store.extend([fork, b], [2, 1], packed=True) as packed:
            assert packed.cu_seqlens_q.device == packed.last.device == step.kv_lens.device == fixed.slots.device
        with store.extend([fork, b], [1, 1]) as more:
            more.append(0, key[:, :, :1], value[:, :, :1])
            fixed.fill(more)
            return CAUSAL(query, more.keys(), more.values(), **more.options)

    want = used()
    try:
        torch.set_default_device("meta")
        found = used()
    finally:
        torch.set_default_device(None)
    assert torch.equal(found, want)


NESTED = torch.nested.nested_tensor([torch.zeros(2, 3, 16)], layout=torch.jagged)
FREED = torch.zeros(1, 2, 3, 8)
FREED.untyped_storage().resize_(0)


@pytest.mark.parametrize(
    ("misuse", "said"),
    [
        (lambda s, a: s.extend(a, 1), "extend: expected a list of the ids of sequences, got 0"),
        (lambda s, a: s.extend((i for i in [a]), [1]), "extend: expected a list of the ids of sequences, got <gen"),
        (lambda s, a: s.view(a), "view: expected a list of the ids"),
        (lambda s, a: s.extend([a], 1), "extend: lengths: expected a list, rows of each sequence, got 1"),
        (lambda s, a: s.extend([a], [2], [1, 2]), "extend: tokens: expected a list of ids, got 1"),
        (lambda s, a: s.allocate(5), "allocate: tokens: expected a list of ids, got 5"),
        (lambda s, a: s.append([a], ["k"], ["v"]), "append: key: expected a tensor of each layer, got str"),
        (lambda s, a: s.extend([a], [2], 1), "extend: tokens: expected a list of ids for each sequence, got 1"),
        (lambda s, a: s.append(a, rows(1, 3), rows(1, 3)), "append: expected a list of the ids of sequences, got 0"),
        (lambda s, a: s.append([a], 3, 3), "append: key: expected a tensor of each layer.*, got int and int"),
        (lambda s, a: s.append([a], rows(1, 3), rows(1, 3), lengths=3), "lengths: expected a list, .*, got 3"),
        (lambda s, a: s.append([a], rows(1, 3), rows(1, 3), tokens=3), "extend: tokens: expected a list of ids"),
        (lambda s, a: s.append([a], {"k": rows(1, 3)}), "append: key: expected a tensor of each layer.*, got dict"),
        (lambda s, a: s.append([a], NESTED, NESTED), "append: key: expected a dense tensor, got a nested one"),
        (lambda s, a: s.append([a], FREED, FREED), "key: expected a tensor with memory"),
        (
            lambda s, a: s.extend(torch.tensor(0), [1]),
            r"extend: expected a list of the ids.*, got a tensor \[\] of int64",
        ),
        (lambda s, a: s.extend([True], [1]), "expected the id of a sequence of this cache, got True"),
        (lambda s, a: s.free(True), "free: expected the id of a sequence of this cache, got True"),
        (lambda s, a: s.extend([a], np.array([[1]])), "extend: lengths: expected 1 ints from 0 on"),
        (lambda s, a: s.extend([a], torch.tensor(1)), "got .a tensor .. of int64.; those on a device are not read"),
        (lambda s, a: s.extend([a], [1], torch.tensor(1)), "extend: tokens: expected a list of ids for each sequence"),
        (lambda s, a: s.extend([a], [1], packed=np.ones(2)), r"extend: packed: expected True or False, got an ndarray"),
        (
            lambda s, a: s.allocate(torch.ones(2)),
            r"tokens: expected ints in one dimension, got a tensor \[2\] of float32",
        ),
        (lambda s, a: s.allocate(torch.ones(2).to_sparse()), "allocate: tokens: expected a dense tensor"),
        (lambda s, a: s.allocate([True, False]), r"allocate: tokens: expected ints, got \[True, False\]"),
        (lambda s, a: s.extend([a], [1]).commit(partial="yes"), "commit: partial: expected True or False, got 'yes'"),
        (lambda s, a: s.keys(False), "keys: layer: expected 0 to 0, got False"),
        (lambda s, a: s.fixed_step(10**30, pages=1), r"fixed_step: expected at most 2\*\*30 rows"),
        (lambda s, a: s.view([a]).attend(0, None, rows(1, 3)), "attend: variant: expected a weft.Attention behind"),
        (lambda s, a: s.fixed_step(1, pages=1).fill(None), "fill: expected a fixed step and one of .*None"),
        (
            lambda s, a: s.append([a], rows(1, 3).numpy()),
            "append: key: expected a tensor of each layer, .*, got ndarray",
        ),
    ],
)
def test_one_thing_where_a_list_is_expected_is_refused_in_words(misuse, said):
    store = PagedCache(8, **SIZES)
    with pytest.raises(weft.WeftError, match=said):
        misuse(store, store.allocate())


# -- what attend takes ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [PagedCache, DenseCache])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_attend_refuses_what_a_step_brings_itself(kind, dtype):
    sizes = {**SIZES, "dtype": dtype}
    store = PagedCache(8, page=4, **sizes) if kind is PagedCache else DenseCache(3, 16, **sizes)
    a, b = store.allocate(), store.allocate()
    query, lens = rows(2, 5, heads=4), torch.tensor([1, 1], dtype=torch.int32)
    with store.extend([a, b], [5, 3]) as step:
        step.append(0, rows(2, 5), rows(2, 5))
        own = step.attend(0, CAUSAL, query)
        for name, value in {
            "kv_lens": lens, "q_lens": lens, "block_table": lens[:, None], "cu_seqlens_q": lens, "cu_seqlens_kv": lens,
            "k_descale": 1.0, "v_descale": 1.0, "rope": query, "query": query, "key": query, "value": query,
        }.items():  # fmt: skip
            with pytest.raises(weft.WeftError, match=f"causal: attend: {name}: the step brings its own; leave it out"):
                step.attend(0, CAUSAL, query, **{name: value})
            assert torch.equal(step.attend(0, CAUSAL, query, **{name: None}), own)
        for length in (4, 6):
            with pytest.raises(weft.WeftError, match=f"query: expected 5 rows, the new ones of the step, got {length}"):
                step.attend(0, CAUSAL, rows(2, length, heads=4))
    assert store.view([a, b]).attend(0, CAUSAL, rows(2, 3, heads=4)).shape == (2, 4, 3, 8)


@pytest.mark.parametrize("kind", [PagedCache, DenseCache])
def test_a_step_whose_rows_are_gone_is_refused(kind):
    """They may be those of another sequence now, or what a cancelled step has written."""
    store = PagedCache(8, page=4, **SIZES) if kind is PagedCache else DenseCache(3, 16, **SIZES)
    a, b, query = store.allocate(), store.allocate(), rows(1, 1, heads=4)
    store.append([a], rows(1, 6), rows(1, 6))

    def stale(change, said):
        seen = store.view([a])
        out = seen.attend(0, CAUSAL, query)
        store.append([b], rows(1, 1), rows(1, 1))  # what happens to others is their matter
        store.truncate(b, 0)
        store.truncate(a, store.length(a))  # which drops nothing
        assert torch.equal(seen.attend(0, CAUSAL, query), out)
        change()
        for read in (lambda: seen.attend(0, CAUSAL, query), lambda: seen.options, lambda: seen.options_of(0)):
            with pytest.raises(weft.WeftError, match=f"step: sequence {a} was {said}.*make another, cache.view"):
                read()

    stale(lambda: store.truncate(a, 5), "truncated or swapped out")
    seen = store.view([a])
    store.append([a], rows(1, 2), rows(1, 2))
    assert seen.attend(0, CAUSAL, query).shape == query.shape  # longer ones still have its rows
    stale(lambda: store.swap_out(a), "truncated or swapped out")
    store.swap_in(a)
    step = store.extend([a], [1])
    step.append(0, rows(1, 1), rows(1, 1))
    step.cancel()
    with pytest.raises(weft.WeftError, match="step: it was cancelled"):
        step.attend(0, CAUSAL, query)
    stale(lambda: store.free(a), "freed")


def test_a_dense_cache_refuses_what_a_paged_one_does():
    store = DenseCache(2, 8, **SIZES)
    for tokens in ("abc", 3, [1.5], torch.ones(2)):
        with pytest.raises(weft.WeftError, match="allocate: tokens: expected"):
            store.allocate(tokens)
    with pytest.raises(weft.WeftError, match="fixed_step: .* a PagedCache has fixed steps"):
        store.fixed_step(1, pages=1)
    assert len(store) == 0


def test_a_cache_that_is_copied_says_what_to_do():
    model = torch.nn.Linear(2, 2)
    model.cache = PagedCache(8, **SIZES)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(weft.WeftError, match=r"PagedCache: a cache is not copied or pickled.*fork\(sequence\)"):
            copied(model)


def test_the_type_of_each_part_of_a_salt_counts():
    alike = [
        ("image", 1),
        ("image", True),
        ("image", 1.0),
        frozenset({1}),
        frozenset({True}),
        0.0,
        -0.0,
        (1, (1,)),
        (1, (True,)),
    ]
    starts = {start_of("allocate", salt) for salt in alike}
    assert len(starts) == len(alike)
    assert start_of("allocate", ("image", 1)) == start_of("allocate", ("image", 1))


def test_pages_are_found_by_their_salt_too():
    store = PagedCache(16, page=2, kv_heads=1, head_dim=4, dtype=torch.float32)

    def filled(tokens, salt):
        made = store.allocate(tokens, salt=salt)
        rows = torch.zeros(1, 1, len(tokens) - store.length(made), 4)
        store.append([made], rows, rows, tokens=[tokens[store.length(made) :]])
        return made

    first = filled([1, 2, 3, 4, 5], b"cat")
    assert store.length(store.allocate([1, 2, 3, 4, 5], salt=b"cat")) == 4
    for other in (None, b"dog", "cat", 0, ("cat",)):
        assert store.length(store.allocate([1, 2, 3, 4, 5], salt=other)) == 0, other
    copy = store.fork(first)  # a copy has the salt: what it adds is found under it
    store.append([copy], torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4), tokens=[[6, 7, 8]])
    assert store.length(store.allocate([1, 2, 3, 4, 5, 6, 7, 8, 9], salt=b"cat")) == 8
    assert store.length(store.allocate([1, 2, 3, 4, 5, 6, 7, 8, 9])) == 0
    with pytest.raises(weft.WeftError, match="allocate: salt: expected what has a hash, .*, got dict"):
        store.allocate([1], salt={})
