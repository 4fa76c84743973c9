"""The rows of the exactness ladder: what of a model, its placement and its adapter meets what."""

from __future__ import annotations

import functools
from typing import Any

from helpers.pairwise import Row, cover_pairs

SHARDED = ("shard", "host", "shard, one resident", "host, one resident")
PLACEMENTS: dict[str, dict[str, Any]] = {
    "shard": {"placement": "shard"},
    "host": {"placement": "host"},
    "shard, one resident": {"placement": "shard", "resident_layers": 1},
    "host, one resident": {"placement": "host", "resident_layers": 1},
    "shard, all resident": {"placement": "shard", "resident_layers": "all"},
    "replicate": {"placement": "replicate"},
    "file": {"placement": "file"},
}
MOE = ("mixtral", "qwen3-moe")
# The first value of an axis is the plainest one: it is taken where another would cover no more.
AXES: dict[str, tuple[Any, ...]] = {
    "placement": tuple(PLACEMENTS),
    "adapter": ("lora", "dora", "whole", "tokens", "upper", "vocabulary", "pissa"),
    "quantization": ("none", "nf4", "nf4 double", "nf4 vocabulary", "int8", "fp8"),
    "family": ("llama", "llama-tied", "qwen3", *MOE),
    "checkpointing": ("off", "non-reentrant", "reentrant", "around-call", "some"),
    "scenarios": ("steps", "passes", "fused", "several", "again", "packed"),
    "prefetch": (1, 0, 2),
    "offload": ("none", "transformers", "trl"),
    "source": ("load", "memory"),
    "dtype": ("float32", "bfloat16"),
    "dropout": (0.0, 0.1),
    "rows": (None, 1),
    "attention": ("sdpa", "eager"),
    "world": (2, 1),
}
PLAIN: Row = {axis: values[0] for axis, values in AXES.items()}


def is_allowed(row: Row) -> bool:
    """Tell whether the values of a row, or of a part of one, may meet."""

    def has(axis: str, *values: Any) -> bool:
        return axis in row and row[axis] in values

    def has_other(axis: str, *values: Any) -> bool:
        return axis in row and row[axis] not in values

    refused = (
        has("placement", "file") and has("source", "memory"),
        # What has no slots has nothing to prefetch into them.
        has_other("prefetch", 1) and has_other("placement", *SHARDED),
        # One rank shards over nobody.
        has("world", 1) and has("placement", "shard", "shard, one resident", "shard, all resident"),
        # A checkpoint around the layer's call recomputes all of its rows.
        has("rows", 1) and has("checkpointing", "around-call"),
        # A fused LM head passes over what an adapter has there.
        has("scenarios", "fused") and has("adapter", "tokens", "vocabulary"),
        # A graph that is kept, and a recomputation that is not, are PyTorch's error.
        has("scenarios", "again") and has_other("checkpointing", "off"),
        has("offload", "transformers") and has_other("checkpointing", "non-reentrant", "reentrant"),
        has("offload", "trl") and has_other("checkpointing", "off", "non-reentrant"),
        has_other("offload", "none") and has_other("scenarios", "steps", "packed"),
    )
    return not any(refused)


def pin(**values: Any) -> Row:
    return PLAIN | values


# Three values that a past bug needed at once, or that are in no axis; those that `make test` takes come first.
PINNED: tuple[Row, ...] = (
    # A base that is sharded over two of four ranks, and replicated across.
    pin(world=4, prefetch=0, dropout=0.1, checkpointing="reentrant"),
    # Recomputation under sharding draws the dropout masks that the forward drew.
    pin(dropout=0.1, checkpointing="non-reentrant", prefetch=0, family="qwen3-moe", quantization="nf4"),
    pin(dropout=0.1, checkpointing="around-call", family="qwen3", scenarios="passes"),
    # The hooks of whoever offloads nest inside of the engine's, or outside; a piece of a batch is in neither's sight.
    pin(offload="transformers", checkpointing="non-reentrant", family="llama-tied", rows=1, source="memory"),
    pin(offload="trl", family="llama-tied", source="memory", quantization="int8", scenarios="packed"),
    # A handle stays valid after a backward, and after an exception; of a quantized weight too.
    pin(scenarios="again", prefetch=0, source="memory", dtype="bfloat16"),
    pin(scenarios="again", quantization="nf4 double", prefetch=0, attention="eager"),
    # What is put on later, by itself or from files, reads the base wherever it rests, and in what it is kept.
    pin(scenarios="added", quantization="nf4", placement="host", prefetch=0, adapter="few"),
    # Experts are fused while they are read: blocks of one must not be scaled by another's.
    pin(family="mixtral", adapter="experts", quantization="nf4", checkpointing="non-reentrant"),
    pin(family="qwen3-moe", adapter="experts", placement="file", scenarios="packed"),
    # A weight that two layers, or the embedding and the head, have in common.
    pin(adapter="replicated", quantization="nf4", prefetch=0),
    pin(adapter="whole, tied", family="llama-tied", checkpointing="reentrant"),
    pin(adapter="dora vocabulary", quantization="nf4 vocabulary", source="memory", scenarios="several"),
    # What PiSSA and OLoRA leave of the base is what is quantized, once.
    pin(adapter="olora", quantization="nf4", placement="host", source="memory", scenarios="fused"),
    pin(adapter="pissa", quantization="fp8", placement="shard, one resident"),
    # Backward ends above what checkpoints itself and asks for gradients of the embedding's output.
    pin(adapter="upper", checkpointing="reentrant", rows=1, source="memory"),
    # Activation checkpointing of some layers is switched on over whatever was chosen; dropout draws the same masks.
    pin(checkpointing="some", prefetch=2, dropout=0.1, scenarios="several", adapter="tokens"),
    # One rank: nothing is gathered, and the host's copies are all that is late.
    pin(world=1, placement="host", prefetch=0, checkpointing="non-reentrant", dropout=0.1, source="memory"),
    # -- The rest is left to CI. -----------------------------------------------------------------------------------
    pin(world=1, source="memory", scenarios="fused"),
    pin(dropout=0.1, checkpointing="reentrant", family="llama-tied", source="memory"),
    pin(offload="transformers", checkpointing="reentrant", prefetch=0, source="memory"),
    pin(scenarios="added", source="memory", adapter="few"),
    pin(scenarios="added", quantization="nf4", placement="replicate", source="memory", adapter="dora"),
    pin(family="mixtral", adapter="experts of a layer", prefetch=0),
    pin(adapter="ia3", quantization="nf4"),
    # The head that a copy of it trains beside is what a pass without the adapter computes with.
    pin(adapter="whole", quantization="nf4 vocabulary", source="memory", scenarios="passes"),
    pin(adapter="tokens", quantization="nf4 vocabulary", source="memory", scenarios="passes"),
    pin(adapter="head", family="llama-tied", prefetch=0),
    pin(adapter="embedding", family="llama-tied", prefetch=0, checkpointing="non-reentrant"),
    pin(world=4, scenarios="several", placement="host", quantization="nf4 double", checkpointing="non-reentrant"),
    pin(world=4, scenarios="packed", family="llama-tied", rows=1, dtype="bfloat16", source="memory"),
)
NUM_QUICK = 18


@functools.cache
def list_rows() -> tuple[Row, ...]:
    """Return all rows: first those that `make test` takes."""
    return tuple(cover_pairs(AXES, is_allowed, PINNED))


def describe(row: Row) -> str:
    """Say in what a row differs from the plainest one."""
    return ", ".join(f"{axis}: {value}" for axis, value in row.items() if value != PLAIN[axis]) or "plain"
