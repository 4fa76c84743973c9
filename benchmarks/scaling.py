"""Predict how training scales from 1 to 1,024 GPUs, flat against hybrid sharding, what fits on cards of 24 GB in bf16
and in nf4, and the longest sequences that fit: `docs/scaling.md`.

    python benchmarks/scaling.py                   write docs/scaling.md from the record
    python benchmarks/scaling.py --trace           trace the models anew first, and write the record
    python benchmarks/scaling.py --table RECORD    print the document of a record

Nothing here is measured. Activations and work are traced from the models' code and kept in a record, since they differ
a little from one version of transformers to the next; the rest is arithmetic over the table of known GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import RECORDS, ROOT, describe_environment, format_table, write_record
from peft import LoraConfig, PeftModel
from transformers import LlamaConfig

from lorashard.config.placement import PlacementOptions, ResolvedPlacement
from lorashard.config.quantization_options import Quantization
from lorashard.planning.activations import Activations
from lorashard.planning.choose import Plan, make_plan, name_placement
from lorashard.planning.costs import Row, Workload, compute_row
from lorashard.planning.hardware import Cluster, find_gpu_type, usable_bytes
from lorashard.planning.size import ModelSize, build_meta_model, measure_model
from lorashard.planning.trace import Microbatch, trace
from lorashard.planning.tracker import Work

RECORD = RECORDS / "scaling-activations.json"
DOCUMENT = ROOT / "docs" / "scaling.md"
GPU_TYPE = "h100-sxm"
GPUS_PER_NODE = 8
GPU_COUNTS = (1, 2, 4, 8, 16, 64, 256, 1024)
TOKENS = (1024, 8192)
# The shapes of the Llama 3.1 family: layers, hidden size, intermediate size, attention heads.
SHAPES = {"8B": (32, 4096, 14336, 32), "70B": (80, 8192, 28672, 64), "405B": (126, 16384, 53248, 128)}
LORA = {"r": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
# What is planned for cards of 24 GB, and on how many of them; the mixture of experts has LoRA on the attention alone.
CARD_TYPE = "rtx4090"
CARD_TOKENS = 1024
MIXTURE = "30B-A3B"
CARDS = (("8B", (1,)), (MIXTURE, (1, 2)), ("70B", (1, 2, 4)))
FORMATS = {"bf16": None, "nf4": Quantization("nf4")}
# The longest sequences of LONG_MODEL: number and type of cards, all of which share each sequence; where its layers keep
# their inputs for backward.
LONG_MODEL = "8B"
LONG_CARDS = ((1, "rtx4090"), (1, "l40s"), (1, "h100-sxm"), (8, "h100-sxm"))
LONG_UNIT = 1024  # lengths are multiples of it
KEPT = {"card": False, "host": True}  # whether `activation_offloading` is on
# transformers' options of activation checkpointing: of all layers, and of none.
RECOMPUTING: dict[str, dict[str, Any] | None] = {"recomputed": {}, "saved": None}


def build(name: str) -> PeftModel:
    """Return a model of SHAPES, or the mixture, with its adapter, on the meta device."""
    if name == MIXTURE:
        folder = ROOT / "tests" / "models" / "Qwen" / "Qwen3-30B-A3B"
        lora = LORA | {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
        return build_meta_model(str(folder), LoraConfig(**lora), torch.bfloat16)
    num_layers, hidden_size, intermediate_size, num_heads = SHAPES[name]
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    )
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return build_meta_model(folder, LoraConfig(**LORA), torch.bfloat16)


def trace_all() -> dict[str, dict[str, Any]]:
    """Return the activations of one row of TOKENS tokens, by model and tokens; one layer stands for all."""
    return {name: {str(num_tokens): _trace(name, num_tokens) for num_tokens in TOKENS} for name in SHAPES}


def trace_cards() -> dict[str, dict[str, Any]]:
    """Return the activations of one row of CARD_TOKENS tokens, by model and format."""
    return {
        name: {label: _trace(name, CARD_TOKENS, quantization) for label, quantization in FORMATS.items()}
        for name, _ in CARDS
    }


def _trace(name: str, num_tokens: int, quantization: Quantization | None = None) -> dict[str, Any]:
    """Return the activations where all layers are recomputed, and where none is: `auto` chooses between the two."""
    return {
        label: _trace_one(name, Microbatch(1, num_tokens, checkpointing=checkpointing), quantization)
        for label, checkpointing in RECOMPUTING.items()
    }


def _trace_one(name: str, microbatch: Microbatch, quantization: Quantization | None = None) -> dict[str, Any]:
    values = dataclasses.asdict(trace(build(name), microbatch, quantization))
    return values | {way: values[way][-1] for way in ("forward", "backward", "layers_saved")}


def trace_longest() -> list[dict[str, Any]]:
    """Return the longest sequences that fit, with the activations of these and of the next longer ones."""
    size = measure_model(build(LONG_MODEL))
    found = []
    for (num_gpus, gpu_type), kept in itertools.product(LONG_CARDS, KEPT):
        row: dict[str, Any] = {"num_gpus": num_gpus, "gpu_type": gpu_type, "kept": kept}

        @functools.cache
        def read(count: int, row: dict[str, Any] = row) -> dict[str, Any]:
            return _trace_one(LONG_MODEL, make_long_microbatch(row, count * LONG_UNIT))

        def count_needed(count: int, row: dict[str, Any] = row, read: Any = read) -> int:
            plan = plan_long(size, row, read(count), count * LONG_UNIT)
            return min(other.peak_bytes for other in plan.rows) - plan.free_bytes

        # Bytes grow evenly with tokens, but for what comes in tiles.
        first, second = 16 * num_gpus, 32 * num_gpus
        slope = (count_needed(second) - count_needed(first)) / (second - first)
        longest = second - round(count_needed(second) / slope)
        while count_needed(longest) > 0:
            longest -= 1
        while count_needed(longest + 1) <= 0:
            longest += 1
        found.append(row | {"max_length": longest * LONG_UNIT, "fits": read(longest), "next": read(longest + 1)})
    return found


def make_long_microbatch(row: dict[str, Any], num_tokens: int) -> Microbatch:
    """Return one sequence, shared by all cards of a row."""
    return Microbatch(1, num_tokens, is_offloading=KEPT[row["kept"]], sequence_parallel_size=row["num_gpus"])


def plan_long(size: ModelSize, row: dict[str, Any], activations: dict[str, Any], num_tokens: int) -> Plan:
    """Return the plan for the cards of a row, where all layers are recomputed."""
    hardware = find_gpu_type(row["gpu_type"])
    cluster = Cluster(hardware, row["num_gpus"], 1, usable_bytes(hardware.memory_bytes))
    options = PlacementOptions(resident_layers=0, sequence_parallel_size=row["num_gpus"])
    return make_plan(size, Workload(_read_activations(activations, len(size.layers)), num_tokens), cluster, options)


def read_workload(found: dict[str, Any], num_layers: int, num_tokens: int) -> Workload:
    """Return the step of which the activations were kept."""
    kept = {label: _read_activations(values, num_layers) for label, values in found.items()}
    return Workload(kept["recomputed"], num_tokens, kept["saved"])


def _read_activations(values: dict[str, Any], num_layers: int) -> Activations:
    layers = {way: (Work(**values[way]),) * num_layers for way in ("forward", "backward")}
    layers["layers_saved"] = (values["layers_saved"],) * num_layers
    return Activations(**values | layers | {"rest": Work(**values["rest"])})


def make_cluster(num_gpus: int) -> Cluster:
    """Return `num_gpus` GPUs on nodes of eight, which have 2 TiB of memory each."""
    hardware = find_gpu_type(GPU_TYPE)
    on_node = min(num_gpus, GPUS_PER_NODE)
    return Cluster(hardware, on_node, num_gpus // on_node, usable_bytes(hardware.memory_bytes), 2 * 2**40)


def shard_row(size: ModelSize, workload: Workload, cluster: Cluster, group_size: int) -> Row:
    """Return the costs of sharding over groups of `group_size` GPUs."""
    return compute_row(size, workload, cluster, ResolvedPlacement("shard", group_size, 0, 1, None, "all"))


def make_rows(size: ModelSize, workload: Workload) -> Iterator[list[str]]:
    """Yield a row of the table for each number of GPUs."""
    for num_gpus in GPU_COUNTS:
        cluster = make_cluster(num_gpus)
        plan = make_plan(size, workload, cluster)
        cells = ["-"] * 5
        if num_gpus > 1:
            flat = shard_row(size, workload, cluster, num_gpus)
            cells[0] = show(flat, num_gpus)
            cells[3] = show_network(flat, cluster)
        if cluster.num_nodes > 1:
            hybrid = shard_row(size, workload, cluster, GPUS_PER_NODE)
            cells[1] = show(hybrid, num_gpus)
            cells[4] = "0"
        best = "nothing fits"
        if plan.chosen is not None:
            best = f"{_name(plan.choice, num_gpus)}: {plan.choice.tokens_per_s:,.0f}"
        recomputed = "-" if plan.checkpointing is None else str(plan.checkpointing.num_recomputed)
        yield [f"{num_gpus:,}", cells[0], cells[1], best, recomputed, cells[3], cells[4]]


def _name(row: Row, num_gpus: int) -> str:
    """Return a placement's name without the recomputed layers, which have a column of their own."""
    return name_placement(dataclasses.replace(row.placement, activation_checkpointing_layers="all"), num_gpus)


