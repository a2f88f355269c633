"""What becomes of one class: it agrees, never asks for attention, is refused, differs, or is not built."""

from __future__ import annotations

import contextlib
import copy
import inspect
import resource
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto

from weft import WeftError
from weft.integrations import transformers as ours

from .given import padding
from .inputs import candidates
from .tiny import parts, tiny

MOST = 110_000_000  # parameters of a model that is looked at
# outputs that are compared, of models that then choose the best by numbers which rounding may put in another order
COMPARED = {name: ("encoder_last", "enc_outputs") for name in ("GroundingDinoModel", "MMGroundingDinoModel")}
ROOM = 3 * 2**30  # bytes that one class may take
TOLERANCE = 2e-4  # of the largest number of an output; float32 through a few layers


@dataclass(frozen=True)
class Found:
    """status: "agrees", "no attention", "refused", "differs" or "not built". why: a few words."""

    name: str
    status: str
    why: str = ""


@cache
def classes() -> dict[str, tuple[type, type]]:
    """Configuration and class, by name: of each configuration the bare model, and those that generate text."""
    found: dict[str, tuple[type, type]] = {}
    for mapping in ("MODEL_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
                    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
                    "MODEL_FOR_PRETRAINING_MAPPING"):  # fmt: skip
        for config, made in _pairs(getattr(modeling_auto, mapping)):
            for one in made if isinstance(made, (list, tuple)) else [made]:
                found.setdefault(one.__name__, (config, one))
    return dict(sorted(found.items()))


def _pairs(mapping: Any) -> Iterator[tuple[Any, Any]]:
    for kind in mapping._model_mapping:
        with contextlib.suppress(Exception):  # what needs a library that is not here
            config = getattr(transformers, mapping._config_mapping[kind])
            names = mapping._model_mapping[kind]
            made = [getattr(transformers, name) for name in (names if isinstance(names, (list, tuple)) else [names])]
            yield config, made


def timed(name: str) -> tuple[Found, float]:
    """In a process of its own."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    ours.register()
    began = time.monotonic()
    return judged(name, *classes()[name]), time.monotonic() - began


def judged(name: str, config: type, made: type) -> Found:
    calls = [0]

    def counted(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        return ours.attention(*args, **options)

    counted.__signature__ = inspect.signature(ours.attention)  # type: ignore[attr-defined]
    with warnings.catch_warnings(), torch.no_grad(), bounded_memory():
        warnings.simplefilter("ignore")
        transformers.AttentionInterface.register(ours.NAME, counted)
        try:
            return _judged(name, config, made, calls)
        finally:
            transformers.AttentionInterface.register(ours.NAME, ours.attention)


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """What is too large fails by itself, before the machine has no memory left for others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _judged(name: str, config: type, made: type, calls: list[int]) -> Found:
    try:
        model, inputs, problem = built(config, made)
    except ImportError as error:
        return Found(name, "not built", short(error))
    if model is None or inputs is None:
        return Found(name, "not built", problem)
    try:
        own = twin(model)
    except KeyError as error:
        if error.args != (ours.NAME,):
            raise
        return Found(name, "refused", "KeyError of transformers: the model has a class for each name that it knows")
    except Exception as error:
        return Found(name, "not built", f"under weft: {short(error)}")
    for given, seen in variations(model, inputs):
        try:
            expected = outputs(model, given)
        except Exception:
            continue  # a mask that this model has no use for
        try:
            got = outputs(own, given)
        except WeftError as error:
            return Found(name, "refused", short(error))
        except Exception as error:
            return Found(name, "differs", f"fails alone: {short(error)}")
        worst = distance(got, expected, seen)
        if worst > TOLERANCE:
            other = as_sdpa(model, given)
            if other is None or distance(got, other, seen) > TOLERANCE:
                return Found(name, "differs", f"by {worst:.1e} of the largest, with {', '.join(given)}")
    return Found(name, "agrees" if calls[0] else "no attention")


def built(config: type, made: Any) -> tuple[Any, dict[str, Any] | None, str]:
    """A random model that runs under "eager", and its inputs; or why there is none."""
    problem = of_inputs = ""
    for whole in tiny(config, made.__name__):
        try:  # a class may take a part of what its configuration says
            small = next((part for part in parts(whole) if type(part) is made.config_class), whole)
            if made.forward is torch.nn.Module.forward:
                return None, None, "no forward of its own"
            with torch.device("meta"):
                size = sum(p.numel() for p in made(copy.deepcopy(small)).parameters())
        except Exception as error:  # of unknown size: it may be too large for the machine
            problem = problem or short(error)
            continue
        if size > MOST:
            problem = problem or f"{size / 1e6:.0f} million parameters"
            continue
        try:
            model = random(made, small)
        except Exception as error:
            problem = problem or short(error)
            continue
        for inputs in candidates(model):
            try:
                if outputs(model, inputs):
                    return model, inputs, ""
            except Exception as error:
                of_inputs = short(error)  # of the last ones, which are the most complete
    return None, None, of_inputs or problem or "no configuration, or no inputs, that are known"


