"""The command line: what it answers, with which exit code, and without which imports."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from helpers.cli import LAUNCHER_VARIABLES, run_cli

from lorashard.cli import main
from lorashard.config.run_config import RunConfig
from lorashard.errors import ConfigError
from lorashard.launch.launcher import build_rank_command, check_output_dir, prepare_logs_dir
from lorashard.runtime.devices import RUN_ID_PREFIX
from lorashard.runtime.failures import FAILURE_FILE_VARIABLE

MISTAKES = (
    (["finetune", "--lerning_rate", "1"], "'learning_rate'?"),
    (["finetune", "--model", "m", "--output_dir", "o"], "--dataset"),
    (["finetune", "--config", "absent.yaml"], "absent.yaml"),
    (["finetune", "--model", "m", "--dataset", "d", "--output_dir", "o", "--gpus", "99"], "gpus: "),
    (["preview", "--model", "m"], "--dataset"),
    (["validate", "--fsdp", "full_shard"], "shards the frozen"),
    (["fintune"], "No such command"),
    (["finetune", "--config"], "requires an argument"),
    (["finetune", "--options_file", "of-a-rank.json"], "options_file"),
)


def test_help_and_mistakes_are_printed_without_heavy_imports() -> None:
    """Catches an import at the top of a file that costs every call of the command line seconds.

    Also an option that nobody can find; and a traceback, a usage screen or a wrong exit code for a mistake.
    """
    helps = [[], ["--help"], ["finetune", "--help"], ["preview", "--help"], ["version"]]
    found = run_cli(*helps, *(words for words, _ in MISTAKES))

    for code, imported, stdout, stderr in found[: len(helps)]:
        assert (code, imported, stderr) == (0, [], "")
        assert "lorashard" in stdout
    hidden = {"task_type", "activation_checkpointing_kwargs", "trainer"}
    expected = [*(f"--{name}" for name in set(RunConfig.model_fields) - hidden), "--config FILE", "SFTConfig"]
    assert [word for word in expected if word not in found[2][2]] == []
    for (_, message), (code, imported, stdout, stderr) in zip(MISTAKES, found[len(helps) :], strict=True):
        assert (code, imported, stdout) == (2, [], ""), message
        assert stderr.startswith("lorashard: error: ") and message in stderr and len(stderr.splitlines()) == 1


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Stand in for training; returns the configurations that it was called with."""
    calls: list[RunConfig] = []
    monkeypatch.setitem(
        sys.modules, "lorashard.training.train", SimpleNamespace(finetune=lambda config, stop: calls.append(config))
    )
    for name in [*LAUNCHER_VARIABLES, "ACCELERATE_MIXED_PRECISION"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "")
    return calls


def enter_launcher(monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> None:
    monkeypatch.setattr("lorashard.launch.launcher.StopRequest.install", lambda *_: None)  # pytest's handlers stay
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))


def finetune_words(tmp_path: Path) -> list[str]:
    return ["finetune", "--model", "m", "--dataset", "d", "--output_dir", str(tmp_path / "out"), "--cpu", "2"]


def test_inside_a_launcher_training_starts_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trained: list[RunConfig]
) -> None:
    """Catches ranks of torchrun that start ranks of their own, and accelerate left to think that it is alone."""
    enter_launcher(monkeypatch)

    assert main([*finetune_words(tmp_path), "--max-steps=3"]) == 0
    assert [config.trainer["max_steps"] for config in trained] == [3]
    assert os.environ["ACCELERATE_USE_CPU"] == "true"


def test_another_number_of_ranks_than_the_launchers_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trained: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches `--cpu 3` passed over inside a launch of two."""
    enter_launcher(monkeypatch)

    assert main([*finetune_words(tmp_path)[:-1], "3"]) == 2
    assert trained == []
    assert "lorashard: error: cpu: expected 2 " in capsys.readouterr().err


def test_who_started_the_command_gets_its_failure_with_fields(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trained: list[RunConfig]
) -> None:
    """Catches a program such as the web UI that has a sentence in a log to go by; and a rank that writes as well."""
    file = tmp_path / "failure.json"
    monkeypatch.setenv(FAILURE_FILE_VARIABLE, str(file))
    assert main([*finetune_words(tmp_path), "--max_steps=many"]) == 2
    failure = json.loads(file.read_text())
    assert (failure["cause"], failure["fields"]["option"]) == ("mistake", "max_steps")
    assert main(["unknown"]) == 2
    assert "unknown" in json.loads(file.read_text())["message"]
    file.unlink()
    enter_launcher(monkeypatch)
    assert main([*finetune_words(tmp_path)[:-1], "3"]) == 2
    assert not file.exists()


def test_a_rank_takes_the_options_that_its_launcher_resolved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trained: list[RunConfig]
) -> None:
    """Catches a rank of lorashard's own launcher that trains with other options than those that were checked."""
    enter_launcher(monkeypatch)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"{RUN_ID_PREFIX}1")
    config = RunConfig(model="m", dataset="d", output_dir=str(tmp_path / "out"), cpu=2, placement="host", max_steps=3)
    command = build_rank_command("finetune", config, tmp_path)

    assert main(command[command.index("lorashard") + 1 :]) == 0
    assert trained == [config]


