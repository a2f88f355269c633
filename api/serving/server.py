"""Continuous batching: requests of different lengths through one cache, a step at a time.

A request is admitted when there is room for its prompt, shares the pages of prompts that begin alike, is filled in
chunks, and then decoded a token a step with all others. Where blocks run out, the request that came last is swapped to
the host, and comes back when there is room.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

import torch
from torch import Tensor

from ..ir.errors import InternalError, WeftError, counted, shown
from ..kv import OutOfBlocksError, PagedCache
from ..kv.blocks import start_of
from ..kv.given import is_size, token_ids
from ..kv.step import on_device
from .graphed import Model

State = Literal["waiting", "running", "swapped", "done", "cancelled"]


@dataclass(eq=False)
class Request:
    """A prompt, what was written after it, and when."""

    number: int  # in the order of arrival
    prompt: tuple[int, ...]
    count: int  # new tokens at most
    stop: frozenset[int]
    salt: Hashable = None  # what the rows of its prompt depend on besides tokens
    state: State = "waiting"
    written: list[int] = field(default_factory=list)
    sequence: int | None = None  # of the cache
    reused: int = 0  # tokens of the prompt that were found in the cache
    arrived: float = 0.0
    times: list[float] = field(default_factory=list)  # when each token was there

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.written]


@dataclass
class Totals:
    """What a server did so far. Reading a step's tokens waits for it, so that seconds are those of the device."""

    prefill_tokens: int = 0  # computed
    prefill_seconds: float = 0.0
    reused_tokens: int = 0  # found in the cache instead
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    steps: int = 0
    swaps: int = 0  # requests that were swapped out
    restarts: int = 0  # requests that lost their pages, and were computed again
    most_used: int = 0  # blocks


