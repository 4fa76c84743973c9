"""What is chosen and why, from sizes and speeds made up for the test: no model, no measuring."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from helpers.planning import make_size

from lorashard.config.placement import PlacementOptions, ResolvedPlacement
from lorashard.errors import ConfigError
from lorashard.planning.activations import Activations, recompute_some
from lorashard.planning.choose import Plan, make_plan, name_placement
from lorashard.planning.costs import Workload, compute_row, gather_seconds
from lorashard.planning.hardware import Cluster, find_gpu_type
from lorashard.planning.memory import count_adapter_bytes
from lorashard.planning.table import render_plan
from lorashard.planning.tracker import Work

GIB = 2**30
NUM_LAYERS = 8
GPU = replace(
    find_gpu_type("rtx4090"),
    flops_per_s=1e14,
    memory_bytes_per_s=1e12,
    host_bytes_per_s=25e9,
    file_bytes_per_s=9e9,
    peer_bytes_per_s=200e9,
    network_bytes_per_s=50e9,
    kernel_s=0.0,
)
SIZE = make_size(NUM_LAYERS, GIB, GIB // 8, 4000)


def make_activations(layer_s: float = 0.1, peak_bytes: int = GIB, recompute: int = 2) -> Activations:
    """Return a microbatch whose layers compute for `layer_s` forward on GPU."""
    forward, backward = Work(layer_s * GPU.flops_per_s), Work(recompute * layer_s * GPU.flops_per_s)
    return Activations(
        saved_bytes=peak_bytes // 2,
        layer_bytes=peak_bytes // 2,
        logits_bytes=0,
        layers_saved=(peak_bytes // 2 // NUM_LAYERS,) * NUM_LAYERS,
        forward=(forward,) * NUM_LAYERS,
        backward=(backward,) * NUM_LAYERS,
        rest=Work(),
    )


def make_cluster(ranks: int = 4, nodes: int = 1, free_bytes: int = 24 * GIB, **hardware: Any) -> Cluster:
    return Cluster(replace(GPU, **hardware), ranks, nodes, free_bytes, 512 * GIB)


def plan(activations=None, cluster=None, **options: Any) -> Plan:
    workload = Workload(activations or make_activations(), 4096)
    return make_plan(SIZE, workload, cluster or make_cluster(), PlacementOptions(**options))


def name_choice(made: Plan, cluster: Cluster) -> str:
    return name_placement(made.choice.placement, cluster.num_ranks)


def test_a_base_that_fits_is_replicated():
    """Catches a model sharded that fits on each GPU, which costs a third of the speed."""
    made = plan()
    assert made.chosen == 0
    assert made.choice.placement.placement == "replicate"
    assert "(9.3 of 24.0 GiB)" in made.reason


def test_the_fastest_that_fits_is_chosen():
    """Catches a choice by order alone: which of gathers and host copies is faster depends on the links."""
    cluster = make_cluster(free_bytes=7 * GIB)
    slow_peers = make_cluster(free_bytes=7 * GIB, peer_bytes_per_s=5e9, host_bytes_per_s=50e9)
    quick = make_activations(layer_s=0.001)
    assert name_choice(plan(cluster=cluster, activations=quick), cluster).startswith("shard")
    # One GPU has no peers: there is the host, and there are files.
    alone = make_cluster(1, free_bytes=7 * GIB)
    assert name_choice(plan(cluster=alone, activations=quick), alone).startswith("host")
    row = plan(cluster=slow_peers, activations=quick).choice
    assert row.wait_s > 0.5 * row.step_s


def test_of_equals_the_simplest_is_chosen():
    """Catches memory spent on resident layers that gain nothing, since every gather is hidden."""
    cluster = make_cluster(free_bytes=9 * GIB)
    assert name_choice(plan(cluster=cluster), cluster) == "shard"


def test_resident_layers_are_the_most_that_fit():
    """Catches spare memory left unused where it would save gathers, and one layer too many."""
    cluster = make_cluster(free_bytes=9 * GIB, peer_bytes_per_s=5e9, host_bytes_per_s=2e8, file_bytes_per_s=2e8)
    made = plan(cluster=cluster, activations=make_activations(layer_s=0.001))
    assert name_choice(made, cluster) == "shard, resident_layers 3"
    more = replace(made.choice.placement, resident_layers=4)
    workload = Workload(make_activations(layer_s=0.001), 4096)
    assert compute_row(SIZE, workload, cluster, more).lacks is not None


def test_nothing_that_fits_is_no_choice():
    """Catches an out-of-memory error in the first step, where the plan knew better, and a placement other than the one
    that was given."""
    for made, amount in (
        (plan(activations=make_activations(peak_bytes=40 * GIB)), "of 24.0 GiB"),
        (plan(placement="replicate", cluster=make_cluster(free_bytes=7 * GIB)), "9.3 of 7.0 GiB"),
    ):
        assert made.chosen is None and amount in made.reason
        with pytest.raises(ConfigError) as error:
            _ = made.choice
        assert (error.value.option, error.value.problem) == ("placement", made.reason)


def test_what_was_asked_for_is_kept():
    """Catches a plan that overrules the user, or leaves out the row of what is given."""
    asked: dict[str, Any]
    for asked, expected in (
        ({"placement": "host"}, "host"),
        ({"placement": "shard", "shard_group_size": 2}, "shard, shard_group_size 2"),
        ({"placement": "file", "resident_layers": 3}, "file, resident_layers 3"),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, "shard, resident_layers all"),
        ({"placement": "shard", "activation_checkpointing_layers": 4}, "shard, activation_checkpointing_layers 4"),
    ):
        made = plan(**asked)
        found = name_choice(made, make_cluster())
        assert found.startswith(expected), (asked, found)
        assert made.rows[0].placement.placement == "replicate"
    assert plan(prefetch=3).choice.placement.prefetch == 3


@pytest.mark.parametrize(
    ("option", "value"), (("shard_group_size", 3), ("resident_layers", 99), ("activation_checkpointing_layers", 99))
)
def test_what_cannot_run_is_not_planned(option, value):
    """Catches rows of numbers for ranks or layers that do not exist, and an option that is ignored in silence."""
    with pytest.raises(ConfigError, match=f"{option}: .*found {value}"):
        plan(**{option: value})


@pytest.mark.parametrize(
    ("options", "expected"),
    (
        (
            {},
            "placement: shard, resident_layers: 0, activation_checkpointing_layers: all, sequence_parallel_size: 1",
        ),
        ({"placement": "host", "activation_checkpointing_layers": "auto"}, "activation_checkpointing_layers: all"),
        (
            {"activation_checkpointing_layers": 2, "resident_layers": 1, "sequence_parallel_size": 2},
            "placement: shard",
        ),
        ({"placement": "host", "sequence_parallel_size": "auto"}, "sequence_parallel_size: 1"),
    ),
)
def test_what_cannot_be_planned_keeps_what_was_given_and_says_the_rest(options, expected):
    """Catches a `host` that becomes `shard` because only the recomputed layers were left to `auto`, unsaid."""
    settled, taken = PlacementOptions(**options).settle_unplanned()
    assert taken == expected and not settled.is_placement_open
    assert all(getattr(settled, name) == value for name, value in options.items() if value != "auto")


def test_between_nodes_the_base_stays_inside_them():
    """Catches a slow network under every gather, where nodes could shard by themselves."""
    cluster = make_cluster(8, nodes=4, free_bytes=7 * GIB, network_bytes_per_s=3e9)
    activations = make_activations(layer_s=0.01)
    assert "shard_group_size 8" in name_choice(plan(activations=activations, cluster=cluster), cluster)
    rows = {name_placement(row.placement, 32): row for row in plan(activations=activations, cluster=cluster).rows}
    flat, hybrid = rows["shard"], rows["shard, shard_group_size 8"]
    assert flat.rest_bytes < hybrid.rest_bytes / 3
    assert flat.wait_s > hybrid.wait_s


def test_a_network_is_used_only_where_a_node_cannot_hold_the_base():
    """Catches a base on the network for what is guessed to be a little faster, and one that would have fitted."""
    links = {"network_bytes_per_s": 1e12, "host_bytes_per_s": 2e8, "file_bytes_per_s": 2e8}
    quick = make_activations(layer_s=0.001)
    for free_bytes, options, expected in (
        (9 * GIB, {"placement": "shard"}, "shard, shard_group_size 2"),
        (9 * GIB, {"placement": "shard", "resident_layers": "auto"}, "shard, shard_group_size 2, resident_layers 1"),
        (
            9 * GIB,
            {"placement": "shard", "shard_group_size": "all", "resident_layers": "auto"},
            "shard, resident_layers 4",
        ),
        (6 * GIB, {}, "shard"),
        (5 * GIB, {}, "host, shard_group_size 2"),
    ):
        cluster = make_cluster(2, nodes=4, free_bytes=free_bytes, **links)
        assert name_choice(plan(activations=quick, cluster=cluster, **options), cluster) == expected


def test_more_tokens_hide_the_transfer():
    """Catches times that are added where they overlap: streaming from the host pays with enough tokens."""
    cluster = make_cluster(1, free_bytes=7 * GIB)
    # A layer's copy takes as long as its forward at this point; its backward takes twice as long.
    break_even_s = GIB / cluster.hardware.host_bytes_per_s
    placement = ResolvedPlacement("host", 1, 0, 1, None, "all")
    shares = []
    for factor in (0.1, 0.3, 0.5, 2):
        workload = Workload(make_activations(layer_s=break_even_s * factor), 1)
        row = compute_row(SIZE, workload, cluster, placement)
        shares.append(row.wait_s / row.step_s)
    assert shares[0] > 0.6
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.02


def test_transfers_that_cannot_overlap_are_added():
    """Catches a CPU's gathers, made by the cores that compute, taken for free."""
    workload = Workload(make_activations(), 1)
    placement = ResolvedPlacement("shard", 4, 0, 1, None, "all")
    beside, between = (
        compute_row(SIZE, workload, make_cluster(is_overlapping=overlaps), placement) for overlaps in (True, False)
    )
    assert beside.wait_s < between.wait_s
    assert between.wait_s == pytest.approx(between.gathered_bytes * 3 / 4 / GPU.peer_bytes_per_s, rel=0.05)


