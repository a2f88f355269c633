"""Training over many devices: FSDP2 divides parameters, weft.distributed divides sequences, and checkpoints resume.

    torchrun --nproc-per-node 8 examples/train.py --model 8b --cp 4 --length 131072 --batch 2 --compile
    python examples/train.py --ranks 2 --cp 2                two processes of gloo on a CPU
    python examples/train.py --ranks 4 --cp 2x2              as on two hosts with two devices each

--cp says how many ranks hold a sequence together. With two numbers, hosts x devices of a host, the devices of a host
may divide heads while keys of these heads travel between hosts. A layer does so where its plan predicts that it is
fastest, or where --strategy is heads+ring or heads+exchange.

The model has the shape of Llama. Its layers attend in turn as `--pattern` says: in a window with a learned sink, or to
all that came before. Each batch follows from its step alone, so a run that is resumed sees what it would have seen.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from char_gpt import Text, python_manual
from ranks import on_ranks
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

import weft
from weft import head, kv_pos, masks, q_pos
from weft.distributed import ContextParallel, Links, ShardPlan

window, sinks = weft.scalar("window", int), weft.tensor("sinks", 1)
VARIANTS = {
    "local": weft.Attention(mask=masks.causal & (q_pos - kv_pos < window), sink=sinks[head], name="local"),
    "whole": weft.Attention(mask=masks.causal, name="whole"),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    inner: int

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


MODELS = {
    "small": Config(64, 2, 4, 2, 192),
    "1b": Config(2048, 16, 32, 8, 8192),
    "8b": Config(4096, 32, 32, 8, 14336),
}


# -- the model ---------------------------------------------------------------------------------------------------------
class Rows:
    """The rows of each sequence that this rank holds, and attention of them over all rows.

    A rank holds the same rows in every layer, so all plans deal them alike.
    """

    def __init__(self, cp: ContextParallel, config: Config, settings: argparse.Namespace, batch: int) -> None:
        self.cp, self.numbers = cp, {"local": {"window": settings.window}, "whole": {}}
        self.deterministic = settings.deterministic or None
        self.plans: dict[str, ShardPlan] = {
            kind: cp.plan(
                VARIANTS[kind], batch=batch, heads=config.heads, kv_heads=config.kv_heads, length=settings.length,
                head_dim=config.head_dim, dtype=settings.dtype, **self.numbers[kind],
            )
            for kind in dict.fromkeys(settings.pattern)
        }  # fmt: skip
        self.positions = cp.rows(next(iter(self.plans.values())))

    def own(self, tokens: Tensor) -> Tensor:
        """This rank's rows of tokens [B, L]."""
        return self.cp.shard(tokens, next(iter(self.plans.values())), dim=1)

    def attend(self, kind: str, query: Tensor, key: Tensor, value: Tensor, learned: Mapping[str, Tensor]) -> Tensor:
        """[B, Hq, rows, D] of this rank's rows."""
        shares: dict[str, Any] = {name: self.cp.share(tensor) for name, tensor in learned.items()}
        out: Tensor = self.cp.attention(
            VARIANTS[kind], query, key, value, plan=self.plans[kind], deterministic=self.deterministic,
            **self.numbers[kind], **shares,
        )  # fmt: skip
        return out


class Block(nn.Module):
    """Attention of one kind, then a gated network, each added to its own input."""

    def __init__(self, config: Config, kind: str) -> None:
        super().__init__()
        self.config, self.kind, self.rotary = config, kind, weft.nn.Rotary(config.head_dim, base=500_000.0)
        of_heads, of_keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.before_attention, self.before_network = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.qkv = nn.Linear(config.width, of_heads + 2 * of_keys, bias=False)
        self.out = nn.Linear(of_heads, config.width, bias=False)
        self.gate_and_up = nn.Linear(config.width, 2 * config.inner, bias=False)
        self.down = nn.Linear(config.inner, config.width, bias=False)
        if kind == "local":
            self.sinks = nn.Parameter(torch.zeros(config.heads))

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], rows: Rows) -> Tensor:
        c = self.config
        heads = self.qkv(self.before_attention(x)).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
        query, key, value = heads.split([c.heads, c.kv_heads, c.kv_heads], dim=1)
        query, key = self.rotary.rotate(query, rotation), self.rotary.rotate(key, rotation)
        learned = {"sinks": self.sinks} if self.kind == "local" else {}
        attended = rows.attend(self.kind, query, key, value, learned)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_and_up(self.before_network(x)).chunk(2, dim=-1)
        result: Tensor = x + self.down(functional.silu(gate) * up)
        return result


