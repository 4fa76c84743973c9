"""Backward ends at the lowest decoder layer that trains: what is gathered, kept and computed, and equal gradients."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch
from helpers.forked_ranks import run_ranks
from helpers.scenarios import one_step
from helpers.tiny import CHECKPOINTING, NUM_LAYERS, build_model, find_differences, make_batch, take_gradients
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import DynamicCache, Gemma4ForCausalLM, Gemma4TextConfig

import lorashard
from lorashard.engine import Unit

Results = dict[str, torch.Tensor]
TARGETS = ["q_proj", "down_proj"]


@contextlib.contextmanager
def noted_gathers() -> Iterator[list[str]]:
    """Collect the names of the units that are gathered."""
    names: list[str] = []
    original = Unit.unshard

    def unshard(unit: Unit, *args) -> None:
        names.append(unit.name)
        original(unit, *args)

    Unit.unshard = unshard
    try:
        yield names
    finally:
        Unit.unshard = original


def make_model(checkpointing: str, layers: list[int], dropout: float = 0.1) -> PeftModel:
    """As trainers have it: whoever checkpoints activations asks for gradients of the embedding's output."""
    model = build_model(
        checkpointing=checkpointing, dropout=dropout, layers_to_transform=layers, target_modules=TARGETS
    )
    model.enable_input_require_grads()
    return model


def compare(rank: int, cases: list[tuple[str, list[int], str, int | None]]) -> list:
    wrong: list = []
    for checkpointing, layers, placement, rows in cases:
        if rows is not None and checkpointing == "around-call":
            continue  # refused
        results = []
        for is_sharded in (False, True):
            model = make_model(checkpointing, layers, dropout=0.0 if rows else 0.1)
            if is_sharded:
                model = lorashard.shard(model, placement, layer_microbatch_size=rows)
            torch.manual_seed(4)
            one_step(model)
            loss = model(**make_batch()).loss
            with noted_gathers() as gathered:
                loss.backward()
            results.append(take_gradients(model) | {"loss": loss.detach()})
        below = [name for name in gathered if name in {f"layers.{i}" for i in range(layers[0])}]
        # A checkpoint around the call, as older transformers have it, hides that the graph ends: one is prefetched.
        allowed = 1 if checkpointing == "around-call" else 0
        wrong += (
            [(checkpointing, layers, name) for name in find_differences(results[1], results[0])] if not rows else []
        )
        wrong += [(checkpointing, layers, below)] if len(below) > allowed else []
        is_close = all(torch.allclose(results[1][n], results[0][n], rtol=1e-4, atol=1e-6) for n in results[0])
        wrong += [] if is_close else [(checkpointing, layers, "far off")]
    return wrong


def test_nothing_below_is_gathered_in_backward():
    """With the embedding's output made to require a gradient, backward would continue, and gather, down to it."""
    layers = itertools.cycle(([3], [2, 4], [5]))
    cases = [(checkpointing, next(layers), "shard", None) for checkpointing in CHECKPOINTING]
    cases += [("non-reentrant", [3], "host", None), ("reentrant", [3], "shard", 1)]
    assert run_ranks(compare, 2, cases) == [[], []]


def count_saved_bytes(model: PeftModel) -> int:
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**make_batch(rows=4, tokens=64)).loss
    loss.backward()
    model.zero_grad()
    return sum(saved.values())


def check_memory(rank: int) -> list[list[int]]:
    found = []
    for asks in (False, True):
        model = build_model(layers_to_transform=[NUM_LAYERS - 1], target_modules=TARGETS)
        if asks:
            model.enable_input_require_grads()
        found.append([count_saved_bytes(model), count_saved_bytes(lorashard.shard(model, "shard"))])
    return found


def test_nothing_below_is_kept_for_backward():
    """A graph that nobody needs holds the activations of every layer below."""
    (plain, sharded), (plain_asked, sharded_asked) = run_ranks(check_memory, 1)[0]
    assert plain_asked > 2 * plain, "plain PEFT keeps every layer's: this test tests nothing"
    assert sharded_asked < 1.1 * sharded


