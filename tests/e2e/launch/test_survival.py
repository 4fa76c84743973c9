"""Runs that are killed, damaged, moved to another number of ranks, or told to go on with something else."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from helpers.finetune import read_losses
from helpers.survival import (
    AfterSteps,
    finish,
    hash_files,
    is_same_adapter,
    kill_all,
    kill_when,
    read_evaluations,
    read_phase,
    read_rows,
    refuse,
    sees,
    start,
    survive,
    train,
)
from safetensors.torch import load_file

from lorashard.runs.events import read_events

CPU_BUDGET_S = 200  # some 35 forked runs, and a real one


@pytest.fixture(scope="module")
def whole(task) -> Path:
    """A run that nothing interrupts, over two epochs' ends."""
    return train(task, "whole", save_total_limit=20)


@pytest.fixture(scope="module")
def alone(task) -> Path:
    """The same in one rank, for what no other rank has a part in."""
    return train(task, "alone", **ALONE, save_total_limit=20)


ALONE = {"cpu": 1, "per_device_train_batch_size": 4}


BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": "true",
    "greater_is_better": "true",  # of a loss: an early evaluation is the best one
    "early_stopping_patience": 3,
    "save_total_limit": 1,
}


@pytest.fixture(scope="module")
def best(task) -> Path:
    """A run that early stopping ends: the third evaluation that is not better."""
    found = train(task, "best", **BEST, eval_dataset=task / "eval.jsonl")
    evaluations = read_evaluations(found)
    assert max(evaluations) == find_best(evaluations) + 3 * 2 < 14
    return found


def find_best(evaluations: dict[int, float]) -> int:
    return max(evaluations, key=evaluations.__getitem__)


def assert_same_run(found: Path, expected: Path) -> None:
    assert is_same_adapter(found, expected)
    assert read_losses(found) == read_losses(expected)
    assert not [path.name for path in found.iterdir() if path.name.startswith((".checkpoint", ".adapter"))]
    assert json.loads((found / "status.json").read_text())["phase"] == "done"


def cut(whole: Path, out: Path, step: int) -> None:
    """Copy a run's folder as a kill leaves it after `checkpoint-STEP`."""
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns("adapter_*"))
    shutil.copytree(whole / f"checkpoint-{step}", out / f"checkpoint-{step}", dirs_exist_ok=True)
    for checkpoint in out.glob("checkpoint-*"):
        if int(checkpoint.name.partition("-")[2]) > step:
            shutil.rmtree(checkpoint)


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_run_ends_as_the_uninterrupted_one(task, whole, is_real):
    """Catches another random state, order of rows, schedule or optimizer after a kill, and steps that are logged twice.

    A kill between steps in the second epoch, of one rank alone; where the run's interpreters are started, the run that
    it ends as was forked. A rank that the kernel kills writes nothing: the launcher says in the folder who it was.
    """
    name = f"killed_{is_real}"
    out = task / name
    is_time = AfterSteps(out, 9, random.Random(0))
    process = start(task, name, last_step=is_time.last_step, is_real=is_real)
    try:
        assert kill_when(process, is_time, "1"), (task / f"{name}.log").read_text()
    finally:
        kill_all(process)
    status = json.loads((out / "status.json").read_text())
    assert process.returncode == 1 and status["phase"] == "failed"
    texts = (status["error"], (task / f"{name}.log").read_text())
    assert all("rank 1 " in said and "SIGKILL" in said for said in texts)
    assert_same_run(train(task, name), whole)
    assert [path.name for path in sorted(out.glob("checkpoint-*"))] == ["checkpoint-12", "checkpoint-14"]
    assert [path.name for path in (out / "checkpoint-14").glob("*.safetensors")] == ["adapter_model.safetensors"]
    names = load_file(out / "checkpoint-14" / "adapter_model.safetensors")
    assert all(".lora_" in name for name in names), "the base was saved"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_at_the_worst_moments_change_nothing(task, whole):
    """Catches what one kill between steps does not: half of a checkpoint taken for a whole one, the last one rotated
    away, an adapter of half its tensors, a step more where the training was over.
    """
    random_ = random.Random(1)
    out = task / "often"
    moments = [
        (lambda: read_phase(out) == "load", "all"),
        (sees(out, ".checkpoint-2.partial"), "0"),
        (AfterSteps(out, 3, random_), "launcher"),
        (sees(out, ".checkpoint-*.deleted"), "all"),
        (AfterSteps(out, 9, random_), "1"),
        (sees(out, ".checkpoint-12.partial/manifest.json"), "all"),
        (sees(out, "checkpoint-14"), "launcher"),
        (sees(out, ".adapter.partial"), "0"),
        (sees(out, "adapter_model.safetensors"), "all"),
    ]
    assert_same_run(survive(task, "often", moments, slow_s=0.05), whole)


