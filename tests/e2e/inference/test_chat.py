"""`lorashard chat` and `lorashard generate` as a person runs them: real processes, lines typed and lines piped."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from helpers import warm
from helpers.cases import slow
from helpers.chat_task import GREEDY, answer, build_task, load_plain, make_environment, talk
from helpers.finetune import LORASHARD
from helpers.finetune import run as run_command
from helpers.paths import ROOT
from peft import PeftModel


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """A folder with a run's adapter, its base, and prompts."""
    return build_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def plain(task) -> PeftModel:
    return load_plain(task)


def run(task: Path, words: list[str], lines: str = "", exit_code: int = 0) -> subprocess.CompletedProcess:
    (task / "tmp").mkdir(exist_ok=True)
    result = run_command([*LORASHARD, *words], task, folder=task, lines=lines, TMPDIR=str(task / "tmp"))
    assert result.returncode == exit_code, result.stderr
    assert exit_code or not list((task / "tmp").glob("lorashard-*"))
    return result


@pytest.mark.parametrize(
    "ranks", [["--cpu", "2", "--placement", "shard", "--resident_layers", "0"], slow(["--cpu", "1"])]
)
def test_piped_lines_are_a_conversation(task, plain, ranks):
    """Catches ranks without a stdin, an answer that is lost at the end, turns forgotten or kept after /reset."""
    lines = "w20 w21\nw22\n\n/reset\nw22\n/exit\nw23\n"
    result = run(task, ["chat", "runs/answers", *GREEDY, *ranks], lines)
    assert result.stdout.splitlines() == [*talk(task, plain, ["w20 w21", "w22"]), *talk(task, plain, ["w22"])]
    assert "placement: " in result.stderr and result.stderr.count("> ") == 6


def test_without_a_template_lines_are_texts_to_continue(task, plain):
    """Catches a conversation written for a tokenizer without a template."""
    result = run(task, ["chat", "runs/plain", *GREEDY, "--cpu", "1"], "w30\nw31 w32\n")
    assert result.stdout.splitlines() == [answer(task, plain, text) for text in ("w30", "w31 w32")]
    assert result.stderr.count("no chat template") == 1


@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_ctrl_c_ends_a_chat_cleanly(task, ranks):
    """Catches a traceback, a rank that is left, and a launcher that waits for another line."""
    command = [*LORASHARD, "chat", "runs/answers", *GREEDY, "--cpu", ranks, "--placement", "shard"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

    def heed_ctrl_c() -> None:  # processes in the background of a shell ignore it, and so would their children
        signal.signal(signal.SIGINT, signal.default_int_handler)

    # Two ranks are started, since a terminal's Ctrl-C comes to interpreters at any moment; one is forked.
    start = partial(subprocess.Popen, preexec_fn=heed_ctrl_c) if ranks == "2" else warm.Popen
    process = start(command, cwd=task, env=make_environment(task), start_new_session=True, **pipes)
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(b"w20\n")
        process.stdin.flush()
        assert process.stdout.readline().strip()  # it answers while the input is open
        time.sleep(0.3)
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        stderr = process.communicate(timeout=60)[1].decode()
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in stderr
    assert not any(child.is_running() for child in children)
    assert not list((task / "tmp").glob("lorashard-*"))


def test_a_mistake_is_one_line_whatever_waits(task):
    """Catches a launcher that waits for a rank 0 which never opened its pipes, and a traceback for a mistake."""
    result = run(task, ["chat", "runs/nowhere", "--cpu", "2"], exit_code=2)
    assert result.stdout == "" and "Traceback" not in result.stderr
    said = [line for line in result.stderr.splitlines() if line.startswith("lorashard: error: ")]
    assert len(said) == 1 and "runs/nowhere" in said[0]
    for folder in (task / "tmp").glob("lorashard-*"):  # the logs, which the line may point to
        shutil.rmtree(folder)


def run_document(task: Path, number: int, name: str, lines: str = "") -> subprocess.CompletedProcess:
    """Run a command of the document, which is to be of that name."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "chat.md").read_text(), re.DOTALL)
    commands = [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]
    assert len(commands) == 3 and commands[number][0] == name
    return run(task, [*commands[number], *GREEDY], lines)


@pytest.mark.slow
def test_the_documents_chat(task, plain):
    """Catches a renamed option in what a person copies, and an input whose last line has no end."""
    result = run_document(task, 0, "chat", "w30\nw31")
    assert result.stdout.splitlines() == talk(task, plain, ["w30", "w31"])
    assert "rank 0 answers alone" in result.stderr


@pytest.mark.slow
def test_the_documents_comparison(task, plain):
    """Catches an adapter that stays off, and a conversation that continues with the base's answer."""
    result = run_document(task, 1, "chat", "w30\nw31\n")
    first, second = talk(task, plain, ["w30", "w31"])
    with plain.disable_adapter():
        base = talk(task, plain, ["w30"])[0]
        other = answer(task, plain, f"<user> w30 <assistant> {first} </s> <user> w31 <assistant>")
    assert first != base
    expected = [f"[base] {base}", f"[adapter] {first}", f"[base] {other}", f"[adapter] {second}"]
    assert result.stdout.splitlines() == expected


@pytest.mark.slow
def test_the_documents_answers_to_a_file(task, plain):
    """Catches rows in another order, a conversation written as a text, and a result that the launcher swallows."""
    result = run_document(task, 2, "generate")
    assert "3 prompts answered" in result.stdout
    rows = [json.loads(line) for line in (task / "answers.jsonl").read_text().splitlines()]
    texts = ["w7 w8", "<user> w9 <assistant>", "w10 w11 w12 w13"]
    assert [row["completion"] for row in rows] == [answer(task, plain, text) for text in texts]
