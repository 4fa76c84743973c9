"""Tiny models from real config classes, with seeded weights: every rank builds the same one."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

NUM_LAYERS = 6
VOCAB_SIZE = 97
_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
)
FAMILIES = ("llama", "llama-tied", "qwen3")
CHECKPOINTING = ("off", "non-reentrant", "reentrant", "around-call")


def build_base(family: str = "llama", dtype: torch.dtype = torch.float32, **sizes: Any) -> PreTrainedModel:
    """Return a seeded base model; `family` is one of FAMILIES."""
    torch.manual_seed(0)
    options = _SIZES | {"tie_word_embeddings": family == "llama-tied"} | sizes
    if family == "qwen3":
        model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**options, head_dim=8))
    else:
        model = LlamaForCausalLM(LlamaConfig(**options))
    return model.to(dtype)


def add_lora(base: PreTrainedModel, dropout: float = 0.0, **options: Any) -> PeftModel:
    """Return `base` with a seeded LoRA whose B is not zero, so that every gradient counts."""
    torch.manual_seed(1)
    config = LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options},
        lora_dropout=dropout,
    )
    model = get_peft_model(base, config)
    fill_lora_b(model)
    return model


def fill_lora_b(model: torch.nn.Module) -> None:
    """Make lora_B of every layer a seeded, non-zero one."""
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)


def build_model(
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.0,
    checkpointing: str = "off",
    **options: Any,
) -> PeftModel:
    """Return a PeftModel in training mode; `checkpointing` is one of CHECKPOINTING."""
    model = add_lora(build_base(family, dtype), dropout, **options)
    set_checkpointing(model, checkpointing)
    return model.train()


def fill_adapter(model: PeftModel) -> PeftModel:
    """Draw all that trains, so that every gradient counts, and return the model in training mode."""
    torch.manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.05)
    return model.train()


def set_checkpointing(model: PeftModel, checkpointing: str) -> None:
    """Switch activation checkpointing on, as transformers does or, for `around-call`, as it did before 5.20."""
    if checkpointing == "off":
        return
    if checkpointing == "around-call":
        for layer in model.get_base_model().model.layers:
            _checkpoint_call(layer)
        return
    if checkpointing == "reentrant":
        model.enable_input_require_grads()
    enable = getattr(model.get_base_model(), "activation_checkpointing_enable", None)
    enable = enable or model.get_base_model().gradient_checkpointing_enable
    enable({"use_reentrant": checkpointing == "reentrant"})


def _checkpoint_call(layer: torch.nn.Module) -> None:
    """Checkpoint the layer's whole call, its module hooks included."""
    original = type(layer)

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return original.__call__(self, *args, **kwargs)
        kwargs |= {"use_cache": False, "past_key_values": None}  # a recomputation would fill the cache twice
        run = lambda *a: original.__call__(self, *a, **kwargs)  # noqa: E731
        return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False)

    layer.__class__ = type(original.__name__, (original,), {"__call__": call})


def disturb(model: torch.nn.Module, name: str = "") -> None:
    """Make every tensor that trains count, or those of one adapter, the same way each time: many begin as zero."""
    generator = torch.Generator().manual_seed(5)
    for key, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        if f".{name}." in f"{key}." if name else parameter.requires_grad:
            parameter.data += (0.05 * torch.randn(parameter.shape, generator=generator)).to(parameter)


def make_batch(seed: int = 3, rows: int = 2, tokens: int = 12) -> dict[str, torch.Tensor]:
    """Return input_ids and labels, both [rows, tokens], some labels masked."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(1, VOCAB_SIZE, (rows, tokens), generator=generator)
    labels = input_ids.clone()
    labels[:, : tokens // 3] = -100
    return {"input_ids": input_ids, "labels": labels}


def take_gradients(model: torch.nn.Module, needs_all: bool = True) -> dict[str, torch.Tensor]:
    """Return the gradients of what trains and forget them in the model; with `needs_all`, each must be there."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.clone()
            parameter.grad = None
        else:
            assert not (needs_all and parameter.requires_grad), f"{name} has no gradient"
    return gradients


def find_differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the names whose tensors are not equal bit for bit, or are in one dict alone."""
    names = found.keys() | expected.keys()
    same = {n for n in found.keys() & expected.keys() if torch.equal(found[n], expected[n])}
    return sorted(names - same)