@pytest.mark.slow
def test_early_stopping_and_the_best_checkpoint_survive_kills(task, best):
    """Catches a patience that begins anew, a best checkpoint that is rotated away or forgotten, and training that goes
    on where early stopping had ended it.
    """
    out = task / "best_killed"
    last = max(read_evaluations(best))
    names = (f".checkpoint-{last - 2}.partial", f"checkpoint-{last}", ".adapter.partial")
    later = [sees(out, name) for name in names]
    moments = [(AfterSteps(out, 5, random.Random(2)), "1"), *zip(later, ("all", "0", "all"), strict=True)]
    found = survive(task, out.name, moments, slow_s=0.05, **BEST, eval_dataset=task / "eval.jsonl")
    assert_same_run(found, best)
    evaluations = read_evaluations(best)
    assert read_evaluations(found) == evaluations
    assert is_same_adapter(found, found / f"checkpoint-{find_best(evaluations)}")


@pytest.mark.slow
def test_a_stop_at_an_epoch_s_end_leaves_its_evaluation_out_of_nothing(task):
    """An epoch that ends with the step at which one rank was asked to stop is evaluated before the run ends."""
    options = {
        "eval_dataset": task / "eval.jsonl",
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": "true",
    }
    expected = train(task, "epochs", **options)
    out = task / "epochs_stopped"
    for step, name in [(6, "checkpoint-6"), (9, "checkpoint-9")]:
        assert finish(start(task, out.name, stop=(step, 1), **options), task, out.name) == 75
        assert (out / name / "manifest.json").exists() and not (out / "adapter_config.json").exists()
    assert_same_run(train(task, out.name, **options), expected)
    assert read_evaluations(out) == read_evaluations(expected) and 6 in read_evaluations(out)