def show(row: Row, num_gpus: int) -> str:
    """Return tokens a second of each GPU and the share of a step that waits."""
    if row.lacks:
        return "does not fit"
    return f"{row.tokens_per_s / num_gpus:,.0f} ({row.wait_s / row.step_s:.0%})"


def show_network(row: Row, cluster: Cluster) -> str:
    """Return the GiB of the base that each node receives from others in a step."""
    return f"{row.gathered_bytes * (cluster.num_nodes - 1) / cluster.num_nodes / 2**30:,.0f}"


def make_card_rows(activations: dict[str, dict[str, Any]]) -> Iterator[list[str]]:
    """Yield a row of the table for each model, number of cards and format."""
    hardware = find_gpu_type(CARD_TYPE)
    for name, counts in CARDS:
        model = build(name)
        sizes = {label: measure_model(model, quantization) for label, quantization in FORMATS.items()}
        for num_gpus in counts:
            for label, size in sizes.items():
                workload = read_workload(activations[name][label], len(size.layers), CARD_TOKENS)
                cluster = Cluster(hardware, num_gpus, 1, usable_bytes(hardware.memory_bytes))
                plan = make_plan(size, workload, cluster)
                row = plan.choice
                assert plan.checkpointing is not None
                recomputed = f"{plan.checkpointing.num_recomputed} of {plan.checkpointing.num_layers}"
                cells = [f"{name}, {label}", str(num_gpus), _name(row, num_gpus), recomputed]
                host_bytes = row.host_bytes * num_gpus + row.file_bytes
                sizes_bytes = (size.base_bytes, row.peak_bytes, host_bytes, row.copied_bytes)
                cells += [f"{num_bytes / 2**30:,.1f}" for num_bytes in sizes_bytes]
                yield [*cells, f"{row.tokens_per_s:,.0f}", f"{row.wait_s / row.step_s:.0%}"]


