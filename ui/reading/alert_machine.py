"""Alerts of what a run stands on: disk, checkpoints, memory, slow ranks, heat."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from lorashard.runs.events import describe_event
from lorashard.runtime.disk import show_bytes

from .alert import Alert, Facts
from .sanitize import show_safely
from .series import to_finite, to_whole
from .states import explain_resume

_LITTLE_BYTES = 200 << 20  # for logs and the adapter, where no checkpoint tells what it needs
_MUCH_OVER_PLAN = 1.05
_LITTLE_LEFT = 0.03  # of a device
_HOT_C = 90.0
_FEW_INTERVALS = 5
_MANY_INTERVALS = 50
# A rank that the others wait for: it waits so much less than they do, as shares of the time.
_SLOW_GAP = 0.2


def find_disk(facts: Facts) -> Iterator[Alert]:
    """Say that the disk of a live run is nearly full, and what any disk has refused."""
    largest_bytes = max((row.size_bytes for row in facts.checkpoints), default=0)
    needed_bytes = max(2 * largest_bytes, _LITTLE_BYTES)
    if facts.state.is_live and facts.free_bytes is not None and facts.free_bytes < needed_bytes:
        takes = f", and a checkpoint takes {show_bytes(largest_bytes)}" if largest_bytes else ""
        sentence = (
            f"{show_bytes(facts.free_bytes)} are free on the disk of {facts.folder}{takes}: make room, or the next "
            "ones are not written (the run continues without them); save_total_limit keeps fewer"
        )
        yield Alert("disk", "warning", None, None, sentence, facts.now_s)
    refused: dict[tuple[str, int | None], Mapping[str, Any]] = {}
    for event in facts.events:
        who = event["rank"]
        if event["kind"] == "disk_accepted":
            refused.pop(("files", who), None)
        elif event["kind"] in ("disk_refused", "end_not_written"):
            refused["files", who] = event
        elif event["kind"] == "checkpoint_saved":
            refused.pop(("checkpoint", who), None)
        elif event["kind"] == "checkpoint_failed":
            refused["checkpoint", who] = event
    for (_, rank), event in refused.items():
        sentence = f"{show_safely(describe_event(event['kind'], event))} (make room on that disk)"
        yield Alert("disk", "warning", rank, to_whole(event.get("step")), sentence, to_finite(event["time"]))


def find_checkpoints(facts: Facts) -> Iterator[Alert]:
    """Say which checkpoints are damaged, and which have been passed over."""
    damaged = set()
    for row in facts.checkpoints:
        if row.problem is not None:
            damaged.add(row.name)
            sentence = f"{show_safely(row.problem)}; {explain_resume(facts.folder)}"
            yield Alert("checkpoint", "warning", None, row.step, sentence, row.time_s)
    for event in facts.events:
        if event["kind"] == "checkpoint_skipped" and event["checkpoint"] not in damaged:
            damaged.add(event["checkpoint"])
            sentence = show_safely(describe_event(event["kind"], event))
            yield Alert("checkpoint", "warning", None, to_whole(event.get("step")), sentence, to_finite(event["time"]))


def find_memory(facts: Facts) -> Iterator[Alert]:
    """Say which ranks have held more than planned, or have next to nothing left. Host memory is not planned."""
    for rank, log in facts.ranks.items():
        last = log.last
        at = to_whole(last.get("step"))
        if "device_peak_bytes" not in last:
            continue
        over_bytes = (log.peak_bytes or 0) - (facts.planned_bytes or 0)
        if facts.planned_bytes and log.peak_bytes and log.peak_bytes > _MUCH_OVER_PLAN * facts.planned_bytes:
            sentence = (
                f"rank {rank} has held {show_bytes(log.peak_bytes)} on its device, {show_bytes(over_bytes)} more than "
                "planned: a longer batch may not fit; a smaller per_device_train_batch_size or max_length makes room"
            )
            yield Alert("memory", "warning", rank, at, sentence, log.update_s)
        total_bytes, used_bytes = to_finite(last.get("device_total_bytes")), to_finite(last.get("device_used_bytes"))
        if not facts.state.is_live or not total_bytes or used_bytes is None:
            continue
        left_bytes = max(0, int(total_bytes - used_bytes))
        if left_bytes < _LITTLE_LEFT * total_bytes:
            sentence = (
                f"{show_bytes(left_bytes)} of {show_bytes(int(total_bytes))} are left on the device of rank {rank}: a "
                "longer batch, or another program there, may end the run; end the other, or take a smaller batch"
            )
            yield Alert("memory", "warning", rank, at, sentence, log.update_s)


def find_slow_rank(facts: Facts) -> Iterator[Alert]:
    """Say which rank the others wait for: the one that itself waits much less than they do for what all gather."""
    if not facts.state.is_live or len(facts.ranks) < 2 or facts.options.get("placement") == "file":
        return
    shares = {}
    for rank, log in facts.ranks.items():
        shares_of_rank = log.series["wait_share"].tail(_MANY_INTERVALS)
        if len(shares_of_rank) >= _FEW_INTERVALS and log.last.get("gathered_bytes"):
            shares[rank] = statistics.median(shares_of_rank)
    if len(shares) < len(facts.ranks):
        return
    rank = min(shares, key=lambda rank: shares[rank])
    others = [share for other, share in shares.items() if other != rank]
    if min(others) - shares[rank] < _SLOW_GAP:
        return
    log = facts.ranks[rank]
    seen = [
        f"{name} {log.last[key]}{unit}"
        for key, name, unit in (
            ("utilization_percent", "utilization", "%"),
            ("temperature_c", "temperature", " C"),
            ("cpu_percent", "CPU", "%"),
        )
        if to_finite(log.last.get(key)) is not None
    ]
    facts_of_it = f" (its {', '.join(seen)})" if seen else ""
    sentence = (
        f"rank {rank} is the slow one: it waits {shares[rank]:.0%} of its time for gathers, the others "
        f"{statistics.median(others):.0%}{facts_of_it}; look at what else runs on its "
        "device, at its temperature and its link"
    )
    yield Alert("slow", "info", rank, int(log.last["step"]), sentence, log.update_s)


def find_heat(facts: Facts) -> Iterator[Alert]:
    """Say which devices are so hot that they slow themselves down."""
    if not facts.state.is_live:
        return
    for rank, log in facts.ranks.items():
        temperature_c = to_finite(log.last.get("temperature_c"))
        if temperature_c is not None and temperature_c >= _HOT_C:
            sentence = (
                f"the device of rank {rank} is at {temperature_c:.0f} C and may slow itself down, for which all ranks "
                "wait: look after its cooling"
            )
            yield Alert("temperature", "warning", rank, int(log.last["step"]), sentence, log.update_s)