@pytest.mark.parametrize(("rank", "is_recorded", "lines"), [(0, True, 1), (1, True, 0), (1, False, 1)])
def test_a_mistake_on_every_rank_is_printed_once(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    trained: list[RunConfig],
    capsys: pytest.CaptureFixture[str],
    rank: int,
    is_recorded: bool,
    lines: int,
) -> None:
    """Catches the same line from each rank of torchrun, and a mistake of one rank that is not printed at all."""
    enter_launcher(monkeypatch, rank)
    note = tmp_path / "error.json"
    if is_recorded:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(note))

    assert main([*finetune_words(tmp_path), "--lora_r", "many"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == lines
    assert note.exists() == is_recorded


def test_a_crash_is_a_traceback_and_an_interrupt_is_quiet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trained: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a crash reported as the user's mistake, and Ctrl-C or a full disk as a crash."""
    enter_launcher(monkeypatch)

    def fail_with(error: BaseException) -> str:
        monkeypatch.setitem(sys.modules, "lorashard.training.train", SimpleNamespace(finetune=Mock(side_effect=error)))
        return f"{main(finetune_words(tmp_path))} {capsys.readouterr().err}"

    crash = fail_with(ValueError("boom"))
    assert crash.startswith("1 Traceback") and crash.splitlines()[-1] == "ValueError: boom"
    assert fail_with(KeyboardInterrupt()) == "130 "
    full = fail_with(OSError(errno.ENOSPC, "No space left on device", "/cache/train.arrow"))
    assert full.startswith("2 lorashard: error: ") and "/cache/train.arrow" in full and full.count("\n") == 1


@pytest.mark.parametrize("name", ["metrics.jsonl", "adapter_model.safetensors", "checkpoint-10"])
def test_a_folder_with_another_run_is_refused(tmp_path: Path, name: str) -> None:
    """Catches a run that is written over, and a resume or an overwrite that is not let through."""
    (tmp_path / name).mkdir()
    options = {"model": "m", "dataset": "d", "output_dir": str(tmp_path)}
    with pytest.raises(ConfigError, match=f"another run .*{name}.*--resume_from_checkpoint"):
        check_output_dir(RunConfig(**options))
    check_output_dir(RunConfig(**options, overwrite_output_dir=True))
    check_output_dir(RunConfig(**options, resume_from_checkpoint=True))
    check_output_dir(RunConfig(**options, resume_from_checkpoint=str(tmp_path / "checkpoint-10")))
    with pytest.raises(ConfigError, match=f"another run .*{name}"):
        check_output_dir(RunConfig(**options, resume_from_checkpoint="elsewhere/checkpoint-10"))


def test_a_folder_without_a_run_is_taken(tmp_path: Path) -> None:
    """Catches a refusal of what is merely not empty, such as the logs of a run that never began."""
    (tmp_path / "logs").mkdir()
    check_output_dir(RunConfig(model="m", dataset="d", output_dir=str(tmp_path)))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="a file"):
        check_output_dir(RunConfig(model="m", dataset="d", output_dir=str(tmp_path / "file")))


def test_logs_begin_anew_unless_the_run_goes_on(tmp_path: Path) -> None:
    """Catches the log of a run before that is taken for this one's, a lost log, and a traceback for a wrong folder."""
    options = {"model": "m", "dataset": "d", "output_dir": str(tmp_path)}

    def prepare(**more: object) -> Path:
        config = RunConfig(**options | more)
        return prepare_logs_dir(config, [config])

    log = prepare() / "rank_3.log"
    log.write_text("before")
    prepare(resume_from_checkpoint=True)
    assert log.read_text() == "before"
    prepare()
    assert not log.exists()

    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        prepare(output_dir=str(tmp_path / "file" / "run"))
