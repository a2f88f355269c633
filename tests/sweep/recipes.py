"""Inputs of classes that names and shapes alone do not tell, by the class's name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from .given import LENGTH, marked, numbers, padding, some_words

PLACES = torch.tensor([[1, 4, 4], [1, 4, 8]])  # frames, rows and columns of patches, of two images


def places(rows: int, columns: int) -> torch.Tensor:
    """Row and column of each patch of two images."""
    return torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).expand(2, -1, -1)


def packed(config: Any) -> dict[str, Any]:
    """Patches of two images in one row, of one height."""
    side = config.patch_size
    return {"pixel_values": numbers(1, 3, side, 48 * side), "target_sizes": torch.tensor([[4, 4], [4, 8]])}


def step(config: Any) -> dict[str, Any]:
    return {"input_ids": marked(config, config.image_token_id, 1), "pixel_values": numbers(2, 3, 32, 32)}


def voxtral(config: Any) -> dict[str, Any]:
    return {
        "input_ids": some_words(config, 8), "input_features": numbers(2, config.audio_config.num_mel_bins, 64),
    }  # fmt: skip


def shared_states(config: Any) -> dict[str, Any]:
    """Keys and values of another model's last layers."""
    keys = (numbers(2, 2, LENGTH, 16, seed=2), numbers(2, 2, LENGTH, 16, seed=3))
    return {
        "inputs_embeds": numbers(2, 1, 2 * config.backbone_hidden_size), "position_ids": torch.full((2, 1), LENGTH - 1),
        "shared_kv_states": {"full_attention": keys, "sliding_attention": keys},
        "attention_mask": padding("left"),
    }  # fmt: skip


def robot(config: Any) -> dict[str, Any]:
    return {
        "input_ids": marked(config.vlm_config, 5, 16), "pixel_values": numbers(2, 1, 3, 32, 32),
        "pixel_attention_mask": torch.ones(2, 1, dtype=torch.long),
        "attention_mask": torch.ones(2, 16 + LENGTH, dtype=torch.long),
    }  # fmt: skip


def codec(config: Any) -> dict[str, Any]:
    return {"input_values": numbers(2, 1, 3200), "input_features": numbers(2, 10, 16), "output_latents": True}


def tiled(config: Any) -> dict[str, Any]:
    return {
        "input_ids": marked(config, 5, 10), "pixel_values": numbers(2, 2, 3, 32, 32),
        "image_sizes": torch.tensor([[32, 32], [32, 32]]),
    }  # fmt: skip


def heard(config: Any) -> dict[str, Any]:
    return {
        "input_ids": marked(config, 5, 8), "input_values": numbers(2, 1, 64), "sample": False,
        "padding_mask": torch.ones(2, 64, dtype=torch.bool),
    }  # fmt: skip


def video(module: str) -> dict[str, Any]:
    """Three frames, with a point in the first one, or with words for what is to be found."""
    modeling = import_module(f"transformers.models.{module}.modeling_{module}")
    kind = next(kind for name, kind in vars(modeling).items() if name.endswith("VideoInferenceSession"))
    frames = numbers(3, 3, 64, 64)
    session = kind(video=frames, video_height=64, video_width=64, dtype=frames.dtype)
    if hasattr(session, "prompts"):
        session.prompts, session.prompt_input_ids = {0: "a"}, {0: torch.arange(3, 10)[None]}
        session.prompt_attention_masks = {0: torch.ones(1, 7, dtype=torch.long)}
    else:
        labels = torch.ones(1, 1, 1, dtype=torch.int)
        point = {"point_coords": torch.tensor([[[[20.0, 30.0]]]]), "point_labels": labels}
        session.add_point_inputs(session.obj_id_to_idx(1), 0, point)
        session.obj_with_new_inputs = [1]
    return {"inference_session": session, "frame_idx": 2}


def squares(config: Any) -> dict[str, Any]:
    """Images as rows of patches."""
    return {
        "pixel_values": numbers(2, 16, 3 * 8 * 8), "pixel_attention_mask": torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4], [4, 4]]),
    }  # fmt: skip


def placed(config: Any) -> dict[str, Any]:
    seen = (torch.arange(LENGTH) < 4).long().expand(2, -1)
    return {"input_ids": some_words(config), "pixel_values": numbers(2, 3, 32, 32), "image_embeds_position_mask": seen}


