"""The scripts of examples/ under real launchers, step by step equal to the same scripts without lorashard."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.examples import Run, assert_same_adapter, assert_same_run, list_training_scripts, make_plain, run_example
from safetensors import safe_open

STEPS = 4
TRAINER = {"max_steps": STEPS, "logging_steps": 1, "report_to": "none", "learning_rate": 1e-3}
LOOP = {"max_steps": STEPS, "save_steps": STEPS // 2}
TRL = TRAINER | {"use_cpu": True, "per_device_train_batch_size": 2}


def list_saved_keys(folder: Path) -> set[str]:
    """Return the names of all tensors in safetensors files anywhere in `folder`, and of files that could hold more."""
    keys: set[str] = set()
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            keys |= set(file.keys())
    return keys | {path.name for path in folder.rglob("*model*.bin")}


def assert_only_the_adapter_is_saved(run: Run) -> None:
    assert [key for key in list_saved_keys(run.folder) if ".lora_" not in key and key != "base_sha256"] == []


def run_both(name: str, options: dict, launcher: str, folder: Path) -> tuple[Run, Run]:
    plain = run_example(name, options, launcher, folder, is_plain=True)
    return run_example(name, options, launcher, folder), plain


def resume(name: str, options: dict, launcher: str, sharded: Run, option: str) -> Run:
    """Run the example again from the checkpoint in the middle of `sharded`, into a folder of its own."""
    folder = sharded.folder.parent
    again = {"output_dir": folder / "resumed", option: sharded.folder / f"checkpoint-{STEPS // 2}"}
    return run_example(name, options | again, launcher, folder)


@pytest.mark.parametrize("path", list_training_scripts(), ids=lambda path: path.name)
def test_one_line_of_an_example_differs(path: Path) -> None:
    """An example that needs more than its one line would promise what it does not keep."""
    compile(make_plain(path.read_text()), path.name, "exec")


@pytest.fixture(scope="module")
def loop_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    return run_both("accelerate_loop", LOOP, "accelerate", tmp_path_factory.mktemp("loop"))


def test_an_accelerate_loop_trains_as_without_lorashard(loop_runs: tuple[Run, Run]) -> None:
    """Catches another loss, norm or adapter, and base weights in `save_state`."""
    sharded, plain = loop_runs
    assert_same_run(sharded, plain, STEPS)
    assert_only_the_adapter_is_saved(sharded)


@pytest.mark.slow
def test_an_accelerate_loop_is_resumed(loop_runs: tuple[Run, Run]) -> None:
    """Catches a `load_state` that misses the base, or leaves the adapter or the optimizer as they were."""
    sharded, _ = loop_runs
    resumed = resume("accelerate_loop", LOOP, "accelerate", sharded, "resume")
    assert resumed.steps == sharded.steps
    assert_same_adapter(resumed, sharded)


@pytest.mark.slow
def test_trainer_trains_as_without_lorashard(tmp_path: Path) -> None:
    """Catches another loss, norm, evaluation or adapter, a base in a checkpoint, and a resumed run that differs."""
    options = TRAINER | {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": STEPS // 2,
    }
    sharded, plain = run_both("trainer", options, "torchrun", tmp_path)

    assert len(plain.evaluations) == 2
    assert_same_run(sharded, plain, STEPS)
    assert_only_the_adapter_is_saved(sharded)
    resumed = resume("trainer", options, "torchrun", sharded, "resume_from_checkpoint")
    assert resumed.steps == sharded.steps
    assert_same_adapter(resumed, sharded)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher, options",
    [
        ("accelerate", {"packing": True, "max_length": 64, "eval_strategy": "steps", "eval_steps": 2}),
        ("torchrun", {"assistant_only_loss": True, "gradient_accumulation_steps": 2}),
        (
            "accelerate",
            {"packing": True, "max_length": 64, "packing_strategy": "wrapped", "label_smoothing_factor": 0.1},
        ),
    ],
    ids=["packing", "assistant-only", "whole-logits"],
)
def test_sft_trainer_trains_as_without_lorashard(launcher: str, options: dict, tmp_path: Path) -> None:
    """Catches a fused head that reads a sharded weight, and packing or masks that see another model.

    TRL fuses the LM head with the loss, but for label smoothing, which needs the whole logits and a second forward.
    """
    sharded, plain = run_both("sft", TRL | options, launcher, tmp_path)

    assert_same_run(sharded, plain, STEPS)
    assert all("mean_token_accuracy" in line for line in sharded.steps)  # of the fused head
    if "packing" in options:
        assert sharded.steps[0]["num_tokens"] > 2 * 2 * options["max_length"] * 0.7


def test_a_job_of_a_sweep_trains_as_the_script_of_one(tmp_path: Path) -> None:
    """Catches jobs that draw, order or add up otherwise than a script alone, and a sweep that cannot be launched."""
    job = run_example("sweep_trainer", TRL, "torchrun", tmp_path, job="large")
    alone = run_example("sft", TRL | {"output_dir": tmp_path / "alone"}, "torchrun", tmp_path)
    assert_same_run(job, alone, STEPS)
    assert (job.folder.parent / "small/adapter_model.safetensors").exists()
