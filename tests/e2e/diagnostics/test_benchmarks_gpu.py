"""The GPU's benchmark where no GPU is: its whole path on a tiny model, and its verdicts on made-up figures."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import warm
from helpers.paths import ROOT
from helpers.planning import measure_peak

from lorashard.planning.hardware import Hardware, find_gpu_type
from lorashard.runtime.dtypes import explain_slow_bfloat16

BENCHMARKS = ROOT / "benchmarks"
CPU_BUDGET_S = 100  # every row of the benchmark is a process, or a launcher and a rank


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
        folder = out.with_name("base")
        words = ["gpu.py", "--device", "cpu", "--shape", "tiny", "--steps", "1", "--out", str(out)]
        words += ["--folder", str(folder), *options]
        monkeypatch.setattr(sys, "argv", words)
        monkeypatch.setenv("HF_HOME", str(out.with_name("hf")))
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(subprocess, "Popen", warm.Popen)
        gpu.main()
        return json.loads(out.read_text()), capsys.readouterr().out

    return run


def check_contender(found: dict, tokens: list[str]) -> None:
    assert "error" not in found, found
    assert list(found["batches"]) == tokens
    for batch in found["batches"].values():
        assert batch["step_s"]["median"] > 0 and len(batch["losses"]) == 3
        assert batch["peak_bytes"] is None


def test_a_run_is_measured_as_a_person_starts_it_and_once(run, tmp_path, monkeypatch):
    """A GPU is available for minutes: a run that fails on a misspelled key there measures nothing."""
    options = ("--only", "finetune_auto", "trl_saving", "--minutes", "9")
    record, _ = run(tmp_path / "record.json", *options)
    for name in ("finetune_auto", "trl_saving"):
        check_contender(record["rows"][name], ["32"])
    own = record["rows"]["finetune_auto"]["batches"]["32"]
    assert own["placement"]["activation_checkpointing_layers"] == 0
    assert own["predicted"]["tokens_per_s"] > 0 and own["predicted"]["peak_bytes"] > 0
    assert own["times_plain"] > 0 and own["largest_loss_difference"] == 0
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("it has been measured"))
    again, table = run(tmp_path / "record.json", *options, "--next", "--list")
    assert again == record and table.count("| measured |") == 2


@pytest.mark.slow
def test_everything_runs_and_contenders_compute_alike(run, tmp_path):
    """As above, with all rows."""
    record, table = run(tmp_path / "record.json")
    rows = record["rows"]
    for name in ("peft", "replicate", "host", "file", "host_nf4", "fsdp2"):
        check_contender(rows[name], ["16", "128", "32"])
    for name in ("finetune", "finetune_nf4", "finetune_host", "finetune_file", "trl"):
        check_contender(rows[name], ["32"])
    host = rows["host"]
    assert host["engine"]["host_bytes_at_rest"] > 0 and host["batches"]["16"]["copied_bytes_per_step"] > 0
    # On a CPU the losses of all steps are equal, so all updates were; the base has to be the same one for that too.
    assert record["bars"]["loss difference from plain PEFT"] == {"found": 0, "at_most": 0.01, "is_met": True}
    assert all(batch["largest_loss_difference"] == 0 for batch in host["batches"].values())
    assert all(batch["predicted"]["tokens_per_s"] > 0 for batch in rows["file"]["batches"].values())
    assert record["bars"]["host's use of the link, 16 tokens"]["is_met"] is None
    quantized = rows["host_nf4"]["batches"]["16"]
    assert 0 < quantized["copied_bytes_per_step"] < host["batches"]["16"]["copied_bytes_per_step"]
    assert 0 < quantized["unpacking_share"] < 1
    assert list(rows["unpacking"]["formats"]) == ["nf4", "nf4, torch", "nf4, double", "int8", "fp8"]
    assert rows["unpacking"]["formats"]["nf4, torch"]["is_equal"]
    assert rows["two_gloo_ranks"]["differing"] == 0
    assert rows["two_gloo_ranks"]["num_gradients"] == 2 * 4 * 7 * 2  # passes, layers, linears, A and B
    assert (tmp_path / "base" / "tiny" / "model-00001.safetensors").stat().st_size > 4 * 2 * 128 * 64 * 3
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
    planned = gpu.plan_contenders("", shape, make_hardware("cpu"))
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
            assert planned[name][str(rows * tokens)]["peak_bytes"] == pytest.approx(found_bytes, rel=gpu.PLAN_TOLERANCE)


@pytest.mark.slow
def test_every_placement_and_batch_is_planned_on_a_gpu(gpu):
    """Catches a bar that passes because nothing was predicted; a placement changes only the base's bytes."""
    planned = {}
    for quantization in ("", "nf4", "int8"):
        for name, rows in gpu.plan_contenders(quantization, gpu.SHAPES["tiny"], make_hardware("cuda")).items():
            assert rows.keys() == {"16", "128", "32"} and all(row["tokens_per_s"] > 0 for row in rows.values())
            planned[name] = {tokens: row["peak_bytes"] for tokens, row in rows.items()}
    assert planned.keys() >= (gpu.PLACEMENTS | gpu.QUANTIZED).keys()
    assert planned["host"] == planned["file"]
    assert all(planned["host"][tokens] < planned["replicate"][tokens] for tokens in planned["host"])
    assert all(planned["replicate_nf4"][tokens] < planned["replicate"][tokens] for tokens in planned["host"])


