"""A tiny model of each family from its config class, saved as the family's hub checkpoints are saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

Tensors = dict[str, torch.Tensor]
VOCAB_SIZE = 199
NUM_LAYERS = 3
NUM_TOKENS = 12


@dataclass(frozen=True)
class Family:
    """What a family's table row says, and how its tiny model is made.

    Attributes:
        hub_id: a checkpoint whose layout is imitated.
        config: the name of the config class, and what differs from SIZES.
        to_hub: makes the hub's tensors of those that `save_pretrained` writes today; None where they are the same.
        stored: how the hub's files differ from the model's own names, for the table.
        lora: what of the adapter is not `target_modules: all-linear`.
        covers: what the adapter sits on, for the table.
        is_vision: images are among the inputs.
        has_fused_head: whether TRL's fused LM head works with the plain model.
    """

    name: str
    hub_id: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)
    to_hub: Callable[[Tensors], Tensors] | None = None
    stored: str = ""
    lora: dict[str, Any] = field(default_factory=dict)
    covers: str = "attention, MLP"
    is_vision: bool = False
    has_fused_head: bool = True


SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
_SPECIAL = {name: SIZES[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}


def _add_rotary(tensors: Tensors) -> Tensors:
    """Old checkpoints hold each layer's rotary frequencies."""
    frequencies = torch.linspace(1, 0.1, 4)
    return tensors | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": frequencies.clone() for i in range(NUM_LAYERS)}


def _store_tied_head(source: str, head: str = "lm_head.weight") -> Callable[[Tensors], Tensors]:
    """Some tied checkpoints hold the head as well."""
    return lambda tensors: tensors | {head: tensors[source].clone()}


def _to_gpt2(tensors: Tensors) -> Tensors:
    """Saved from the model without a head, with the causal masks."""
    masks = {f"h.{i}.attn.bias": torch.ones(64, 64).tril()[None, None] for i in range(NUM_LAYERS)}
    return {key.removeprefix("transformer."): value for key, value in tensors.items()} | masks


def _to_gpt_neox(tensors: Tensors) -> Tensors:
    """Saved with the causal masks, their fill value and the rotary frequencies."""
    buffers: Tensors = {}
    for i in range(NUM_LAYERS):
        prefix = f"gpt_neox.layers.{i}.attention"
        buffers[f"{prefix}.bias"] = torch.ones(64, 64, dtype=torch.bool).tril()[None, None]
        buffers[f"{prefix}.masked_bias"] = torch.tensor(-1e4)
        buffers[f"{prefix}.rotary_emb.inv_freq"] = torch.linspace(1, 0.1, 4)
    return tensors | buffers


def _to_opt(tensors: Tensors) -> Tensors:
    """Saved from the model without a head."""
    return {key.removeprefix("model."): value for key, value in tensors.items()}


def _to_deepseek(tensors: Tensors) -> Tensors:
    """The multi-token prediction layer comes after the last; transformers knows its number in DeepSeek-V3 alone."""
    extra = {key.replace("layers.2.", "layers.61."): v.clone() for key, v in tensors.items() if "layers.2." in key}
    return tensors | extra | {"model.layers.61.eh_proj.weight": torch.randn(32, 64, dtype=torch.bfloat16)}


def _to_qwen_vl(tensors: Tensors) -> Tensors:
    return {
        key.replace("model.language_model.", "model.").replace("model.visual.", "visual."): value
        for key, value in tensors.items()
    }


def _to_llava(tensors: Tensors) -> Tensors:
    """The language tower is a whole model in the file: it was one when the checkpoint was made."""
    renamed: Tensors = {}
    for key, value in tensors.items():
        key = key.replace("model.language_model.", "language_model.model.")
        key = key.removeprefix("model.") if not key.startswith("language_model") else key
        renamed["language_model." + key if key.startswith("lm_head") else key] = value
    return renamed


_VISION = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, patch_size=4)