def make_long_rows(size: ModelSize, longest: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield a row of the table for each of LONG_CARDS, and each place of what layers keep."""
    for row in longest:
        num_tokens = row["max_length"]
        plan = plan_long(size, row, row["fits"], num_tokens)
        best = plan.choice
        assert plan_long(size, row, row["next"], num_tokens + LONG_UNIT).chosen is None, row
        hidden_bytes = row["fits"]["hidden_bytes"] * len(size.layers) * row["num_gpus"] * KEPT[row["kept"]]
        host_bytes = best.host_bytes * row["num_gpus"] + best.file_bytes + hidden_bytes
        hardware = find_gpu_type(row["gpu_type"])
        card = f"{row['num_gpus']} x {hardware.memory_bytes / 2**30:.0f} GB ({row['gpu_type']})"
        cells = [card, row["kept"], f"{num_tokens:,}", name_placement(best.placement, row["num_gpus"])]
        cells += [f"{best.peak_bytes / 2**30:,.1f}", f"{host_bytes / 2**30:,.0f}"]
        yield [*cells, "-" if KEPT[row["kept"]] else f"{best.step_s:,.0f} s"]


def render(record: dict[str, Any]) -> str:
    """Return docs/scaling.md."""
    hardware = find_gpu_type(GPU_TYPE)
    parts = [
        HEAD.format(
            gpus=GPUS_PER_NODE,
            gpu_type=GPU_TYPE,
            flops=hardware.flops_per_s / 1e12,
            peer=hardware.peer_bytes_per_s / 1e9,
            network=hardware.network_bytes_per_s / 1e9,
            torch=record["environment"]["versions"]["torch"],
            transformers=record["environment"]["versions"]["transformers"],
        )
    ]
    header = (
        "GPUs",
        "flat: tokens/s of each (waits)",
        "hybrid: tokens/s of each (waits)",
        "the plan's choice: tokens/s of all",
        "its layers that recompute",
        "flat: GiB into a node",
        "hybrid: GiB into a node",
    )
    for name in SHAPES:
        size = measure_model(build(name))
        for num_tokens in TOKENS:
            workload = read_workload(record["activations"][name][str(num_tokens)], len(size.layers), num_tokens)
            title = f"## {name}, {num_tokens:,} tokens on each GPU a step, {len(size.layers)} layers"
            parts += [title, format_table(header, list(make_rows(size, workload)))]
    card = find_gpu_type(CARD_TYPE)
    parts += [
        CARDS_HEAD.format(
            tokens=CARD_TOKENS,
            gpu_type=CARD_TYPE,
            free=usable_bytes(card.memory_bytes) / 2**30,
            host=card.host_bytes_per_s / 1e9,
        ),
        format_table(
            (
                "model",
                "cards",
                "the plan's choice",
                "layers that recompute",
                "base, GiB",
                "peak of a card, GiB",
                "host memory in all, GiB",
                "copied to each card a step, GiB",
                "tokens/s of all",
                "waits",
            ),
            make_card_rows(record["cards"]),
        ),
        LONGEST_HEAD.format(unit=LONG_UNIT),
        format_table(
            (
                "cards",
                "layers keep their inputs on the",
                "longest `max_length`",
                "placement",
                "peak of a card, GiB",
                "host memory in all, GiB",
                "a step",
            ),
            make_long_rows(measure_model(build(LONG_MODEL)), record["longest"]),
        ),
    ]
    return "\n\n".join(parts) + "\n"


HEAD = """# How training scales: a prediction

Written by `python benchmarks/scaling.py`; a test keeps it so. **None of this is measured.** Nobody has timed
lorashard on more than one node: the bytes are the engine's (`tests/distributed/engine/test_costs.py` compares the
same formula with what 2, 4 and 2 x 2 ranks count), the seconds are arithmetic over data sheets.

