"""Layers that compute their batch in pieces give the same as in one; whatever cannot be split is refused.

The tolerance: the gradient of an adapter is a sum over sequences, and the order of the sum differs.
"""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from helpers.tiny import VOCAB_SIZE, add_lora, build_model, make_batch, set_checkpointing, take_gradients
from peft import PeftModel
from torch import nn
from transformers import (
    AttentionInterface,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from lorashard.engine.autograd import is_in_backward
from lorashard.errors import ConfigError
from lorashard.model.micro_batching import split_layers
from lorashard.model.stacks import find_decoder_stack

NUM_LAYERS = 3
_SIZES = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
)
_GEMMA = _SIZES | dict(head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"] * 2)
_GPT2 = dict(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=NUM_LAYERS, n_head=4)
FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=8)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**_GEMMA | {"num_hidden_layers": 4})),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**_GEMMA | {"num_hidden_layers": 4})),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**_GPT2, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)),
}


# Family, attention, activation checkpointing, sequences of a piece.
CASES = (
    ("llama", "sdpa", "off", 2),
    ("llama", "eager", "non-reentrant", 1),
    ("qwen3", "sdpa", "reentrant", 2),
    ("mixtral", "eager", "off", 1),
    ("gemma2", "eager", "reentrant", 1),
    ("gemma3", "sdpa", "non-reentrant", 2),
    ("gpt2", "sdpa", "off", 2),
)


def build(family: str = "llama", checkpointing: str = "off", attention: str = "sdpa") -> PeftModel:
    torch.manual_seed(0)
    base = FAMILIES[family]()
    base.set_attn_implementation("eager" if family == "gemma2" else attention)  # Gemma 2 knows no other
    base.config.use_cache = False
    options = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True} if family == "gpt2" else {}
    model = add_lora(base, **options)
    if checkpointing != "off":
        set_checkpointing(model, checkpointing)
    return model.train()


def split(model: nn.Module, rows: int) -> Any:
    split_layers(find_decoder_stack(model)[1], rows)
    return model


def count_pieces(model: nn.Module) -> list[int]:
    """Return a list of one value: how often the first layer's last submodule has run so far."""
    count = [0]
    layer = find_decoder_stack(model)[1][0]

    def add(module: nn.Module, args: Any) -> None:
        count[0] += not is_in_backward()  # not while it is recomputed

    layer.mlp.register_forward_pre_hook(add)
    return count


def make_padded_batch(rows: int = 5, tokens: int = 12) -> dict[str, torch.Tensor]:
    batch = make_batch(rows=rows, tokens=tokens)
    mask = torch.arange(tokens) < torch.arange(tokens, tokens - rows, -1)[:, None]
    batch["labels"][~mask] = -100
    return batch | {"attention_mask": mask.long()}


def make_packed_batch(lengths: tuple[int, ...] = (3, 7, 1, 5, 4)) -> dict[str, torch.Tensor]:
    """Return what TRL's collator makes of packed sequences: one row."""
    tokens = make_batch(rows=1, tokens=sum(lengths))["input_ids"][0]
    rows = [{"input_ids": tokens.tolist(), "seq_lengths": list(lengths)}]
    return DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(rows)