FAMILIES = (
    Family("Llama", "meta-llama/Llama-2-7b-hf", "LlamaConfig", to_hub=_add_rotary, stored="with rotary frequencies"),
    Family("Mistral", "mistralai/Mistral-7B-v0.3", "MistralConfig", dict(sliding_window=8)),
    Family("Qwen2", "Qwen/Qwen2.5-0.5B", "Qwen2Config", dict(tie_word_embeddings=True)),
    Family(
        "Qwen3",
        "Qwen/Qwen3-0.6B",
        "Qwen3Config",
        dict(head_dim=16, tie_word_embeddings=True),
        to_hub=_store_tied_head("model.embed_tokens.weight"),
        stored="with the tied head",
    ),
    Family("Gemma 2", "google/gemma-2-2b", "Gemma2Config", dict(head_dim=16, sliding_window=8)),
    Family("Gemma 3", "google/gemma-3-1b-pt", "Gemma3TextConfig", dict(head_dim=16, sliding_window=8)),
    Family("Phi-3", "microsoft/Phi-3.5-mini-instruct", "Phi3Config"),
    Family("OLMo 2", "allenai/OLMo-2-1124-7B", "Olmo2Config"),
    Family(
        "GPT-2",
        "openai-community/gpt2",
        "GPT2Config",
        _SPECIAL | dict(n_embd=32, n_layer=NUM_LAYERS, n_head=4, n_positions=64),
        to_hub=_to_gpt2,
        stored="without a prefix, with causal masks",
    ),
    Family(
        "GPT-NeoX",
        "EleutherAI/pythia-1b",
        "GPTNeoXConfig",
        to_hub=_to_gpt_neox,
        stored="with causal masks and rotary frequencies",
    ),
    Family(
        "OPT",
        "facebook/opt-1.3b",
        "OPTConfig",
        dict(ffn_dim=48, word_embed_proj_dim=32),
        to_hub=_to_opt,
        stored="without the prefix `model.`",
    ),
    Family(
        "Falcon",
        "tiiuae/falcon-7b",
        "FalconConfig",
        dict(multi_query=True, parallel_attn=True, bias=False),
        to_hub=_store_tied_head("transformer.word_embeddings.weight"),
        stored="with the tied head",
    ),
    Family("StarCoder2", "bigcode/starcoder2-3b", "Starcoder2Config", dict(sliding_window=8)),
    Family("Cohere", "CohereLabs/c4ai-command-r-v01", "CohereConfig"),
    Family("Granite", "ibm-granite/granite-3.3-2b-base", "GraniteConfig", dict(tie_word_embeddings=True)),
    Family("SmolLM3", "HuggingFaceTB/SmolLM3-3B", "SmolLM3Config", dict(no_rope_layer_interval=2)),
    Family(
        "Mixtral",
        "mistralai/Mixtral-8x7B-v0.1",
        "MixtralConfig",
        dict(num_local_experts=4),
        stored="expert by expert",
        lora=_EXPERTS,
        covers="attention, experts",
    ),
    Family(
        "Qwen3-MoE",
        "Qwen/Qwen3-30B-A3B",
        "Qwen3MoeConfig",
        dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True),
        stored="expert by expert",
        lora=_EXPERTS,
        covers="attention, experts",
    ),
    Family(
        "GPT-OSS",
        "unsloth/gpt-oss-20b-BF16",
        "GptOssConfig",
        dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
        lora=_EXPERTS,
        covers="attention, experts",
    ),
    Family(
        "DeepSeek-V3",
        "unsloth/DeepSeek-V3-bf16",
        "DeepseekV3Config",
        dict(
            num_key_value_heads=4,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            moe_intermediate_size=24,
        ),
        to_hub=_to_deepseek,
        stored="expert by expert, with the multi-token prediction layer",
        lora=_EXPERTS,
        covers="attention, MLP, shared and routed experts",
    ),
    Family(
        "Qwen2.5-VL",
        "Qwen/Qwen2.5-VL-3B-Instruct",
        "Qwen2_5_VLConfig",
        dict(
            text_config=SIZES
            | dict(rope_parameters=dict(rope_type="default", mrope_section=[1, 1, 2], rope_theta=1e4)),
            vision_config=dict(
                depth=4, hidden_size=32, intermediate_size=48, num_heads=4, out_hidden_size=32, patch_size=4,
                window_size=16, fullatt_block_indexes=[1, 3],
            ),
            image_token_id=190,
            video_token_id=191,
            vision_start_token_id=192,
            vision_end_token_id=193,
            tie_word_embeddings=True,
        ),
        to_hub=_to_qwen_vl,
        stored="as `model.` and `visual.`",
        covers="attention and MLP of both towers",
        is_vision=True,
    ),
    Family(
        "Gemma 3 with images",
        "google/gemma-3-4b-pt",
        "Gemma3Config",
        dict(
            text_config=SIZES | dict(head_dim=16, sliding_window=8),
            vision_config=_VISION | dict(num_hidden_layers=2, image_size=16),
            mm_tokens_per_image=4,
            image_token_index=190,
            boi_token_index=192,
            eoi_token_index=193,
        ),
        to_hub=_to_llava,
        stored="as `language_model.model.` and `vision_tower.`",
        covers="attention and MLP of both towers",
        is_vision=True,
    ),
)  # fmt: skip


