"""The benchmark of long rows: its whole path on a tiny model, and what it makes of the ranks' figures."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import warm
from helpers.paths import ROOT

SIZES = "--layers 1 --hidden 32 --heads 4 --kv-heads 2 --intermediate 32 --vocab 50 --lora-r 2 --lengths 16 32"


@pytest.fixture
def long(monkeypatch):
    """benchmarks/long.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import long

    return long


@pytest.mark.slow
def test_rows_are_shared_and_a_peer_that_cannot_run_says_why(long, monkeypatch, tmp_path, capsys):
    """Catches a benchmark that cannot be repeated, and a peer's failure that ends it or leaves an empty cell."""
    out = tmp_path / "record.json"
    only = ["--only", "lorashard_shared", "torch_ring"]
    monkeypatch.setattr(sys, "argv", ["long.py", *SIZES.split(), *only, "--turns", "1", "--out", str(out)])
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)
    long.main()
    record = json.loads(out.read_text())
    found = record["contenders"]["lorashard_shared"]["lengths"]
    assert [one["tokens_per_step"] for one in found.values()] == [16, 32]
    for one in found.values():
        assert one["largest_gradient_error"] <= long.GRADIENT_TOLERANCE
        assert one["step_s"]["min"] > 0 and one["peak_bytes"] > one["before_model_bytes"] > 0
    reason = record["contenders"]["torch_ring"]["does_not_run"]
    assert reason.startswith("NotImplementedError: ")
    assert f"| PEFT + FSDP2, torch's `context_parallel` | does not run: {reason} |" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [1.001, float("nan")])
def test_wrong_gradients_end_a_contender(long, tmp_path, wrong):
    """Catches figures of a contender that computes something else; a NaN is no difference that `max` would find."""
    job = {"name": "lorashard_shared", "folder": str(tmp_path)}
    torch.save([torch.ones(2), torch.ones(2)], long.find_gradients(job, 16))
    right = SimpleNamespace(gradients=lambda: [torch.ones(2), torch.full((2,), 1 + 1e-6)])
    assert 0 < long.compare_gradients(job, 16, right) < long.GRADIENT_TOLERANCE
    contender = SimpleNamespace(gradients=lambda: [torch.ones(2), torch.full((2,), wrong)])
    with pytest.raises(RuntimeError, match="differs from the whole model's"):
        long.compare_gradients(job, 16, contender)


def test_a_step_takes_as_long_as_its_slowest_rank_and_own_rows_count_each(long):
    """Catches data parallelism whose throughput counts one rank's row, and a rank that waits told as a fast one."""

    def report(*seconds: float, peak_bytes: int = 5) -> dict:
        one = {"step_s": seconds, "processor_s": seconds, "peak_bytes": peak_bytes}
        return {"lengths": {"16": one | {"before_model_bytes": 2, "gradient_error": 0.0}}}

    turns = [[report(4.0, 1.0), report(2.0, 8.0)], [report(5.0, 9.0), report(5.0, 9.0, peak_bytes=7)]]
    own, shared = (long.join(name, turns)["16"] for name in ("lorashard", "lorashard_shared"))
    assert own["step_s"] == {"median": 6.5, "min": 4.0, "max": 9.0, "all": [4.0, 8.0, 5.0, 9.0]}
    assert (own["tokens_per_s"], shared["tokens_per_s"]) == (32 / 4, 16 / 4)
    assert own["processor_s"]["all"] == [6.0, 9.0, 10.0, 18.0]
    assert own["peak_bytes"] == 7
