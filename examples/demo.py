"""The whole path on one page: declare a variant, look at its plan, and train a small GPT with the generated op.

    python examples/demo.py            under two minutes on two cores; uses the GPU if there is one

Two copies of one model start from the same seed and see the same batches. One attends with the generated op, the other
with `variant.reference`, the dense definition in plain torch. Their losses are printed side by side, with the speed of
both; pictures, plans and generated kernels are left in `out/`.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from char_gpt import Attend, CharGPT, Config, Text, capped_window, generate, python_manual
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

import weft


@dataclass
class Run:
    """One of the two models, its optimizer, and what was measured."""

    name: str
    model: CharGPT
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of each step

    def step(self, batch: Tensor, learning_rate: float) -> None:
        """One step of AdamW on tokens [B, L + 1]."""
        start = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        with half_precision(batch.device):
            loss = self.model.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss.item())  # waits for the device
        self.seconds.append(time.perf_counter() - start)

    def recent_loss(self, step: int) -> float:
        """Mean loss of the last 20 steps up to this one, since single batches are small."""
        return statistics.mean(self.losses[max(0, step - 19) : step + 1])

    def speed(self, tokens: int) -> float:
        """Tokens a second; the median step, so that the first one (which generates kernels) does not count."""
        return tokens / statistics.median(self.seconds)


def half_precision(device: torch.device) -> AbstractContextManager[object]:
    """bf16 on a GPU, float32 on a CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def new_run(name: str, config: Config, attend: Attend, device: torch.device) -> Run:
    torch.manual_seed(1)
    model = CharGPT(config, attend).to(device)
    return Run(name, model, torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1))


def show_plan(console: Console, shape: weft.Shape, window: int, out: Path) -> None:
    """Print the variant and its plan; leave plan, mask picture and kernels in `out`."""
    console.print(Panel(str(capped_window), title="the variant, as it reads back", title_align="left"))
    console.print(capped_window.explain(shape, window=window), markup=False, highlight=False, soft_wrap=True)
    files = {"plan_h100.txt": capped_window.explain(shape, device="h100", window=window)}
    for direction in ("forward", "backward"):
        files[f"kernel_{direction}.py"] = capped_window.source(shape, direction=direction)
        files[f"kernel_{direction}_h100.py"] = capped_window.source(shape, direction=direction, device="h100")
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (out / name).write_text(text)
    block = max(16, shape.q_len // 16)
    picture = out / "mask.png"
    drawn = capped_window.show_mask(
        shape.q_len, shape.kv_len, block_q=block, block_kv=block, path=picture, window=window
    )  # fmt: skip
    console.print(drawn, markup=False, highlight=False, soft_wrap=True)
    console.print(f"saved: {', '.join(str(p) for p in [picture, *(out / n for n in files)])}")


def train(console: Console, runs: Sequence[Run], text: Text, steps: int, batch: int, length: int) -> None:
    """Train all runs on the same batches, side by side."""
    random = torch.Generator().manual_seed(2)
    device = next(runs[0].model.parameters()).device
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("training", total=steps)
        for step in range(steps):
            tokens = text.batch(random, batch, length).to(device)
            rate = 4e-3 * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)
            for run in runs:
                run.step(tokens, rate)
            losses = "   ".join(f"{run.name} {run.losses[-1]:.3f}" for run in runs)
            progress.update(task, advance=1, description=f"loss: {losses}")


def show_losses(console: Console, runs: Sequence[Run], tokens: int) -> None:
    """Losses (means of 20 steps), the largest difference at any step, and the speed of each run."""
    table = Table("step", *(f"loss, {run.name}" for run in runs), "difference")
    steps = len(runs[0].losses)
    for step in sorted({0, *(steps * k // 6 - 1 for k in range(1, 7))} - {-1}):
        losses = [run.recent_loss(step) for run in runs]
        table.add_row(str(step + 1), *(f"{loss:.4f}" for loss in losses), f"{abs(losses[0] - losses[1]):.1e}")
    table.add_section()
    table.add_row("tokens/s", *(f"{run.speed(tokens):,.0f}" for run in runs), "")
    table.add_row("first step, s", *(f"{run.seconds[0]:.2f}" for run in runs), "")
    console.print(table)
    largest = max(abs(a - b) for a, b in zip(runs[0].losses, runs[1].losses, strict=True))
    console.print(f"largest difference of the losses at any step: {largest:.1e} (rounding, amplified by training)")


def show_sample(console: Console, model: CharGPT, text: Text, count: int) -> None:
    """Text that the model writes: each new character is one query against all the keys so far."""
    prompt = text.encode("The ").to(next(model.parameters()).device)
    start = time.perf_counter()
    with half_precision(prompt.device):
        written = text.decode(generate(model, prompt, count, temperature=0.6))
    rate = count / (time.perf_counter() - start)
    title = f"written by the model through the same op, one query a step ({rate:.0f} characters/s)"
    console.print(Panel(written, title=title, title_align="left"), markup=False, highlight=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch, length, steps = (32, 512, 600) if device.type == "cuda" else (2, 512, 120)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--length", type=int, default=length)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--sample", type=int, default=500, help="characters to write at the end")
    parser.add_argument("--out", type=Path, default=Path("out"))
    given = parser.parse_args(arguments)

    torch.set_num_threads(1)  # the model is small: more threads spend their time waiting for each other
    console = Console()
    text = python_manual()
    config = Config(len(text.characters))
    shape = weft.shape(
        batch=given.batch, heads=config.heads, kv_heads=config.kv_heads, q_len=given.length, head_dim=config.head_dim,
        dtype="bf16" if device.type == "cuda" else "fp32",
    )  # fmt: skip
    show_plan(console, shape, given.window, given.out)
    runs = [
        new_run("generated", config, functools.partial(capped_window, window=given.window), device),
        new_run("reference", config, functools.partial(capped_window.reference, window=given.window), device),
    ]
    size = sum(p.numel() for p in runs[0].model.parameters())
    console.print(f"\ntraining on {device}: {size:,} parameters, {len(text.tokens):,} characters of the Python manual")
    train(console, runs, text, given.steps, given.batch, given.length)
    show_losses(console, runs, given.batch * given.length)
    show_sample(console, runs[0].model, text, given.sample)


if __name__ == "__main__":
    main()
