"""Which checkpoint a run goes on from, and which it refuses: each before any work is done for it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lorashard.config.run_config import RunConfig
from lorashard.errors import CheckpointError, ConfigError
from lorashard.runs.checkpoints import place_partial, publish, read_manifest
from lorashard.training.resume import Facts, check_resume, choose_checkpoint
from lorashard.training.resume_request import check_wanted, read_progress

LORA = {"modules_to_save": None, "r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"], "use_dora": False}
# 22 rows, 8 a step, on 2 ranks: the last step of an epoch has 6.
SAVED = Facts("sft", 2, 8, 22, 22, "ab" * 32, "random, seed 42", LORA, {"learning_rate": 2e-4}, True)


def make_config(folder: Path, **options) -> RunConfig:
    return RunConfig(model_name_or_path="m", dataset="d", output_dir=str(folder), **options)


def make_arguments(**options) -> SimpleNamespace:
    defaults = dict(ignore_data_skip=False, max_steps=9, num_train_epochs=3.0, train_sampling_strategy="random")
    return SimpleNamespace(**defaults | options)


def save(folder: Path, step: int, facts: Facts = SAVED) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    place_partial(checkpoint).mkdir(parents=True)
    (place_partial(checkpoint) / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    publish(checkpoint, asdict(facts))
    return checkpoint


@pytest.mark.parametrize(
    "change, option, expected, found",
    [
        ({"method": "dpo"}, "method", "sft", "dpo"),
        ({"lora": LORA | {"r": 8}}, "r", "16", "8"),
        ({"lora": LORA | {"target_modules": "all-linear"}}, "target_modules", "", "all-linear"),
        ({"lora": LORA | {"modules_to_save": ["lm_head"]}}, "modules_to_save", "None", "lm_head"),
        ({"data_sha256": "cd" * 32}, "dataset", "abababababab", "cdcdcdcdcdcd"),
        ({"num_rows": 21}, "dataset", "22 ", "21 "),
        ({"order": "random, seed 43"}, None, "seed 42", "seed 43"),
        ({"order": "sequential, seed 42"}, None, "random", "sequential"),
        ({"rows_per_step": 16, "world_size": 4}, "global_batch_size", "8, as of checkpoint-4 on 2 ", "16 on 4"),
        ({"rows_per_epoch": 24, "world_size": 4}, "global_batch_size", "22 ", "24 on 4"),
    ],
)
def test_what_decides_the_steps_must_be_as_it_was(tmp_path, change, option, expected, found):
    """A run that goes on with other rows, or an adapter that is loaded into another one, looks healthy."""
    checkpoint = save(tmp_path, 4)
    same = [make_config(tmp_path), make_arguments(), checkpoint, SAVED]
    assert check_resume(*same, pytest.fail) == 2
    with pytest.raises(ConfigError) as error:
        check_resume(*same[:3], replace(SAVED, **change), pytest.fail)
    assert error.value.option == option
    assert expected in str(error.value.expected) and found in str(error.value.found)
    assert "\n" not in str(error.value)
    if not {"method", "lora"} & change.keys():
        skipping = make_arguments(ignore_data_skip=True)
        assert check_resume(same[0], skipping, checkpoint, replace(SAVED, **change), pytest.fail) == 2


def test_other_numerics_are_told(tmp_path):
    """Catches steps that differ from those of an uninterrupted run, without a word; old checkpoints do not say."""
    saved = replace(SAVED, numerics="compile")
    told: list[str] = []
    same = [make_config(tmp_path), make_arguments()]
    assert check_resume(*same, save(tmp_path, 4, saved), replace(saved, numerics="exact"), told.append) == 2
    assert len(told) == 1 and "numerics exact for compile, as asked" in told[0]
    check_resume(*same, save(tmp_path, 5), saved, pytest.fail)


@pytest.mark.parametrize(
    "step, max_steps, is_refused", [(1, 2, False), (1, 3, True), (3, 5, False), (3, 6, True), (5, 5, False)]
)
def test_an_epoch_s_end_matters_where_it_is_still_to_come(tmp_path, step, max_steps, is_refused):
    """A run is refused for an end that it never comes to, or its last step changes unseen. An epoch has 3 steps."""
    found = [make_config(tmp_path), make_arguments(max_steps=max_steps), save(tmp_path, step)]
    moved = replace(SAVED, world_size=4, rows_per_epoch=24)
    if is_refused:
        with pytest.raises(ConfigError, match="last step"):
            check_resume(*found, moved, pytest.fail)
    else:
        assert check_resume(*found, moved, pytest.fail) == 2
    by_epochs = make_arguments(max_steps=-1, num_train_epochs=max_steps / 3)
    if not is_refused:
        assert check_resume(found[0], by_epochs, found[2], moved, pytest.fail) == 2


def test_filled_steps_are_said_where_they_are_new(tmp_path):
    """A run without `global_batch_size` goes on with it: that is the person's word, and changes the epoch's last step.

    In another order than the random one nothing is filled.
    """
    filling = make_config(tmp_path, global_batch_size=8)
    checkpoint, moved = save(tmp_path, 4), replace(SAVED, world_size=4, rows_per_epoch=24)
    said: list[str] = []
    assert check_resume(filling, make_arguments(), checkpoint, moved, said.append) == 2
    assert len(said) == 1 and "24 rows an epoch, 22 before checkpoint-4" in said[0]
    with pytest.raises(ConfigError, match="last step"):
        check_resume(filling, make_arguments(train_sampling_strategy="sequential"), checkpoint, moved, pytest.fail)
    both = save(tmp_path / "both", 4, replace(SAVED, rows_per_epoch=24))
    assert check_resume(filling, make_arguments(), both, moved, pytest.fail) == 2


def test_the_newest_complete_checkpoint_is_chosen_and_the_others_are_named(tmp_path):
    """Catches a damaged one that is taken, and one that is passed over without a word."""
    for step in (2, 9, 10):
        save(tmp_path, step)
    save(tmp_path, 12, replace(SAVED, is_resumable=False))
    (tmp_path / "checkpoint-14").mkdir()
    state = tmp_path / "checkpoint-10" / "trainer_state.json"
    state.write_text(state.read_text().replace("10", "11"))
    for wanted in ("auto", True):
        skipped: list[dict] = []
        config = make_config(tmp_path, resume_from_checkpoint=wanted)
        emit = lambda _, skipped=skipped, **fields: skipped.append(fields)  # noqa: E731
        chosen = choose_checkpoint(config, True, emit, pytest.fail)
        assert chosen == tmp_path / "checkpoint-9"
        assert [fields["checkpoint"] for fields in skipped] == [f"checkpoint-{step}" for step in (14, 12, 10)]
        said = [fields["problem"] for fields in skipped]
        assert "manifest" in said[0] and "adapter alone" in said[1] and f"{state}: damaged" in said[2]
    for step, message in [(10, f"{state}: damaged"), (12, "adapter alone")]:
        by_path = make_config(tmp_path, resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        with pytest.raises(CheckpointError, match=message):
            choose_checkpoint(by_path, True, pytest.fail, pytest.fail)
    assert choose_checkpoint(make_config(tmp_path), True, pytest.fail, pytest.fail) is None


def test_a_bare_trainer_s_checkpoint_is_taken_by_name_alone(tmp_path):
    """Nothing tells whether it is whole: that is said, and the person decides."""
    (save(tmp_path, 4) / "manifest.json").unlink()
    said: list[str] = []
    config = make_config(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    checkpoint = choose_checkpoint(config, True, pytest.fail, said.append)
    assert checkpoint == tmp_path / "checkpoint-4" and len(said) == 1 and "has no manifest" in said[0]
    assert check_resume(config, make_arguments(), checkpoint, SAVED, pytest.fail) is None
    auto = make_config(tmp_path, resume_from_checkpoint="auto")
    assert choose_checkpoint(auto, True, lambda kind, **fields: said.append(kind), said.append) is None
    assert said[1:] == ["checkpoint_skipped"]


def test_to_start_afresh_never_costs_a_finished_adapter(tmp_path):
    """`auto` in the folder of a run that saved no checkpoints, or whose are all damaged, would delete it."""
    auto, true = (make_config(tmp_path, resume_from_checkpoint=wanted) for wanted in ("auto", True))
    check_wanted(auto)
    with pytest.raises(ConfigError, match="found none"):
        check_wanted(true)
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(ConfigError, match="finished adapter.*--overwrite_output_dir"):
        check_wanted(auto)
    check_wanted(make_config(tmp_path, resume_from_checkpoint="auto", overwrite_output_dir=True))
    (save(tmp_path, 2) / "manifest.json").unlink()
    for config, message in [(auto, "a finished adapter"), (true, "found none")]:
        check_wanted(config)
        with pytest.raises(ConfigError, match=message):
            choose_checkpoint(config, True, lambda kind, **fields: None, pytest.fail)


def test_a_checkpoint_may_have_any_name_and_must_be_one(tmp_path):
    """The step in a folder's name is not the one that a renamed or a copied checkpoint has come to."""
    place = save(tmp_path, 4).rename(tmp_path / "the-best")
    assert read_progress(place) == 4
    check_wanted(make_config(tmp_path, resume_from_checkpoint=str(place)))
    for name, message in [("nowhere", "found nothing at"), (".", "found one without")]:
        with pytest.raises(ConfigError, match=f"checkpoint's folder.*{message}"):
            check_wanted(make_config(tmp_path, resume_from_checkpoint=str(tmp_path / name)))
    for damaged in ("", "[]", "{}"):
        (place / "trainer_state.json").write_text(damaged)
        with pytest.raises(ConfigError, match=r"trainer_state\.json: .*damaged"):
            check_wanted(make_config(tmp_path, resume_from_checkpoint=str(place)))