def check_what_must_go_on(rank: int) -> list:
    """Cases in which backward must reach the first layer, or what lies before it."""
    wrong = []
    embeddings = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(6))

    def own_embeddings(model: PeftModel) -> Results:
        inputs = embeddings.clone().requires_grad_()
        model(inputs_embeds=inputs, labels=make_batch()["labels"]).loss.backward()
        return take_gradients(model) | {"inputs": inputs.grad}

    def switched(model: PeftModel) -> Results:
        lower = LoraConfig(r=4, target_modules=TARGETS, layers_to_transform=[1], init_lora_weights=False)
        torch.manual_seed(8)
        model.add_adapter("lower", lower)
        found = one_step(model)
        model.set_adapter("lower")
        found |= {f"lower {name}": value for name, value in one_step(model).items()}
        model.base_model.set_adapter(["default", "lower"])
        found |= {f"both {name}": value for name, value in one_step(model).items()}
        model.set_adapter("default")
        return found | {f"again {name}": value for name, value in one_step(model).items()}

    def run_twice(model: PeftModel) -> Results:
        """Some models pass through their layers again: the second time backward must go through them all."""
        inner = model.get_base_model().model
        stack = list(inner.layers)
        inner.layers = torch.nn.ModuleList([*stack, *stack])
        inner.config.num_hidden_layers = 2 * NUM_LAYERS
        return one_step(model)

    def cached(model: PeftModel) -> Results:
        """The keys and values of a prompt that is learned, say."""
        torch.manual_seed(9)
        pairs = [[torch.randn(2, 2, 3, 8).requires_grad_() for _ in range(2)] for _ in range(NUM_LAYERS)]
        model(**make_batch(tokens=9), past_key_values=DynamicCache(pairs)).loss.backward()
        return take_gradients(model) | {f"cache {i}": pair[0].grad for i, pair in enumerate(pairs)}

    tied = {"family": "llama-tied"}
    cases = [
        ("own embeddings", {}, own_embeddings),
        ("cache", {}, cached),
        ("tied tokens", tied | {"trainable_token_indices": [3, 5]}, one_step),
        ("tied embeddings", tied | {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, one_step),
        ("switched", {}, switched),
        ("embeddings adapted", {"target_modules": ["embed_tokens", "q_proj"]}, one_step),
        ("embeddings saved", {"modules_to_save": ["embed_tokens"]}, one_step),
        ("tokens", {"trainable_token_indices": [3, 5]}, one_step),
        ("head alone", {"target_modules": ["lm_head"], "layers_to_transform": None}, one_step),
        ("norm", {"modules_to_save": ["norm", "lm_head"]}, one_step),
        ("run twice", {"layers_to_transform": [4]}, run_twice),
    ]
    for (name, options, scenario), checkpointing in zip(
        cases, itertools.cycle(("non-reentrant", "reentrant")), strict=False
    ):
        if name == "cache":
            checkpointing = "off"  # no cache with the others
        results = []
        for is_sharded in (False, True):
            defaults = {"target_modules": TARGETS, "layers_to_transform": [3]}
            model = build_model(checkpointing=checkpointing, **defaults | options)
            model.enable_input_require_grads()
            results.append(scenario(lorashard.shard(model, "host") if is_sharded else model))
        wrong += [(name, checkpointing, n) for n in find_differences(results[1], results[0])]
    return wrong


def test_what_lies_below_and_trains_is_reached():
    """Cut too high, an adapter never trains, and the loss goes down all the same."""
    assert run_ranks(check_what_must_go_on, 1) == [[]]


def test_a_projection_listed_after_the_layers_that_runs_before_is_reached():
    """Gemma 4 makes inputs for each layer; the modules' order says that these come last."""
    config = Gemma4TextConfig(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=99,
    )  # fmt: skip
    targets = r".*layers\.(2|3)\..*(q_proj|down_proj)|.*per_layer_model_projection"
    results = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model = Gemma4ForCausalLM(config)
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
        results.append(one_step(lorashard.shard(model, "host") if is_sharded else model))
    assert find_differences(results[1], results[0]) == []


def test_a_pass_that_reaches_no_layer_leaves_no_floor_behind():
    """A layer that somebody calls alone afterward would run without gradients."""
    model = lorashard.shard(build_model(target_modules=["lm_head"]), "replicate")
    one_step(model)
    layer = model.get_base_model().model.layers[0]
    hidden = torch.ones(1, 4, 32, requires_grad=True)
    rotary = model.get_base_model().model.rotary_emb(hidden, torch.arange(4)[None])
    assert layer(hidden, position_embeddings=rotary).grad_fn is not None


def check_interrupt(rank: int) -> bool:
    model = lorashard.shard(make_model("off", [3]), "shard")
    stack = model.get_base_model().model.layers
    handle = stack[1].mlp.register_forward_hook(lambda *args: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        one_step(model)
    handle.remove()
    return torch.is_grad_enabled() and bool(one_step(model))


def test_an_interrupt_leaves_gradients_on():
    """Ctrl-C inside of a layer that runs without gradients would leave a notebook unable to train."""
    assert run_ranks(check_interrupt, 1) == [True]