def test_layers_may_save_what_memory_is_left_for():
    """Catches memory left unused that would spare recomputation, and a wrong mixture of the two."""
    recomputed, saved = make_activations(peak_bytes=GIB), make_activations(peak_bytes=16 * GIB, recompute=1)
    half = recompute_some(recomputed, saved, NUM_LAYERS // 2)
    assert half.saved_bytes == (recomputed.saved_bytes + saved.saved_bytes) // 2
    assert sum(work.flops for work in half.backward) == pytest.approx(1.5 * sum(work.flops for work in saved.backward))
    workload = Workload(recomputed, 4096, saved_activations=saved)
    options = PlacementOptions(placement="replicate", activation_checkpointing_layers="auto")
    made = make_plan(SIZE, workload, make_cluster(free_bytes=22 * GIB), options)
    layers = made.choice.placement.activation_checkpointing_layers
    assert isinstance(layers, int) and 0 < layers < NUM_LAYERS
    fewer = replace(made.choice.placement, activation_checkpointing_layers=layers - 1)
    assert compute_row(SIZE, workload, make_cluster(free_bytes=22 * GIB), fewer).lacks


def plan_saving(saved_bytes: int, layer_s: float = 0.1, free_bytes: int = 9 * GIB, **options: Any) -> Plan:
    """Return a plan over slow links, where all layers together may save `saved_bytes`."""
    recomputed = make_activations(layer_s)
    saved = replace(make_activations(layer_s, recompute=1), saved_bytes=saved_bytes)
    saved = replace(saved, layers_saved=(saved_bytes // NUM_LAYERS,) * NUM_LAYERS)
    cluster = make_cluster(free_bytes=free_bytes, peer_bytes_per_s=5e9, host_bytes_per_s=2e8, file_bytes_per_s=2e8)
    return make_plan(SIZE, Workload(recomputed, 4096, saved_activations=saved), cluster, PlacementOptions(**options))


def test_layers_that_save_are_planned_wherever_the_placement_is():
    """Catches recomputation by default where memory is free, a given placement overruled or its residents planned too,
    a gain that was not predicted, and a plan in a run's folder without it."""
    made = plan_saving(16 * GIB, free_bytes=22 * GIB)
    row, found = made.choice, made.checkpointing
    assert found is not None and row.placement.placement == "replicate" and row.placement.resident_layers == 0
    assert found.num_recomputed == row.placement.activation_checkpointing_layers
    assert 0 < found.num_recomputed < found.num_layers == NUM_LAYERS
    assert (found.tokens_per_s, found.recomputed_tokens_per_s) == (row.tokens_per_s, made.rows[0].tokens_per_s)
    assert str(found) in render_plan(made, 4) and f"{row.tokens_per_s:,.0f} tokens/s instead of" in str(found)
    assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made
    auto = {"activation_checkpointing_layers": "auto"}
    for asked, line, name in (
        ({}, "None", "shard"),
        (auto, "activation checkpointing: 0 of 8", "shard, activation_checkpointing_layers 0"),
    ):
        made = plan_saving(2 * GIB, free_bytes=24 * GIB, placement="shard", **asked)
        assert str(made.checkpointing).startswith(line)
        assert name_choice(made, make_cluster()) == name


def test_resident_layers_and_saved_activations_share_the_memory_that_is_left():
    """Catches the two tried apart alone, so that memory beside the better one stays unused, and one of them always
    preferred: over slow links quick layers gain by residents, slow ones by saving."""
    counts = []
    for layer_s in (0.05, 0.1, 0.5):
        placement = plan_saving(
            2 * GIB, layer_s, placement="shard", resident_layers="auto", activation_checkpointing_layers="auto"
        ).choice.placement
        counts.append((placement.resident_layers, placement.activation_checkpointing_layers))
    assert counts == [(3, 6), (1, 0), (0, 0)]


def test_host_memory_is_limited_too():
    """Catches a base planned into more host memory than the node has."""
    small = replace(make_cluster(free_bytes=7 * GIB), free_host_bytes=4 * GIB)
    rows = {row.placement.placement: row for row in plan(cluster=small).rows if not row.placement.resident_layers}
    assert rows["host"].lacks.startswith("8.2 of 4.0 GiB of host")
    assert rows["file"].fits


def test_on_a_cpu_activations_do_not_displace_the_base():
    """Catches a base that is read from the disk in every pass, since its pages went for saved activations; and a plan
    that leaves no byte to anybody."""
    recomputed, saved = make_activations(), make_activations(peak_bytes=6 * GIB, recompute=1)
    workload = Workload(recomputed, 4096, saved)
    for free_bytes in (11 * GIB, 13 * GIB, 16 * GIB):
        cluster = make_cluster(1, device_type="cpu", free_bytes=free_bytes)
        made = make_plan(SIZE, workload, cluster, PlacementOptions())
        assert made.choice.placement.placement == "replicate"
        assert made.choice.peak_bytes <= 0.9 * free_bytes or made.choice.placement.num_recomputed == "all"


def test_on_a_cpu_files_are_mapped_and_host_memory_is_the_device():
    """Catches slots for weights that are used where they lie, and two rows for one thing."""
    cluster = make_cluster(2, device_type="cpu", free_bytes=2 * GIB)
    made = plan(cluster=cluster)
    assert [row.placement.placement for row in made.rows] == ["replicate", "shard", "file"]
    files = made.choice
    assert files.placement.placement == "file"
    assert (files.rest_bytes, files.slot_bytes, files.copied_bytes, files.wait_s) == (0, 0, 0, 0)


def test_a_ring_between_nodes_takes_as_long_as_its_slowest_part():
    """Catches the network's time left out, or each rank charged for what its node receives once."""
    cluster = make_cluster(8, nodes=2)
    inside, across = gather_seconds(GIB, 8, cluster), gather_seconds(GIB, 16, cluster)
    assert inside == pytest.approx(GIB * 7 / 8 / GPU.peer_bytes_per_s, rel=0.05)
    assert across == pytest.approx(GIB / 2 / GPU.network_bytes_per_s, rel=0.05)
    assert gather_seconds(GIB, 1, cluster) == 0


def test_optimizer_states_are_counted_by_name():
    """Catches fp32 states planned for an 8-bit optimizer, and DDP's buckets left out."""
    assert count_adapter_bytes(SIZE, "adamw_torch", 1) == 4000 + 4000 + 8000
    assert count_adapter_bytes(SIZE, "adamw_torch", 2) == 4000 * 3 + 8000
    assert count_adapter_bytes(SIZE, "adamw_bnb_8bit", 1) == 8000 + 2000
    assert count_adapter_bytes(SIZE, "some_new_optimizer", 1) == 16000


def test_the_table_shows_every_row_and_marks_the_choice():
    """Catches a column that hides what does not fit, or a mark at the wrong row."""
    made = plan(cluster=make_cluster(free_bytes=7 * GIB))
    text = render_plan(made, 4)
    lines = [line for line in text.splitlines() if line.startswith(("> ", "  "))]
    assert len(lines) == len(made.rows) + 1
    assert [line.startswith("> ") for line in lines].index(True) == made.chosen + 1
    assert "no: 9.3 of 7.0 GiB" in lines[1]
    assert "dataset" not in lines[0]
    assert made.reason in text
    with_time = make_plan(SIZE, Workload(make_activations(), 4096, dataset_tokens=10**7), make_cluster())
    assert "dataset" in render_plan(with_time, 4)


def test_a_given_placement_is_taken_whatever_it_costs():
    """Catches a given placement without the costs of the others beside it, and a plan in a run's folder that cannot be
    read back."""
    workload = Workload(make_activations(), 4096)
    given = ResolvedPlacement("shard", 4, 2, 1, None)
    for free_bytes, fits in ((24 * GIB, True), (GIB, False)):
        made = make_plan(SIZE, workload, make_cluster(free_bytes=free_bytes), given=given)
        assert (made.choice.placement, made.choice.fits) == (given, fits)
        assert "resident_layers 2" in made.reason and len({row.placement.placement for row in made.rows}) > 1
        assert Plan.from_json(json.loads(json.dumps(made.to_json()))) == made
