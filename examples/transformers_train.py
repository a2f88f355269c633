"""Training a model of Hugging Face transformers on Weft's kernels: `register()`, and `attn_implementation="weft"`.

The model is a small Gemma 2: scores are capped, and every other layer sees a window. Each row of a batch holds two
pieces of text, one after the other, and position_ids that start anew tell them apart. No mask of all pairs is made;
what layers see instead is printed. Needs the extra weft-attention[transformers]; nothing is downloaded.
"""

from typing import Any

import torch
from char_gpt import Text, python_manual
from transformers import Gemma2Config, Gemma2ForCausalLM

from weft.integrations import transformers as weft_transformers


def prose() -> Text:
    """Python's manual in small letters, with one space between words."""
    manual = python_manual()
    return Text(" ".join(manual.decode(manual.tokens).lower().split()))


def made(text: Text, implementation: str, width: int = 64) -> Any:
    """A model with random weights, the same for every implementation."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=len(text.characters), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=24, attn_logit_softcapping=20.0,
        query_pre_attn_scalar=16, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Gemma2ForCausalLM._from_config(config, attn_implementation=implementation).to(device)


def train(model: Any, text: Text, steps: int, batch: int = 4, length: int = 48) -> list[float]:
    """Losses, in nats a character."""
    random = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    positions = torch.cat([torch.arange(length), torch.arange(length)]).expand(batch, -1).to(model.device)
    losses = []
    for _ in range(steps):
        pieces = text.batch(random, 2 * batch, length - 1).view(batch, -1).to(model.device)
        labels = pieces.clone()
        labels[:, length] = -100  # nothing tells the first character of the second piece
        loss = model(pieces, position_ids=positions, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(steps: int = 80) -> None:
    weft_transformers.register()
    text = prose()
    model, eager = made(text, "weft"), made(text, "eager")
    difference = max(abs(ours - theirs) for ours, theirs in zip(train(model, text, 3), train(eager, text, 3)))
    print(f"largest difference to the losses of eager, 3 steps: {difference:.1e}")
    losses = train(model, text, steps)
    for step in sorted({*range(0, steps, max(1, steps // 4)), steps - 1}):
        print(f"step {step:3d}   loss {losses[step]:.3f}")
    for number, variant in enumerate(weft_transformers.variants()):
        print(f"variant {number}: score {variant.score}, mask {variant.mask}")


if __name__ == "__main__":
    main()