def make_hardware(device_type: str) -> Hardware:
    return replace(find_gpu_type("h100-sxm"), device_type=device_type)


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


def test_bars_and_failures_are_recorded(gpu, monkeypatch, tmp_path, capsys):
    """Catches results lost with a contender that runs out of memory, and a bar that passes without a result."""
    reports = {
        "prepare": {"host_to_device_bytes_per_s": 50e9, "speeds": asdict(make_hardware("cuda"))},
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

    def plan(quantization, shape, hardware):
        if quantization:
            raise ValueError("no plan")
        assert hardware == make_hardware("cuda")
        predicted = {"512": {"peak_bytes": 2**34}, "16384": {"peak_bytes": 1.05 * 2**34, "tokens_per_s": 1.0}}
        return dict.fromkeys(gpu.PLACEMENTS, predicted)

    monkeypatch.setattr(gpu, "try_launch", launch)
    monkeypatch.setattr(gpu, "plan_contenders", plan)
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--minutes", "60", "--out", str(tmp_path / "record.json")])
    gpu.main()
    record = json.loads((tmp_path / "record.json").read_text())
    assert {title.split(",")[0]: one["is_met"] for title, one in record["bars"].items()} == {
        "fastest finetune": None,
        "resident finetune's step / TRL's": None,
        "resident step / plain PEFT's": False,
        "host's use of the link": True,
        "host step / resident's": True,
        "nf4's unpacking / step": None,
        "device allocations after the first step": False,
        "loss difference from plain PEFT": True,
        "differing gradients in the checks": False,
        "peak's difference from the plan's": False,
        "tokens/s' difference from the plan's": True,
    }
    rows = record["rows"]
    batches = {name: rows[name]["batches"] for name in ("peft", "host")}
    assert batches["host"]["512"]["plan_error"] == {"peak_bytes": 0}
    expected = {"peak_bytes": pytest.approx(1 / 1.05 - 1), "tokens_per_s": pytest.approx(1 / 1.05 - 1)}
    assert batches["host"]["16384"]["plan_error"] == expected
    assert batches["peft"]["512"]["plan_error"] == {} and "predicted" not in batches["peft"]["512"]
    assert rows["zero3"]["error"] == "not installed: deepspeed"
    assert rows["finetune"]["error"] == "not installed: trl, datasets"
    assert rows["nccl_alone"]["error"] == "took longer than 60 s"
    assert rows["host_nf4"]["unplanned"] == "ValueError: no plan"
    table = capsys.readouterr().out
    for part in (
        "| FSDP2, CPUOffloadPolicy | 512 | OutOfMemoryError: no |",
        "| 90% |  | 16.0 | 16.8 |",
        "two_gloo_ranks: FAILED",
    ):
        assert part in table
    assert gpu.slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


def test_a_run_says_why_it_failed(gpu, tmp_path):
    """Catches an exit code in place of the reason, and a run that was ended for time told as one that chose to stop."""
    import gpu_finetune

    for failure, expected in (
        ({"cause": "memory", "message": "rank 0 failed: OutOfMemoryError: no\nmore"}, "memory: rank 0 failed"),
        ({"cause": "stop", "message": "stopped by SIGTERM"}, "took longer than 9 s"),
    ):
        (tmp_path / "status.json").write_text(json.dumps({"failure": failure}))
        assert gpu_finetune.explain_failure(tmp_path, "took longer than 9 s").startswith(expected)
    assert gpu_finetune.explain_failure(tmp_path / "none", "ended with exit code 1") == "ended with exit code 1"
