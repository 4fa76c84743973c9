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
from lorashard.engine import Placeholder, State
from lorashard.errors import ShardError
from lorashard.runtime.dist import set_timeout


class Broken(torch.autograd.Function):
    """Raises in forward or in backward."""

    @staticmethod
    def forward(ctx, hidden, error, where):
        if where == "forward":
            raise error
        ctx.error = error
        return hidden.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ctx.error


def check_exceptions(rank: int) -> list:
    wrong = []
    expected = one_step(build_model())
    for error, where, checkpointing, layer in (
        (ValueError("a bad batch"), "forward", "off", 0),
        (ValueError("a bad batch"), "backward", "non-reentrant", 3),
        (KeyboardInterrupt(), "forward", "non-reentrant", 3),
        (KeyboardInterrupt(), "backward", "off", 0),
    ):
        model = lorashard.shard(build_model(checkpointing=checkpointing))
        norm = model.get_base_model().model.layers[layer].post_attention_layernorm
        hook = norm.register_forward_hook(lambda m, i, output, e=error, w=where: Broken.apply(output, e, w))
        for _ in range(2):
            with pytest.raises(type(error)):
                one_step(model)
        hook.remove()
        model.zero_grad()
        wrong += [(str(error), where, checkpointing, layer, d) for d in find_differences(one_step(model), expected)]
    return wrong


def test_the_engine_is_usable_after_an_exception():
    """A unit left whole, a gather left in flight or a view left in a traceback would spoil the next step."""
    assert run_ranks(check_exceptions, 2) == [[], []]


def check_divergence(rank: int) -> list[str]:
    messages = []
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
            messages.append(str(error))
    return messages


def evaluate_twice(model: PeftModel, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model(**make_batch())


def step_early(model: PeftModel, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def train_once_more(model: PeftModel, optimizer: torch.optim.Optimizer) -> None:
    one_step(model)


def test_ranks_that_diverge_stop_with_a_sentence():
    """Shards have equal sizes: without the check a rank would read another unit's bytes, and nothing would tell."""
    for messages in run_ranks(check_divergence, 2):
        assert len(messages) == 3
        assert "with gradients" in messages[0] and "without gradients" in messages[0]
        assert "rank 0" in messages[0] and "rank 1" in messages[0]
        assert all("optimizer step" in message for message in messages[1:])
        assert all("diverged" in message for message in messages)


def run_in_another_order(rank: int) -> str:
    set_timeout(20)
    model = lorashard.shard(build_model(), prefetch=0)
    if rank == 1:
        layers = model.get_base_model().model.layers
        layers[2], layers[3] = layers[3], layers[2]
    try:
        one_step(model)
        one_step(model)
    except ShardError as error:
        return str(error)
    return ""


def test_equal_counts_of_different_units_are_found():
    """Two ranks that gathered equally often, but not the same units, have read each other's bytes."""
    assert all("diverged" in message for message in run_ranks(run_in_another_order, 2))


class Stash(torch.autograd.Function):
    """Keeps a weight on ctx, as some quantized kernels do: it escapes saved-tensor hooks."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.weight = weight
        return hidden * weight

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.weight, None


def check_stash(rank: int) -> str:
    model = lorashard.shard(build_model())
    for layer in model.get_base_model().model.layers:
        norm = layer.input_layernorm
        norm.register_forward_hook(lambda module, i, output: Stash.apply(output, module.weight))
    try:
        one_step(model)
    except ShardError as error:
        return str(error)
    return ""


def test_a_weight_stashed_on_ctx_is_refused():
    """It would read another unit's bytes in backward: the loss healthy, the gradients wrong."""
    for message in run_ranks(check_stash, 2):
        assert "'layers.1'" in message and "ctx.save_for_backward" in message


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
    weight = model.get_base_model().model.layers[2].self_attn.q_proj.base_layer.weight
    for name, use in {
        "added": lambda: weight + 1,
        "summed": lambda: weight.sum(),
        "cast": lambda: weight.to(torch.float16),
        "copied": lambda: copy.deepcopy(weight),
        "pickled": lambda: torch.save(dict(model.named_parameters()), io.BytesIO()),
        "base saved": lambda: model.get_base_model().save_pretrained(f"{folder}/base{rank}"),
        "written": lambda: weight.zero_(),
        "listed": lambda: weight.tolist(),
        "to numpy": lambda: weight.numpy(),
    }.items():
        try:
            use()
            facts[name] = "went through"
        except ShardError as error:
            facts[name] = "placement='replicate'" in str(error)
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
        "casting to float16": lambda module: module.half(),
        "casting to bfloat16": lambda module: module.bfloat16(),
        "casting to float64": lambda module: module.double(),
        "casting to float16 ": lambda module: module.to("cpu", torch.float16),
        " to float16": lambda module: module.type(torch.float16),
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


def check_states(rank: int) -> list:
    model = lorashard.shard(build_model())
    engine = lorashard.api.engine_of(model)
    seen = [{unit.state for unit in engine.units}]
    loss = model(**make_batch()).loss
    seen.append({unit.state for unit in engine.units})
    during: set = set()
    model.get_base_model().model.layers[3].mlp.register_full_backward_hook(
        lambda *a: during.update((unit.name, unit.state) for unit in engine.units)
    )
    model(**make_batch()).loss.backward()
    loss.backward()
    seen.append({unit.state for unit in engine.units})
    return [seen, ("layers.3", State.UNSHARDED) in during, ("layers.0", State.SHARDED) in during]


def test_units_pass_through_their_states():
    """A unit that stays UNSHARDED after a pass would pin a slot and starve the next one."""
    for seen, is_whole_in_its_backward, is_sharded_far_away in run_ranks(check_states, 2):
        assert seen[0] == {State.SHARDED}
        assert seen[1] == seen[2] == {State.SHARDED, State.IDLE}
        assert is_whole_in_its_backward and is_sharded_far_away


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
