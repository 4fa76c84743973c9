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
from lorashard.errors import ConfigError
from lorashard.model.compiling import compile_layers, read_compile_options

CPU_BUDGET_S = 140  # torch compiles
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


def compare_compiled(rank: int, model: dict, options: dict, lengths: Sequence[int]) -> tuple[list[str], int]:
    """Return what differs from the uncompiled model, and how many graphs were compiled."""
    expected = train(build_model(**model), lengths)
    counters.clear()
    found = train(lorashard.shard(build_model(**model), **options, torch_compile=EXACT), lengths)
    return find_differences(found, expected), counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("world_size", "model", "options", "lengths", "most_graphs"),
    [
        # On one rank the host is where weights rest apart from their slots. One graph, whichever layer it is.
        (1, dict(dropout=0.1, target_modules=["q_proj", "down_proj"]), dict(placement="host"), (12, 12), 1),
        # By input that requires a gradient or not (the first layer's), and by fixed and dynamic lengths.
        pytest.param(
            2,
            {},
            dict(resident_layers=2, activation_checkpointing_layers=3, prefetch=0),
            (12, 9),
            4,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one rank", "ranks"],
)
def test_gradients_equal_plain_peft_and_layers_share_graphs(world_size, model, options, lengths, most_graphs):
    """Catches a weight that the compiled code keeps for another unit's backward, and a guard that fails by layer."""
    model = model | {"checkpointing": "non-reentrant"}
    for wrong, num_graphs in run_ranks(compare_compiled, world_size, model, options, lengths):
        assert wrong == [] and 1 <= num_graphs <= most_graphs


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


def compare_fused(rank: int, dtype: torch.dtype) -> tuple[list[str], float]:
    """Return what differs from the same layers compiled unsharded, and how far the farthest is from exact numerics.

    The second, of the loss and each gradient, is the largest difference by the largest value. In bfloat16 it is alone.
    """
    options = dict(checkpointing="non-reentrant", target_modules=["q_proj", "down_proj"], dtype=dtype)
    exact = train(build_model(**options), (12,))
    fused = train(lorashard.shard(build_model(**options), "host", numerics="fused"), (12,))
    distance = max(float((fused[name] - exact[name]).abs().max() / exact[name].abs().max()) for name in exact)
    if dtype == torch.bfloat16:
        return [], distance
    model = build_model(**options)
    compile_layers(model.get_base_model().model.layers, read_compile_options(True, CPU))
    return find_differences(fused, train(model, (12,))), distance


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_fused_gives_the_gradients_of_the_same_code_unsharded_within_its_tolerance(
    dtype, tolerance, tmp_path, monkeypatch
):
    """Catches a weight of another unit in code that torch's own compiler makes, and `fused` that computes as exact."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # not code that was made for other instructions
    [(wrong, distance)] = run_ranks(compare_fused, 1, dtype)
    assert wrong == [] and 0 < distance < tolerance


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
def test_what_torch_refuses_is_refused_before_anything_is_loaded(options, message):
    """Catches a wrong option that fails in the first step, minutes later."""
    with pytest.raises(ConfigError, match=message) as caught:
        read_compile_options(options, CPU)
    assert caught.value.option == "torch_compile"


def test_inductor_without_a_compiler_is_refused():
    """Catches a page of generated code as the answer to a missing g++."""
    with inductor.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(ConfigError, match="g\\+\\+"):
        read_compile_options(True, CPU)
    assert read_compile_options({"backend": "aot_eager"}, CPU) == {"backend": "aot_eager"}


def test_a_replaced_forward_is_refused():
    """Catches layers that look compiled and are not, because their instances run another forward."""
    layers = add_lora(build_base()).get_base_model().model.layers
    layers[1].forward = copy.copy(layers[1].forward)
    with pytest.raises(ConfigError, match="replaced"):
        compile_layers(layers, EXACT)