def test_facts_of_another_version_are_told_and_skipped(tmp_path):
    """A field that a later version adds or drops: a crash, which `max_restarts` would repeat."""
    checkpoint = save(tmp_path, 4)
    manifest = read_manifest(checkpoint)
    for facts in (manifest.facts | {"later": 1}, {k: v for k, v in manifest.facts.items() if k != "is_resumable"}):
        with pytest.raises(CheckpointError, match="checkpoint-4.*another version"):
            Facts.read(replace(manifest, facts=facts))
    older = dict(SAVED.lora)
    del older["modules_to_save"]  # an option that it did not know
    saved = Facts.read(replace(manifest, facts=manifest.facts | {"lora": older}))
    assert saved.lora == older


def test_another_dtype_than_the_checkpoint_s_is_said(tmp_path):
    """A run that goes on in another dtype than it began in takes other steps, and nothing else shows it."""
    checkpoint = save(tmp_path, 4, replace(SAVED, dtype="bfloat16"))
    same = [make_config(tmp_path), make_arguments(), checkpoint]
    assert check_resume(*same, replace(SAVED, dtype="bfloat16"), pytest.fail) == 2
    told: list[str] = []
    assert check_resume(*same, replace(SAVED, dtype="float32"), told.append) == 2
    assert len(told) == 1 and "dtype float32 for bfloat16" in told[0]


def test_a_changed_learning_rate_is_said_to_have_no_effect(tmp_path):
    """A person who lowers the rate of a run that goes on, and believes that it was lowered."""
    told: list[str] = []
    changed = replace(SAVED, schedule={"learning_rate": 1e-5})
    assert check_resume(make_config(tmp_path), make_arguments(), save(tmp_path, 4), changed, told.append) == 2
    assert len(told) == 1 and "learning_rate 1e-05 for 0.0002" in told[0]
