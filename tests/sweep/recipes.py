"""Small configurations and inputs of classes that names and shapes alone do not tell, by the class's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .given import LENGTH, marked, numbers, some_words

SOME = {"num_hidden_layers": 3, "num_attention_heads": 4}
SMALL = {"hidden_size": 64, "intermediate_size": 64, **SOME}
DINO = {"model_type": "dinov2", "hidden_size": 32, "image_size": 16, "patch_size": 4, "use_mask_token": False, **SOME}
POINTS = {"hidden_size": 32, "image_size": 32, "patch_size": 8, "mask_input_channels": 4}
MASKS = {"hidden_size": 32, "mlp_dim": 32, "num_attention_heads": 4, "iou_head_hidden_dim": 32}
SAM = {
    "vision_config": {"hidden_size": 64, "output_channels": 32, "image_size": 32, "patch_size": 8, "window_size": 3,
                      "global_attn_indexes": [1], "num_pos_feats": 16, **SOME},
    "prompt_encoder_config": POINTS, "mask_decoder_config": MASKS,
}  # fmt: skip
SAM2 = {
    "vision_config": {
        "backbone_config": {
            "model_type": "sam2_hiera_det_model", "hidden_size": 16, "image_size": [64, 64], "blocks_per_stage": [1, 1, 2, 1],
            "embed_dim_per_stage": [16, 32, 64, 128], "num_attention_heads_per_stage": [1, 2, 4, 8],
            "window_size_per_stage": [4, 2, 4, 2], "global_attention_blocks": [3],
            "window_positional_embedding_background_size": [4, 4],
        },
        "backbone_channel_list": [128, 64, 32, 16], "fpn_hidden_size": 32,
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    "prompt_encoder_config": POINTS | {"image_size": 64, "patch_size": 16}, "mask_decoder_config": MASKS,
}  # fmt: skip
STEP = {
    "vision_config": {"hidden_size": 32, "image_size": 32, "patch_size": 8, **SOME}, "image_token_id": 5,
    "text_config": SMALL | {
        "vocab_size": 128, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "moe_intermediate_size": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "n_routed_experts": 4,
        "num_experts_per_tok": 2, "share_expert_dim": 32,
    },
}  # fmt: skip
BLOCKS = {"model_type": "pp_lcnet_v4", "out_features": ["stage1", "stage2", "stage3", "stage4"],
          "block_configs": [[[3, 96, 96, 1, True]], [[3, 96, 96, 2, False]], [[3, 96, 192, 2, False]], [[3, 192, 384, 2, False]]]}  # fmt: skip
BARK = {"hidden_size": 64, "num_layers": 3, "num_heads": 4, "block_size": 64, "input_vocab_size": 128,
        "output_vocab_size": 128}  # fmt: skip
CLVP = {"hidden_size": 128, "intermediate_size": 64, "projection_dim": 32, "bos_token_id": 1, **SOME}
VIBE = {"hidden_size": 16, "num_filters": 8, "downsampling_ratios": (2, 4), "depths": (1, 1, 1)}
ZAMBA = SMALL | {
    "vocab_size": 128, "num_hidden_layers": 5, "num_key_value_heads": 4,
    "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
}  # fmt: skip
ZAMBA2 = {"mamba_d_state": 16, "chunk_size": 8, "use_mem_rope": True, "adapter_rank": 8}

# what a class's configuration is made of, in place of what the names of its fields tell
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "ClapModel": {
        "projection_dim": 32, "text_config": SMALL | {"vocab_size": 128},
        "audio_config": {"num_mel_bins": 16, "spec_size": 64, "window_size": 4, "hidden_size": 64, "depths": (2, 2),
                         "num_attention_heads": (2, 4), "patch_embeds_hidden_size": 32},
    },
    "DepthProModel": {
        "patch_size": 16, "fusion_hidden_size": 16, "intermediate_hook_ids": (2, 1),
        "intermediate_feature_dims": (16, 16), "scaled_images_feature_dims": (16, 16, 16),
        "image_model_config": DINO, "patch_model_config": DINO, "fov_model_config": DINO,
    },
    "GraniteSpeech5Encoder": SMALL | {"vocab_size": 64, "num_mel_bins": 16, "context_size": 8},
    "GraniteSpeech5ForCTC": {
        "vocab_size": 64, "encoder_config": SMALL | {"vocab_size": 64, "num_mel_bins": 16, "context_size": 8},
    },
    "Llama4ForConditionalGeneration": {
        "image_token_index": 5,
        "vision_config": {"hidden_size": 64, "intermediate_size": 256, "vision_output_dim": 64, "image_size": 32,
                          "patch_size": 8, "projector_input_dim": 64, "projector_output_dim": 64, **SOME},
        "text_config": SMALL | {"vocab_size": 128, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4,
                                "intermediate_size_mlp": 64, "attention_chunk_size": 8},
    },
    "LwDetrModel": {
        "backbone_config": {"model_type": "lw_detr_vit", "hidden_size": 64, "image_size": 64, "patch_size": 8,
                            "pretrain_image_size": 64, "num_windows": 4, "window_block_indices": [0, 2],
                            "out_indices": [2, 3], **SOME},
        "projector_scale_factors": [1.0], "d_model": 32, "decoder_ffn_dim": 32, "decoder_layers": 2,
        "decoder_self_attention_heads": 4, "decoder_cross_attention_heads": 4, "num_queries": 8, "group_detr": 2,
    },
    "MiniCPMOcrVisionModel": SMALL | {"image_size": 64, "patch_size": 8, "insert_layer_id": 1},
    "MiniCPMV4_7VisionModel": SMALL | {"image_size": 64, "patch_size": 8, "insert_layer_id": 1},
    "PPOCRV6SmallDetModel": {"backbone_config": BLOCKS, "layer_list_out_channels": [96, 96, 192, 384]},
    "PPOCRV6MediumDetModel": {"backbone_config": BLOCKS, "layer_list_out_channels": [96, 96, 192, 384]},
    "RfDetrModel": {
        "backbone_config": {"model_type": "rf_detr_dinov2", "hidden_size": 64, "image_size": 64, "patch_size": 8,
                            "num_windows": 2, "out_features": ["stage1", "stage3"], **SOME},
        "d_model": 32, "decoder_ffn_dim": 32, "decoder_layers": 2, "decoder_self_attention_heads": 4,
        "decoder_cross_attention_heads": 4, "num_queries": 8, "group_detr": 2,
    },
    "Sam2Model": SAM2,
    "Step3p7Model": STEP, "Step3p7ForConditionalGeneration": STEP,
    "UVDocModel": {"backbone_config": {"model_type": "uvdoc_backbone",
                                       "out_features": [f"stage{n}" for n in range(1, 7)]}},
    "SamModel": SAM, "SamHQModel": SAM | {"mask_decoder_config": MASKS | {"vit_dim": 64}},
    "BarkModel": {"semantic_config": BARK, "coarse_acoustics_config": BARK, "fine_acoustics_config": BARK},
    "ClvpModelForConditionalGeneration": {
        "projection_dim": 32,
        "text_config": CLVP | {"vocab_size": 64}, "speech_config": CLVP | {"vocab_size": 128},
        "decoder_config": SMALL | {"vocab_size": 128, "bos_token_id": 126, "eos_token_id": 127, "feature_size": 16,
                                   "decoder_fixing_codes": (3, 4, 4, 5)},
    },
    "EfficientNetModel": {"in_channels": [8, 8], "out_channels": [8, 16], "kernel_sizes": [3, 3], "strides": [1, 2],
                          "num_block_repeats": [1, 1], "expand_ratios": [1, 6], "depthwise_padding": [],
                          "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 16},
    "Gemma3nAudioEncoder": {"hidden_size": 64, "conf_num_hidden_layers": 3, "conf_num_attention_heads": 4,
                            "sscp_conv_channel_size": (8, 8), "input_feat_size": 32},
    "PerceiverModel": {"num_latents": 8, "d_latents": 64, "d_model": 64, "num_self_attends_per_block": 3,
                       "num_self_attention_heads": 4, "num_cross_attention_heads": 4},
    "Pix2StructForConditionalGeneration": {
        "text_config": {"vocab_size": 128, "hidden_size": 64, "d_kv": 16, "d_ff": 64, "num_layers": 3, "num_heads": 4},
        "vision_config": {"hidden_size": 64, "patch_embed_hidden_size": 48, "d_ff": 64, "d_kv": 16, "seq_len": 64,
                          **SOME},
    },
    "T5Gemma2Encoder": {
        "image_token_index": 5, "mm_tokens_per_image": 4,
        "text_config": SMALL | {"vocab_size": 128, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8,
                                "query_pre_attn_scalar": 16, "dropout_rate": 0.0,
                                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "vision_config": SMALL | {"image_size": 32, "patch_size": 8, "vision_use_head": False},
    },
    "VibeVoiceAcousticTokenizerModel": VIBE, "VibeVoiceAcousticTokenizerEncoderModel": VIBE,
    "VibeVoiceAcousticTokenizerDecoderModel": VIBE,
    "ZambaModel": ZAMBA, "ZambaForCausalLM": ZAMBA,
    "Zamba2Model": ZAMBA | ZAMBA2, "Zamba2ForCausalLM": ZAMBA | ZAMBA2,
    "LightGlueForKeypointMatching": {
        "descriptor_dim": 64, "num_hidden_layers": 3,
        "keypoint_detector_config": {
            "model_type": "superpoint", "encoder_hidden_sizes": [8, 8, 8, 8], "decoder_hidden_size": 8,
            "keypoint_decoder_dim": 65, "descriptor_decoder_dim": 64, "keypoint_threshold": 0.0, "max_keypoints": 16,
        },
    },
    "EfficientLoFTRModel": {"hidden_size": 64, "stage_num_blocks": [1, 1, 1], "stage_stride": [2, 1, 2],
                            "out_features": [16, 32, 64], "num_attention_layers": 2, "num_attention_heads": 4},
    "SegGptModel": {"hidden_size": 64, "image_size": (64, 32), "patch_size": 8, "pretrain_image_size": 32,
                    "decoder_hidden_size": 16, "mlp_dim": 64, "merge_index": 1,
                    "intermediate_hidden_state_indices": (0, 1, 2), "num_hidden_layers": 4, "num_attention_heads": 4},
}  # fmt: skip

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
    "InstructBlipVideoModel": lambda c: {
        "pixel_values": numbers(2, 4, 3, 32, 32), "qformer_input_ids": some_words(c),
        "input_ids": marked(c, c.video_token_id, 32), "decoder_input_ids": some_words(c, 7),
    },
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
        "flattened_patches": torch.cat([places(4, 4) + 1, numbers(2, 16, 48)], -1), "decoder_input_ids": some_words(c, 7),
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
        "pixel_values": numbers(48, 3 * c.patch_size**2), "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 8]]),
        "merge_sizes": torch.tensor([2, 2]),
    },
}  # fmt: skip
