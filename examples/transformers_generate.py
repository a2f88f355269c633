"""Generating with a model of Hugging Face transformers on Weft's kernels: prompts of different lengths, in one batch.

`generate` pads the prompts on the left, and keeps keys and values in a cache that grows, or in one of a fixed size
(`cache_implementation="static"`). Both, and each prompt by itself, go on with the same characters as under "eager".
Needs the extra weft-attention[transformers]; the model of transformers_train.py is trained for some steps first.
"""

import torch
from transformers_train import made, prose, train

from weft.integrations.transformers import register

PROMPTS = ("the ", "a function is ", "if the value of the expression ")


def main(steps: int = 80, count: int = 30) -> None:
    register()
    text = prose()
    model = made(text, "weft")
    print(f"loss after {steps} steps: {train(model, text, steps)[-1]:.2f}")
    model.eval()

    prompts = [text.encode(prompt)[0] for prompt in PROMPTS]
    ids, seen = torch.zeros(2, len(prompts), max(map(len, prompts)), dtype=torch.long, device=model.device)
    for number, row in enumerate(prompts):
        ids[number, -len(row) :] = row
        seen[number, -len(row) :] = 1

    def following(ids: torch.Tensor, seen: torch.Tensor, implementation: str, cache: str = "dynamic") -> torch.Tensor:
        model.set_attn_implementation(implementation)
        options = {"max_new_tokens": count, "do_sample": False, "cache_implementation": cache}
        found: torch.Tensor = model.generate(ids, attention_mask=seen, **options)
        return found[:, ids.shape[1] :]

    grows = following(ids, seen, "weft")
    for prompt, found in zip(PROMPTS, grows):
        print(f"{prompt}|{text.decode(found)}")
    alone = torch.cat(
        [following(row[None].to(ids.device), torch.ones_like(row)[None].to(ids.device), "weft") for row in prompts]
    )
    print("the same with a static cache:", torch.equal(grows, following(ids, seen, "weft", "static")))
    print("each prompt by itself:       ", torch.equal(grows, alone))
    print("under eager:                 ", torch.equal(grows, following(ids, seen, "eager")))


if __name__ == "__main__":
    main()
