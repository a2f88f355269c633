"""Generating with a model of Hugging Face transformers on Weft's kernels: prompts of different lengths, in one batch.

`generate` pads the prompts on the left, and keeps keys and values in a cache that grows, or in one of a fixed size
(`cache_implementation="static"`). Both, and each prompt by itself, go on with the same characters as under "eager".
Needs the extra weft[transformers]; the model of transformers_train.py is trained for some steps first.
"""

import torch
from char_gpt import python_manual
from transformers_train import made, train

from weft.integrations.transformers import register

PROMPTS = ("The ", "A function is ", "If the value of the expression ")


def main(steps: int = 60, count: int = 40) -> None:
    register()
    text = python_manual()
    model = made(text, "weft")
    print(f"loss after {steps} steps: {train(model, text, steps)[-1]:.2f}")
    model.eval()

    prompts = [text.encode(prompt)[0] for prompt in PROMPTS]
    ids, seen = torch.zeros(2, len(prompts), max(map(len, prompts)), dtype=torch.long, device=model.device)
    for row, prompt in enumerate(prompts):
        ids[row, -len(prompt) :] = prompt
        seen[row, -len(prompt) :] = 1

    def following(implementation: str, cache: str) -> torch.Tensor:
        model.set_attn_implementation(implementation)
        found = model.generate(
            ids, attention_mask=seen, max_new_tokens=count, do_sample=False, cache_implementation=cache
        )
        return found[:, ids.shape[1] :]

    grows = following("weft", "dynamic")
    for prompt, row in zip(PROMPTS, grows):
        print(f"{prompt}|{text.decode(row)!r}")
    alone = [
        model.generate(prompt[None].to(model.device), max_new_tokens=count, do_sample=False)[0, len(prompt) :]
        for prompt in prompts
    ]
    print("the same with a static cache:", torch.equal(grows, following("weft", "static")))
    print("each prompt by itself:       ", all(torch.equal(a, b) for a, b in zip(alone, grows)))
    print("under eager:                 ", torch.equal(grows, following("eager", "dynamic")))


if __name__ == "__main__":
    main()
