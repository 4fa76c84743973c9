"""The exactness ladder: every adapter gradient of a sharded model equals plain PEFT's, bit for bit.

Its rows (tests/helpers/ladder.py) let every two of its axes' values meet: family, placement, adapter, quantization,
activation checkpointing, offloading of activations, prefetch, dtype, dropout, rows of a layer's pieces, attention,
source of the base, number of ranks, and what is done with the model.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import pytest
import torch
import transformers.modeling_utils
from bitsandbytes.nn import Linear4bit
from helpers.bases import save_base
from helpers.forked_ranks import run_ranks
from helpers.ladder import MOE, NUM_QUICK, PLACEMENTS, PLAIN, describe, list_rows
from helpers.pairwise import Row
from helpers.scenarios import (
    SCENARIOS,
    Results,
    Scenario,
    deleted,
    loaded_later,
    make_lora,
    mixed_batch,
    one_step,
    other_modules,
    reading_the_base,
    run_scenario,
    switched_off,
    switching,
    weighted,
)
from helpers.tiny import (
    FAMILIES,
    build_base,
    build_model,
    disturb,
    find_differences,
    make_batch,
    set_checkpointing,
    take_gradients,
)
from peft import IA3Config, LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
)
from trl.models.activation_offloading import get_act_offloading_ctx_manager

import lorashard
from lorashard.engine import FrozenWeight
from lorashard.model.micro_batching import split_layers
from lorashard.model.stacks import find_decoder_stack

CPU_BUDGET_S = 130  # the whole array: some 85 models, plain and on one to four ranks
NUM_LAYERS = 4  # one more than there are slots, with a layer of prefetch
# Rows of whole blocks of 64, which is what bitsandbytes' CPU kernel is right for.
SIZES: dict[str, Any] = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=NUM_LAYERS)
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": dict(num_local_experts=3),
    "qwen3-moe": dict(num_experts=3, moe_intermediate_size=64, head_dim=16),
}
QUANTIZATIONS = {
    "none": None,
    "nf4": "nf4",
    "nf4 double": lorashard.Quantization("nf4", double_quant=True),
    "nf4 vocabulary": lorashard.Quantization("nf4", has_vocabulary=True),
    "int8": "int8",
    "fp8": "fp8",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


# -- models ------------------------------------------------------------------------------------------------------------


def save_bases(folder: Path) -> None:
    """Save a base of each family in several files, and adapters for the first that are loaded later."""
    for family in (*FAMILIES, *MOE):
        save_base(folder / family, family, max_shard_size="50KB", **SIZES | EXPERTS.get(family, {}))
    for family in MOE:
        keys = json.loads((folder / family / "model.safetensors.index.json").read_text())["weight_map"]
        assert any("experts.2." in key for key in keys), "this checkpoint does not need a conversion"
    for name, options in {
        "later": {},
        "later dora": {"use_dora": True},
        "later head": {"modules_to_save": ["lm_head"]},
    }.items():
        made = get_peft_model(build_base("llama", **SIZES), make_lora(**options))
        disturb(made)
        made.save_pretrained(folder / "later" / name)


def make_config(row: Row) -> PeftConfig:
    family, adapter = row["family"], row["adapter"]
    targets = ["q_proj", "o_proj"] if family in MOE else ["q_proj", "down_proj"]
    tokens: Any = [3, 5] if family == "llama-tied" else {"embed_tokens": [1, 2], "lm_head": [1, 2]}
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    options: dict[str, dict[str, Any]] = {
        "lora": {} if family in MOE else {"target_modules": "all-linear"},
        "few": {},
        "dora": {"use_dora": True},
        "whole": {"modules_to_save": ["lm_head", "input_layernorm"]},
        "whole, tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        "tokens": {"trainable_token_indices": tokens},
        "upper": {"layers_to_transform": [2, 3]},
        "vocabulary": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        "head": {"target_modules": ["q_proj", "lm_head"]},
        "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
        "dora vocabulary": {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "use_dora": True},
        "pissa": {"init_lora_weights": "pissa"},
        "olora": {"init_lora_weights": "olora"},
        "experts": {"target_modules": [], "target_parameters": experts},
        "experts of a layer": {"target_parameters": ["layers.1.mlp.experts.down_proj"]},
        "replicated": {"layer_replication": [[0, 3], [1, 4]]},
    }
    if adapter == "ia3":
        return IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    return LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": targets, "task_type": "CAUSAL_LM"} | options[adapter],
        lora_dropout=row["dropout"],
    )


def quantize(weight: torch.Tensor, name: str) -> torch.Tensor:
    """Quantize and dequantize as others do: bitsandbytes, and for fp8 the definition.

    Of nf4's own scales bitsandbytes' CPU kernel does not always take the nearest number: here it is the nearest.
    """
    rows = weight.reshape(-1, weight.shape[-1])
    if name == "int8":
        values, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(rows)
        found = torch.ops.bitsandbytes.int8_vectorwise_dequant(values, scales)
    elif name == "fp8":
        scales = rows.float().abs().amax(dim=1, keepdim=True) / 448
        found = (rows.float() / scales).to(torch.float8_e4m3fn).float() * scales
    else:
        packed, state = bnb.quantize_4bit(weight.reshape(-1, 64), quant_type="nf4", blocksize=64)
        if "double" in name:
            offset, map_ = state.absmax.double().mean().float(), bnb.create_dynamic_map()
            for block in state.absmax.split(256):  # in place
                largest = (block - offset).abs().amax()
                nearest = ((block - offset) * (1 / largest))[:, None].sub(map_).abs().argmin(dim=1)
                block.copy_(map_[nearest] * largest + offset)
        found = bnb.dequantize_4bit(packed, state)
    return found.to(weight.dtype).view(weight.shape)


@torch.no_grad()
def quantize_base(model: nn.Module, name: str) -> None:
    """Replace the linear weights of decoder layers, and experts, by what quantizing makes of them."""
    done = set()
    for path, parameter in model.named_parameters():
        is_adapter = any(part in path for part in ("lora_", "modules_to_save", "trainable_tokens", "ia3_"))
        is_vocabulary = "vocabulary" in name and ("lm_head" in path or "embed_tokens" in path)
        is_in_layer = ".layers." in f".{path}" and ".gate." not in path
        if not is_adapter and parameter.dim() > 1 and (is_in_layer or is_vocabulary) and parameter not in done:
            parameter.copy_(quantize(parameter.data, name))
            done.add(parameter)


def put_on_plain(folder: Path, row: Row, seed: int, quantizes: bool) -> PeftModel:
    """Return plain PEFT; with `quantizes` on the base's values as quantizing leaves them."""
    base = AutoModelForCausalLM.from_pretrained(
        folder / row["family"], dtype=DTYPES[row["dtype"]], attn_implementation=row["attention"]
    )
    # From files, what begins with the base's values begins with those that are computed with; PiSSA rewrites the
    # files. In memory PEFT has read them before.
    is_first = row["source"] == "load" and row["adapter"] not in ("pissa", "olora")
    quantizes = quantizes and row["quantization"] != "none"
    if quantizes and is_first:
        quantize_base(base, row["quantization"])
    torch.manual_seed(seed)
    model = get_peft_model(base, make_config(row))
    if quantizes and not is_first:
        quantize_base(model, row["quantization"])
    return model


