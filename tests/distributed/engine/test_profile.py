"""`profile_steps` of `load` and `shard`, where no trainer tells of the steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.forked_ranks import run_ranks
from helpers.tiny import build_model, make_batch

import lorashard
from lorashard.errors import ConfigError


def train_three_steps(rank: int, folder: str) -> None:
    model = lorashard.shard(build_model(), "shard", profile_steps="2-2", profile_dir=folder)
    adapter = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for step in range(1, 4):
        with torch.profiler.record_function(f"step {step}"):
            model(**make_batch()).loss.backward()
        other.step()  # of no concern to the adapter
        adapter.step()


def test_the_steps_of_the_adapters_optimizer_are_traced(tmp_path):
    """Catches a trace of the wrong steps, or one that another optimizer of the script has ended."""
    run_ranks(train_three_steps, 2, str(tmp_path / "profile"))
    for rank in range(2):
        trace = json.loads((tmp_path / "profile" / f"rank_{rank}.json").read_text())
        names = {event["name"] for event in trace["traceEvents"] if "name" in event}
        assert "unshard layers.0" in names
        assert {name for name in names if name.startswith("step ")} == {"step 2"}
    assert (tmp_path / "profile" / "summary.md").read_text().startswith("# Steps 2 to 2")


def test_a_range_that_is_none_is_refused(tmp_path):
    """Catches a mistake that shows when the run is over and there is no trace."""
    with pytest.raises(ConfigError, match="5-3"):
        lorashard.shard(build_model(), "shard", profile_steps="5-3", profile_dir=Path(tmp_path))
