"""Compiled decoder layers: the same gradients, few graphs, the same adapter files."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from helpers.forked_ranks import run_ranks
from helpers.tiny import add_lora, build_base, build_model, find_differences, make_batch, take_gradients
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from torch._dynamo import config as dynamo
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.nn.parallel import DistributedDataParallel

import lorashard
from lorashard.config.placement import PlacementOptions
from lorashard.errors import ConfigError
from lorashard.model.compiling import compile_layers, read_compile_options

CPU_BUDGET_S = 90  # torch compiles
Results = dict[str, torch.Tensor]
CPU = torch.device("cpu")
# What torch.compile traces and differentiates, run by the kernels of eager mode: every bit can be compared.
EXACT = {"backend": "aot_eager", "fullgraph": True}


def train(model: PeftModel, lengths: Sequence[int] = (12, 9, 9)) -> Results:
    """Return gradients and loss of a microbatch of each length."""
    torch.manual_seed(5)
    found: Results = {}
    for seed, tokens in enumerate(lengths):
        loss = model(**make_batch(seed, tokens=tokens), use_cache=False).loss
        loss.backward()
        gradients = take_gradients(model) | {"loss": loss.detach()}
        found |= {f"{seed} {name}": value for name, value in gradients.items()}
    return found


def split(case: dict) -> tuple[dict, dict]:
    """Return what is for the model and what is for `shard`."""
    options = {name: value for name, value in case.items() if name in PlacementOptions.model_fields}
    return {name: value for name, value in case.items() if name not in options}, options


def compare_compiled(rank: int, cases: list[dict], lengths: Sequence[int]) -> dict[str, object]:
    found = {}
    for case in cases:
        plain, options = split(case)
        torch.compiler.reset()
        counters.clear()
        if "layer_microbatch_size" in options:  # it changes the order of sums
            expected = train(lorashard.shard(build_model(**plain), **options), lengths)
        else:
            expected = train(build_model(**plain), lengths)
        sharded = lorashard.shard(build_model(**plain), **options, torch_compile=EXACT)
        wrong = find_differences(train(sharded, lengths), expected)
        found[str(case)] = (wrong, counters["stats"]["unique_graphs"])
    return found


# With the most graphs: by input that requires a gradient or not (the first layer's), by fixed and dynamic lengths, and
# by chunks of a batch with and without padding and an offset, but not by layer. On one rank the host is where weights
# rest apart from their slots.
CASES = [
    (dict(placement="host", checkpointing="non-reentrant", dropout=0.1, target_modules=["q_proj", "down_proj"]), 1)
]
# Layers in pieces, resident and recomputed or not, on ranks that gather the others.
RANKS = [
    (dict(resident_layers=2, activation_checkpointing_layers=3, checkpointing="non-reentrant", prefetch=0), 4),
]


@pytest.mark.parametrize(
    ("world_size", "cases", "lengths"),
    [(1, CASES, (12, 12)), pytest.param(2, RANKS, (12, 9), marks=pytest.mark.slow)],
    ids=["one rank", "ranks"],
)
def test_gradients_equal_plain_peft_and_layers_share_graphs(world_size, cases, lengths):
    """Catches a weight that the compiled code keeps for another unit's backward, and a guard that fails by layer."""
    for found in run_ranks(compare_compiled, world_size, [case for case, _ in cases], lengths):
        for case, most in cases:
            wrong, num_graphs = found[str(case)]
            assert wrong == [], case
            assert 1 <= num_graphs <= most, (case, num_graphs)


def compare_modes(rank: int, folder: Path) -> list[str]:
    """Return what differs between a compiled and an uncompiled model in use: evaluation, generation, files."""
    plain = build_model()
    sharded = lorashard.shard(build_model(), "host", torch_compile=EXACT)
    wrong = find_differences(train(sharded, (12,)), train(plain, (12,)))
    for model in (plain, sharded):
        model.eval()
    batch = make_batch(seed=8)
    with torch.no_grad():
        same = [torch.equal(sharded(**batch, use_cache=c).logits, plain(**batch, use_cache=c).logits) for c in (0, 1)]
        with sharded.disable_adapter(), plain.disable_adapter():
            same.append(torch.equal(sharded(**batch, use_cache=False).logits, plain(**batch, use_cache=False).logits))
    num_graphs = counters["stats"]["unique_graphs"]
    tokens = [model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False) for model in (plain, sharded)]
    same += [torch.equal(*tokens), counters["stats"]["unique_graphs"] == num_graphs]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sharded(**batch).loss.backward()
    same.append(any("use_cache=False" in str(warning.message) for warning in caught))
    sharded.save_pretrained(folder / f"compiled{rank}")
    plain.save_pretrained(folder / f"plain{rank}")
    return wrong + [f"{index}" for index, is_same in enumerate(same) if not is_same]