def take_results(model: nn.Module, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    output = model(**batch)
    output.loss.backward()
    return take_gradients(model) | {"loss": output.loss.detach(), "logits": output.logits.detach()}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = float(value.abs().max())
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")


def check(batch: dict[str, Any], size: int, num_pieces: int, family: str = "llama", **options: Any) -> None:
    """Compare a model that is split with one that is not."""
    attention = options.get("attention", "sdpa")
    model = split(build(family, **options), size)
    count = count_pieces(model)
    assert_close(take_results(model, batch), take_results(build(family, attention=attention), batch))
    assert count == [num_pieces]


@pytest.mark.parametrize(("family", "attention", "checkpointing", "size"), CASES)
def test_pieces_give_the_gradients_of_the_batch(family, attention, checkpointing, size):
    """Sequences in the wrong order, another's mask or position, one too many in the last piece; of packed ones a
    sequence split in two, one that sees another's tokens, a position that does not begin again."""
    packed = make_packed_batch()
    without_lengths = {name: packed[name] for name in ("input_ids", "labels", "position_ids")}
    for batch in (make_padded_batch(), packed, without_lengths):
        check(batch, size, -(-5 // size), family, checkpointing=checkpointing, attention=attention)


def flash_by_loops(module, query, key, value, attention_mask, scaling, cu_seq_lens_q=None, position_ids=None, **kwargs):
    """Attention as flash attention understands its arguments: no mask, sequences from lengths or from positions."""
    assert attention_mask is None
    starts = (position_ids[0] == 0).nonzero().flatten().tolist() + [query.shape[2]]
    bounds = starts if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    assert bounds[0] == 0 and bounds[-1] == query.shape[2]
    attend = partial(nn.functional.scaled_dot_product_attention, is_causal=True, scale=scaling, enable_gqa=True)
    parts = [attend(*(x[:, :, a:b] for x in (query, key, value))) for a, b in itertools.pairwise(bounds)]
    return torch.cat(parts, 2).transpose(1, 2), None


def test_a_packed_row_without_a_mask_is_split_where_flash_attention_splits():
    """Lengths that still count from the row's beginning, or pieces that begin elsewhere than the kernel's."""
    AttentionInterface.register("flash_by_loops", flash_by_loops)
    batch = make_packed_batch()
    for names in (batch.keys(), ("input_ids", "labels", "position_ids")):
        results = []
        for sequences in (None, 1, 2, 4):
            model = build()
            model.get_base_model().config._attn_implementation = "flash_by_loops"  # no package has it
            count = count_pieces(model)
            if sequences is not None:
                split(model, sequences)
            results.append(take_results(model, {name: batch[name] for name in names}))
            assert count == [-(-5 // (sequences or 5))]
            assert_close(results[-1], results[0])


def test_tensors_that_change_in_place_are_read_again():
    """A buffer that a data loader fills again for each batch would be split where the last batch was."""
    batch = make_packed_batch()
    model = split(build(), 1)
    take_results(model, batch)
    changed = make_packed_batch((9, 1, 1, 4, 5))
    for name in batch.keys() - {"max_length_q", "max_length_k"}:
        batch[name].copy_(changed[name])
    assert_close(take_results(model, batch), take_results(build(), changed))


def test_positions_that_restart_within_rows_are_no_packed_row():
    """Positions that begin again within the rows of a batch, taken for those of a packed row."""
    batch = make_batch(rows=3, tokens=10) | {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]] * 3)}
    batch["position_ids"][1] = torch.arange(10)
    check(batch, 2, 2)


def test_accumulated_microbatches_give_the_same():
    """The promise itself: a batch in pieces of two rows is what accumulation over microbatches of two rows gives."""
    batch = make_batch(rows=6)
    accumulated = build()
    for begin in (0, 2, 4):
        (accumulated(**{name: value[begin : begin + 2] for name, value in batch.items()}).loss / 3).backward()
    model = split(build(checkpointing="non-reentrant"), 2)
    model(**batch).loss.backward()
    assert_close(take_gradients(model), take_gradients(accumulated))


@pytest.mark.parametrize(
    ("checkpointing", "batch"),
    (("off", make_padded_batch()), ("non-reentrant", make_packed_batch()), ("reentrant", make_padded_batch())),
    ids=("batch", "packed", "reentrant"),
)
def test_router_logits_are_recorded_once_per_layer(checkpointing, batch):
    """transformers' hooks record a router's logits once per piece, which the auxiliary loss does not expect."""
    results = []
    for model in (build("mixtral", checkpointing), split(build("mixtral", checkpointing), 2)):
        output = model(**batch, output_router_logits=True)
        assert len(output.router_logits) == NUM_LAYERS
        output.loss.backward()
        logits = {f"router {i}": logits.detach() for i, logits in enumerate(output.router_logits)}
        results.append(take_gradients(model) | logits | {"loss": output.loss.detach(), "aux": output.aux_loss.detach()})
    assert_close(*results)


def test_attentions_and_hidden_states_are_recorded_once_per_layer():
    """A record for each piece would be taken for one for each layer."""
    models = (build(attention="eager"), split(build(attention="eager"), 2))
    outputs = [model(**make_padded_batch(), output_attentions=True, output_hidden_states=True) for model in models]
    for name in ("attentions", "hidden_states"):
        expected, found = ({str(i): t.detach() for i, t in enumerate(output[name])} for output in outputs)
        assert_close(found, expected)
    with pytest.raises(ConfigError, match="attentions"):
        models[1](**make_packed_batch(), output_attentions=True)


def test_evaluation_is_split_too():
    """Evaluation of a large batch needs the activations of a layer as well."""
    model, plain = split(build(), 2).eval(), build().eval()
    for context, batch in ((torch.no_grad, make_padded_batch()), (torch.inference_mode, make_packed_batch())):
        count = count_pieces(model)
        with context():
            torch.testing.assert_close(model(**batch).logits, plain(**batch).logits, rtol=1e-5, atol=1e-6)
        assert count == [3]


def test_a_batch_with_a_cache_is_not_split_unless_the_cache_is_dropped():
    """A cache that each piece adds its keys to would mix sequences. transformers drops it under activation
    checkpointing, but inside the checkpoint: outside, it would keep every training batch from being split."""
    batch = make_batch(rows=3)
    model, plain = split(build(), 1).eval(), build().eval()
    count = count_pieces(model)
    tokens = [m.generate(batch["input_ids"], max_new_tokens=4, do_sample=False, use_cache=True) for m in (model, plain)]
    assert torch.equal(*tokens) and count == [4]
    model = split(build(checkpointing="non-reentrant"), 2)
    count = count_pieces(model)
    assert_close(take_results(model, batch | {"past_key_values": DynamicCache()}), take_results(build(), batch))
    assert count == [2]


def test_adapters_added_later_train_as_well():
    """PEFT injects into the layers after they were split: each piece must run what is there by then."""
    torch.manual_seed(0)
    base = FAMILIES["llama"]()
    model = add_lora(split(base, 2)).train()
    assert_close(take_results(model, make_batch(rows=4)), take_results(build(), make_batch(rows=4)))


def test_a_copy_runs_its_own_layers():
    """A reference model copied from a split one must not run the original's layers."""
    model = split(build(), 2)
    copied = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    assert_close(take_results(copied, make_batch(rows=4)), take_results(build(), make_batch(rows=4)))


def test_a_layer_that_checkpoints_its_call_checkpoints_pieces(monkeypatch):
    """Before 5.20 transformers checkpoints around the hooks: all sequences would be recomputed at once."""
    recomputed: list[int] = []
    num_rows: list[int] = []

    def checkpoint(function: Any, hidden: torch.Tensor) -> Any:
        recomputed.append(len(hidden))
        return torch.utils.checkpoint.checkpoint(function, hidden, use_reentrant=False)

    class OldLayer(nn.Module):
        gradient_checkpointing = True
        _gradient_checkpointing_func = staticmethod(checkpoint)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(partial(nn.Module.__call__, self, **kwargs), *args)

    class OldToy(OldLayer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, hidden, past_key_values=None):
            num_rows.append(len(hidden))
            return (self.linear(hidden),)

    monkeypatch.setattr("lorashard.model.micro_batching.GradientCheckpointingLayer", OldLayer)
    layer, visits = OldToy(), []
    split_layers([layer], 2)
    layer.register_forward_hook(lambda *args: visits.append(is_in_backward()))
    hidden = torch.randn(5, 3, 4, requires_grad=True)
    layer(hidden, past_key_values=object())[0].sum().backward()
    assert recomputed == [2, 2, 1] and visits == [False] and num_rows == [2, 2, 1, 1, 2, 2]
    assert isinstance(layer, OldToy) and type(layer).__name__ == "OldToy"


@pytest.mark.parametrize("batch", (make_batch(rows=4), make_packed_batch()), ids=("rows", "packed"))
def test_activation_checkpointing_around_a_layer_is_refused(batch):
    """It would recompute all sequences at once: right gradients, and no memory saved."""
    model = build_model(checkpointing="around-call")
    loss = split(model, 1)(**batch, use_cache=False).loss
    with pytest.raises(ConfigError, match="activation checkpointing"):
        loss.backward()