class Llama(nn.Module):
    """A decoder whose layers attend as the pattern says, in turn."""

    def __init__(self, config: Config, vocabulary: int, pattern: Sequence[str]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config, pattern[n % len(pattern)]) for n in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.rotary = weft.nn.Rotary(config.head_dim, base=500_000.0)

    def forward(self, tokens: Tensor, rows: Rows) -> Tensor:
        """Logits [B, rows, vocabulary] of this rank's tokens [B, rows]."""
        rotation = self.rotary(rows.positions.to(tokens.device))
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rotation, rows)
        logits: Tensor = self.head(self.norm(x))
        return logits


# -- training ----------------------------------------------------------------------------------------------------------
class Trainer:
    """A model whose parameters lie on all ranks, its optimizer, and the step that comes next."""

    def __init__(self, settings: argparse.Namespace, device: torch.device, text: Text) -> None:
        self.settings, self.device, self.text, self.step = settings, device, text, 0
        ranks, cp = dist.get_world_size(), math.prod(settings.cp)
        if ranks % cp or settings.batch % (ranks // cp):
            raise SystemExit(
                f"--cp {shown(settings.cp)}, --batch {settings.batch}: expected numbers so that {ranks} ranks are "
                "groups of --cp, and the groups divide the batch"
            )
        self.groups, self.config = ranks // cp, MODELS[settings.model]
        cp_group, self.group = self._context(device)
        self.rows = Rows(cp_group, self.config, settings, settings.batch // self.groups)
        torch.manual_seed(settings.seed)  # a model starts from the same numbers on every mesh
        with device:
            self.model = Llama(self.config, len(text.characters), settings.pattern)
        self.flops = self._flops()
        everyone = init_device_mesh(device.type, (ranks,))  # parameters and what AdamW keeps of them lie on all ranks
        half = MixedPrecisionPolicy(param_dtype=DTYPES[settings.dtype], reduce_dtype=torch.float32)
        for block in self.model.blocks:
            if settings.compile:
                block.compile()
            fully_shard(block, mesh=everyone, mp_policy=half)
        fully_shard(self.model, mesh=everyone, mp_policy=half)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.rate, betas=(0.9, 0.95))

    def _context(self, device: torch.device) -> tuple[ContextParallel, int]:
        """The ranks that hold a sequence with this one, and the number of their group."""
        s, shape = self.settings, (self.groups, *self.settings.cp)
        names = ("dp", "cp") if len(shape) == 2 else ("dp", "hosts", "cp")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        dim, links = ("cp", None) if len(shape) == 2 else (("hosts", "cp"), Links(per_host=shape[2]))
        cp = ContextParallel(mesh, dim, strategy=s.strategy, balance=s.balance, links=links)
        return cp, mesh.get_local_rank("dp")

    def _flops(self) -> float:
        """Of the products of a step: a forward, and twice as much backward."""
        tokens = self.settings.batch * self.settings.length
        weights: int = sum(m.weight.numel() for m in self.model.modules() if isinstance(m, nn.Linear))
        pairs = sum(sum(self.rows.plans[str(block.kind)].pairs) for block in self.model.blocks)
        of_pairs = 4.0 * self.config.heads * self.config.head_dim * pairs
        found: float = 3.0 * (2.0 * tokens * weights + of_pairs * int(self.settings.batch))
        return found

    def batch(self) -> Tensor:
        """Tokens [B, L + 1] of this group: of the whole batch, which is the same on every mesh, its rows."""
        random = torch.Generator().manual_seed(self.settings.seed + self.step)
        whole = self.text.batch(random, self.settings.batch, self.settings.length)
        return whole.chunk(self.groups)[self.group].to(self.device)

    def run_step(self) -> float:
        """One step of AdamW; gives the mean loss of the whole batch, in nats a character."""
        tokens = self.batch()
        inputs, labels = self.rows.own(tokens[:, :-1]), self.rows.own(tokens[:, 1:])
        logits = self.model(inputs, self.rows)
        total = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
        loss = total / (self.settings.batch * self.settings.length)
        (loss * dist.get_world_size()).backward()  # FSDP takes the mean of all ranks, and the loss is their sum
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate * min(1.0, (self.step + 1) / 20)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        mean = loss.detach()
        dist.all_reduce(mean)
        return float(mean)  # waits for the device

    # -- checkpoints ---------------------------------------------------------------------------------------------------
    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": torch.tensor(self.step)}

    def save(self) -> None:
        """Each rank writes its own shards."""
        save(self._state(), checkpoint_id=self.settings.out / f"step-{self.step:08d}")

    def load(self) -> bool:
        """Go on from the last checkpoint, of any mesh; False where there is none."""
        whole = sorted(p.parent for p in self.settings.out.glob("step-*/.metadata"))  # which is written last
        if not whole:
            return False
        state = self._state()
        load(state, checkpoint_id=whole[-1])
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"])  # fmt: skip
        self.step = int(state["step"])
        return True


class Report:
    """A table of the last steps that stays in place on a terminal, and one line a step elsewhere."""

    COLUMNS = ("step", "loss", "tokens/s", "of the matrix limit", "GiB")

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.steps = trainer, list[tuple[str, ...]]()
        self.console = Console(quiet=dist.get_rank() > 0)
        plan = next(iter(trainer.rows.plans.values()))
        self.limit = plan.hardware.matrix_flops(trainer.settings.dtype) * dist.get_world_size()

    def table(self) -> Table:
        table = Table(*self.COLUMNS)
        for row in self.steps[-20:]:
            table.add_row(*row)
        return table

    def over(self, steps: Iterator[tuple[float, float]]) -> None:
        """Show each step of these: its loss, and the seconds that it took."""
        s, trainer = self.trainer.settings, self.trainer
        with Live(console=self.console, get_renderable=self.table, transient=not self.console.is_terminal):
            for loss, seconds in steps:
                memory = torch.cuda.max_memory_allocated() / 2**30 if trainer.device.type == "cuda" else 0.0
                self.steps.append(
                    (f"{trainer.step}", f"{loss:.6f}", f"{s.batch * s.length / seconds:,.0f}",
                     f"{trainer.flops / seconds / self.limit:.1%}", f"{memory:.1f}")
                )  # fmt: skip
                if not self.console.is_terminal:
                    self.console.print("   ".join(f"{n} {v}" for n, v in zip(self.COLUMNS, self.steps[-1])))


def run(settings: argparse.Namespace, device: torch.device) -> None:
    """Train on this rank."""
    if settings.deterministic and device.type == "cuda":
        torch.use_deterministic_algorithms(True)
    trainer = Trainer(settings, device, python_manual())
    report = Report(trainer)
    resumed = trainer.load()
    if not resumed:
        for plan in trainer.rows.plans.values():
            report.console.print(plan.explain(), highlight=False, markup=False, soft_wrap=True)
    size = sum(p.numel() for p in trainer.model.parameters())
    told = f"resumed at step {trainer.step}" if resumed else "from the start"
    mesh = f"groups of {shown(settings.cp)}"
    report.console.print(f"{size:,} parameters, {dist.get_world_size()} ranks in {mesh}: {told}", highlight=False)

    def steps() -> Iterator[tuple[float, float]]:
        while trainer.step < settings.steps:
            begin = time.perf_counter()
            loss = trainer.run_step()
            yield loss, time.perf_counter() - begin
            if trainer.step % settings.every == 0 or trainer.step == settings.steps:
                trainer.save()

    report.over(steps())


def context(text: str) -> tuple[int, ...]:
    """The numbers of --cp: `4` or `2x8`."""
    parts = text.split("x")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"expected a positive number, or two as 2x8, got {text}")
    return tuple(map(int, parts))


def shown(numbers: Sequence[int]) -> str:
    """As --cp takes them."""
    return "x".join(map(str, numbers))


def main(arguments: Sequence[str] | None = None, work: Callable[..., None] = run) -> None:
    """Train in the processes of torchrun, or in `--ranks` of this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"ranks": 1, "steps": 100, "batch": 4, "length": 256, "window": 64, "every": 50, "seed": 1}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--pattern", nargs="+", choices=VARIANTS, default=["local", "whole"])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--cp", type=context, default=(1,), help="ranks of a sequence: a number, or HOSTSxDEVICES")
    parser.add_argument("--strategy", default="auto", help="of all layers, in place of what each plan takes")
    parser.add_argument("--balance", default="zigzag", help="how all layers deal rows: see docs/distributed.md")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--compile", action="store_true", help="all of a block but its attention, by torch.compile")
    parser.add_argument("--deterministic", action="store_true", help="a GPU resumes bit for bit too")
    parser.add_argument("--out", type=Path, default=Path("out/train"), help="checkpoints; the last one is resumed")
    settings = parser.parse_args(arguments)
    on_ranks(functools.partial(work, settings), settings.ranks)


if __name__ == "__main__":
    main()
