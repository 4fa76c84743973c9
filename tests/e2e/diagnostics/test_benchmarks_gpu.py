"""The GPU's benchmark where no GPU is: its whole path on a tiny model, and its verdicts on made-up figures."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import warm
from helpers.paths import ROOT
from helpers.planning import measure_peak

from lorashard.runtime.dtypes import explain_slow_bfloat16

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    """benchmarks/gpu.py as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    return gpu


@pytest.fixture
def run(gpu, monkeypatch, capsys):
    """Measure the tiny model as the command does, and return the record and what is printed."""

    def run(out: Path, *options: str) -> tuple[dict, str]:
        words = ["gpu.py", "--device", "cpu", "--shape", "tiny", "--steps", "1", "--out", str(out), *options]
        monkeypatch.setattr(sys, "argv", words)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(subprocess, "Popen", warm.Popen)
        gpu.main()
        return json.loads(out.read_text()), capsys.readouterr().out

    return run


def check_contender(found: dict) -> None:
    assert "error" not in found, found
    assert list(found["batches"]) == ["16", "128", "32"]
    for batch in found["batches"].values():
        assert batch["step_s"]["median"] > 0 and len(batch["losses"]) == 3
        assert batch["peak_bytes"] is batch["predicted_peak_bytes"] is batch["allocations_by_step"] is None


@pytest.mark.slow
def test_everything_runs_and_contenders_compute_alike(run, tmp_path):
    """A GPU is available for minutes: a run that fails on a misspelled key there measures nothing."""
    folder = tmp_path / "base"
    record, table = run(tmp_path / "record.json", "--folder", str(folder))
    for name in ("peft", "replicate", "host", "file", "host_nf4", "fsdp2"):
        check_contender(record["contenders"][name])
    host = record["contenders"]["host"]
    assert host["engine"]["host_bytes_at_rest"] > 0 and host["batches"]["16"]["copied_bytes_per_step"] > 0
    # On a CPU the losses of all steps are equal, so all updates were; the base has to be the same one for that too.
    assert record["bars"]["loss difference from plain PEFT"] == {"found": 0, "at_most": 0.01, "is_met": True}
    assert all(batch["largest_loss_difference"] == 0 for batch in host["batches"].values())
    assert record["bars"]["host's use of the link, 16 tokens"]["is_met"] is None
    quantized = record["contenders"]["host_nf4"]["batches"]["16"]
    assert 0 < quantized["copied_bytes_per_step"] < host["batches"]["16"]["copied_bytes_per_step"]
    assert 0 < quantized["unpacking_share"] < 1
    assert list(record["unpacking"]) == ["nf4", "nf4, torch", "nf4, double", "int8", "fp8"]
    assert record["unpacking"]["nf4, torch"]["is_equal"]
    assert record["checks"]["two_gloo_ranks"]["differing"] == 0
    assert record["checks"]["two_gloo_ranks"]["num_gradients"] == 2 * 4 * 7 * 2  # passes, layers, linears, A and B
    assert (folder / "tiny" / "model-00001.safetensors").stat().st_size > 4 * 2 * 128 * 64 * 3
    assert "| lorashard, `host` | 128 |" in table and "| nf4, torch |" in table


@pytest.mark.skipif(
    explain_slow_bfloat16(torch.device("cpu")) is not None,
    reason="what torch's bfloat16 kernels allocate is planned as with bfloat16 instructions, and this CPU has none",
)
def test_the_planned_peak_is_that_of_the_contender(gpu, tmp_path):
    """Catches a plan of other training than the contenders': an fp32 adapter, a fused loss, no recomputation."""
    import gpu_jobs

    shape, device = gpu.SHAPES["tiny"], torch.device("cpu")
    gpu_jobs.write_base(shape.make_config(), tmp_path, device)
    planned = gpu.plan_peaks(shape, "cpu")
    for name in ("replicate", "file"):
        contender = gpu_jobs.WAYS[name].build(str(tmp_path), shape, device)
        # The base rests in the files, or in memory.
        resting = [p for p in contender.model.parameters() if p.requires_grad or name == "replicate"]
        for rows, tokens in shape.batches:
            (batch,) = gpu_jobs.make_batches(shape.size(rows, tokens), 1, 0, device)
            contender.step(batch)  # the optimizer's state rests
            peak_bytes = measure_peak(partial(contender.step, batch))
            states = [value for state in contender.optimizer.state.values() for value in state.values()]
            found_bytes = peak_bytes + sum(tensor.nbytes for tensor in resting + states)
            assert planned[name][str(rows * tokens)] == pytest.approx(found_bytes, rel=gpu.PLAN_TOLERANCE)