def _other(name: str, config: str, **options: Any) -> Family:
    """Return a family that is not among those that were asked for, saved as transformers saves today."""
    own = {key: options.pop(key) for key in ("lora", "has_fused_head") if key in options}
    return Family(name, "", config, options, **own)


_SMALL = _SPECIAL | dict(n_embd=32, n_layer=NUM_LAYERS, n_head=4)
_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
_LOCAL_MOE = dict(num_local_experts=4, num_experts_per_tok=2)
_NO_ROUTER = {"exclude_modules": ["router"]}  # it returns a tuple, which PEFT's Linear cannot
_MAMBA = {"target_modules": ["in_proj", "x_proj"]}  # PEFT refuses the others

OTHERS = (
    _other("BART (decoder)", "BartConfig", d_model=32, decoder_layers=3, encoder_layers=3, decoder_attention_heads=4,
           decoder_ffn_dim=48, is_decoder=True, is_encoder_decoder=False, forced_eos_token_id=None),
    _other("BioGPT", "BioGptConfig"),
    _other("BLOOM", "BloomConfig", **_SMALL),
    _other("CodeGen", "CodeGenConfig", **_SMALL, rotary_dim=8, n_positions=64),
    _other("Cohere 2", "Cohere2Config", sliding_window=8),
    _other("DeepSeek-V2", "DeepseekV2Config", num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, head_dim=8,
           qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=8, num_experts_per_tok=2, n_group=2,
           topk_group=1, first_k_dense_replace=1, moe_intermediate_size=24),
    _other("ERNIE 4.5", "Ernie4_5Config"),
    _other("EXAONE 4", "Exaone4Config", sliding_window=8),
    _other("Falcon Mamba", "FalconMambaConfig", state_size=8, lora=_MAMBA),
    _other("Gemma", "GemmaConfig", head_dim=16),
    _other("Gemma 3n (text)", "Gemma3nTextConfig", head_dim=16, sliding_window=8, hidden_size_per_layer_input=8,
           layer_types=["sliding_attention", "full_attention", "full_attention"], num_kv_shared_layers=0,
           vocab_size_per_layer_input=VOCAB_SIZE, laurel_rank=4, activation_sparsity_pattern=[0.0] * NUM_LAYERS),
    _other("GLM", "GlmConfig", head_dim=16),
    _other("GLM-4", "Glm4Config", head_dim=16),
    _other("GPT-BigCode", "GPTBigCodeConfig", **_SMALL, n_positions=64),
    _other("GPT-J", "GPTJConfig", **_SMALL, rotary_dim=8, n_positions=64),
    _other("GPT-Neo", "GPTNeoConfig", num_layers=3, num_heads=4,
           attention_types=[[["global", "local"], 1], [["global"], 1]]),
    _other("Granite MoE", "GraniteMoeConfig", **_LOCAL_MOE),
    _other("Granite 4 (hybrid)", "GraniteMoeHybridConfig", **_LOCAL_MOE, layer_types=["mamba", "attention", "mamba"],
           mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, shared_intermediate_size=48),
    _other("Helium", "HeliumConfig", head_dim=8, num_key_value_heads=4),
    _other("Jamba", "JambaConfig", num_experts=4, num_experts_per_tok=2, attn_layer_period=2, attn_layer_offset=1,
           expert_layer_period=2, expert_layer_offset=1, use_mamba_kernels=False, mamba_d_state=8, mamba_dt_rank=4),
    _other("LFM2", "Lfm2Config", layer_types=["conv", "full_attention", "conv"], block_ff_dim=48, block_multiple_of=8),
    _other("Llama 4 (text)", "Llama4TextConfig", head_dim=16, num_local_experts=4, intermediate_size_mlp=48,
           moe_layers=[1], lora=_NO_ROUTER, has_fused_head=False),
    _other("Mamba", "MambaConfig", state_size=8, lora=_MAMBA),
    _other("Mamba 2", "Mamba2Config", num_heads=8, head_dim=8, n_groups=2, state_size=8, expand=2,
           lora={"target_modules": ["in_proj"]}),
    _other("MiniMax", "MiniMaxConfig", num_local_experts=4, block_size=8,
           layer_types=["linear_attention", "full_attention", "linear_attention"]),
    _other("MPT", "MptConfig", **_SPECIAL, d_model=32, n_layers=NUM_LAYERS, n_heads=4, max_seq_len=64),
    _other("Nemotron", "NemotronConfig"),
    _other("OLMo", "OlmoConfig"),
    _other("OLMo 3", "Olmo3Config", sliding_window=8),
    _other("OLMoE", "OlmoeConfig", num_experts=4, num_experts_per_tok=2),
    _other("Persimmon", "PersimmonConfig"),
    _other("Phi", "PhiConfig"),
    _other("Phi-3.5-MoE", "PhimoeConfig", **_LOCAL_MOE, lora=_NO_ROUTER),
    _other("Qwen2-MoE", "Qwen2MoeConfig", **_MOE, shared_expert_intermediate_size=24),
    _other("Qwen3-Next", "Qwen3NextConfig", **_MOE, head_dim=16, shared_expert_intermediate_size=24,
           layer_types=["linear_attention", "full_attention", "linear_attention"], linear_num_value_heads=4,
           linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8),
    _other("RecurrentGemma", "RecurrentGemmaConfig", lru_width=32, attention_window_size=8),
    _other("StableLM", "StableLmConfig"),
    _other("XGLM", "XGLMConfig", **_SPECIAL, d_model=32, ffn_dim=48, num_layers=NUM_LAYERS, attention_heads=4),
    _other("Zamba 2", "Zamba2Config", num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2, mamba_d_state=8,
           mamba_headdim=8, n_mamba_heads=8, mamba_ngroups=1, num_mem_blocks=1, use_mem_rope=False, adapter_rank=4,
           attention_hidden_size=64, attention_head_dim=16, use_mamba_kernels=False),
)  # fmt: skip


