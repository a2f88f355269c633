"""Small configurations of models, by the names and sizes of their fields alone."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

from .configurations import CONFIGURATIONS

# what a field whose name matches is set to; the first that does
FIXED: list[tuple[str, Any]] = [
    (r"^(num_|n_)?(hidden_|encoder_|decoder_|attention_|transformer_|block_)*(layers?|layer)$|num_hidden_layers|^n_layers?$"
     r"|^num_layers$|encoder_layers$|decoder_layers$|^depth$|num_\w*_layers$|^num_blocks$|_depth$|^n_blocks$", 3),
    (r"^attn_layer_period$", 2), (r"^attn_layer_offset$", 1),
    (r"^mamba_n_heads$|^mamba_num_heads$", 8), (r"^mamba_d_head$|^mamba_head_dim$|^mamba_d_state$", 16),
    (r"num_key_value_heads|num_kv_heads|^n_head_kv$|num_key_value_groups_$|multi_query_group_num", 2),
    (r"num_attention_heads|^n_heads?$|^num_heads$|attention_heads$|_num_heads$|^heads$|^encoder_heads$", 4),
    (r"^qk_nope_head_dim$|^v_head_dim$", 16), (r"^qk_rope_head_dim$", 8), (r"^qk_head_dim$", 24),
    (r"head_dim$|^d_kv$|^kv_channels$|attention_head_size|^key_length$", 16),
    (r"q_lora_rank|kv_lora_rank|_rank$", 16),
    (r"^num_experts_per_tok|^num_selected_experts|^moe_top_?k|^top_k_experts$|^moe_k$", 2),
    (r"num_\w*experts$|^n_routed_experts$|^moe_num_experts$|^num_experts$", 4),
    (r"^n_group$|^num_expert_group", 2), (r"^topk_group$", 1),
    (r"vocab_size|_vocab$|codebook_size", 128),
    (r"max_position_embeddings|^n_positions$|max_source_positions|max_target_positions|^n_ctx$|max_seq_len", 128),
    (r"intermediate_size|ffn_dim|^d_ff$|^n_inner$|mlp_dim|feedforward_dim|ffn_hidden_size|mlp_hidden|_ffn_dim$", 64),
    (r"hidden_size|^d_model$|^n_embd$|embed_dim$|embedding_size|projection_dim|embedding_dim|^dim$|model_dim|d_embed"
     r"|hidden_dim$|^n_embed$|_width$|^width$|out_dim$|output_dim$|projection_size", 64),
    (r"image_size$|^img_size$|input_size$", 32), (r"patch_size$", 8),
    (r"sliding_window$|attention_window|chunk_size$", 8),
    (r"num_mel_bins|num_bins|feature_size", 16), (r"num_frames", 4),
    (r"num_queries$|num_query_tokens|num_latents$", 8),
    (r"context_length|prediction_length", 8),
]  # fmt: skip
# what is None where nobody says otherwise, and must not be
ABSENT = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
          "attn_layer_indices": [1], "head_dim": 16, "num_key_value_heads": 2, "first_k_dense_replace": 1}  # fmt: skip
Recipe = Callable[[str, Any], Any]


def fixed(name: str, value: Any) -> Any:
    """A number by its name; lists of numbers become shorter where they are of layers."""
    if value is None:
        return ABSENT.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    for pattern, wanted in FIXED:
        if re.search(pattern, name):
            return min(value, wanted)
    return value


def shared(by: int) -> Recipe:
    """Widths and numbers of heads divided by one number where they divide, so that what was equal stays so."""

    def of(name: str, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        if re.search(FIXED[0][0], name) or re.search(r"vocab|experts|position", name):
            return fixed(name, value)
        wide = value >= 64 and value % by == 0
        return value // by if wide and re.search(r"size|dim|width|embd|model|channels|ff|inner", name) else value

    return of


def fewer_layers(name: str, value: Any) -> Any:
    """Nothing but layers, experts and words."""
    wanted = re.search(FIXED[0][0], name) or re.search(r"vocab_size|num_\w*experts$", name)
    return fixed(name, value) if wanted else value


def with_lists(recipe: Recipe) -> Recipe:
    """The same for each number of a list."""

    def of(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and value and all(type(part) is int for part in value):
            return type(value)([recipe(name, part) for part in value])
        return recipe(name, value)

    return of


RECIPES: dict[str, Recipe] = {
    "fixed": fixed, "fixed, lists too": with_lists(fixed),
    "an eighth": shared(8), "an eighth, lists too": with_lists(shared(8)),
    "a quarter": shared(4), "fewer layers": fewer_layers, "as it is": lambda name, value: value,
}  # fmt: skip


# what configurations of some kinds need besides, by their model_type
NEEDED: list[tuple[str, dict[str, Any]]] = [
    (r"^(autoformer|informer|time_series_transformer)$", {"prediction_length": 8, "context_length": 8}),
    (r"^esm$", {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32}),
    (r"^(reformer)$", {"is_decoder": True}),
    (r"^(hiera)$", {"decoder_hidden_size": 64, "decoder_depth": 1, "decoder_num_heads": 4}),
    (r"^lfm2_moe$", {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}),
    (r"^granitemoehybrid$", {"layer_types": ["linear_attention", "full_attention", "linear_attention"],
                             "num_hidden_layers": 3}),
    (r"^cohere_compass_text$", {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4}
                                                 for kind in ("full_attention", "sliding_attention")}}),
    (r"^mistral4$", {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "qk_head_dim": 16, "head_dim": 16}),
    (r"^hrm_text$", {"num_layers_per_stack": 1, "num_hidden_layers": 8}),
    (r"^blenderbot$", {"decoder_layers": 2, "encoder_layers": 2}),
    (r"^moonshine_streaming$", {"num_key_value_heads": 4}),
    (r"^(chameleon|emu3)$", {"vocabulary_map": {"<image>": 4}}),
    (r"^(mimi|kyutai|csm|pocket)", {"upsample_groups": 64}),
    (r"^gemma3n_text$", {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"] * 2,
                         "num_hidden_layers": 4, "intermediate_size": [64] * 4,
                         "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0]}),
    (r"^diffusion_gemma", {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}),
    (r"^deepseek_ocr2", {"mlp_layer_types": ["dense", "sparse", "sparse"]}),
    (r"^ernie4_5_vl_moe_text$", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                     "mrope_section": [3, 3, 2]}}),
    (r"^(blip-2|instructblip|instructblipvideo)$", {"image_token_index": 5, "image_token_id": 5, "video_token_index": 5,
                                                    "video_token_id": 5}),
    (r"^kosmos-2$", {"latent_query_num": 4}),
    (r"^autoformer$", {"label_length": 4}),
    (r"^xmod$", {"languages": ["en_XX"], "default_language": "en_XX"}),
]  # fmt: skip


def completed(config: Any) -> None:
    for part in parts(config):
        for pattern, fields in NEEDED:
            if re.search(pattern, str(getattr(part, "model_type", ""))):
                for name, value in fields.items():
                    setattr(part, name, value)
        if type(part).__name__ == "DbrxAttentionConfig":
            part.rope_theta, part.clip_qkv = 1e4, 8.0


def tiny(made: Callable[..., Any], name: str = "") -> Iterator[Any]:
    """Configurations to try, the smallest first; of a class of that name, if one is known for it."""
    if name in CONFIGURATIONS:
        try:
            config = made(**copy.deepcopy(CONFIGURATIONS[name]))
        except ImportError:  # of a library that is not installed
            raise
        except Exception:  # of a version that names its fields otherwise
            pass
        else:
            yield config
            return
    for recipe in RECIPES.values():
        try:
            config = made()
            shrink(config, recipe)
        except Exception:  # whatever a configuration says of numbers that do not go together
            continue
        for mended in (cut_lists, rotated_heads, small_words, short_rotations, completed):
            with contextlib.suppress(Exception):  # one that has no such fields
                mended(config)
        yield config


def shrink(config: Any, recipe: Recipe) -> None:
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrink(value, recipe)
        elif not name.startswith("_"):
            small = recipe(name, value)
            if small is not value and small != value:
                setattr(config, name, small)


def cut_lists(config: Any) -> None:
    """Lists of one entry a layer, cut to so many layers; all kinds of layer stay if there is room."""
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            cut_lists(value)
    kinds = getattr(config, "layer_types", None)
    layers = getattr(config, "num_hidden_layers", None)
    if kinds and isinstance(layers, int) and len(kinds) != layers:
        different = list(dict.fromkeys(kinds))
        config.num_hidden_layers = max(layers, min(len(different), 5))
        config.layer_types = (different + kinds)[: config.num_hidden_layers]
        for name, value in list(vars(config).items()):
            if isinstance(value, list) and len(value) == len(kinds) and name != "layer_types":
                setattr(config, name, value[: config.num_hidden_layers])


def parts(config: Any) -> Iterator[Any]:
    """A configuration and those in it."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from parts(value)


