"""A sharded model after things that go wrong, and in the hands of those who copy, move and save models."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from helpers.forked_ranks import run_ranks
from helpers.scenarios import one_step
from helpers.tiny import add_lora, build_base, build_model, find_differences, make_batch
from peft import PeftModel
from torch.nn.parallel import DistributedDataParallel

import lorashard
from lorashard.engine import Placeholder
from lorashard.errors import ShardError


def check_divergence(rank: int) -> list[ShardError]:
    errors = []
    for diverge in (evaluate_twice, step_early, train_once_more):
        model = lorashard.shard(build_model())
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        try:
            if rank == 1:
                diverge(model, optimizer)
            one_step(model)
            optimizer.step()
            one_step(model)
        except ShardError as error:
            errors.append(error)
    return errors


def evaluate_twice(model: PeftModel, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model(**make_batch())


def step_early(model: PeftModel, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def train_once_more(model: PeftModel, optimizer: torch.optim.Optimizer) -> None:
    one_step(model)


def test_ranks_that_diverge_stop_with_what_each_does():
    """Shards have equal sizes: without the check a rank would read another unit's bytes, and nothing would tell."""
    for first, *others in run_ranks(check_divergence, 2):
        assert "with gradients" in first.found and "without gradients" in first.found
        assert "rank 0" in first.found and "rank 1" in first.found
        assert len(others) == 2 and all("optimizer step" in error.found for error in others)


def check_bookkeeping(rank: int, folder: str) -> dict:
    plain, model = build_model(), lorashard.shard(build_model())
    base_names = {n for n, p in plain.named_parameters() if not p.requires_grad}
    ignored = {name for name in DistributedDataParallel(model).parameters_to_ignore if name.endswith("weight")}
    facts = {
        "counts": model.num_parameters() == plain.num_parameters(),
        "trainable": model.get_nb_trainable_parameters() == plain.get_nb_trainable_parameters(),
        "names": [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()],
        "shapes": all(a.shape == b.shape for a, b in zip(model.parameters(), plain.parameters(), strict=True)),
        "dtypes": {p.dtype for p in model.parameters()} == {torch.float32},
        "moved": model.to("cpu") is model and model.to("cpu:0") is model and model.float() is model,
        "ignored by DDP": ignored == base_names,
        "no base in state_dict": model.state_dict().keys() == plain.state_dict().keys() - base_names,
    }
    one_step(model)
    facts["no values after a step"] = all(
        isinstance(dict(model.named_parameters())[n], Placeholder) for n in base_names
    )
    model.save_pretrained(f"{folder}/{rank}")
    loaded = PeftModel.from_pretrained(build_base(), f"{folder}/{rank}")
    expected = {n: p for n, p in plain.named_parameters() if p.requires_grad}
    facts["saved adapter"] = find_differences({n: p for n, p in loaded.named_parameters() if n in expected}, expected)
    for name, use in {
        "pickled": lambda: torch.save(dict(model.named_parameters()), io.BytesIO()),
        "base saved": lambda: model.get_base_model().save_pretrained(f"{folder}/base{rank}"),
    }.items():
        try:
            use()
            facts[name] = "went through"
        except ShardError as error:
            facts[name] = "placement='replicate'" in error.fix
    facts["written files"] = [path.name for path in Path(folder).rglob("*.safetensors") if "adapter" not in path.name]
    return facts


def test_a_sharded_model_keeps_its_bookkeeping_and_refuses_to_be_read(tmp_path):
    """Counts, moves and adapter saves stay right; whatever would write or compute with absent weights fails loudly."""
    for facts in run_ranks(check_bookkeeping, 2, str(tmp_path)):
        assert facts.pop("saved adapter") == [] and facts.pop("written files") == []
        assert {name: fact for name, fact in facts.items() if fact is not True} == {}


@pytest.mark.parametrize("placement", ["shard", "replicate"])
def test_a_call_on_the_whole_model_is_named_when_it_is_refused(placement):
    """Catches an aten operation's name, pickle's own riddle, or the advice to replicate what is replicated, for an
    answer; and a call refused that changes nothing."""
    model = lorashard.shard(build_model(), placement=placement)
    calls = {
        "copy.deepcopy": lambda module: copy.deepcopy(module),
        "copy.copy": lambda module: copy.copy(module),
        "pickle": lambda module: pickle.dumps(module),
        "torch.save": lambda module: torch.save(module, io.BytesIO()),
        "half()": lambda module: module.half(),
        "bfloat16()": lambda module: module.bfloat16(),
        "double()": lambda module: module.double(),
        "to(torch.float16)": lambda module: module.to("cpu", torch.float16),
        "float16)": lambda module: module.type(torch.float16),
        "resize_token_embeddings": lambda module: module.resize_token_embeddings(1000),
    }
    for module in (model, model.get_base_model()):
        for name, call in calls.items():
            with pytest.raises(ShardError) as caught:
                call(module)
            message = str(caught.value)
            assert name in message and "aten" not in message and "replicate" not in message and "\n" not in message
        num_tokens = module.config.vocab_size
        assert module.float() is module and module.to(torch.float32) is module and module.type(torch.float32) is module
        assert module.resize_token_embeddings(num_tokens).weight.shape[0] == num_tokens
    assert find_differences(one_step(model), one_step(build_model())) == []


@pytest.mark.parametrize("prefetch", [0, 1])
def test_layers_that_share_a_module_are_recomputed(prefetch):
    """What layers share rests with the embedding: entered in a recomputation, it took the layer's own weights away."""
    found = []
    for is_sharded in (False, True):
        base = build_base()
        for layer in base.model.layers:
            layer.self_attn = base.model.layers[0].self_attn
        model = add_lora(base, 0.0, target_modules=["gate_proj", "down_proj"])
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train().enable_input_require_grads()
        found.append(one_step(lorashard.shard(model, "host", prefetch=prefetch) if is_sharded else model))
    assert find_differences(found[1], found[0]) == []