class Server:
    """Runs requests through a model.

    model: computes the new rows of a step, appending to its cache; on a GPU `Graphed(model, cache)` saves the time of
    launching its kernels one by one. most: sequences at once. chunk: prompt tokens of a
    step. temperature: of drawing tokens; 0 takes the likeliest. mixed: chunks of prompts are computed in one packed
    step, together with the tokens of all others, and not before them. `model` then takes tokens [1, total], as packed
    steps are, and `last` has rows of the one batch row. Steps without prompts are padded in any case.
    """

    def __init__(
        self,
        model: Model,
        cache: PagedCache,
        *,
        most: int = 16,
        chunk: int = 512,
        mixed: bool = False,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        if not isinstance(cache, PagedCache):
            raise WeftError(f"Server: cache: expected a weft.kv.PagedCache, got {type(cache).__name__}")
        if not callable(model):
            raise WeftError(f"Server: model: expected a function of (tokens, step, last), got {shown(model)}")
        if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not 0 <= temperature < inf:
            raise WeftError(f"Server: temperature: expected a number from 0 on, got {shown(temperature)}")
        for name, value in (("most", most), ("chunk", chunk)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise WeftError(f"Server: {name}: expected a positive int, got {shown(value)}")
        if not isinstance(mixed, bool):
            raise WeftError(f"Server: mixed: expected True or False, got {shown(mixed)}")
        if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:  # as torch takes them
            raise WeftError(f"Server: seed: expected an int from -2**63 to 2**64 - 1, got {shown(seed)}")
        self.model, self.cache, self.most, self.chunk, self.temperature = model, cache, most, chunk, temperature
        self.mixed = mixed
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self.totals = Totals()
        self._random = torch.Generator(cache.device).manual_seed(seed)
        self._submitted, self._blocks = 0, cache.usage.blocks

    def submit(self, prompt: Iterable[int], count: int, stop: Iterable[int] = (), *, salt: Hashable = None) -> Request:
        """Queue a prompt, to be continued by `count` tokens, or up to one of `stop`.

        salt: as of `PagedCache.allocate`: only requests with an equal one share pages.
        """
        start_of("submit", salt)
        tokens = tuple(token_ids("submit: prompt", prompt))
        if not tokens or not is_size(count):
            raise WeftError(
                f"submit: expected a prompt and a count from 1 on, got {counted(len(tokens), 'token')}, {shown(count)}"
            )
        ends = frozenset(token_ids("submit: stop", stop))
        # the last token is drawn, and goes nowhere
        pages, blocks = -(-(len(tokens) + count - 1) // self.cache.page), self._blocks
        if pages > blocks:
            raise WeftError(
                f"submit: {counted(len(tokens), 'token')} and {count} more take {counted(pages, 'block')}, and the "
                f"cache has {blocks}; make it larger, or ask for less"
            )
        made = Request(self._submitted, tokens, count, ends, salt, arrived=time.perf_counter())
        self._submitted += 1
        self.waiting.append(made)
        return made

    def cancel(self, request: Request) -> bool:
        """End a request, in whatever state, between two steps: its blocks are free, and what was written stays with it.

        False where it was done or cancelled before. Raises WeftError for a request that is not this server's, and,
        with nothing changed, while a step computes it.
        """
        if not isinstance(request, Request):
            raise WeftError(f"cancel: expected a request, as submit gives it, got {type(request).__name__}")
        if request.state in ("done", "cancelled"):
            return False
        queue = next((q for q in (self.waiting, self.running, self.swapped) if request in q), None)
        if queue is None:
            raise WeftError(f"cancel: request {request.number} was submitted to another server")
        if request.sequence is not None:
            self.cache.free(request.sequence)
        queue.remove(request)
        request.state, request.sequence = "cancelled", None
        return True

    @property
    def is_busy(self) -> bool:
        """Whether a request is not done."""
        return bool(self.waiting or self.running or self.swapped)

    def run(self) -> None:
        """Steps until all requests are done."""
        while self.is_busy:
            self.step()

    def step(self) -> None:
        """Bring back and admit what there is room for; then one chunk of prompts, and one token of each request that
        has its prompt behind it: one after the other, or where `mixed`, together."""
        self._resume()
        self._admit()
        decoding = [r for r in self.running if self._left(r) == 1]
        filling = [r for r in self.running if self._left(r) > 1]
        if filling and self.mixed:
            self._feed([*decoding, *filling], len(decoding) + self.chunk, packed=True)
            decoding = []
        elif filling:
            self._feed(filling, self.chunk)
        if decoding := [r for r in decoding if r.state == "running"]:
            self._feed(decoding, len(decoding))
        self.totals.steps += 1

    # -- who runs ----------------------------------------------------------------------------------------------------
    def _left(self, request: Request) -> int:
        """Tokens of a request that are not in the cache."""
        return len(request.prompt) + len(request.written) - self.cache.length(_sequence(request))

    def _resume(self) -> None:
        """Swap in those that came first, where each running one could still take a block."""
        while self.swapped and len(self.running) < self.most:
            request = min(self.swapped, key=lambda r: r.number)
            needed = self.cache.blocks(_sequence(request)).count(-1) + len(self.running) + 1
            if self.running and needed > self.cache.free_blocks:
                return
            try:
                self.cache.swap_in(_sequence(request))
            except OutOfBlocksError:
                self._restart_one(besides=request)
                continue
            self.swapped.remove(request)
            self.running.append(request)
            request.state = "running"

    def _admit(self) -> None:
        while self.waiting and not self.swapped and len(self.running) < self.most:
            request, page = self.waiting[0], self.cache.page
            start = request.prompt[:page]
            begins = (start_of("submit", request.salt), start)
            if len(start) == page and any(
                self._left(r) > 1 and (start_of("submit", r.salt), r.prompt[:page]) == begins for r in self.running
            ):
                return  # it begins as one that is being filled, whose pages it can have when they are there
            tokens = request.tokens
            sequence = self.cache.allocate(tokens, salt=request.salt)
            needed = -(-len(tokens) // page) - len(self.cache.blocks(sequence)) + len(self.running) + 1
            if self.running and needed > self.cache.free_blocks:
                self.cache.free(sequence)
                return
            self.waiting.popleft()
            request.sequence, request.state, request.reused = sequence, "running", self.cache.length(sequence)
            self.totals.reused_tokens += request.reused
            self.running.append(request)

    def _make_room(self) -> None:
        """Swap out the request that came last; where one alone is left, give up what swapped ones still hold."""
        if len(self.running) > 1:
            victim = max(self.running, key=lambda r: r.number)
            self.cache.swap_out(_sequence(victim))
            self.running.remove(victim)
            self.swapped.append(victim)
            victim.state = "swapped"
            self.totals.swaps += 1
        else:
            self._restart_one()

    def _restart_one(self, besides: Request | None = None) -> None:
        """Give up the pages of the swapped request that came last: pages that swapped ones share stay in the cache."""
        among = [r for r in self.swapped if r is not besides]
        if not among:
            others = len(self.cache) - len(self.running) - len(self.swapped)
            if others:
                raise OutOfBlocksError(
                    "Server: a request that fits the cache finds no room in it beside "
                    f"{counted(others, 'sequence')} of others; free them, and go on with run()"
                )
            raise InternalError("serving: a request that fits the cache finds no room in it")
        victim = max(among, key=lambda r: r.number)
        self.cache.free(_sequence(victim))
        self.swapped.remove(victim)
        victim.sequence, victim.state = None, "waiting"
        self.waiting.appendleft(victim)
        self.totals.restarts += 1

    # -- a step of the model -----------------------------------------------------------------------------------------
    def _feed(self, requests: Sequence[Request], budget: int, packed: bool = False) -> None:
        """Compute up to `budget` tokens of these requests, and count them; packed: in a packed step."""
        start = time.perf_counter()
        while True:
            new, left = [], budget
            for request in requests:
                new.append(min(self._left(request), left))
                left -= new[-1]
            fed = [(r, n) for r, n in zip(requests, new) if n]
            try:
                tokens = self._tokens(fed)
                decoded = sum(self._left(r) == 1 for r, _ in fed)
                step = self.cache.extend([_sequence(r) for r, _ in fed], [*map(len, tokens)], tokens, packed=packed)
                break
            except OutOfBlocksError:
                self._make_room()
                requests = [r for r in requests if r.state == "running"]
                if not requests:
                    return
        with step, torch.inference_mode():
            shown = [t + [0] * (step.length - len(t)) for t in tokens]
            if packed:
                shown = [[t for own in tokens for t in own]]
            (rows,) = on_device([torch.tensor(shown, dtype=torch.int32, device="cpu")], self.cache.device)
            logits = self.model(rows, step, step.last)
            if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(fed) or not logits.shape[1]:
                got = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
                raise WeftError(
                    f"Server: model: expected logits [{len(fed)}, vocabulary], those after row `last` of each "
                    f"sequence, got {got}"
                )
            # the one wait of a step, inside of it: where it is interrupted, the step is cancelled, and no token missing
            found = self._draw(logits).tolist()
        now = time.perf_counter()
        self.totals.most_used = max(self.totals.most_used, self._blocks - self.cache.free_blocks)
        for (request, _), token in zip(fed, found):
            if not self._left(request):
                self._write(request, token, now)
        self._count(now - start, decoded, sum(map(len, tokens)))

    def _count(self, seconds: float, decoded: int, computed: int) -> None:
        """Tokens of a step, of which some follow prompts; its seconds are those of each kind by how many there are."""
        totals, share = self.totals, decoded / computed
        totals.prefill_seconds += seconds * (1 - share)
        totals.decode_seconds += seconds * share
        totals.prefill_tokens += computed - decoded
        totals.decode_tokens += decoded

    def _tokens(self, fed: Sequence[tuple[Request, int]]) -> list[list[int]]:
        done = [self.cache.length(_sequence(r)) for r, _ in fed]
        return [r.tokens[first : first + n] for first, (r, n) in zip(done, fed)]

    def _draw(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return logits.argmax(-1)
        weights = (logits.float() / self.temperature).softmax(-1)
        return torch.multinomial(weights, 1, generator=self._random)[:, 0]

    def _write(self, request: Request, token: int, now: float) -> None:
        request.written.append(token)
        request.times.append(now)
        if len(request.written) == request.count or token in request.stop:
            self.cache.free(_sequence(request))
            self.running.remove(request)
            request.state, request.sequence = "done", None


def _sequence(request: Request) -> int:
    """Of a request that has one: all but those that wait, or are done."""
    assert request.sequence is not None
    return request.sequence