def rotated_heads(config: Any) -> None:
    """A latent attention has a key head for each query head, and its `head_dim` is that of its rotated columns."""
    for part in parts(config):
        if isinstance(getattr(part, "qk_rope_head_dim", None), int) and hasattr(part, "head_dim"):
            part.head_dim = part.qk_rope_head_dim
            part.num_key_value_heads = part.num_attention_heads


def small_words(config: Any) -> None:
    """Numbers of special words within the vocabulary, each another one."""
    sizes = [
        part.vocab_size
        for part in parts(config)
        if isinstance(getattr(part, "vocab_size", None), int) and part.vocab_size > 9
    ]
    most, given = min(sizes, default=128), {}
    for part in parts(config):
        for name, value in list(vars(part).items()):
            if re.search(r"(token|pad|bos|eos)\w*_(id|index)$", name) and isinstance(value, int) and value >= most:
                given.setdefault(value, most - 1 - len(given))
                setattr(part, name, given[value])


def short_rotations(config: Any) -> None:
    """Sections of rotary embeddings (`mrope_section`) that add up to half of a small head."""
    for part in parts(config):
        rope = getattr(part, "rope_parameters", None) or {}
        for own in [rope, *[v for v in rope.values() if isinstance(v, dict)]]:
            section = own.get("mrope_section", [8, 12, 12])  # as models have it that are told of none
            heads = getattr(part, "num_attention_heads", 0)
            head = getattr(part, "head_dim", None) or (part.hidden_size // heads if heads else 0)
            half = (
                int(head * own.get("partial_rotary_factor", getattr(part, "partial_rotary_factor", None) or 1.0)) // 2
            )
            if half >= 4 and "rope_type" in own and sum(section) != half:
                short = [max(1, n * half // sum(section)) for n in section]
                own["mrope_section"] = [half - sum(short[1:]), *short[1:]]