@pytest.mark.slow
def test_every_placement_and_batch_is_planned_on_a_gpu(gpu):
    """Catches a bar that passes because nothing was predicted; a placement changes only the base's bytes."""
    shape = gpu.SHAPES["tiny"]
    planned = gpu.plan_peaks(shape, "cuda")
    assert planned.keys() == (gpu.PLACEMENTS | gpu.QUANTIZED).keys()
    assert all(peaks.keys() == {"16", "128", "32"} for peaks in planned.values())
    assert planned["host"] == planned["file"]
    assert all(planned["host"][tokens] < planned["replicate"][tokens] for tokens in planned["host"])
    assert all(planned["replicate_nf4"][tokens] < planned["replicate"][tokens] for tokens in planned["host"])


def make_report(
    step_s: float, copied_bytes_per_s: float | None = None, losses=(12.0, 11.0), allocations=0, peak_bytes=2**34
):
    batch = {
        "step_s": {"median": step_s},
        "tokens_per_s": 1 / step_s,
        "exposed_wait_s": 0.1,
        "copied_bytes_per_s": copied_bytes_per_s,
        "peak_bytes": peak_bytes,
        "allocations_after_first_step": allocations,
        "losses": list(losses),
    }
    return {"batches": {"512": batch, "16384": dict(batch)}}


def test_bars_and_failures_are_recorded(gpu, monkeypatch):
    """Catches results lost with a contender that runs out of memory, and a bar that passes without a result."""
    reports = {
        "prepare": {"host_to_device_bytes_per_s": 50e9},
        "peft": make_report(1.0),
        "replicate": make_report(1.03),
        "host": make_report(1.05, 45e9, losses=(12.0, 11.05), allocations=1),
        "file": make_report(1.2, 10e9, peak_bytes=1.11 * 2**34),
        "two_gloo_ranks": {"differing": 2},
        "fsdp2": {"batches": {"512": {"error": "OutOfMemoryError: no"}}},
    }

    def launch(script, job, world_size, device, timeout_s):
        found = reports.get(job.get("name", job["what"]))
        return gpu.Outcome([found], None if found else "took longer than 60 s")

    monkeypatch.setattr(gpu, "try_launch", launch)
    planned = {name: {"512": 2**34, "16384": 1.05 * 2**34} for name in gpu.PLACEMENTS}
    monkeypatch.setattr(gpu, "plan_peaks", lambda shape, device_type: planned)
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    record = gpu.measure(gpu.parse_args())
    record["hardware"]["gpus"] = ["NVIDIA H100 80GB HBM3"]
    assert {title.split(",")[0]: one["is_met"] for title, one in record["bars"].items()} == {
        "resident step / plain PEFT's": False,
        "host's use of the link": True,
        "host step / resident's": True,
        "nf4's unpacking / step": None,
        "device allocations after the first step": False,
        "loss difference from plain PEFT": True,
        "differing gradients in the checks": False,
        "peak's difference from the plan's": False,
    }
    batches = {name: record["contenders"][name]["batches"] for name in ("peft", "host")}
    assert [batches["host"][tokens]["plan_error"] for tokens in ("512", "16384")] == [0, pytest.approx(1 - 1 / 1.05)]
    assert batches["peft"]["512"]["predicted_peak_bytes"] is batches["peft"]["512"]["plan_error"] is None
    assert record["contenders"]["zero3"] == {"error": "not installed"}
    assert record["checks"]["nccl_alone"] == {"error": "took longer than 60 s"}
    table = gpu.make_tables(json.loads(json.dumps(record)))
    for part in (
        "| FSDP2, CPUOffloadPolicy | 512 | OutOfMemoryError: no |",
        "| 90% |  | 16.0 | 16.8 |",
        "two_gloo_ranks: FAILED",
    ):
        assert part in table
    assert gpu.slug(record["hardware"]["gpus"][0]) == "nvidia-h100-80gb-hbm3"
