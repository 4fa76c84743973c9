"""Runs that are killed, damaged, moved to another number of ranks, or told to go on with something else."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from helpers.finetune import read_lines, read_losses
from helpers.survival import (
    AfterSteps,
    finish,
    hash_files,
    is_same_adapter,
    read_evaluations,
    read_phase,
    read_rows,
    refuse,
    sees,
    start,
    survive,
    train,
)

CPU_BUDGET_S = 200  # some 40 runs


@pytest.fixture(scope="module")
def whole(task) -> Path:
    """A run that nothing interrupts, over two epochs' ends."""
    return train(task, "whole", save_total_limit=20)


@pytest.fixture(scope="module")
def alone(task) -> Path:
    """The same in one rank, for what no other rank has a part in."""
    return train(task, "alone", **ALONE, save_total_limit=20)


ALONE = {"cpu": 1, "per_device_train_batch_size": 4}


def assert_same_run(found: Path, expected: Path) -> None:
    assert is_same_adapter(found, expected)
    assert read_losses(found) == read_losses(expected)
    assert not [path.name for path in found.iterdir() if path.name.startswith((".checkpoint", ".adapter"))]
    assert json.loads((found / "status.json").read_text())["phase"] == "done"


def test_a_killed_run_ends_as_the_uninterrupted_one(task, whole):
    """Catches another random state, order of rows, schedule or optimizer after a kill, and steps that are logged twice.

    A kill between steps in the second epoch, of one rank alone.
    """
    out = task / "killed"
    found = survive(task, "killed", [(AfterSteps(out, 9, random.Random(0)), "1")])
    assert_same_run(found, whole)
    assert [path.name for path in sorted(found.glob("checkpoint-*"))] == ["checkpoint-12", "checkpoint-14"]
    assert "going on from" in (found / "logs" / "rank_0.log").read_text()


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


def test_early_stopping_and_the_best_checkpoint_survive_kills(task):
    """Catches a patience that begins anew, a best checkpoint that is rotated away or forgotten, and training that goes
    on where early stopping had ended it.
    """
    options = {
        "eval_dataset": task / "eval.jsonl",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": "true",
        "greater_is_better": "true",  # of a loss: an early evaluation is the best one
        "early_stopping_patience": 3,
        "save_total_limit": 1,
    }
    expected = train(task, "best", **options)
    evaluations = read_evaluations(expected)
    assert list(evaluations) == [2, 4, 6, 8, 10], "the third evaluation that is not better ends the run"
    out = task / "best_killed"
    moments = [
        (AfterSteps(out, 5, random.Random(2)), "1"),
        (sees(out, ".checkpoint-8.partial"), "all"),
        (sees(out, "checkpoint-10"), "0"),
        (sees(out, ".adapter.partial"), "all"),
    ]
    found = survive(task, "best_killed", moments, slow_s=0.05, **options)
    assert_same_run(found, expected)
    assert read_evaluations(found) == evaluations
    assert is_same_adapter(found, found / "checkpoint-4")


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