@pytest.mark.slow
def test_a_resumed_run_of_dpo_keeps_its_reference(task):
    """A reference adapter that is made anew from the trained one, or is left out of a checkpoint, moves the goal."""
    rows = [json.loads(line) for line in (task / "rows.jsonl").read_text().splitlines()[:22]]
    pairs = [{"prompt": r["question"], "chosen": r["answer"], "rejected": "it is not known"} for r in rows]
    (task / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    options = {"method": "dpo", "dataset": task / "pairs.jsonl", "max_grad_norm": 0, "max_steps": 4}
    expected = train(task, "dpo", **options)
    cut(expected, task / "dpo_killed", 2)
    assert_same_run(train(task, "dpo_killed", **options), expected)


@pytest.mark.slow
def test_rows_that_are_grouped_by_length_come_in_the_same_order_again(task):
    """That order is drawn from whatever random state there is: a resumed epoch has others, and so has another rank."""
    options = {"cpu": 2, "train_sampling_strategy": "group_by_length", "save_steps": 8, "max_steps": 12}
    expected = train(task, "grouped", **options)
    cut(expected, task / "grouped_killed", 8)
    assert_same_run(train(task, "grouped_killed", **options), expected)
    epoch_steps = -(-22 // 4)
    rows = read_rows(task, "grouped", 2)
    orders = [
        [row for step in range(begin, begin + epoch_steps) for row in rows[step]] for begin in (1, epoch_steps + 1)
    ]
    assert all(len({tuple(row) for row in order}) == 22 for order in orders), "rows are missing from an epoch"
    assert orders[0] != orders[1]


WORLDS = [(1, "file"), pytest.param(4, "host", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def eight_rows(task) -> Path:
    """Two ranks, eight rows a step, and an epoch that eight does not divide."""
    return train(task, "eight_rows", **BATCH, save_total_limit=20)


BATCH = {
    "global_batch_size": 8,
    "per_device_train_batch_size": 1,
    "lora_dropout": 0.0,
    "max_steps": 8,
    "save_steps": 4,
}


@pytest.mark.parametrize(("num_ranks", "placement"), WORLDS)
def test_another_number_of_ranks_goes_on_with_the_same_rows(task, eight_rows, num_ranks, placement):
    """Rows that are seen twice or never after a move, and a last step of an epoch with another mean.

    The rows of each step are the same; sums are made in another order, so the losses agree to 1e-6.
    """
    name = f"moved{num_ranks}"
    checkpoint = eight_rows / "checkpoint-4"
    found = train(task, name, **BATCH | {"cpu": num_ranks, "placement": placement, "resume": checkpoint})
    rows, expected_rows = read_rows(task, name, num_ranks), read_rows(task, "eight_rows", 2)
    assert rows == {step: expected_rows[step] for step in range(5, 9)}
    assert all(len(rows) == 8 for rows in expected_rows.values())
    losses, expected = read_losses(found), read_losses(eight_rows)
    assert losses == {step: pytest.approx(expected[step], rel=1e-6) for step in range(5, 9)}
    said = (found / "logs" / "rank_0.log").read_text()
    assert "random states of 2 ranks" in said


def test_what_cannot_be_kept_is_refused_before_training(task, whole):
    """A run that goes on with other rows looks healthy; one that is refused late has cost the one before."""
    shutil.copytree(whole, task / "refused")
    assert "22 on 1" in refuse(task, "refused", cpu=1, gradient_accumulation_steps=2, max_steps=19)
    rows = (task / "few.jsonl").read_text().splitlines(keepends=True)
    (task / "fewer.jsonl").write_text("".join(rows[1:]))
    assert "22 examples" in refuse(task, "refused", dataset=task / "fewer.jsonl")
    checkpoint = task / "refused" / "checkpoint-14" / "optimizer.pt"
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    assert f"{checkpoint}: damaged" in refuse(task, "refused", resume=checkpoint.parent)


def test_a_damaged_checkpoint_is_skipped_named_and_put_aside(task, whole):
    """The newest one damaged costs two steps, not the run; and it must not be taken for the newest once more."""
    folder = shutil.copytree(whole, task / "damaged")
    with (folder / "checkpoint-14" / "optimizer.pt").open("r+b") as file:
        file.truncate(1000)
    shutil.rmtree(folder / "checkpoint-12")
    (folder / "checkpoint-12").mkdir()
    assert_same_run(train(task, "damaged", save_total_limit=20), whole)
    events = read_events(folder)
    skipped = {event["step"]: event["problem"] for event in events if event["kind"] == "checkpoint_skipped"}
    assert "optimizer.pt" in skipped[14] and "manifest.json" in skipped[12]
    renamed = [event["renamed"] for event in events if event["kind"] == "checkpoint_set_aside"]
    assert "set-aside-checkpoint-14" in renamed
    assert [event["step"] for event in events if event["kind"] == "resumed"] == [10]
    assert (folder / "set-aside-checkpoint-14" / "optimizer.pt").stat().st_size == 1000


@pytest.mark.slow
def test_an_older_checkpoint_can_be_gone_on_from(task, alone):
    """Newer ones that stay would be taken by the next `auto`, or be deleted as the newest are kept."""
    folder = shutil.copytree(alone, task / "older")
    assert_same_run(train(task, "older", **ALONE, resume=folder / "checkpoint-8", save_total_limit=2), alone)
    aside = sorted(path.name for path in folder.glob("set-aside-*"))
    assert aside == [f"set-aside-checkpoint-{step}" for step in (10, 12, 14)]
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-12", "checkpoint-14"]


@pytest.mark.slow
def test_a_finished_run_has_nothing_to_do(task, alone):
    """The command of a scheduler that starts it once more: no step, no other adapter."""
    folder = shutil.copytree(alone, task / "finished")
    checkpoints = {path.name: hash_files(path) for path in folder.glob("checkpoint-*")}
    assert_same_run(train(task, "finished", **ALONE, save_total_limit=20), alone)
    assert {path.name: hash_files(path) for path in folder.glob("checkpoint-*")} == checkpoints
    assert not (task / "finished_rows_0.jsonl").exists(), "a step was trained"
