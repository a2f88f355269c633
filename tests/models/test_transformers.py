"""Models of Hugging Face transformers under attn_implementation="weft" give what they give under "eager".

All are small and random. Rows of padding are compared with nobody: what stands there is looked at by nobody.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from weft import UnavailableError, WeftError
from weft.integrations.transformers import attention

transformers = pytest.importorskip("transformers")  # the extra weft-attention[transformers]
weft.integrations.transformers.register()

# what models call their cache
CACHE = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"
# before 5.20 transformers itself fails to make the mask of chunks for a static cache, under any attention
CHUNKS = inspect.signature(transformers.masking_utils.create_chunked_causal_mask).parameters
STATIC_CHUNKS_FAIL = "block_sequence_ids" not in CHUNKS
WIDTH = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": None}  # fmt: skip
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
SIZES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 6},
    "Gemma2": {"sliding_window": 6, "head_dim": 16, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 16},
    "Gemma3": {"sliding_window": 6, "head_dim": 16, "query_pre_attn_scalar": 16, **LAYERS},
    "GptOss": {"sliding_window": 6, "head_dim": 16, **EXPERTS, **LAYERS},
    "Qwen3": {"head_dim": 24},
    "DeepseekV3": {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
                   "n_shared_experts": 1, "moe_intermediate_size": 16, "num_experts_per_tok": 2,
                   "first_k_dense_replace": 1, **LATENT},
    "Llama4": {"attention_chunk_size": 6, "head_dim": 16, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2,
               "no_rope_layers": [1, 0], "layer_types": ["chunked_attention", "full_attention"], **EXPERTS},
}  # fmt: skip


def both(made: Callable[[], Any]) -> tuple[Any, Any]:
    """A random model under "eager" and under "weft"."""
    torch.manual_seed(0)
    eager = made().eval()
    eager.set_attn_implementation("eager")
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("weft")
    return eager, ours


def decoder(name: str) -> tuple[Any, Any]:
    text = "Text" if name in ("Gemma3", "Llama4") else ""
    config = getattr(transformers, f"{name}{text}Config")(**(WIDTH | SIZES[name]))
    return both(lambda: getattr(transformers, f"{name}ForCausalLM")(config))


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(eager: Any, ours: Any, seen: Tensor | None = None, **inputs: Any) -> None:
    """Logits where `seen`, and gradients of all parameters, are equal to rounding."""
    found = []
    for model in (eager, ours):
        logits = model(**inputs).logits
        logits = logits[seen.bool()] if seen is not None else logits
        weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=logits.dtype)
        found.append((logits.detach(), gradients(model, (logits * weight).sum())))
    (expected, expected_grads), (got, got_grads) = found
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-5)
    alike(got_grads, expected_grads)


def alike(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for name, grad in expected.items():
        scale = max(float(grad.abs().max()), 1e-3 * largest)  # those of biases of keys are 0 but for rounding
        assert float((got[name] - grad).abs().max()) < 2e-5 * scale, name


def generated_alike(eager: Any, ours: Any, ids: Tensor, cache: str, **inputs: Any) -> None:
    """The logits of each token that is generated."""
    expected, got = (
        model.generate(
            ids, cache_implementation=cache, output_logits=True, return_dict_in_generate=True, max_new_tokens=9,
            do_sample=False, **inputs,
        )
        for model in (eager, ours)
    )  # fmt: skip
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), atol=2e-6, rtol=2e-5)


def tokens(*shape: int) -> Tensor:
    return torch.randint(2, 96, shape, generator=torch.Generator().manual_seed(2))


def padding(side: str) -> Tensor:
    seen = torch.ones(2, 15, dtype=torch.long)
    if side == "left":
        seen[0, :4] = 0
    else:
        seen[1, -5:] = 0
    return seen


@pytest.mark.parametrize("name", SIZES)
def test_a_decoder_trains_and_generates_as_eager(name: str) -> None:
    eager, ours = decoder(name)
    ids = tokens(2, 15)
    same(eager, ours, input_ids=ids)
    for side in ("left", "right"):
        same(eager, ours, padding(side), input_ids=ids, attention_mask=padding(side))
    packed = torch.cat([torch.arange(4), torch.arange(9), torch.arange(2)])[None]
    same(eager, ours, input_ids=ids[:1], position_ids=packed, use_cache=False)
    for cache in ("dynamic", "static"):
        if not (cache == "static" and name == "Llama4" and STATIC_CHUNKS_FAIL):
            generated_alike(eager, ours, ids, cache, attention_mask=padding("left"))


def t5() -> tuple[Any, Any]:
    sizes = {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4,
             "dropout_rate": 0.0, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8,
             "relative_attention_max_distance": 20}  # fmt: skip
    return both(lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)))


def test_t5_trains_its_position_bias_and_generates() -> None:
    eager, ours = t5()
    ids, answer = tokens(2, 15), tokens(2, 7)
    for side in ("left", "right"):
        same(eager, ours, input_ids=ids, attention_mask=padding(side), decoder_input_ids=answer)
    assert ours.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad.abs().max() > 0
    for cache in ("dynamic", "static"):
        generated_alike(eager, ours, ids, cache, attention_mask=padding("right"))


def test_paligemma_sees_its_image_and_prompt_both_ways() -> None:
    text = {**WIDTH, "model_type": "gemma", "head_dim": 16, "vocab_size": 96}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
              "num_attention_heads": 2, "image_size": 16, "patch_size": 8, "vision_use_head": False}  # fmt: skip
    config = transformers.PaliGemmaConfig(
        vision_config=vision, text_config=text, image_token_index=95, projection_dim=64, pad_token_id=0
    )
    eager, ours = both(lambda: transformers.PaliGemmaForConditionalGeneration(config))
    ids = torch.cat([torch.full((2, 4), 95), tokens(2, 11).clamp(max=94)], dim=1)
    kinds = (torch.arange(15) >= 9).long().expand(2, -1)  # 0: image and prompt, 1: what is to be learned
    image = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    given = {"input_ids": ids, "pixel_values": image, "attention_mask": padding("right")}
    same(eager, ours, padding("right"), token_type_ids=kinds, labels=ids, **given)
    for cache in ("dynamic", "static"):
        generated_alike(eager, ours, ids, cache, pixel_values=image, attention_mask=torch.ones_like(ids))


def test_a_model_compiles_as_one_graph_with_its_backward() -> None:
    torch.compiler.reset()
    eager, ours = decoder("Gemma3")
    ids, seen = tokens(2, 15), padding("left").bool()
    found = []
    for model, owner in ((eager, eager), (torch.compile(ours, fullgraph=True, backend="aot_eager"), ours)):
        logits = model(ids, use_cache=False, attention_mask=padding("left")).logits[seen]
        found.append((logits.detach(), gradients(owner, logits.square().sum())))
    torch.testing.assert_close(found[1][0], found[0][0], atol=2e-6, rtol=2e-5)
    alike(found[1][1], found[0][1])
    packed = torch.cat([torch.arange(4), torch.arange(9), torch.arange(2)])[None].expand(2, -1)
    forward = torch.compile(ours, fullgraph=True, backend="eager")
    with torch.no_grad():
        expected, got = (model(ids, use_cache=False, position_ids=packed).logits for model in (eager, forward))
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-5)


def test_decode_steps_of_a_static_cache_share_a_graph() -> None:
    """As `generate` compiles them on a GPU, with masks that are made outside."""
    torch.compiler.reset()
    eager, ours = decoder("Gemma3")
    graphs = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    compiled = torch.compile(ours.forward, fullgraph=True, backend=backend)
    ids = tokens(2, 24)
    found = []
    for model, decode in ((eager, eager.forward), (ours, compiled)):
        cache = transformers.StaticCache(config=model.config, max_cache_len=24)
        logits = []
        for step in range(15, 24):
            given = model.prepare_inputs_for_generation(
                ids[:, :step], **{CACHE: cache}, use_cache=True, is_first_iteration=step == 15,
                next_sequence_length=None if step == 15 else 1,
                attention_mask=torch.cat([padding("left"), torch.ones(2, step - 15, dtype=torch.long)], dim=1),
            )  # fmt: skip
            with torch.no_grad():
                logits.append((model.forward if step == 15 else decode)(**given).logits[:, -1])
        found.append(torch.stack(logits))
    torch.testing.assert_close(found[1], found[0], atol=2e-6, rtol=2e-5)
    assert graphs == 2  # the second one for all numbers but those of the first step


def test_packed_sequences_of_the_collator() -> None:
    """With a cache transformers does not look at position_ids; cu_seq_lens_q tells all the same."""
    eager, ours = decoder("Mistral")
    pieces = [{"input_ids": row.tolist()} for row in (tokens(2, 15)[0, :7], tokens(2, 15)[1])]
    packed = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)(pieces)
    losses = [eager(use_cache=False, **packed).loss, ours(use_cache=False, **packed).loss, ours(**packed).loss]
    torch.testing.assert_close(losses[1:], losses[:1] * 2, atol=1e-6, rtol=0)


def test_checkpoints_drop_the_same_weights() -> None:
    _, ours = decoder("Llama")
    ours.train()
    for layer in ours.model.layers:
        layer.self_attn.attention_dropout = 0.3
    ids = tokens(2, 15)
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        found.append(gradients(ours, ours(ids, labels=ids, use_cache=False).loss))
        getattr(ours, "activation_checkpointing_enable", ours.gradient_checkpointing_enable)()
    alike(found[1], found[0])
    others = gradients(ours, ours(ids, labels=ids, use_cache=False).loss)  # of another seed
    assert any((found[0][name] - grad).abs().max() > 1e-3 for name, grad in others.items())


def test_chunks_of_a_prompt_behind_a_cache() -> None:
    for name in ("Mistral", "Llama4"):
        found = []
        for model in decoder(name):
            cache = transformers.DynamicCache(config=model.config)
            with torch.no_grad():
                parts = [
                    model(tokens(2, 15)[:, a:b], **{CACHE: cache}, attention_mask=padding("left")[:, :b]).logits
                    for a, b in ((0, 7), (7, 12), (12, 15))
                ]
            found.append(torch.cat(parts, dim=1)[padding("left").bool()])
        torch.testing.assert_close(found[1], found[0], atol=2e-6, rtol=2e-5)


def test_gpt2_asks_its_mask_of_a_static_cache_for_its_dimensions() -> None:
    config = transformers.GPT2Config(
        vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=None, pad_token_id=0
    )
    eager, ours = both(lambda: transformers.GPT2LMHeadModel(config))
    tokens = torch.randint(2, 96, (2, 9))
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    assert torch.equal(ours.generate(tokens, **options), eager.generate(tokens, **options))


@pytest.mark.filterwarnings("ignore:weft. the model computes with its mask itself")
def test_doge_computes_with_its_mask() -> None:
    config = transformers.DogeConfig(**WIDTH, head_dim=16, keep_window_size=8)
    eager, ours = both(lambda: transformers.DogeForCausalLM(config))
    ids = tokens(2, 15)
    same(eager, ours, input_ids=ids)
    with torch.no_grad():
        whole, part = ours(ids).logits[:, :14], ours(ids[:, :14]).logits
    torch.testing.assert_close(whole[:, :8], part[:, :8])
    for side in ("left", "right"):
        same(eager, ours, padding(side), input_ids=ids, attention_mask=padding(side))
    for cache in ("dynamic", "static"):
        generated_alike(eager, ours, ids, cache, attention_mask=padding("left"))
    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found = compiled(ids, attention_mask=padding("left"), use_cache=False).logits[padding("left").bool()]
        expected = eager(ids, attention_mask=padding("left"), use_cache=False).logits[padding("left").bool()]
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_a_mask_of_one_query_holds_for_all(window: int | None) -> None:
    """As LightGlue asks for it: of floats it would be added to the scores of every query."""
    _, ours = decoder("Mistral")
    config = copy.deepcopy(ours.config)
    config.sliding_window = window
    made = transformers.masking_utils.create_bidirectional_mask
    if window is not None:
        made = transformers.masking_utils.create_bidirectional_sliding_window_mask
    query, key, value = torch.randn(3, 2, 4, 15, 16, generator=torch.Generator().manual_seed(3))
    found = []
    for name, attend in (("eager", None), ("weft", attention)):
        config._attn_implementation = name
        mask = made(config=config, inputs_embeds=torch.zeros(2, 1, 64), attention_mask=padding("right"),
                    encoder_hidden_states=torch.zeros(2, 15, 64))  # fmt: skip
        if attend is None:
            weights = (query @ key.transpose(2, 3) / 4 + mask).softmax(-1)
            found.append((weights @ value).transpose(1, 2))
        else:
            found.append(attend(torch.nn.Identity(), query, key, value, mask)[0])
    torch.testing.assert_close(found[1], found[0], atol=2e-6, rtol=2e-5)


def test_a_mask_that_hides_nothing_holds_for_more_keys() -> None:
    """As Muse Glimmer's assistant has them: of its noise and of its context. Under "eager" such a mask is None."""
    config = transformers.MistralConfig(**WIDTH, sliding_window=8)
    config._attn_implementation = "weft"
    mask = transformers.masking_utils.create_bidirectional_sliding_window_mask(
        config=config, inputs_embeds=torch.zeros(2, 4, 64), attention_mask=None
    )
    query, key, value = torch.randn(3, 2, 4, 9, 16, generator=torch.Generator().manual_seed(3))
    query = query[:, :, :4]
    layer = torch.nn.Identity()
    layer.is_causal = True  # it has no say where there is a mask
    expected = ((query @ key.transpose(2, 3) / 4).softmax(-1) @ value).transpose(1, 2)
    torch.testing.assert_close(attention(layer, query, key, value, mask)[0], expected, atol=2e-6, rtol=2e-5)
    wide = transformers.masking_utils.create_bidirectional_sliding_window_mask(
        config=config, inputs_embeds=torch.zeros(2, 9, 64), attention_mask=None
    )
    with pytest.raises(WeftError, match="expected one of 4 queries and 9 keys"):
        attention(layer, query, key, value, wide)


