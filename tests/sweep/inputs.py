"""Inputs that a model may take, tried one after the other."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from .given import LENGTH, numbers, some_words
from .recipes import INPUTS


def _answer(config: Any) -> dict[str, Any]:
    return {"decoder_input_ids": some_words(config, 7)}


def _found(config: Any, *names: str, otherwise: int) -> int:
    for part in (config, *[v for v in vars(config).values() if hasattr(v, "model_type")]):
        for name in names:
            value = getattr(part, name, None)
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
                return int(value[0])
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return otherwise


def candidates(model: Any) -> Iterator[dict[str, Any]]:
    """Those that fit what `forward` takes, likelier ones first."""
    if type(model).__name__ in INPUTS:
        with contextlib.suppress(Exception):  # of a version whose configuration has other fields
            yield INPUTS[type(model).__name__](model.config)
            return
    config, takes = model.config, inspect.signature(model.forward).parameters
    words = {"input_ids": some_words(config)} if "input_ids" in takes else {}
    answer = _answer(config) if "decoder_input_ids" in takes else {}
    images, sounds = list(_images(config, takes)), list(_sounds(config, takes))
    if words:
        yield words | answer
        yield words
    for other in (*images, *sounds):
        yield other
        yield other | answer
        yield other | words
    if "inputs_embeds" in takes:
        width = _found(config, "hidden_size", "d_model", "n_embd", "dim", otherwise=64)
        yield {"inputs_embeds": numbers(2, LENGTH, width)} | answer
    yield from _others(config, takes)
    yield from _joined(config, takes, words, answer, [*images, *sounds])


def _joined(
    config: Any, takes: Any, words: dict[str, Any], answer: dict[str, Any], others: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """With what else is asked for by name: masks of sounds, words of a second part, places of patches."""
    marked = dict(words)
    token = next((t for n in ("image_token_id", "image_token_index", "audio_token_id")
                  if isinstance(t := getattr(config, n, None), int)), None)  # fmt: skip
    for other in others:
        more: dict[str, Any] = {}
        (main,) = [v for n, v in other.items() if not n.endswith("grid_thw")][:1]
        for name in ("input_features_mask", "feature_attention_mask"):
            if name in takes:
                more[name] = torch.ones(2, main.shape[-1], dtype=torch.long)
        for name in ("qformer_input_ids", "task_inputs"):
            if name in takes:
                more[name] = some_words(config)
        for name in ("pixel_position_ids", "image_position_ids"):
            if name in takes and main.dim() == 4:
                side = main.shape[-1] // _found(config, "patch_size", otherwise=8)
                more[name] = torch.cartesian_prod(torch.arange(side), torch.arange(side)).expand(2, -1, -1)
        if more:
            yield other | more
            yield other | more | words | answer
        if words and token is not None:
            for count in (1, 4, 8, 16, 64):  # as many words stand for an image
                ids = torch.cat([torch.full((2, count), token), words["input_ids"]], 1)
                yield other | more | marked | {"input_ids": ids} | answer
    if "visual_feats" in takes:
        yield words | {"visual_feats": numbers(2, 5, config.visual_feat_dim), "visual_pos": numbers(2, 5, 4).abs()}
    if {"states", "actions"} <= takes.keys():
        steps = torch.arange(6).expand(2, -1)
        yield {
            "states": numbers(2, 6, config.state_dim), "actions": numbers(2, 6, config.act_dim),
            "rewards": numbers(2, 6, 1), "returns_to_go": numbers(2, 6, 1), "timesteps": steps,
            "attention_mask": torch.ones(2, 6, dtype=torch.long),
        }  # fmt: skip


def _images(config: Any, takes: Any) -> Iterator[dict[str, Any]]:
    if "pixel_values" in takes:
        size = _found(config, "image_size", "img_size", otherwise=32)
        channels = _found(config, "num_channels", "in_channels", "in_chans", otherwise=3)
        for side in dict.fromkeys((size, 32, 64, 224)):
            yield {"pixel_values": numbers(2, channels, side, side)}
        frames = _found(config, "num_frames", otherwise=4)
        yield {"pixel_values": numbers(2, frames, channels, size, size)}
    if "pixel_values_videos" in takes:
        size = _found(config, "image_size", "crop_size", otherwise=32)
        yield {
            "pixel_values_videos": numbers(
                2, _found(config, "num_frames", "frames_per_clip", otherwise=4), 3, size, size
            )
        }
    for grid in [name for name in ("grid_thw", "image_grid_thw") if name in takes]:  # patches of two images, packed
        patch, depth = _found(config, "patch_size", otherwise=8), _found(config, "temporal_patch_size", otherwise=1)
        channels = _found(config, "in_channels", "num_channels", "in_chans", otherwise=3)
        columns = channels * depth * patch * patch
        places = torch.tensor([[1, 4, 4], [1, 4, 8]])
        for name in [name for name in ("hidden_states", "pixel_values") if name in takes]:
            yield {name: numbers(48, columns), grid: places}
            yield {name: numbers(48, channels, patch, patch), grid: places}


def _sounds(config: Any, takes: Any) -> Iterator[dict[str, Any]]:
    if "input_features" in takes:
        bins = _found(
            config,
            "feature_projection_input_dim",
            "num_mel_bins",
            "input_feat_per_channel",
            "feature_size",
            "n_mels",
            otherwise=80,
        )
        frames = 2 * _found(config, "max_source_positions", otherwise=32)
        for length in (frames, 64):
            yield {"input_features": numbers(2, bins, length)}
            yield {"input_features": numbers(2, length, bins)}
    if "input_values" in takes:
        yield {"input_values": numbers(2, 4000)}
        yield {"input_values": numbers(2, 1, 4000)}
        yield {"input_values": numbers(2, 1, 3840)}
        yield {"input_values": numbers(2, 3840)}
        bins = _found(config, "num_mel_bins", otherwise=16)
        yield {"input_values": numbers(2, _found(config, "max_length", otherwise=64), bins)}
    if "audio_values" in takes:
        yield {"audio_values": numbers(2, 1, 4000)}


def _others(config: Any, takes: Any) -> Iterator[dict[str, Any]]:
    if "past_values" in takes:
        channels = _found(config, "num_input_channels", otherwise=1)
        length = _found(config, "context_length", "prediction_length", otherwise=32)
        yield {"past_values": numbers(2, length, channels)}
        yield {"past_values": numbers(2, length)}
        lags = max(getattr(config, "lags_sequence", None) or [0])
        past, future = length + lags, _found(config, "prediction_length", otherwise=8)
        features = getattr(config, "num_time_features", 0)
        yield {
            "past_values": numbers(2, past), "past_time_features": numbers(2, past, features),
            "past_observed_mask": torch.ones(2, past), "future_values": numbers(2, future),
            "future_time_features": numbers(2, future, features),
        }  # fmt: skip
    if "hidden_states" in takes:
        yield {"hidden_states": numbers(2, LENGTH, _found(config, "hidden_size", "d_model", otherwise=64))}
    if "inputs" in takes:
        yield {"inputs": numbers(2, LENGTH, _found(config, "d_model", otherwise=64))}
    if "bbox" in takes and "decoder_input_ids" in takes:
        yield {"input_ids": some_words(config), "bbox": numbers(2, LENGTH, 4).abs().clamp(max=1.0), **_answer(config)}
    if "bbox" in takes:
        yield {"input_ids": some_words(config), "bbox": torch.arange(2 * LENGTH * 4).reshape(2, LENGTH, 4) % 60}
        yield {"input_ids": some_words(config), "bbox": numbers(2, LENGTH, 8)}
