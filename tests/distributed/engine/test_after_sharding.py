"""What scripts and trainers do to a model after its base has been sharded: it works, or is an error that says why."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from helpers.forked_ranks import run_ranks
from helpers.tiny import NUM_LAYERS, build_model, find_differences, make_batch, take_gradients
from peft import PeftModel
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM

import lorashard
from lorashard.errors import ConfigError, ShardError

CPU_BUDGET_S = 30.0


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**make_batch()).logits


def unfreeze_norms(model: PeftModel) -> None:
    for name, parameter in model.named_parameters():
        if "input_layernorm" in name:
            parameter.requires_grad = True


@pytest.mark.parametrize("placement", ["host", "replicate"])
def test_a_base_that_a_script_has_unfrozen_is_refused_when_training_begins(placement):
    """Weights that would not be trained, or apart on each rank, and the adapter beside them as if all were well."""
    model = lorashard.shard(build_model(), placement=placement)
    unfreeze_norms(model)
    logits(model)  # who only evaluates does no harm
    with pytest.raises(ConfigError) as raised:
        model.train()(**make_batch())
    message = str(raised.value)
    assert "\n" not in message and f"{NUM_LAYERS} of its weights" in message
    assert "model.layers.0.input_layernorm.weight" in message
    assert "modules_to_save" in message and "trainable_token_indices" in message
    model.get_base_model().requires_grad_(False)
    model.add_adapter("again", model.peft_config["default"])
    model.set_adapter("again")
    model(**make_batch()).loss.backward()


EMBEDDING_ADAPTERS = (
    {"target_modules": ["embed_tokens", "lm_head"]},
    {"trainable_token_indices": {"embed_tokens": [1, 2]}},
)


def unload(rank: int) -> list[bool]:
    found = []
    for lora in EMBEDDING_ADAPTERS:
        base = lorashard.shard(build_model(**lora), placement="shard").unload()
        found.append(torch.equal(logits(base), logits(build_model(**lora).unload())))
    return found


def test_the_base_that_unload_returns_is_gathered_where_an_adapter_was():
    """Hooks that have gone with the wrapper of the embedding: the base reads a placeholder in its first forward."""
    assert run_ranks(unload, 2) == [[True] * len(EMBEDDING_ADAPTERS)] * 2


def test_a_base_that_is_returned_unsharded_is_a_plain_model(tmp_path: Path):
    """A merged model that is refused for ever: it cannot be cast, copied, pickled or trained any more."""
    expected = build_model().merge_and_unload()
    merged = lorashard.shard(build_model(), placement="replicate").merge_and_unload()
    torch.save(merged, tmp_path / "whole")
    for model in (merged, copy.deepcopy(merged), torch.load(tmp_path / "whole", weights_only=False)):
        assert torch.equal(logits(model), logits(expected))
        model.train().requires_grad_(True)(**make_batch()).loss.backward()
        assert model.model.layers[0].mlp.up_proj.weight.grad is not None
    merged.half().save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
    assert find_differences(loaded.state_dict(), expected.half().state_dict()) == []
    assert lorashard.shard(build_model(), placement="replicate").unload().double().dtype == torch.float64
    with pytest.raises(ShardError):
        lorashard.shard(build_model(), placement="host").unload().half()


def train_in_ddp(rank: int) -> tuple[bool, bool, int]:
    model = lorashard.shard(build_model(), placement="shard")
    base = {n for n, p in model.named_parameters() if not p.requires_grad}
    model.register_buffer("bias_mask", torch.ones(2, dtype=torch.bool))
    model._ddp_params_and_buffers_to_ignore = ["bias_mask"]  # what TRL's dpo.py assigns
    wrapped = DistributedDataParallel(model)
    wrapped(**make_batch()).loss.backward()
    ignored = wrapped.parameters_to_ignore
    return "bias_mask" in ignored, base <= ignored, len(take_gradients(model))


def test_what_a_script_lets_ddp_ignore_does_not_take_the_place_of_the_base():
    """DDP would look at placeholders, and broadcast the base of a rank that has it unsharded."""
    for has_own, has_base, num_gradients in run_ranks(train_in_ddp, 2):
        assert has_own and has_base and num_gradients == NUM_LAYERS * 7 * 2


def test_a_trainer_that_compiles_the_whole_model_learns_what_to_use():
    """An internal error of the compiler, in a file of lorashard's that has no fault."""
    model = lorashard.shard(build_model(), placement="host")
    with pytest.raises(ConfigError) as raised:
        torch.compile(model, backend="eager")(**make_batch())
    assert raised.value.option == "torch_compile"
    model(**make_batch()).loss.backward()
    assert len(take_gradients(model)) == NUM_LAYERS * 7 * 2