Llama 3.1's shapes, LoRA with r 16 on all linear layers, bf16, one row a step, {gpus} x {gpu_type} with 2 TiB of host
memory on each node, {flops:.0f} TFLOPS, {peer:.0f} GB/s between the GPUs of a node and {network:.0f} GB/s into each
node, as programs see them. Activations are traced with torch {torch} and transformers {transformers}.

*Flat* shards the base over all GPUs, *hybrid* (`shard_group_size: node`) over those of each node, so that the base
never crosses the network; that is the default. In both all layers recompute their activations; *the plan's choice* is
what `placement: auto` takes, which recomputes as few as memory demands. *Waits* is the share of a step that waits for
the base. The last two columns are what each node receives of the base in a step."""

CARDS_HEAD = """## Cards of 24 GB: bf16 and nf4, {tokens:,} tokens on each a step

{gpu_type}, of which {free:.1f} GiB can be planned with, and {host:.0f} GB/s from the host's memory, whose size is not
known: compare it with the column. The 8B and the 70B as above; 30B-A3B is Qwen3's, a mixture of experts, with LoRA on
the attention alone. In nf4 the linear weights of decoder layers and the experts have 4.5 bits, and are unpacked by each
operation that reads them, in forward, recomputation and backward; that is in the time, at the speed of the card's
memory. `lorashard plan --model meta-llama/Llama-3.3-70B-Instruct --gpu_type {gpu_type} --gpus 2 --quantization nf4
--per_device_train_batch_size 1` shows every placement."""


LONGEST_HEAD = """## The longest sequence that fits: 8B in bf16, one sequence, predicted

As above, LoRA with r 16 on all linear layers, all of which recompute their activations. The longest `max_length`, in
multiples of {unit:,}, that the plan says fits: one multiple more does not. Layers keep their inputs for backward on the
*card*, or with `activation_offloading: true` in the *host*'s memory, whose size is not checked; the time of these
copies is not planned. Several cards all share each sequence (`sequence_parallel_size: 8`), which `auto` chooses where
fewer are not enough: each has an eighth of the tokens, and in attention an eighth of the heads over all tokens. Beyond
the 131,072 tokens that Llama 3.1 was made for, a plan warns.

For comparison, with ALST (Arctic Long Sequence Training, [arXiv 2506.13996](https://arxiv.org/abs/2506.13996)) its
authors report 500K tokens for Llama-8B on one H100. That is their figure for their setting, and was not tried here.
Among other things it computes MLPs a tile of the tokens at a time, which these rows do without (`mlp_tile_tokens` does
it)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="store_true", help="trace the models anew and write the record")
    parser.add_argument("--table", metavar="RECORD", type=Path, help="print the document of a record")
    arguments = parser.parse_args()
    if arguments.table:
        print(render(json.loads(arguments.table.read_text())))
        return
    if arguments.trace:
        traced = {"activations": trace_all(), "cards": trace_cards(), "longest": trace_longest()}
        write_record({"environment": describe_environment(), **traced}, RECORD)
    DOCUMENT.write_text(render(json.loads(RECORD.read_text())))
    print(f"wrote {DOCUMENT}")


if __name__ == "__main__":
    main()