def random(made: Any, config: Any) -> Any:
    torch.manual_seed(0)
    model = made._from_config(config, attn_implementation="eager").float().eval()
    for name, p in model.named_parameters():  # as many are made so small that attention is hardly there
        if p.dim() >= 2 and "embed" not in name and p.is_floating_point():
            p.normal_(0, p[0].numel() ** -0.5)
    return model


def twin(model: Any) -> Any:
    """The same model as from_pretrained(..., attn_implementation="weft") loads it."""
    config = copy.deepcopy(model.config)
    own = type(model)._from_config(config, attn_implementation=ours.NAME).float().eval()
    own.load_state_dict(model.state_dict())
    buffers = dict(model.named_buffers())
    for name, given in own.named_buffers():
        if given.shape == buffers[name].shape:  # some grow as they are used
            given.copy_(buffers[name])
    own.generation_config = copy.deepcopy(getattr(model, "generation_config", None))
    return own


def variations(model: Any, inputs: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Tensor | None]]:
    yield inputs, None
    takes = inspect.signature(model.forward).parameters
    for name, mask in hidden_ends(inputs):
        if name in takes and inputs.get(name, mask).shape == mask.shape:
            yield inputs | {name: mask}, None
    if "input_ids" not in inputs:
        return
    length = inputs["input_ids"].shape[1]
    if "attention_mask" in takes:
        for side in ("left", "right"):
            yield inputs | {"attention_mask": padding(side, length)}, padding(side, length).bool()

    if model.can_generate():
        for cache in ("dynamic", "static"):
            given = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
            yield given | {"attention_mask": padding("left", length), "cache_implementation": cache}, None


def hidden_ends(inputs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Masks that hide the end of the second sound or image, or of its features; which of them fits a model tells."""
    for name in ("input_values", "input_features", "inputs_embeds"):
        given = inputs.get(name)
        if isinstance(given, Tensor):
            for length in dict.fromkeys((given.shape[1], given.shape[-1])):
                seen = torch.ones(len(given), length, dtype=torch.long)
                seen[1:, length - length // 3 :] = 0
                for mask in ("attention_mask", "input_features_mask", "padding_mask"):
                    yield mask, seen
    given = inputs.get("pixel_values")
    if isinstance(given, Tensor) and given.dim() == 4:
        seen = torch.ones(len(given), *given.shape[2:], dtype=torch.long)
        seen[1:, :, given.shape[3] // 2 :] = 0
        yield "pixel_mask", seen


def outputs(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(1)
    if "cache_implementation" in inputs:
        return generated(model, inputs)
    inputs = {name: value if isinstance(value, Tensor) else copy.deepcopy(value) for name, value in inputs.items()}
    if "frame_idx" in inputs:  # later frames of a video look at earlier ones
        return list(flat([model(**inputs | {"frame_idx": n}) for n in range(inputs["frame_idx"] + 1)]))
    found = model(**inputs)
    # weights are never in memory under "weft", and some models hand them out unasked
    kept = COMPARED.get(type(model).__name__, ("",))
    if hasattr(found, "items"):
        found = [v for k, v in found.items() if "attentions" not in k and k.startswith(kept)]
    found = [t for t in flat(found) if t.numel()]
    # some return nothing but codes
    return [t for t in found if t.is_floating_point()] or [t.float() for t in found if t.dtype == torch.long]


def generated(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """The logits of each token that `generate` takes, up to the first that two numbers may decide in either way."""
    first = {"decoder_start_token_id": 1} if model.config.is_encoder_decoder else {}
    found = model.generate(
        **inputs, **first, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    best = torch.stack(found.logits).topk(2).values
    clear = ((best[..., 0] - best[..., 1]) > 1e-3 * best[..., 0].abs()).flatten(1).all(1).long().cumprod(0).sum()
    return [torch.stack(found.logits[: int(clear) + 1])]


def flat(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, dict):  # as of a part of the model
        yield from flat([part for name, part in given.items() if "attentions" not in str(name)])
    elif isinstance(given, (list, tuple)):
        for part in given:
            yield from flat(part)


def distance(got: list[Tensor], expected: list[Tensor], seen: Tensor | None) -> float:
    """The largest difference, as a part of the largest number of that output; rows of padding are left out."""
    if len(got) != len(expected):
        return float("inf")
    worst = 0.0
    for one, other in zip(got, expected):
        if one.shape != other.shape:
            return float("inf")
        if seen is not None:
            if one.shape[:2] != seen.shape:
                continue  # what is made of all rows may have rows of padding in it
            one, other = one[seen], other[seen]
        finite = other.isfinite()
        if not torch.equal(finite, one.isfinite()):
            return float("inf")
        one, other = one[finite], other[finite]
        if other.numel():
            worst = max(worst, float((one - other).abs().max() / other.abs().max().clamp(min=1e-6)))
    return worst


def as_sdpa(model: Any, inputs: dict[str, Any]) -> list[Tensor] | None:
    """What it gives with "sdpa" in all parts that have it: under "eager" some models add masks of bools, as 1 and 0."""
    other = copy.deepcopy(model)
    for part in other.modules():
        if isinstance(part, transformers.PreTrainedModel) and part._supports_sdpa:
            part.config._attn_implementation_internal = "sdpa"
    with contextlib.suppress(Exception):
        return outputs(other, inputs)
    return None


def short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:160]