def build_plain(folder: Path, row: Row) -> tuple[PeftModel, Results]:
    """Return the plain model that a row is compared with, and its adapter as it was made."""
    model = put_on_plain(folder, row, 7, True)
    made = take_made(model)
    if row["rows"] is not None:
        split_layers(find_decoder_stack(model)[1], row["rows"])
    # What is recomputed is the same; but of pieces the sum may be made in another order then.
    return get_ready(model, row, row["checkpointing"] if row["rows"] is not None else "off"), made


def build_sharded(folder: Path, row: Row, rank: int) -> tuple[PeftModel, Results]:
    """Return the sharded model; ranks that draw other random numbers must end with rank 0's."""
    options: dict[str, Any] = PLACEMENTS[row["placement"]] | {"quantization": QUANTIZATIONS[row["quantization"]]}
    if row["prefetch"] != 1:
        options["prefetch"] = row["prefetch"]
    if row["rows"] is not None:
        options["layer_microbatch_size"] = row["rows"]
    if row["world"] == 4:
        options["shard_group_size"] = 2
    if row["checkpointing"] == "some":
        options["activation_checkpointing_layers"] = 2
    if row["source"] == "memory":
        model = lorashard.shard(put_on_plain(folder, row, 7 + rank, False), **options)
    else:
        torch.manual_seed(7 + rank)
        options |= {"dtype": DTYPES[row["dtype"]]}
        if row["attention"] != "sdpa":  # the default
            options["attn_implementation"] = row["attention"]
        model = lorashard.load(str(folder / row["family"]), make_config(row), **options)
    made = take_made(model)
    model = get_ready(model, row, row["checkpointing"])
    if row["checkpointing"] == "some":
        layers = find_decoder_stack(model)[1]
        assert sum(layer.gradient_checkpointing for layer in layers) == 2
    return model, made


