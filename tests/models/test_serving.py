"""Continuous batching: whatever is shared, chunked, swapped or computed again, each request gets what it gets alone."""

from __future__ import annotations

import re

import pytest
import torch
from click.testing import CliRunner

import weft
from weft import kv_pos, nn, q_pos
from weft.kv import DenseCache, OutOfBlocksError, PagedCache
from weft.serving import Graphed, Server
from weft.tools.bench_serve import Load, percentiles, random_decoder
from weft.tools.cli import main

VOCABULARY, WIDTH = 17, 32
CAUSAL = weft.Attention(mask=kv_pos <= q_pos, name="causal")


class Model(torch.nn.Module):
    """Two layers; `asked` counts the rows that it computes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        rope = nn.Rotary(8)
        self.layers = torch.nn.ModuleList(nn.Attention(WIDTH, 4, 2, variant=CAUSAL, rope=rope, layer=n) for n in (0, 1))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)
        self.asked = 0

    def hidden(self, tokens, **more):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x, **more)
        return x

    def forward(self, tokens, step, last):
        self.asked += sum(b - a for a, b in zip(step.starts, step.ends))
        return self.head(self.hidden(tokens, cache=step)[torch.arange(len(tokens)), last])

    @torch.no_grad()
    def alone(self, prompt, count):
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.head(self.hidden(torch.tensor([tokens]))[0, -1]).argmax()))
        return tokens[len(prompt) :]


def served(blocks, prompts, counts, page=4, **more):
    model = Model()
    cache = PagedCache(blocks, page=page, layers=2, kv_heads=2, head_dim=8, dtype=torch.float32)
    server = Server(model, cache, **more)
    requests = [server.submit(p, n) for p, n in zip(prompts, counts)]
    for _ in range(400):
        if not server.is_busy:
            break
        server.step()
        usage = cache.usage
        assert len(server.running) <= server.most and usage.used <= blocks
    assert [r.state for r in requests] == ["done"] * len(requests)
    assert cache.usage.used == 0 and cache.usage.swapped == 0 and len(cache) == 0
    for r, count in zip(requests, counts):
        assert r.written == model.alone(r.prompt, count), r.number
        assert len(r.times) == count and r.arrived < r.times[0]
    return server, model


def prompts_of(lengths, shared=()):
    generator = torch.Generator().manual_seed(6)
    return [[*shared, *torch.randint(VOCABULARY, (n,), generator=generator).tolist()] for n in lengths]


MIXED = pytest.mark.parametrize("mixed", [False, True])


@MIXED
def test_lengths_of_their_own(mixed):
    server, model = served(60, prompts_of([1, 9, 30, 4, 17]), [12, 3, 7, 1, 9], most=3, chunk=8, mixed=mixed)
    assert model.asked == server.totals.prefill_tokens + server.totals.decode_tokens
    assert server.totals.swaps == server.totals.restarts == 0


def test_prompts_that_begin_alike_are_computed_once():
    server, _ = served(60, prompts_of([3, 5, 4, 6], shared=range(13)), [4] * 4)
    assert server.totals.reused_tokens == 3 * 12
    assert server.totals.prefill_tokens == sum([16, 18, 17, 19]) - 3 * 12


def test_a_mixed_step_has_prompts_and_single_tokens():
    """As many tokens are computed, and a model is called once a step."""
    steps = []

    class Watched(Model):
        def forward(self, tokens, step, last):
            steps.append((len(tokens), [b - a for a, b in zip(step.starts, step.ends)]))
            assert step.cu_seqlens_q is None or tokens.shape == step.positions.shape == (1, step.length)
            return super().forward(tokens, step, last)

    model = Watched()
    cache = PagedCache(60, page=4, layers=2, kv_heads=2, head_dim=8, dtype=torch.float32)
    server = Server(model, cache, chunk=6, mixed=True)
    requests = [server.submit(p, 5) for p in prompts_of([3, 14])]
    server.run()
    assert [r.written for r in requests] == [model.alone(r.prompt, 5) for r in requests]
    assert steps[:3] == [(1, [3, 3]), (1, [1, 6]), (1, [1, 5])] and steps[3:] == [(2, [1, 1])] * 2 + [(1, [1])] * 2
    assert server.totals.steps == len(steps)
    assert (server.totals.prefill_tokens, server.totals.decode_tokens) == (17, 8)


@MIXED
def test_requests_are_swapped_where_blocks_run_out(mixed):
    server, _ = served(12, prompts_of([9, 6, 7, 10]), [22, 20, 18, 14], most=4, mixed=mixed)
    assert server.totals.swaps > 0 and server.totals.most_used == 12


@MIXED
def test_shared_pages_of_swapped_requests_are_given_up_at_last(mixed):
    """Pages that swapped requests share stay in the cache: where they leave no room, one loses its own."""
    prompts = [*prompts_of([4]), *prompts_of([1, 2], shared=range(16))]
    server, _ = served(10, prompts, [31, 20, 20], most=3, mixed=mixed)
    assert server.totals.restarts > 0 and server.totals.swaps > 1


def test_a_token_that_ends_an_answer():
    model = Model()
    first = model.alone([3, 1], 3)
    server = Server(model, PagedCache(9, page=4, layers=2, kv_heads=2, head_dim=8, dtype=torch.float32))
    request = server.submit([3, 1], 30, stop=[first[-1]])
    server.run()
    assert request.written == first[: first.index(first[-1]) + 1]


def test_drawing_follows_the_seed():
    texts = []
    for seed in (1, 1, 2):
        cache = PagedCache(9, layers=2, kv_heads=2, head_dim=8, dtype=torch.float32)
        server = Server(Model(), cache, temperature=2.0, seed=seed)
        request = server.submit([3, 1], 30)
        server.run()
        texts.append(request.written)
    assert texts[0] == texts[1] != texts[2]


def test_requests_that_never_fit():
    cache = PagedCache(4, page=4, layers=2, kv_heads=2, head_dim=8, dtype=torch.float32)
    server = Server(Model(), cache)
    with pytest.raises(weft.WeftError, match="10 tokens and 8 more take 5 blocks, and the cache has 4; make it larger"):
        server.submit([0] * 10, 8)
    longest = server.submit([0] * 10, 7)  # the last token is drawn, and needs no room
    server.run()
    assert len(longest.written) == 7 and server.totals.most_used == 4
    with pytest.raises(weft.WeftError, match="expected a prompt and a count from 1 on, got 0 tokens, 3"):
        server.submit([], 3)
    with pytest.raises(weft.WeftError, match="expected a prompt and a count from 1 on, got 2 tokens, 2.5"):
        server.submit([3, 1], 2.5)
    for prompt in ("a text", [3, 1.5]):  # a server that took it would stop at it for ever
        with pytest.raises(weft.WeftError, match="submit: prompt: expected (a list of ids|ints), got "):
            server.submit(prompt, 3)
    assert server.submit(torch.tensor([3, 1]), 2).prompt == (3, 1)
    for shape in ((1, 2, 7), (3, 7)):
        every = Server(lambda *_, shape=shape: torch.zeros(shape), server.cache)
        every.submit([3, 1], 2)
        with pytest.raises(weft.WeftError, match=r"model: expected logits \[1, vocabulary\], those after row `last`"):
            every.run()
    with pytest.raises(weft.WeftError, match="chunk: expected a positive int, got 0"):
        Server(Model(), cache, chunk=0)
    for name, wrong in (("most", True), ("mixed", "yes"), ("seed", "x"), ("seed", -(2**64)), ("seed", 2**64)):
        with pytest.raises(weft.WeftError, match=f"Server: {name}: expected .*, got {wrong!r}"):
            Server(Model(), cache, **{name: wrong})
    with pytest.raises(weft.WeftError, match="cache: expected a weft.kv.PagedCache, got DenseCache"):
        Server(Model(), DenseCache(4, 4, kv_heads=2, head_dim=8, dtype=torch.float32))
    with pytest.raises(weft.WeftError, match="Graphed: cache: expected a weft.kv.PagedCache on a GPU, got one on cpu"):
        Graphed(Model(), cache)


def test_a_cache_with_sequences_of_others_says_so_and_serves_when_they_are_freed():
    model = Model()
    cache = PagedCache(8, page=4, layers=2, kv_heads=2, head_dim=8, dtype=torch.float32)
    own = cache.allocate()
    cache.append([own], [torch.zeros(1, 2, 16, 8)] * 2, [torch.zeros(1, 2, 16, 8)] * 2)
    server = Server(model, cache)
    requests = [server.submit(p, 12) for p in prompts_of([14, 9])]
    with pytest.raises(OutOfBlocksError, match="Server: .* finds no room in it beside 1 sequence of others; free them"):
        server.run()
    cache.free(own)
    server.run()
    assert [r.written for r in requests] == [model.alone(r.prompt, 12) for r in requests]


def test_a_step_that_is_interrupted_while_it_waits_is_done_again():
    """As by Ctrl-C: no request is left without the token that it waits for."""
    model = Model()
    server = Server(model, PagedCache(9, page=4, layers=2, kv_heads=2, head_dim=8, dtype=torch.float32))
    request, draw, steps = server.submit([3, 1], 5), server._draw, []

    class Interrupted:
        def tolist(self):
            raise KeyboardInterrupt

    for drawn in (lambda logits: Interrupted(), draw) * 3:  # a prompt and single tokens
        server._draw = drawn
        try:
            server.step()
        except KeyboardInterrupt:
            steps.append(len(request.written))
    assert steps == [0, 1, 2] and len(request.written) == 3
    server.run()
    assert request.written == model.alone([3, 1], 5)


SMALL = [
    "bench-serve", "--requests", "5", "--prompt-len", "20:30", "--new-tokens", "6", "--layers", "2", "--heads", "2",
    "--head-dim", "16", "--kv-heads", "1", "--vocabulary", "50", "--most", "3", "--on", "cpu",
]  # fmt: skip


def test_the_benchmark_says_what_was_done():
    mixed = CliRunner().invoke(main, [*SMALL, "--mixed"])
    assert mixed.exit_code == 0 and "decode     25 tokens in " in mixed.output, mixed.output
    result = CliRunner().invoke(main, [*SMALL, "--shared", "17", "--page", "8"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line.split()[0] for line in lines] == ["requests", "prefill", "decode", "first", "next", "cache"]
    assert lines[0].startswith("requests   5 in ") and "; 64 more found in the cache" in lines[1]
    assert lines[2].startswith("decode     25 tokens in ") and "p99" in lines[4]
    assert "of 15 blocks of 8 used" in lines[5]


@pytest.mark.parametrize("mixed", [[], ["--mixed"]])
def test_the_benchmark_serves_from_a_cache_of_fp8(mixed):
    """A row of float32 has 4 bytes a number, one of FP8 one byte, and 4 for its descale."""
    sizes = []
    for dtype in ([], ["--cache-dtype", "e4m3"]):
        result = CliRunner().invoke(main, [*SMALL, *mixed, *dtype, "--blocks", "4096"])
        assert result.exit_code == 0 and "requests   5 in " in result.output, result.output
        sizes.append(float(re.search(r", ([\d.]+) MiB", result.output)[1]))
    assert sizes == [16.0, 5.0]  # of 65,536 rows: 2 layers, keys and values, 16 columns of 4 bytes; of 16 + 4


@pytest.mark.parametrize("mixed", [[], ["--mixed"]])
def test_the_benchmark_draws_tensors(mixed):
    biased = ["--score", "score + t[batch, head, kv_pos] + near[abs(q_pos - kv_pos)]", "--mask", "kv_pos <= q_pos"]
    given = ["--tensor", "t:3", "--tensor", "near:1", "--set", "t=random", "--set", "near=random"]
    result = CliRunner().invoke(main, [*SMALL, *biased, *given, *mixed])
    assert result.exit_code == 0 and "requests   5 in " in result.output, result.output


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--prompt-len", "30:20"], "--prompt-len: expected N or LEAST:MOST, got '30:20'"),
        (["--shared", "20"], "--shared: expected less than the shortest prompt, 20, got 20"),
        (["--page", "12"], "page: expected a power of two from 1 to 256, got 12"),
        (["--blocks", "2"], "more take 3 blocks, and the cache has 2"),
        (["--kv-heads", "3"], "kv_heads: expected a divisor of 2 heads, got 3"),
        (["--mask", "kv_pos < n", "--scalar", "n:int"], "--set: missing n; write --set n=NUMBER"),
        (["--score", "score + t[head]", "--tensor", "t:1"], "--set: missing t; write --set t=random"),
    ],
)
def test_loads_that_cannot_be_served(more, words):
    result = CliRunner().invoke(main, [*SMALL, *more])
    assert result.exit_code == 2 and words in result.output, result.output


def test_percentiles_are_of_the_measured():
    assert percentiles([k / 1000 for k in range(100, 0, -1)]) == "p50 50.0 ms, p90 90.0 ms, p99 99.0 ms"
    assert percentiles([0.25]) == "p50 250.0 ms, p90 250.0 ms, p99 250.0 ms" and percentiles([]) == "nothing measured"


def test_what_is_no_model_or_no_number_is_refused_in_words():
    def served(model, **options):
        server = Server(model, PagedCache(8, kv_heads=1, head_dim=8, dtype=torch.float32), **options)
        server.submit([1, 2], 2)
        server.run()

    for model in (None, "llama"):
        with pytest.raises(weft.WeftError, match=r"Server: model: expected a function of \(tokens, step, last\)"):
            served(model)
    for found, got in ((None, "NoneType"), ((torch.zeros(1, 5),), "tuple"), (torch.zeros(1, 0), r"\[1, 0\]")):
        with pytest.raises(weft.WeftError, match=rf"expected logits \[1, vocabulary\].*got {got}"):
            served(lambda tokens, step, last, found=found: found)
    for temperature in (-1.0, float("nan"), "0.5"):
        with pytest.raises(weft.WeftError, match="Server: temperature: expected a number from 0 on"):
            served(lambda tokens, step, last: torch.zeros(1, 5), temperature=temperature)
    server = Server(lambda tokens, step, last: None, PagedCache(8, kv_heads=1, head_dim=8, dtype=torch.float32))
    with pytest.raises(weft.WeftError, match="submit: stop: expected a list of ids, got 2"):
        server.submit([1], 1, stop=2)


# -- requests that end early, and prompts that only look alike ---------------------------------------------------------
def server_of(model, blocks=12, **more):
    cache = PagedCache(blocks, page=4, layers=2, kv_heads=2, head_dim=8, dtype=torch.float32)
    return Server(model, cache, **more)


@MIXED
def test_cancelled_in_every_state_its_blocks_are_free(mixed):
    """Others get what they get alone."""
    model = Model()
    server = server_of(model, most=3, mixed=mixed)
    requests = [server.submit(p, n) for p, n in zip(prompts_of([9, 6, 7, 10, 3]), [22, 20, 18, 14, 5])]
    while not server.swapped:
        server.step()
    running, swapped, waiting = server.running[0], server.swapped[0], server.waiting[0]
    for request in (running, swapped, waiting):
        before, held = request.written[:], request.sequence
        assert server.cancel(request) and not server.cancel(request)
        assert request.state == "cancelled" and request.written == before and request.sequence is None
        assert held is None or held not in server.cache
    server.run()
    left = [r for r in requests if r not in (running, swapped, waiting)]
    assert len(left) == 2 and [r.state for r in left] == ["done", "done"]
    for r in left:
        assert r.written == model.alone(r.prompt, r.count)
        assert not server.cancel(r) and r.state == "done"
    assert len(server.cache) == 0 and server.cache.usage.used == server.cache.usage.swapped == 0


def test_all_may_be_cancelled_while_prompts_are_filled():
    server = server_of(Model(), chunk=4)
    requests = [server.submit(p, 5) for p in prompts_of([14, 11])]
    server.step()
    for request in requests:
        assert server.cancel(request)
    assert not server.is_busy and server.cache.usage.used == 0
    server.run()
    assert [r.written for r in requests] == [[], []]


def test_what_cannot_be_cancelled():
    server, other = server_of(Model()), server_of(Model())
    with pytest.raises(weft.WeftError, match="cancel: request 0 was submitted to another server"):
        server.cancel(other.submit([1, 2], 3))
    with pytest.raises(weft.WeftError, match="cancel: expected a request, as submit gives it, got int"):
        server.cancel(0)

    class Cancelling(Model):
        def forward(self, tokens, step, last):
            with pytest.raises(weft.WeftError, match="free: .*open"):
                inside.cancel(request)
            return super().forward(tokens, step, last)

    inside = server_of(Cancelling())
    request = inside.submit([1, 2], 3)
    inside.run()
    assert request.state == "done" and len(request.written) == 3


@MIXED
def test_prompts_of_other_salts_share_nothing(mixed):
    """Placeholders of two images are the same tokens, and their rows are not."""
    server = server_of(Model(), blocks=60, mixed=mixed)
    prompt = list(range(13))
    for salts, reused in (((b"a", b"b", None), 0), ((b"a", b"b", None), 36), ((b"c", 1, True, "a"), 0)):
        before = server.totals.reused_tokens
        for salt in salts:
            server.submit(prompt, 2, salt=salt)
        server.run()
        assert server.totals.reused_tokens - before == reused
    with pytest.raises(weft.WeftError, match="submit: salt: expected what has a hash, .*, got list"):
        server.submit(prompt, 2, salt=[1])


def test_prompts_of_one_salt_wait_for_each_other():
    server = server_of(Model(), blocks=60)
    for salt in (b"a", b"a", b"b"):
        server.submit(list(range(13)), 2, salt=salt)
    server.run()
    assert server.totals.reused_tokens == 12


@torch.no_grad()
def test_a_small_model_writes_from_fp8_what_it_writes_from_bf16():
    """Logits are near, and a token differs only where two were nearly as likely."""
    load = Load(1, (24, 24), 0, 12, 1, 512, None, 16, 2, 4, 2, 32, 50, seed=3)
    model = random_decoder(load, CAUSAL, {}, torch.device("cpu"), torch.bfloat16)
    prompt = torch.randint(50, (4, 24), generator=torch.Generator().manual_seed(1))
    found = {}
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        cache = PagedCache(16, layers=2, kv_heads=2, head_dim=32, dtype=dtype)
        sequences, tokens = [cache.allocate() for _ in prompt], prompt
        found[dtype] = []
        for _ in range(12):
            with cache.extend(sequences, [tokens.shape[1]] * 4) as step:
                found[dtype].append(model(tokens, step, step.last).float())
            tokens = found[torch.bfloat16][len(found[dtype]) - 1].argmax(-1, keepdim=True)  # both read the same text
    plain, ours = (torch.stack(found[dtype]) for dtype in found)
    assert 0 < (ours - plain).norm() < 0.05 * plain.norm()
    best = plain.topk(2).values
    sure = best[..., 0] - best[..., 1] > 2 * (ours - plain).abs().amax(-1)
    assert sure.float().mean() > 0.5 and (ours.argmax(-1) == plain.argmax(-1))[sure].all()
