"""What is told of a sweep before any rank starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lorashard.config.run_config import RunConfig
from lorashard.errors import ConfigError, DataError
from lorashard.launch.checks import check_data, check_options
from lorashard.launch.launcher import own_folders
from lorashard.runtime.devices import VisibleGpus


def make_sweep(*jobs: dict[str, Any], **options: Any) -> RunConfig:
    return RunConfig(model="m", output_dir="o", max_steps=3, cpu=1, sweep={"jobs": list(jobs)}, **options)


def test_a_job_that_cannot_run_stops_all_before_they_start() -> None:
    """Catches a sweep whose jobs are looked at in the ranks alone."""
    check_options(make_sweep({"name": "a", "lora_r": 4}, dataset="d"), VisibleGpus(0))
    with pytest.raises(ConfigError, match=r"job b: lora_r"):
        check_options(make_sweep({"name": "a"}, {"name": "b", "lora_r": -4}, dataset="d"), VisibleGpus(0))


def test_each_jobs_dataset_is_looked_at(tmp_path: Path) -> None:
    """Catches a job without data, a dataset that is not there, and one of another method, in any job but the first."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n', encoding="utf-8")
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"chosen": "a", "rejected": "b"}\n', encoding="utf-8")
    first = {"name": "a", "dataset": str(rows)}

    def look(*jobs: dict[str, Any]) -> None:
        config = make_sweep(*jobs)
        with own_folders(config.model_copy(update={"output_dir": str(tmp_path / "out")})) as runs:
            check_data(runs)

    look(first)
    for second, said in (
        ({"name": "b"}, "job b: dataset: has to be given"),
        ({"name": "b", "dataset": "./absent.jsonl"}, "absent.jsonl"),
        ({"name": "b", "dataset": str(pairs)}, "choose method dpo"),
    ):
        with pytest.raises((ConfigError, DataError), match=said):
            look(first, second)