def make_config(family: Family) -> PreTrainedConfig:
    """Return the config of a family's tiny model."""
    config_class = getattr(transformers, family.config)
    has_own_sizes = family.is_vision or not {"n_embd", "d_model"}.isdisjoint(family.options)
    return config_class(**({} if has_own_sizes else SIZES) | family.options)


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the auto class that makes a generating model of `config`."""
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def save_family(family: Family, folder: Path) -> Path:
    """Save a family's tiny model in bf16 as its hub checkpoints are saved; no two of its tensors are alike."""
    torch.manual_seed(0)
    config = make_config(family)
    model = auto_class(config).from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape).to(tensor.dtype), alpha=0.05)
    model.save_pretrained(folder)
    if family.to_hub is not None:
        file = folder / "model.safetensors"
        save_file(family.to_hub(load_file(file)), file, metadata={"format": "pt"})
    return folder


def load_plain(folder: Path, dtype: torch.dtype) -> Any:
    """Return the model as transformers alone loads it."""
    return auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=dtype)


def make_inputs(family: Family, has_images: bool = True) -> dict[str, torch.Tensor]:
    """Return a batch of two rows, the second padded on the right; with images where the family takes them."""
    generator = torch.Generator().manual_seed(3)
    input_ids = torch.randint(3, 180, (2, NUM_TOKENS), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, -3:] = 0
    images: dict[str, torch.Tensor] = {}
    if family.is_vision and has_images:
        input_ids[:, 1], input_ids[:, 2:6], input_ids[:, 6] = 192, 190, 193
        is_image = (input_ids == 190).long()
        if family.config == "Qwen2_5_VLConfig":
            pixels = torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=generator)
            images = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}
            images["mm_token_type_ids"] = is_image
        else:
            images = {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "token_type_ids": is_image}
    input_ids[1, -3:] = 0
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    labels[:, : NUM_TOKENS // 2] = -100
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, **images}