def test_a_killed_run_of_dpo_keeps_its_reference(task):
    """A reference adapter that is made anew from the trained one, or is left out of a checkpoint, moves the goal."""
    rows = [json.loads(line) for line in (task / "rows.jsonl").read_text().splitlines()[:22]]
    pairs = [{"prompt": r["question"], "chosen": r["answer"], "rejected": "it is not known"} for r in rows]
    (task / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    options = {"method": "dpo", "dataset": task / "pairs.jsonl", "max_grad_norm": 0, "max_steps": 8}
    expected = train(task, "dpo", **options)
    out = task / "dpo_killed"
    moments = [(AfterSteps(out, 3, random.Random(3)), "0"), (sees(out, ".checkpoint-8.partial"), "all")]
    assert_same_run(survive(task, "dpo_killed", moments, slow_s=0.05, **options), expected)


def test_rows_that_are_grouped_by_length_come_in_the_same_order_again(task):
    """That order is drawn from whatever random state there is: a resumed epoch has others, and so has another rank."""
    options = {"cpu": 2, "train_sampling_strategy": "group_by_length"}
    expected = train(task, "grouped", **options)
    out = task / "grouped_killed"
    found = survive(task, out.name, [(AfterSteps(out, 9, random.Random(4)), "0")], **options)
    assert_same_run(found, expected)
    epoch_steps = -(-22 // 4)
    rows = read_rows(task, "grouped", 2)
    orders = []
    for begin in (1, epoch_steps + 1):
        drawn = [row for step in range(begin, min(begin + epoch_steps, 15)) for row in rows[step]]
        orders.append(drawn)
        if begin + epoch_steps <= 15:
            assert len({tuple(row) for row in drawn}) == 22, "rows are missing from an epoch"
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
    assert ("holds the random states of 2 ranks" in said) == (num_ranks != 2)


def test_what_cannot_be_kept_is_refused_before_training(task, whole, alone):
    """A run that goes on with other rows looks healthy; one that is refused late has cost the one before."""
    shutil.copytree(whole, task / "refused_whole")
    moved = {"cpu": 1, "gradient_accumulation_steps": 2, "max_steps": 19}
    assert "22 on 1, so the last step of an epoch" in refuse(task, "refused_whole", **moved)
    shutil.copytree(alone, task / "refused")
    rows = (task / "few.jsonl").read_text().splitlines(keepends=True)
    (task / "fewer.jsonl").write_text("".join(rows[1:]))
    (task / "edited.jsonl").write_text("".join([rows[0].replace("what", "that"), *rows[1:]]))
    for options, expected in [
        ({"dataset": task / "fewer.jsonl"}, "the data have changed since checkpoint-14: it was trained on 22 rows"),
        ({"dataset": task / "edited.jsonl"}, "the data have changed since checkpoint-14"),
        ({"per_device_train_batch_size": 1}, "--global_batch_size 4"),
        ({"lora_r": 4}, "was trained with r 16, and this run has 4"),
        ({"seed": 43}, "came in another order: random, seed 42; this run has random, seed 43"),
    ]:
        assert expected in refuse(task, "refused", **ALONE | options)
    checkpoint = task / "refused" / "checkpoint-14" / "optimizer.pt"
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    assert f"{checkpoint} is damaged" in refuse(task, "refused", **ALONE, resume=checkpoint.parent)
    for path in (task / "refused").glob("checkpoint-*"):
        shutil.rmtree(path)
    assert "a finished adapter" in refuse(task, "refused", **ALONE)
    assert "expected a complete checkpoint" in refuse(task, "refused", **ALONE, resume="true")


def test_a_damaged_checkpoint_is_skipped_named_and_put_aside(task, whole):
    """The newest one damaged costs two steps, not the run; and it must not be taken for the newest once more."""
    folder = shutil.copytree(whole, task / "damaged")
    with (folder / "checkpoint-14" / "optimizer.pt").open("r+b") as file:
        file.truncate(1000)
    shutil.rmtree(folder / "checkpoint-12")
    (folder / "checkpoint-12").mkdir()
    assert_same_run(train(task, "damaged", save_total_limit=20), whole)
    said = (folder / "logs" / "rank_0.log").read_text()
    assert "checkpoint-14 is skipped: " in said and "optimizer.pt is damaged: expected" in said
    assert "checkpoint-12 is skipped: " in said and "has no manifest.json" in said
    assert "checkpoint-14 is not gone on from: it is now set-aside-checkpoint-14" in said
    assert (folder / "set-aside-checkpoint-14" / "optimizer.pt").stat().st_size == 1000
    assert "going on from" in said and "step 10" in said


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
    (task / "finished_rows_0.jsonl").touch()
    assert_same_run(train(task, "finished", **ALONE, save_total_limit=20), alone)
    assert {path.name: hash_files(path) for path in folder.glob("checkpoint-*")} == checkpoints
    assert not read_lines(task / "finished_rows_0.jsonl"), "a step was trained"


@pytest.mark.slow
def test_a_checkpoint_without_a_manifest_is_taken_where_it_is_named(task, alone):
    """A bare Trainer's checkpoint cannot be told to be whole: `auto` leaves it, a person may know better."""
    folder = shutil.copytree(alone, task / "bare", ignore=shutil.ignore_patterns("adapter*", "checkpoint-[!8]*"))
    (folder / "adapter_model.safetensors").unlink(missing_ok=True)
    shutil.copytree(alone / "checkpoint-8", folder / "checkpoint-8", dirs_exist_ok=True)
    (folder / "checkpoint-8" / "manifest.json").unlink()
    named = shutil.copytree(folder / "checkpoint-8", task / "by-name")
    found = train(task, "named", **ALONE, resume=named)
    assert is_same_adapter(found, alone) and sorted(read_losses(found)) == list(range(9, 15))
    assert f"{named} has no manifest" in (found / "logs" / "rank_0.log").read_text()
    found = train(task, "bare", **ALONE)
    assert_same_run(found, alone)
    assert "checkpoint-8 is skipped: " in (found / "logs" / "rank_0.log").read_text()
    assert (folder / "set-aside-checkpoint-8").is_dir()


@pytest.mark.slow
def test_other_data_can_be_gone_on_with_where_that_is_said(task, alone):
    """`ignore_data_skip` is the way out that the refusal names."""
    rows = (task / "few.jsonl").read_text().splitlines(keepends=True)
    (task / "more.jsonl").write_text("".join(rows[3:]))
    options = ALONE | {"dataset": task / "more.jsonl", "ignore_data_skip": "true", "resume": alone / "checkpoint-8"}
    assert sorted(read_losses(train(task, "other_data", **options))) == list(range(9, 15))


@pytest.mark.slow
def test_a_run_in_an_empty_folder_starts_afresh(task):
    """`auto` is for a command that is started again and again: the first time there is nothing."""
    (task / "empty").mkdir()
    process = start(task, "empty", **ALONE, max_steps=2)
    assert finish(process, task, "empty") == 0
    assert read_losses(task / "empty").keys() == {1, 2}