@pytest.mark.slow
def test_compiled_models_are_used_and_saved_as_others(tmp_path):
    """Catches `_orig_mod.` in an adapter's keys, a graph for each new token, and layers that quietly run uncompiled."""
    assert run_ranks(compare_modes, 1, tmp_path) == [[]]
    compiled, plain = (load_file(tmp_path / f"{name}0" / "adapter_model.safetensors") for name in ("compiled", "plain"))
    assert find_differences(compiled, plain) == []
    restored = PeftModel.from_pretrained(build_base(), tmp_path / "compiled0")
    expected = PeftModel.from_pretrained(build_base(), tmp_path / "plain0")
    assert torch.equal(restored(**make_batch()).logits, expected(**make_batch()).logits)


def compare_inductor(rank: int) -> list[tuple[list[str], float]]:
    """Return what differs from the same layers compiled unsharded, and how far the loss is from the uncompiled one."""
    found = []
    for case in (dict(checkpointing="non-reentrant", target_modules=["q_proj", "down_proj"]),):
        torch.compiler.reset()
        plain = train(build_model(**case), (12,))
        model = build_model(**case)
        compile_layers(model.get_base_model().model.layers, read_compile_options(True, CPU))
        unsharded = train(model, (12,))
        sharded = train(lorashard.shard(build_model(**case), "host", torch_compile=True), (12,))
        loss = max(float((sharded[name] - plain[name]).abs()) for name in plain if name.endswith("loss"))
        found.append((find_differences(sharded, unsharded), loss))
    return found


@pytest.mark.slow
def test_inductor_gives_the_gradients_of_the_same_code_unsharded_and_the_same_loss(tmp_path, monkeypatch):
    """Catches a weight of another unit in code that torch's own compiler makes: against eager it rounds otherwise."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # not code that was made for other instructions
    for ((wrong, loss),) in run_ranks(compare_inductor, 1):
        assert wrong == [] and loss < 1e-5


class Adapted(nn.Module):
    """A layer that has more to train than DDP's first bucket holds, 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(640, 640), nn.Linear(640, 640)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(hidden).relu())


def count_graphs(rank: int) -> tuple[int, bool]:
    """Return how many graphs are compiled for a layer inside DDP, and whether dynamo's own setting is as it was."""
    graphs = []

    def remember(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable:
        graphs.append(graph)
        return graph.forward

    layer = Adapted()
    compile_layers([layer], {"backend": remember})
    DistributedDataParallel(layer, bucket_cap_mb=1)(torch.ones(2, 640))
    return len(graphs), bool(dynamo.optimize_ddp)


def test_ddp_does_not_cut_the_graph_of_a_layer():
    """Catches dynamo's optimizer for DDP, which splits a layer's graph wherever a bucket of gradients ends."""
    assert run_ranks(count_graphs, 2) == [(1, True)] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "reduce-overhead"}, "CUDA graphs"),
        ({"options": {"triton.cudagraphs": True}}, "CUDA graphs"),
        ({"backend": "nope"}, "nope"),
        ({"mode": "fastest"}, "fastest"),
        ({"speed": 1}, "speed"),
    ],
)
def test_what_torch_refuses_is_said_before_anything_is_loaded(options, message):
    """Catches a wrong option that fails in the first step, minutes later."""
    with pytest.raises(ConfigError, match=message):
        read_compile_options(options, CPU)


def test_inductor_without_a_compiler_is_refused(monkeypatch):
    """Catches a page of generated code as the answer to a missing g++."""
    monkeypatch.setattr(inductor.cpp, "cxx", ("no-such-compiler",))
    with pytest.raises(ConfigError, match="g\\+\\+"):
        read_compile_options(True, CPU)
    assert read_compile_options({"backend": "aot_eager"}, CPU) == {"backend": "aot_eager"}


def test_a_replaced_forward_is_refused():
    """Catches layers that look compiled and are not, because their instances run another forward."""
    layers = add_lora(build_base()).get_base_model().model.layers
    layers[1].forward = copy.copy(layers[1].forward)
    with pytest.raises(ConfigError, match="replaced"):
        compile_layers(layers, EXACT)