def beside(config: Any) -> dict[str, Any]:
    seen = torch.ones(2, LENGTH, 1, dtype=torch.long)
    return {
        "input_ids": some_words(config), "pixel_values": numbers(2, 1, 3, 32, 32), "image_attention_mask": seen,
    }  # fmt: skip


def languages(config: Any) -> dict[str, Any]:
    return {"input_ids": some_words(config), "lang_ids": torch.zeros(2, dtype=torch.long)}


def asked(config: Any) -> dict[str, Any]:
    """Frames, words that ask, and words that an answer starts with."""
    return {
        "pixel_values": numbers(2, 4, 3, 32, 32), "qformer_input_ids": some_words(config),
        "input_ids": marked(config, config.video_token_id, 32), "decoder_input_ids": some_words(config, 7),
    }  # fmt: skip


def wide(config: Any) -> dict[str, Any]:
    """An image of which a backbone leaves more than one place."""
    return {"pixel_values": numbers(2, 3, 128, 128)}


def pictures(token: int, *shape: int) -> Callable[[Any], dict[str, Any]]:
    """Four words that stand for what an image becomes."""
    return lambda config: {"input_ids": marked(config, token, 4), "pixel_values": numbers(2, *shape)}


# what a class takes
INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "ClapModel": lambda c: {"input_ids": some_words(c), "input_features": numbers(2, 1, 256, 16)},
    "DepthProModel": lambda c: {"pixel_values": numbers(2, 3, 64, 64)},
    "FastSpeech2ConformerWithHifiGan": lambda c: {"input_ids": some_words(c.model_config)},
    "FunAsrNanoEncoder": lambda c: {
        "input_features": numbers(2, LENGTH, c.input_size), "input_features_mask": torch.ones(2, LENGTH),
    },
    "Gemma4AudioModel": lambda c: {"input_features": numbers(2, 64, c.subsampling_conv_channels[0])},
    "Gemma4VisionModel": lambda c: {
        "pixel_values": numbers(2, 36, 3 * c.patch_size**2), "pixel_position_ids": places(6, 6),
    },
    "GraniteSpeech5Encoder": lambda c: {"input_features": numbers(2, 64, 4 * c.num_mel_bins)},
    "GraniteSpeech5ForCTC": lambda c: {"input_features": numbers(2, 64, 64)},
    "Inkling2VisionModel": lambda c: {
        "pixel_values": numbers(12, 2 * c.patch_size, 2 * c.patch_size, 3),
        "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 4]]),
    },
    "InstructBlipModel": lambda c: {
        "pixel_values": numbers(2, 3, 32, 32), "qformer_input_ids": some_words(c),
        "input_ids": marked(c, c.image_token_id, 8), "decoder_input_ids": some_words(c, 7),
    },
    "InstructBlipVideoModel": asked, "InstructBlipVideoForConditionalGeneration": asked,
    # transformers looks for image_outputs in what its text model returns by name
    "Llama4ForConditionalGeneration": lambda c: {
        "input_ids": marked(c, c.image_token_index, 4), "pixel_values": numbers(2, 3, 32, 32), "return_dict": False,
    },
    "LwDetrModel": lambda c: {"pixel_values": numbers(2, 3, 64, 64)},
    "MiniCPMOcrVisionModel": packed, "MiniCPMV4_7VisionModel": packed,
    "OneFormerModel": lambda c: {
        "pixel_values": numbers(2, 3, 64, 64), "task_inputs": some_words(c.backbone_config, c.task_seq_len),
    },
    "RfDetrModel": lambda c: {"pixel_values": numbers(2, 3, 64, 64)},
    "Sam2Model": lambda c: {"pixel_values": numbers(2, 3, 64, 64), "input_points": numbers(2, 1, 3, 2).abs() * 20,
                            "input_labels": torch.ones(2, 1, 3, dtype=torch.int)},
    "Step3p7Model": step, "Step3p7ForConditionalGeneration": step,
    "Blip2QFormerModel": lambda c: {
        "query_embeds": numbers(2, 8, c.hidden_size), "encoder_hidden_states": numbers(2, 5, c.encoder_hidden_size),
    },
    "BltModel": lambda c: {"input_ids": some_words(c), "use_cache": False},
    "BltForCausalLM": lambda c: {"input_ids": some_words(c), "use_cache": False},
    "ClvpModelForConditionalGeneration": lambda c: {
        "input_ids": some_words(c.text_config), "input_features": numbers(2, 16, 64),
    },
    "Gemma3nAudioEncoder": lambda c: {
        "audio_mel": numbers(2, 64, c.input_feat_size), "audio_mel_mask": torch.zeros(2, 64, dtype=torch.bool),
    },
    "MimiDecoderModel": lambda c: {"latents": numbers(2, c.hidden_size, 8)},
    "PerceiverModel": lambda c: {"inputs": numbers(2, LENGTH, c.d_model)},
    "Pix2StructForConditionalGeneration": lambda c: {
        "flattened_patches": torch.cat([places(4, 4) + 1, numbers(2, 16, 48)], -1),
        "decoder_input_ids": some_words(c, 7),
    },
    "PocketTTSAudioTokenizerDecoderModel": lambda c: {"latents": numbers(2, c.hidden_size, 8)},
    "T5Gemma2Encoder": lambda c: {
        "input_ids": marked(c, c.image_token_index, 4), "pixel_values": numbers(2, 3, 32, 32),
    },
    "VibeVoiceAcousticTokenizerModel": lambda c: {"input_values": numbers(2, 1, 64), "sample": False},
    "VibeVoiceAcousticTokenizerEncoderModel": lambda c: {"hidden_states": numbers(2, 1, 64)},
    "VibeVoiceAcousticTokenizerDecoderModel": lambda c: {"hidden_states": numbers(2, c.hidden_size, 8)},
    "VoxtralRealtimeModel": voxtral, "VoxtralRealtimeForConditionalGeneration": voxtral,
    "LightGlueForKeypointMatching": lambda c: {"pixel_values": numbers(2, 2, 3, 32, 32)},
    "EfficientLoFTRModel": lambda c: {"pixel_values": numbers(2, 2, 3, 64, 64)},
    "SegGptModel": lambda c: {
        "pixel_values": numbers(2, 3, 32, 32), "prompt_pixel_values": numbers(2, 3, 32, 32, seed=2),
        "prompt_masks": numbers(2, 3, 32, 32, seed=3),
    },
    "VideoLlama3VisionModel": lambda c: {
        "pixel_values": numbers(48, 3 * c.patch_size**2), "grid_thw": PLACES,
        "merge_sizes": torch.tensor([2, 2]),
    },
    "MuseGlimmerAssistantModel": lambda c: {
        "noise_embeds": numbers(2, 4, 64), "context_hidden_states": numbers(2, 5, 128),
    },
    "Gemma4AssistantForCausalLM": shared_states, "Gemma4UnifiedAssistantForCausalLM": shared_states,
    "PI0Model": lambda c: robot(c) | {"action_embeds": numbers(2, 5, 64)},
    "PI0ForConditionalGeneration": lambda c: robot(c) | {
        "state": numbers(2, 8), "noise": numbers(2, 4, 8), "timestep": torch.tensor([0.2, 0.7]),
    },
    "NeuCodecModel": codec, "Xcodec2Model": codec,
    "XcodecModel": lambda c: {"input_values": numbers(2, 1, 3200)},
    "Sam3TrackerModel": lambda c: {
        "pixel_values": numbers(2, 3, 64, 64), "input_points": numbers(2, 1, 3, 2).abs() * 20,
        "input_labels": torch.ones(2, 1, 3, dtype=torch.int),
    },
    "TvpModel": lambda c: {"input_ids": some_words(c)[:1], "pixel_values": numbers(1, 4, 3, 64, 64)},
    "Granite4VisionModel": tiled, "Granite4VisionForConditionalGeneration": tiled,
    "VibeVoiceForConditionalGeneration": heard,
    "VibeVoiceAsrModel": heard, "VibeVoiceAsrForConditionalGeneration": heard,
    "Sam2VideoModel": lambda c: video("sam2_video"),
    "Sam3TrackerVideoModel": lambda c: video("sam3_tracker_video"),
    "TimmWrapperModel": lambda c: {"pixel_values": numbers(2, 3, 32, 32)},
    "TimmBackbone": lambda c: {"pixel_values": numbers(2, 3, 32, 32)},
    "FastVlmModel": pictures(5, 3, 64, 64), "FastVlmForConditionalGeneration": pictures(5, 3, 64, 64),
    "Gemma3nModel": pictures(113, 3, 64, 64), "Gemma3nForConditionalGeneration": pictures(113, 3, 64, 64),
    "PerceptionLMModel": pictures(5, 1, 3, 32, 32),
    "PerceptionLMForConditionalGeneration": pictures(5, 1, 3, 32, 32),
    "PeVideoEncoder": lambda c: {"pixel_values_videos": numbers(2, 4, 3, 32, 32)},
    "PeVideoModel": lambda c: {"input_ids": some_words(c), "pixel_values_videos": numbers(2, 4, 3, 32, 32)},
    "PeAudioVideoEncoder": lambda c: {
        "pixel_values_videos": numbers(2, 4, 3, 32, 32), "input_values": numbers(2, 1, 64),
    },
    "PeAudioVideoModel": lambda c: {
        "input_ids": some_words(c), "pixel_values_videos": numbers(2, 4, 3, 32, 32), "input_values": numbers(2, 1, 64),
    },
    "EdgeTamVisionModel": lambda c: {"pixel_values": numbers(2, 3, 64, 64)},
    "EdgeTamModel": lambda c: {
        "pixel_values": numbers(2, 3, 64, 64), "input_points": numbers(2, 1, 3, 2).abs() * 20,
        "input_labels": torch.ones(2, 1, 3, dtype=torch.int),
    },
    "EdgeTamVideoModel": lambda c: video("edgetam_video"),
    "OmDetTurboForObjectDetection": lambda c: {
        "pixel_values": numbers(2, 3, 64, 64), "classes_input_ids": some_words(c, 6).reshape(3, 4),
        "classes_attention_mask": torch.ones(3, 4), "tasks_input_ids": some_words(c, 7),
        "tasks_attention_mask": torch.ones(2, 7), "classes_structure": torch.tensor([1, 2]),
    },
    "HiggsAudioV2TokenizerModel": lambda c: {"input_values": numbers(2, 1, 9600)},
    "PPOCRV6MediumDetModel": lambda c: {"pixel_values": numbers(2, 3, 64, 64)},
    "Sam3VideoModel": lambda c: video("sam3_video"),
    "Siglip2Model": lambda c: squares(c) | {"input_ids": some_words(c)}, "Siglip2VisionModel": squares,
    "VideoMAEForPreTraining": lambda c: {
        "pixel_values": numbers(2, c.num_frames, 3, 32, 32),
        "bool_masked_pos": torch.arange(c.num_frames // c.tubelet_size * 16).expand(2, -1) % 2 == 0,
    },
    "TimesFmModel": lambda c: {
        "past_values": numbers(2, 2 * c.patch_length), "past_values_padding": torch.zeros(2, 2 * c.patch_length),
        "freq": torch.zeros(2, 1, dtype=torch.long),
    },
    "SpeechT5Model": lambda c: {
        "input_values": numbers(2, LENGTH, c.hidden_size), "decoder_input_values": numbers(2, 7, c.hidden_size, seed=2),
    },
    "SplinterForPreTraining": lambda c: {
        "input_ids": some_words(c), "question_positions": torch.tensor([[2], [3]]),
    },
    "Kosmos2Model": placed, "Kosmos2ForConditionalGeneration": placed,
    "IdeficsModel": beside, "IdeficsForVisionText2Text": beside,
    "DoryModel": lambda c: {"input_ids": some_words(c), "use_cache": False},
    "DoryForCausalLM": lambda c: {"input_ids": some_words(c), "use_cache": False},
    "XmodModel": languages, "XmodForCausalLM": languages, "XmodForMaskedLM": languages,
    "Qwen3ASREncoder": lambda c: {
        "input_features": numbers(2, c.num_mel_bins, 200), "input_features_mask": torch.ones(2, 200, dtype=torch.long),
    },
    "MuseGlimmerVisionModel": lambda c: {"pixel_values": numbers(48, 384), "grid_thw": PLACES},
    "MuseSparkVisionModel": lambda c: {"pixel_values": numbers(48, 384), "grid_thw": PLACES},
    "DetrModel": wide, "ConditionalDetrModel": wide, "DabDetrModel": wide, "DeformableDetrModel": wide,
    "TableTransformerModel": wide,
}  # fmt: skip