def take_made(model: PeftModel) -> Results:
    """Return what a new adapter begins with, its dtypes as well, and the buffers."""
    made = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    return {f"made {name}": tensor for name, tensor in (made | dict(model.named_buffers())).items()}


def get_ready(model: PeftModel, row: Row, checkpointing: str) -> PeftModel:
    disturb(model)
    set_checkpointing(model, "non-reentrant" if checkpointing == "some" else checkpointing)
    if row["rows"] is not None:
        model.config.use_cache = False  # with a cache a batch stays whole
    return model.train()


# -- activations on the host -------------------------------------------------------------------------------------------


class CopyToHost(torch.autograd.graph.saved_tensors_hooks):
    """transformers' `save_on_cpu`, without pinned memory; notes the address of each storage that it was handed."""

    seen: set[int] = set()

    def __init__(self, **options: Any) -> None:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.note(tensor)
            return tensor.clone()

        super().__init__(pack, lambda packed: packed)

    @classmethod
    def note(cls, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, FrozenWeight):
            cls.seen.add(tensor.untyped_storage().data_ptr())


def offload_checkpoints(model: PeftModel, checkpointing: str) -> AbstractContextManager[object]:
    """transformers' own hooks, placed around each layer, inside of the engine's."""
    transformers.modeling_utils.save_on_cpu = CopyToHost  # type: ignore[attr-defined]
    enable = model.get_base_model().activation_checkpointing_enable
    enable({"use_reentrant": checkpointing == "reentrant"}, offload=True)
    return nullcontext()


def offload_with_trl(model: PeftModel, checkpointing: str) -> AbstractContextManager[object]:
    """TRL's hooks, placed around the whole step; it looks at every parameter's storage before.

    It is told that the CPU is the accelerator.
    """
    torch.accelerator.current_accelerator = lambda *args, **kwargs: torch.device("cpu")  # type: ignore[assignment]
    torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]  # TRL asks for it beside bitsandbytes
    offload = get_act_offloading_ctx_manager(model, use_pin_memory=False, use_streams=False, min_offload_size=1)
    pack = offload.pack_hook

    def note(tensor: torch.Tensor) -> Any:
        CopyToHost.note(tensor)
        return pack(tensor)

    offload.pack_hook = note
    return offload


OFFLOADS = {"transformers": offload_checkpoints, "trl": offload_with_trl}


# -- the ladder --------------------------------------------------------------------------------------------------------


def list_scenarios(folder: Path, row: Row) -> tuple[Scenario, ...]:
    if row["scenarios"] in SCENARIOS:
        return SCENARIOS[row["scenarios"]]
    later = (switching, switched_off, mixed_batch, weighted, reading_the_base, other_modules)
    return (*later, loaded_later(folder / "later"), deleted)


def run_all(scenarios: tuple[Scenario, ...], model: PeftModel) -> Results:
    found: Results = {}
    for scenario in scenarios:
        found |= {f"{scenario.__name__}: {key}": value for key, value in run_scenario(scenario, model).items()}
    return found


def run_row(folder: Path, row: Row, rank: int) -> Results:
    """Return what a row's sharded model gives."""
    model, made = build_sharded(folder, row, rank)
    scenarios = list_scenarios(folder, row)
    if row["offload"] == "none":
        return made | run_all(scenarios, model)
    CopyToHost.seen.clear()
    offload = OFFLOADS[row["offload"]](model, row["checkpointing"])
    with offload:
        found = made | run_all(scenarios, model)
    assert CopyToHost.seen, "nothing was offloaded"
    slots = {slot.address for slot in lorashard.api.engine_of(model).pool}
    assert not slots & CopyToHost.seen, "a slot was offloaded"
    return found


