"""Small configurations of classes that the names of their fields do not tell, by the class's name."""

from __future__ import annotations

from typing import Any

# parts that several classes share, or that are too long for a line
SOME = {"num_hidden_layers": 3, "num_attention_heads": 4}
SMALL = {"hidden_size": 64, "intermediate_size": 64, **SOME}
DINO = {"model_type": "dinov2", "hidden_size": 32, "image_size": 16, "patch_size": 4, "use_mask_token": False, **SOME}
# images cut along points: what points are made of, what masks are, and the three kinds of Sam
POINTS = {"hidden_size": 32, "image_size": 32, "patch_size": 8, "mask_input_channels": 4}
MASKS = {"hidden_size": 32, "mlp_dim": 32, "num_attention_heads": 4, "iou_head_hidden_dim": 32}
SAM = {
    "vision_config": {"hidden_size": 64, "output_channels": 32, "image_size": 32, "patch_size": 8, "window_size": 3,
                      "global_attn_indexes": [1], "num_pos_feats": 16, **SOME},
    "prompt_encoder_config": POINTS, "mask_decoder_config": MASKS,
}  # fmt: skip
SAM2: dict[str, Any] = {
    "vision_config": {
        "backbone_config": {
            "model_type": "sam2_hiera_det_model", "hidden_size": 16, "image_size": [64, 64],
            "blocks_per_stage": [1, 1, 2, 1],
            "embed_dim_per_stage": [16, 32, 64, 128], "num_attention_heads_per_stage": [1, 2, 4, 8],
            "window_size_per_stage": [4, 2, 4, 2], "global_attention_blocks": [3],
            "window_positional_embedding_background_size": [4, 4],
        },
        "backbone_channel_list": [128, 64, 32, 16], "fpn_hidden_size": 32,
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    "prompt_encoder_config": POINTS | {"image_size": 64, "patch_size": 16}, "mask_decoder_config": MASKS,
}  # fmt: skip
# Step 3.7, blocks of PP-OCR, Clvp, VibeVoice's codec, Zamba
STEP = {
    "vision_config": {"hidden_size": 32, "image_size": 32, "patch_size": 8, **SOME}, "image_token_id": 5,
    "text_config": SMALL | {
        "vocab_size": 128, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "moe_intermediate_size": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "n_routed_experts": 4,
        "num_experts_per_tok": 2, "share_expert_dim": 32,
    },
}  # fmt: skip
BLOCKS = {"model_type": "pp_lcnet_v4", "out_features": ["stage1", "stage2", "stage3", "stage4"],
          "block_configs": [[[3, 96, 96, 1, True]], [[3, 96, 96, 2, False]], [[3, 96, 192, 2, False]],
                            [[3, 192, 384, 2, False]]]}  # fmt: skip
CLVP = {"hidden_size": 128, "intermediate_size": 64, "projection_dim": 32, "bos_token_id": 1, **SOME}
VIBE = {"hidden_size": 16, "num_filters": 8, "downsampling_ratios": (2, 4), "depths": (1, 1, 1)}
ZAMBA = SMALL | {
    "vocab_size": 128, "num_hidden_layers": 5, "num_key_value_heads": 4,
    "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
}  # fmt: skip
ZAMBA2 = {"mamba_d_state": 16, "chunk_size": 8, "use_mem_rope": True, "adapter_rank": 8}
# words whose heads share keys, and those of them that see a window
KEYS = SMALL | {"vocab_size": 128, "num_key_value_heads": 2, "head_dim": 16}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
ASSISTANT = {
    "backbone_hidden_size": 32,
    "text_config": KEYS | SLIDING | {"num_kv_shared_layers": 3, "hidden_size_per_layer_input": 0,
                                     "vocab_size_per_layer_input": 0, "global_head_dim": 16},
}  # fmt: skip
SIGLIP = SMALL | {"model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8, "vision_use_head": False}
# PI0, and codecs of NeuCodec and Xcodec2
ROBOT = {
    "chunk_size": 4, "max_state_dim": 8, "max_action_dim": 8,
    "vlm_config": {"model_type": "paligemma", "projection_dim": 64, "image_token_id": 5, "vision_config": SIGLIP,
                   "text_config": KEYS | {"model_type": "gemma"}},
    "dit_config": KEYS | {"model_type": "gemma"},
}  # fmt: skip
BERT = {"model_type": "wav2vec2-bert", "feature_projection_input_dim": 16, **SMALL}
CODEC = SMALL | {"num_key_value_heads": 4, "head_dim": 16, "encoder_hidden_size": 8, "quantization_dim": 128,
                 "semantic_model_config": BERT}  # fmt: skip
# Dots 3 Note: latent keys, some of which are chosen
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 24, "qk_nope_head_dim": 16, "v_head_dim": 16}
NOTE = SMALL | LATENT | {f"swa_{name}": value for name, value in LATENT.items()} | {
    "vocab_size": 128, "num_key_value_heads": 4, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4,
    "qk_rope_head_dim": 8, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 2, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_experts_intermediate_size": 32, "sliding_window": 8,
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"], "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NOTES = {
    "text_config": NOTE, "image_token_id": 5, "video_token_id": 6, "audio_token_id": 7,
    "vision_config": SMALL | {"patch_size": 8, "moe_intermediate_size": 32, "num_local_experts": 4,
                              "adapter_in_dim": 64, "adapter_out_dim": 64,
                              "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "audio_config": SMALL | {"feature_size": 16, "downsample_hidden_size": 8, "adapter_input_size": 64,
                             "adapter_out_dim": 64},
}  # fmt: skip
# Qwen 4: rows of a state, and keys chosen by blocks
QWEN4 = KEYS | {
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
    "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
    "indexer_compress_ratio": 4, "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
}  # fmt: skip
QWEN4S = {
    "text_config": QWEN4, "image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7,
    "vision_end_token_id": 8,
    "vision_config": {"depth": 2, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4, "patch_size": 8,
                      "out_hidden_size": 64, "num_position_embeddings": 16},
}  # fmt: skip
# Granite 4 Vision, and what is spoken and heard by VibeVoice
GRANITE = {
    "text_config": SMALL | {"vocab_size": 128, "num_key_value_heads": 2},
    "vision_config": SMALL | {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8},
    "image_token_index": 5, "image_grid_pinpoints": [[32, 32]], "downsample_rate": "1/2",
    "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1, 1, 2, 2],
}  # fmt: skip
SPEECH = {"text_config": KEYS | {"model_type": "qwen2"}, "audio_token_id": 5}
SPOKEN = SPEECH | {"audio_config": VIBE, "semantic_model_config": VIBE,
                   "diffusion_head_config": {"hidden_size": 64, "latent_size": 16, "intermediate_size": 64,
                                             "num_hidden_layers": 2}}  # fmt: skip
HEARD = SPEECH | {"acoustic_tokenizer_encoder_config": VIBE, "semantic_tokenizer_encoder_config": VIBE,
                  "acoustic_tokenizer_chunk_size": 64}  # fmt: skip
SAM3: dict[str, Any] = {
    "vision_config": {
        "backbone_config": SMALL | {"model_type": "sam3_vit_model", "image_size": 64, "patch_size": 8,
                                    "window_size": 4, "global_attn_indexes": [1], "pretrain_image_size": 32},
        "fpn_hidden_size": 32, "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
    },
    "prompt_encoder_config": POINTS | {"image_size": 64}, "mask_decoder_config": MASKS,
}  # fmt: skip
# what follows points over frames; memories have 64 columns in transformers, and have to be narrower than the rest
WIDER: dict[str, Any] = {
    "prompt_encoder_config": POINTS | {"hidden_size": 128, "image_size": 64},
    "mask_decoder_config": MASKS | {"hidden_size": 128, "iou_head_hidden_dim": 128},
    "memory_attention_hidden_size": 128, "memory_attention_num_layers": 2, "memory_encoder_hidden_size": 128,
    "memory_attention_feed_forward_hidden_size": 32, "image_size": 64,
    "mask_downsampler_embed_dim": 128, "memory_fuser_embed_dim": 128, "memory_fuser_intermediate_dim": 32,
}  # fmt: skip
TRACKED2 = SAM2 | WIDER | {
    "vision_config": SAM2["vision_config"] | {"fpn_hidden_size": 128}, "memory_attention_rope_feat_sizes": [4, 4],
    "prompt_encoder_config": WIDER["prompt_encoder_config"] | {"patch_size": 16},
}  # fmt: skip
TRACKED3 = SAM3 | WIDER | {
    "vision_config": SAM3["vision_config"] | {"fpn_hidden_size": 128}, "memory_attention_rope_feat_sizes": [8, 8],
}  # fmt: skip
# Sam 3, which finds what words name
PART = {"hidden_size": 128, "num_attention_heads": 4}
LAYERS = PART | {"num_layers": 2, "intermediate_size": 32}
FOUND = {
    "low_res_mask_size": 32, "score_threshold_detection": 0.0, "new_det_thresh": 0.0, "tracker_config": TRACKED3,
    "detector_config": {
        "vision_config": TRACKED3["vision_config"], "mask_decoder_config": PART, "geometry_encoder_config": LAYERS,
        "detr_encoder_config": LAYERS, "detr_decoder_config": LAYERS | {"num_queries": 4},
        "text_config": SMALL | {"model_type": "clip_text_model", "vocab_size": 128, "hidden_size": 32,
                                "projection_dim": 32, "eos_token_id": 2, "bos_token_id": 1},
    },
}  # fmt: skip
# with a part of timm: FastVLM, Gemma 3n, PerceptionLM, Pe, EdgeTam
VIT = {"architecture": "vit_tiny_patch16_224",
       "model_args": {"img_size": 32, "embed_dim": 64, "depth": 2, "num_heads": 4}}  # fmt: skip
FAST = {
    "image_token_index": 5, "text_config": KEYS | {"model_type": "qwen2"},
    "vision_config": {"model_type": "timm_wrapper", "architecture": "fastvit_t8", "hidden_size": 768},
}  # fmt: skip
NANO = {
    "image_token_id": 113, "audio_token_id": 121, "vision_soft_tokens_per_image": 4,
    "text_config": KEYS | {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8,
        "intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0], "laurel_rank": 16,
        "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16,
    },
    "vision_config": {"architecture": "resnet18", "hidden_size": 512, "vocab_size": 8, "vocab_offset": 112},
    "audio_config": {"hidden_size": 64, "conf_num_hidden_layers": 2, "conf_num_attention_heads": 4, "vocab_size": 8,
                     "vocab_offset": 120, "sscp_conv_channel_size": (8, 8), "input_feat_size": 32},
}  # fmt: skip
PERCEPTION = {
    "image_token_id": 5, "video_token_id": 6, "text_config": KEYS | {"model_type": "llama"},
    "vision_config": VIT | {"model_type": "timm_wrapper", "do_pooling": False},
}  # fmt: skip
SEEN = SMALL | {"head_dim": 16, "num_key_value_heads": 4, "vision_config": VIT | {"num_classes": 16}}
LISTENED = SMALL | {"head_dim": 16, "num_key_value_heads": 4,
                    "dac_config": {"encoder_hidden_size": 8, "downsampling_ratios": [2, 4], "codebook_dim": 16,
                                   "hidden_size": 32}}  # fmt: skip
WORDS = SMALL | {"model_type": "modernbert", "vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1,
                 "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}  # fmt: skip
SEEN_AND_HEARD = SMALL | {"head_dim": 16, "num_key_value_heads": 4, "video_config": SEEN, "audio_config": LISTENED}
EDGE = {
    "backbone_config": {"model_type": "timm_wrapper", "architecture": "repvit_m1", "num_classes": 2,
                        "model_args": {"in_chans": 3, "features_only": True, "out_indices": [0, 1, 2, 3]}},
    "backbone_channel_list": [384, 192, 96, 48], "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    "fpn_hidden_size": 32,
}  # fmt: skip
# PP-OCR's kernels along rows, columns and both
CONVOLUTIONS = {"reduce_channel": [1, 1, 0], "return_channel": [1, 1, 0]}
for ratio, size in (("longratio", 7), ("midratio", 5), ("shortratio", 3)):
    CONVOLUTIONS |= {
        f"vertical_long_to_small_conv_{ratio}": [[size, 1], 1, [size // 2, 0]],
        f"horizontal_small_to_long_conv_{ratio}": [[1, size], 1, [0, size // 2]],
        f"symmetric_conv_long_{ratio}": [size, 1, size // 2],
    }

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
    "PPOCRV6MediumDetModel": {"backbone_config": BLOCKS, "intraclass_block_config": CONVOLUTIONS,
                              "scale_factor_list": [1, 2, 4, 8], "kernel_list": [3, 2, 2]},
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
    "ClvpModelForConditionalGeneration": {
        "projection_dim": 32,
        "text_config": CLVP | {"vocab_size": 64}, "speech_config": CLVP | {"vocab_size": 128},
        "decoder_config": SMALL | {"vocab_size": 128, "bos_token_id": 126, "eos_token_id": 127, "feature_size": 16,
                                   "decoder_fixing_codes": (3, 4, 4, 5)},
    },
    "EfficientNetModel": {"in_channels": [32, 8], "out_channels": [8, 16], "kernel_sizes": [3, 3], "strides": [1, 2],
                          "num_block_repeats": [1, 1], "expand_ratios": [1, 6], "depthwise_padding": [],
                          "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280},
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
    "EfficientLoFTRModel": {"hidden_size": 64, "stage_num_blocks": [1, 1, 1, 1], "stage_stride": [2, 1, 2, 2],
                            "out_features": [16, 16, 32, 64], "num_attention_layers": 2, "num_attention_heads": 8},
    "SegGptModel": {"hidden_size": 64, "image_size": (64, 32), "patch_size": 8, "pretrain_image_size": 32,
                    "decoder_hidden_size": 16, "mlp_dim": 64, "merge_index": 0,
                    "intermediate_hidden_state_indices": (1, 2, 3), "num_hidden_layers": 4, "num_attention_heads": 4},
    "MuseGlimmerAssistantModel": KEYS | SLIDING | {"target_layer_ids": [0, 1], "block_size": 4, "pad_token_id": 0,
                                                   "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3},
    "Gemma4AssistantForCausalLM": ASSISTANT, "Gemma4UnifiedAssistantForCausalLM": ASSISTANT,
    "PI0Model": ROBOT, "PI0ForConditionalGeneration": ROBOT,
    "NeuCodecModel": CODEC, "Xcodec2Model": CODEC,
    "XcodecModel": {"semantic_model_config": SMALL | {"model_type": "hubert", "conv_dim": [16] * 7}},
    "Sam3TrackerModel": SAM3,
    "TvpModel": SMALL | {
        "vocab_size": 128, "num_frames": 4, "max_img_size": 64, "visual_prompt_size": 8,
        "backbone_config": {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1],
                            "out_features": ["stage2"]},
    },
    "Granite4VisionModel": GRANITE, "Granite4VisionForConditionalGeneration": GRANITE,
    "VibeVoiceForConditionalGeneration": SPOKEN,
    "VibeVoiceAsrModel": HEARD, "VibeVoiceAsrForConditionalGeneration": HEARD,
    "Dots3NoteTextModel": NOTE, "Dots3NoteForCausalLM": NOTES,
    "Dots3NoteModel": NOTES, "Dots3NoteForConditionalGeneration": NOTES,
    "Qwen4ExpTextModel": QWEN4, "Qwen4ExpForCausalLM": QWEN4S,
    "Qwen4ExpModel": QWEN4S, "Qwen4ExpForConditionalGeneration": QWEN4S,
    "Sam2VideoModel": TRACKED2,
    "Sam3TrackerVideoModel": TRACKED3,
    "TimmWrapperModel": VIT, "TimmBackbone": {"backbone": "resnet18", "out_indices": [1, 2]},
    "FastVlmModel": FAST, "FastVlmForConditionalGeneration": FAST,
    "Gemma3nModel": NANO, "Gemma3nForConditionalGeneration": NANO,
    "PerceptionLMModel": PERCEPTION, "PerceptionLMForConditionalGeneration": PERCEPTION,
    "PeVideoEncoder": SEEN, "PeVideoModel": {"text_config": WORDS, "video_config": SEEN},
    "PeAudioVideoEncoder": SEEN_AND_HEARD,
    "PeAudioVideoModel": {"text_config": WORDS, "audio_video_config": SEEN_AND_HEARD},
    "EdgeTamVisionModel": EDGE, "EdgeTamModel": SAM2 | {"vision_config": EDGE},
    "EdgeTamVideoModel": TRACKED2 | {
        "vision_config": EDGE | {"model_type": "edgetam_vision_model", "fpn_hidden_size": 128},
        "memory_attention_rope_k_sizes": [2, 2],
        "perceiver_resampler_num_latents": 4, "perceiver_resampler_num_latents_2d": 4,
    },
    "OmDetTurboForObjectDetection": {
        "image_size": 64, "text_projection_in_dim": 32, "text_projection_out_dim": 32, "task_encoder_hidden_dim": 64,
        "class_embed_dim": 32, "num_queries": 8, "encoder_hidden_dim": 64, "vision_features_channels": (64, 64, 64),
        "encoder_in_channels": (32, 64, 128), "encoder_attention_heads": 4, "encoder_dim_feedforward": 64,
        "decoder_hidden_dim": 64, "decoder_num_heads": 4, "decoder_num_layers": 2, "decoder_dim_feedforward": 64,
        "disable_custom_kernels": True, "apply_layernorm_after_vision_backbone": False,
        "text_config": SMALL | {"model_type": "clip_text_model", "vocab_size": 128, "hidden_size": 32,
                                "projection_dim": 32, "eos_token_id": 2, "bos_token_id": 1},
        "backbone_config": {"model_type": "swin", "image_size": 64, "embed_dim": 16, "depths": [1, 1, 1, 1],
                            "num_heads": [1, 2, 4, 4], "window_size": 2, "out_indices": [2, 3, 4]},
    },
    "HiggsAudioV2TokenizerModel": {
        "acoustic_model_config": {"downsampling_ratios": [8, 5, 4, 6], "upsampling_ratios": [8, 5, 4, 6],
                                  "encoder_hidden_size": 8, "decoder_hidden_size": 64, "hidden_size": 64},
        "semantic_model_config": SMALL | {"model_type": "hubert", "conv_dim": [16] * 7},
    },
    "Sam3VideoModel": FOUND,
}  # fmt: skip