def test_weights_that_are_asked_for_are_refused() -> None:
    _, ours = decoder("Llama")
    with pytest.raises(UnavailableError, match="output_attentions: weights are never in memory"):
        ours(tokens(2, 15), output_attentions=True)


def test_an_error_names_its_layer() -> None:
    _, ours = decoder("Llama")
    ours.model.layers[1].self_attn.scaling = "half"
    with pytest.raises(WeftError, match=r"in model\.layers\.1\.self_attn \(LlamaAttention\) of LlamaForCausalLM"):
        ours(tokens(2, 15))
    _, ours = decoder("Llama")
    with pytest.raises(
        UnavailableError, match=r"in model\.layers\.0\.self_attn \(LlamaAttention\) of LlamaForCausalLM"
    ):
        ours(tokens(2, 15), output_attentions=True)
    with pytest.raises(UnavailableError, match=r"in a layer \(Module\)"):
        attention(torch.nn.Module(), *torch.zeros(3, 1, 1, 4, 8), None, indices=tokens(1))


def test_a_decoder_trains_in_the_interpreter() -> None:
    eager, ours = decoder("Gemma2")
    with weft.settings(target="interpret"):
        same(eager, ours, padding("left"), input_ids=tokens(2, 15), attention_mask=padding("left"))


# -- caches of FP8 -----------------------------------------------------------------------------------------------------
def written(model: Any, tokens: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    """New tokens [B, 8] of a greedy search, and their logits [8, B, vocabulary]."""
    found = model.generate(
        tokens, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True, **more
    )
    return found.sequences[:, tokens.shape[1] :], torch.stack(found.logits)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3", "GptOss", "Qwen3"])
def test_a_cache_of_fp8_changes_logits_little(name: str) -> None:
    _, model = decoder(name)
    tokens = torch.randint(1, 96, (2, 11), generator=torch.Generator().manual_seed(3))
    cache = weft.integrations.transformers.fp8_cache(model.config)
    plain, expected = written(model, tokens)
    new, logits = written(model, tokens, **{CACHE: cache})
    assert all(layer.keys.dtype is torch.uint8 for layer in cache.layers)
    error = (logits[0] - expected[0]).norm() / expected[0].norm()
    assert 0 < error < 0.1
    for at in range(8):  # the first token that differs was hardly likelier than the other
        best = expected[at].topk(2).values
        sure = best[:, 0] - best[:, 1] > 2 * (logits[at] - expected[at]).abs().amax(-1)
        alike = (new[:, :at] == plain[:, :at]).all(-1)
        assert (new[:, at] == plain[:, at])[sure & alike].all()


def test_rows_of_a_cache_of_fp8_keep_their_descales_where_it_is_cropped_and_reordered() -> None:
    from weft.integrations.caches import packed, unpacked

    rows = torch.randn(3, 2, 5, 21) * torch.logspace(-3, 3, 5)[:, None]
    data = unpacked(packed(rows, torch.float8_e5m2), 21, torch.float8_e5m2)
    again = unpacked(packed(rows, torch.float8_e5m2)[[2, 0]][..., :-2, :], 21, torch.float8_e5m2)
    for kept, of in ((data, rows), (again, rows[[2, 0], :, :3])):
        real = weft.fp8.dequantize(weft.fp8.Quantized(kept, kept._weft_descale))
        assert (real - of).norm() < 0.08 * of.norm()


def test_caches_of_fp8_that_cannot_be() -> None:
    _, model = decoder("Llama")
    made = weft.integrations.transformers.fp8_cache
    for dtype in (torch.float16, [], None, "float8_e4m3fn"):
        with pytest.raises(WeftError, match="fp8_cache: dtype: expected torch.float8_e4m3fn or torch.float8_e5m2, got"):
            made(model.config, dtype)
    for config in (model, []):
        with pytest.raises(
            WeftError, match="fp8_cache: config: expected the config of a model, model.config, got [Ll]"
        ):
            made(config)
    config = transformers.LlamaConfig(num_hidden_layers=2, layer_types=["full_attention", "linear_attention"])
    with pytest.raises(UnavailableError, match="fp8_cache: LinearAttentionLayer: not to be had in FP8"):
        made(config)
    with pytest.raises(UnavailableError, match="fp8_cache: a model with kv_lora_rank computes with"):
        made(decoder("DeepseekV3")[1].config)
    query, key = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 5, 16).to(torch.float8_e4m3fn)
    with pytest.raises(WeftError, match="key: got torch.float8_e4m3fn without the descales of fp8_cache"):
        attention(torch.nn.Module(), query, key, key, None)