def compare(rank: int, folder: Path, rows: list[Row], expected: list[Results]) -> dict[str, Any]:
    """Return what differs, row by row."""
    wrong: dict[str, Any] = {}
    for row, reference in zip(rows, expected, strict=True):
        found = run_row(folder, row, rank)
        different = find_differences(found, reference)
        different += [name for name in found.keys() & reference.keys() if found[name].dtype != reference[name].dtype]
        if different:
            wrong[describe(row)] = f"{len(different)} of {len(reference)}, such as {different[:3]}"
    return wrong


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    save_bases(folder)
    return folder


def find_wrong_rows(folder: Path, rows: list[Row]) -> dict[str, Any]:
    """Compare rows with plain models, which are run once, before there are ranks."""
    wrong: dict[str, Any] = {}
    for world_size in sorted({row["world"] for row in rows}):
        chosen = [row for row in rows if row["world"] == world_size]
        expected = []
        for row in chosen:
            model, made = build_plain(folder, row)
            expected.append(made | run_all(list_scenarios(folder, row), model))
        for rank, found in enumerate(run_ranks(compare, world_size, folder, chosen, expected)):
            wrong |= {f"rank {rank} of {world_size}: {row}": names for row, names in found.items()}
    return wrong


PARTS = {"quick 1": slice(0, 6), "quick 2": slice(6, 12), "quick 3": slice(12, NUM_QUICK)}
SLOW = pytest.param(slice(NUM_QUICK, None), marks=pytest.mark.slow)


@pytest.mark.parametrize("part", [*PARTS.values(), SLOW], ids=[*PARTS, "others"])
def test_gradients_equal_plain_peft(bases, part):
    """A slot overwritten too early, a handle that restores another unit, a swallowed hook, a range read from the wrong
    place, a scale of another block, an adapter that each rank has drawn for itself: any wrong byte shows."""
    assert find_wrong_rows(bases, list(list_rows()[part])) == {}


# -- what is near, and not equal ---------------------------------------------------------------------------------------


def test_ranks_with_slices_equal_one_process_accumulating():
    """DDP over the adapter: a slice on each rank gives what one process gives for all; the order of the sum differs."""
    for worst in run_ranks(check_slices, 2):
        assert worst < 1e-5


def check_slices(rank: int) -> float:
    plain, sharded = build_model(), lorashard.shard(build_model())
    parallel = torch.nn.parallel.DistributedDataParallel(sharded)
    for _ in range(2):
        for microbatch in range(2):
            (plain(**make_batch(seed=microbatch)).loss / 2).backward()
        parallel(**make_batch(seed=rank)).loss.backward()
        expected, found = take_gradients(plain), take_gradients(sharded)
        worst = max(float((found[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in expected)
    return worst


def test_gradients_are_close_to_bitsandbytes_own(bases):
    """Plain PEFT with bitsandbytes' own modules, on one device; another codebook, block or scale is off by percents.

    In float32: its modules unpack and multiply there as ours do, and nothing differed where this was written; another
    processor's kernels may add in another order. In bfloat16 those of a CPU with AVX512-BF16 round the scales as well,
    and gradients differ by 3 % of their norm.
    """
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(bases / "llama", dtype=torch.float32, quantization_config=config)
    assert isinstance(base.model.layers[0].mlp.up_proj, Linear4bit)
    torch.manual_seed(7)
    theirs = get_peft_model(base, make_lora())
    torch.manual_seed(7)
    options: dict[str, Any] = {"dtype": torch.float32, "quantization": "nf4", "device": torch.device("cpu")}
    ours = lorashard.load(str(bases / "llama"), make_lora(), "replicate", **options)
    found, expected = (run_scenario(one_step, get_ready(model, PLAIN, "off")) for model in (ours, theirs))
    assert found.keys() == expected.keys()
    assert max(float((found[n] - expected[n]).norm() / expected[n].norm()) for n in found) < 1e-5
