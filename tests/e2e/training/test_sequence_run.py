"""`lorashard finetune` where ranks share each row: the run, and what it leaves, are those of one rank."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.finetune import LORASHARD, STEPS, build_task, make_options, read_lines, read_losses, run, train
from safetensors.torch import load_file
from torch.testing import assert_close

RELATIVE = 1e-5
COMMON: dict[str, Any] = {"global_batch_size": 4, "save_strategy": "steps", "save_steps": 3}
EVALUATION: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 4}


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return build_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def alone(task) -> Path:
    train(task, "alone", cpu=1, eval_dataset=task / "eval.jsonl", **EVALUATION, **COMMON)
    return task / "alone"


@pytest.fixture(scope="module")
def shared(task) -> Path:
    options = {"eval_dataset": task / "eval.jsonl", "sequence_parallel_size": 2}
    train(task, "shared", cpu=2, **options, **EVALUATION, **COMMON)
    return task / "shared"


def test_the_run_is_that_of_one_rank(alone, shared):
    """Catches rows that are divided over ranks that share them, and what counts once for each of these.

    The last batch of an evaluation is part-filled.
    """
    names = ("loss", "eval_loss", "num_tokens", "grad_norm", "mean_token_accuracy")
    found, expected = (
        [
            (line["step"], name, line[name])
            for line in read_lines(folder / "metrics.jsonl")
            for name in names
            if name in line
        ]
        for folder in (shared, alone)
    )
    assert [value[:2] for value in found] == [value[:2] for value in expected] and len(found) > 3 * STEPS
    assert [value[2] for value in found] == pytest.approx([value[2] for value in expected], rel=RELATIVE)


def test_what_it_leaves_is_an_adapter_like_any_other(alone, shared):
    """Catches an adapter that merging, chat or evaluation would have to know to be of shared rows."""
    files = [sorted(str(path.relative_to(folder)) for path in folder.glob("adapter*")) for folder in (shared, alone)]
    assert files[0] == files[1] != []
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in (shared, alone)]
    assert configs[0] == configs[1]
    found, expected = (load_file(folder / "adapter_model.safetensors") for folder in (shared, alone))
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks_a_row(task, alone, shared):
    """Catches facts of a checkpoint, and places in the data, that count ranks where groups count."""
    shutil.copytree(shared, task / "resumed")
    shutil.rmtree(task / "resumed" / f"checkpoint-{STEPS}")
    train(task, "resumed", cpu=2, resume_from_checkpoint="auto", **COMMON)
    after = {step: loss for step, loss in read_losses(alone).items() if step > 3}
    losses = read_losses(task / "resumed")
    assert {step: losses[step] for step in after} == pytest.approx(after, rel=RELATIVE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cpu": 2, "sequence_parallel_size": 3}, ["sequence_parallel_size: ", "found 3", "2 is the largest"]),
        ({"cpu": 2, "sp_size": 2, "method": "reward"}, ["sequence_parallel_size: ", "reward"]),
    ],
    ids=["ranks", "method"],
)
def test_what_cannot_be_shared_is_refused_at_once(task, options, words):
    """Catches mistakes that are found once the model is loaded, or never."""
    result = run([*LORASHARD, "finetune", *make_options(task, "refused", **options)], task)
    assert result.returncode == 2 and all(word in result.stderr for word in words), result.stderr
    assert len(result.stderr.strip().splitlines()) == 1 and not (task / "refused").exists()
