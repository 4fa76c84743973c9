"""What `lorashard validate` says beyond the mistakes that options, rows and files hold: memory, and what to know."""

from __future__ import annotations

import json
import shutil

import pytest
from helpers.data import write_jsonl
from helpers.paths import ROOT

from lorashard.config.run_config import RunConfig
from lorashard.data import prepare
from lorashard.data.sources import open_source
from lorashard.diagnostics.validate import WARNING, validate
from lorashard.errors import ConfigError, UserError
from lorashard.planning import probe, run_plan
from lorashard.planning.choose import Plan
from lorashard.planning.hardware import HardwareOptions
from lorashard.runtime import dtypes
from lorashard.runtime.devices import count_cores


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """Return the configuration of a run on a machine whose CPU has no bfloat16, and whose speeds are not measured."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(dtypes, "explain_slow_bfloat16", lambda device: "this CPU is slow in it")
    monkeypatch.setattr(run_plan, "probe", lambda *key: probe.recall_hardware(*key)[0])
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a b c"}] * 4)
    base = tmp_path / "base"
    shutil.copytree(ROOT / "examples/demo/base", base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))  # a plan takes half a second each

    def configure(**options) -> RunConfig:
        given = {"model": str(base), "dataset": rows, "output_dir": str(tmp_path / "out"), "cpu": 1, "max_length": 16}
        given |= {"per_device_train_batch_size": 1, "activation_checkpointing_layers": "all"}
        return RunConfig(**given | options)

    return configure


def test_what_does_not_fit_is_refused_before_it_starts(configure, monkeypatch):
    """Catches a check that passes without a look at the memory that is free; and one that refuses a placement which a
    run would obey."""
    monkeypatch.setattr(run_plan, "measure_free_bytes", lambda device, num_ranks: 2**10)
    with pytest.raises(ConfigError, match="nothing fits") as caught:
        list(validate(configure()))
    assert caught.value.option == "placement"
    chosen = configure(placement="replicate")
    assert f"{WARNING}placement: nothing fits" in "\n".join(validate(chosen))


def test_what_works_badly_is_said_wherever_a_plan_is_shown(configure):
    """Catches a run of days in bfloat16 on a CPU without it, ranks without cores, an adapter larger than its base, or
    rows longer than the model was made for, of which nobody says a word; and a warning where nothing is amiss."""
    config = configure(dtype="bfloat16", cpu=count_cores() + 1, lora_r=1280, max_length=100_000)
    plan, _ = run_plan.forecast(config, HardwareOptions())
    expected = ("dtype: bfloat16 as asked, but this CPU is slow in it", "lora_r: ", "max_length: ", "cpu: ")
    assert [warning[: len(start)] for warning, start in zip(plan.warnings, expected, strict=True)] == list(expected)
    assert Plan.from_json(plan.to_json()) == plan
    said = [line.removeprefix(WARNING) for line in validate(config) if line.startswith(WARNING)]
    assert {line.partition(":")[0] for line in said} == {"dtype", "lora_r", "cpu"}  # its rows are short
    quiet = configure(cpu=None)  # one rank, as finetune takes it
    assert run_plan.forecast(configure(), HardwareOptions())[0].warnings == ()
    lines = list(validate(quiet))
    assert any(line.startswith("placement: ") for line in lines) and not [
        line for line in lines if line.startswith(WARNING)
    ]


def test_each_job_of_a_sweep_is_checked(configure, tmp_path, monkeypatch):
    """Catches a job that nothing is said of, common data that is read for each job, and a mistake that names none."""
    read = []
    monkeypatch.setattr(prepare, "open_source", lambda name, *rest: read.append(name) or open_source(name, *rest))
    config = configure(max_steps=2, sweep={"grid": {"lora_r": [2, 4], "seed": [1, 2]}})
    lines = list(validate(config))
    assert [line.split(" ")[:4] for line in lines if line.startswith("job ")] == [
        ["job", f"lora_r-{rank}_seed-{seed}:", f"{rank * 3456:,}", "trainable"] for rank in (2, 4) for seed in (1, 2)
    ]
    assert sum(line.startswith("dataset: 4 rows") for line in lines) == 1 and len(read) == 1
    assert sum(line.startswith("sweep: 4 jobs") for line in lines) == 1

    other = write_jsonl(tmp_path / "other.jsonl", [{"text": "a b c d"}] * 3)
    lines = list(validate(configure(max_steps=2, sweep={"jobs": [{"name": "a"}, {"name": "b", "dataset": other}]})))
    assert [line.startswith(f"job {name}: ") and f"dataset: {rows} rows" in line
            for name, rows, line in zip("ab", (4, 3), (line for line in lines if line.startswith("job ")), strict=True)
            ] == [True, True]  # fmt: skip
    assert "examples: 3 (of job b; chosen as the longest of 2 datasets)" in lines
    for mistake in ({"lora_target_modules": ["nope"]}, {"dataset": str(tmp_path / "base/config.json")}):
        jobs = [{"name": "a"}, {"name": "b"} | mistake]
        with pytest.raises(UserError, match="job b"):
            list(validate(configure(max_steps=2, sweep={"jobs": jobs})))
