"""`lorashard chat --json` as a program uses it: real processes, requests on pipes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers import warm
from helpers.chat_task import GREEDY, NEW_TOKENS, answer, build_task, load_plain, make_environment, talk
from helpers.finetune import LORASHARD
from peft import PeftModel

ALONE = ["--cpu", "1"]
SHARDED = ["--cpu", "2", "--placement", "shard", "--resident_layers", "0"]
EVERY_PLACE = [ALONE, pytest.param(SHARDED, marks=pytest.mark.slow)]
MANY_TOKENS = 3000


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """A folder with a run's adapter and its base, which knows enough positions for an answer to be canceled."""
    return build_task(tmp_path_factory.mktemp("task"), num_positions=2 * MANY_TOKENS)


@pytest.fixture(scope="module")
def plain(task) -> PeftModel:
    return load_plain(task)


class Program:
    """Writes requests and reads what comes of them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, *requests: dict[str, Any] | str) -> None:
        lines = [request if isinstance(request, str) else json.dumps(request) for request in requests]
        self.process.stdin.write("".join(line + "\n" for line in lines))
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return json.loads(line)

    def hear_answer(self, source: str) -> tuple[str, dict[str, Any]]:
        """Return a source's whole answer and how it ended; nothing else may come in between."""
        text = ""
        while not (said := self.hear()).get("is_end"):
            assert set(said) == {"source", "text"} and said["source"] == source, said
            text += said["text"]
        assert said["source"] == source
        return text, said


@contextmanager
def talk_with(task: Path, words: list[str]) -> Iterator[Program]:
    """Start a chat that is ready; no process of it is left."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [*LORASHARD, "chat", *words, "--json", *GREEDY]
    process = warm.Popen(command, cwd=task, env=make_environment(task), start_new_session=True, **pipes)
    try:
        program = Program(process)
        ready = program.hear()
        assert ready["ready"] is True and ready["placement"].startswith("placement: ")
        children = psutil.Process(process.pid).children(recursive=True)
        yield program
        process.wait(timeout=30)
        assert not any(child.is_running() for child in children)
        assert not list((task / "tmp").glob("lorashard-*"))
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            with suppress(BrokenPipeError):
                pipe.close()


@pytest.mark.parametrize("ranks", EVERY_PLACE)
def test_each_source_keeps_its_conversation(task, plain, ranks):
    """Catches a base that continues the adapter's answers, a wrong line that ends the chat or changes the order,
    options of one request that stay for the next, and a complete conversation that is stored."""
    with talk_with(task, ["runs/answers", *ranks]) as program:
        both = {"sources": ["base", "adapter"]}
        program.ask({"content": "w20 w21"} | both, '{"contents": "w22"}', {"content": "w22", "temperature": 0})
        program.ask({"content": "w22", "max_new_tokens": 2, "sources": ["adapter"]}, {"reset": True}, "no")
        program.ask({"content": "w20 w21"} | both, {"content": "w22"} | both)
        whole = [{"role": "user", "content": "w30"}]
        program.ask({"conversations": {"adapter": whole, "base": "w31 w32"}}, {"conversations": {"base": [{}]}})
        program.process.stdin.close()  # what was asked is answered all the same
        with plain.disable_adapter():
            base = talk(task, plain, ["w20 w21", "w22"])
            continued = answer(task, plain, "w31 w32")
        adapter = talk(task, plain, ["w20 w21", "w22"])
        assert program.hear_answer("base")[0] == base[0] != adapter[0]
        text, end = program.hear_answer("adapter")
        assert text == adapter[0] and end["num_tokens"] == NEW_TOKENS and end["is_cut"] and not end["is_canceled"]
        assert "contents" in program.hear()["error"]
        assert program.hear()["error"].startswith("temperature: ")
        text, end = program.hear_answer("adapter")
        assert text == " ".join(adapter[1].split()[:2]) and end["num_tokens"] == 2
        assert program.hear() == {"reset": True}
        assert "JSON object" in program.hear()["error"]
        for i in range(2):
            assert program.hear_answer("base")[0] == base[i]
            assert program.hear_answer("adapter")[0] == adapter[i]
        assert program.hear_answer("adapter")[0] == talk(task, plain, ["w30"])[0]
        assert program.hear_answer("base")[0] == continued
        assert "error" in program.hear()
        assert program.process.wait(timeout=60) == 0


@pytest.mark.parametrize("ranks", EVERY_PLACE)
def test_an_answer_can_be_canceled(task, plain, ranks):
    """Catches ranks that continue or hang when rank 0 stops, a canceled request whose other source answers,
    and a question that is lost because it came with the cancellation."""
    with talk_with(task, ["runs/answers", *ranks]) as program:
        program.ask({"content": "w30", "sources": ["adapter", "base"], "max_new_tokens": MANY_TOKENS})
        assert program.hear()["source"] == "adapter"
        program.ask({"conversations": {"adapter": [{"role": "user", "content": "w30"}]}}, {"cancel": True})
        end = program.hear_answer("adapter")[1]
        assert end["is_canceled"] and 0 < end["num_tokens"] < MANY_TOKENS
        text, end = program.hear_answer("base")
        assert text == "" and end["is_canceled"] and end["num_tokens"] == 0
        assert program.hear_answer("adapter")[0] == talk(task, plain, ["w30"])[0]
        program.process.stdin.close()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [ALONE, SHARDED])
def test_it_ends_with_the_program_that_asked(task, ranks):
    """Catches a model that stays in memory, and goes on answering, for a program that was killed."""
    with talk_with(task, ["runs/answers", *ranks]) as program:
        program.ask(
            {"content": "w30", "max_new_tokens": MANY_TOKENS}, {"content": "w30", "max_new_tokens": MANY_TOKENS}
        )
        assert program.hear()["source"] == "adapter"
        program.process.stdin.close()
        program.process.stdout.close()
        program.process.wait(timeout=30)
        assert "Traceback" not in program.process.stderr.read()
