"""The process that answers what needs torch: how it begins, ends, is killed, and what it says of mistakes.

All but the first test put a small program in the process's place, which speaks as it does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

import psutil
import pytest

from lorashard.errors import ConfigError
from lorashard_ui.running.worker import Worker

_STAND_IN = """
import json, os, sys, time
for line in sys.stdin:
    name, *arguments = json.loads(line)
    words = arguments[0]
    if "crash" in words:
        print("out of luck", file=sys.stderr)
        os.kill(os.getpid(), 9)
    if "hang" in words:
        time.sleep(60)
    if "wrong" in words:
        print(json.dumps({"error": "lora_r: expected a whole number, found 'x'"}), flush=True)
        continue
    if name == "validate":
        for number in range(3):
            print(json.dumps({"line": f"line {number}"}), flush=True)
        print(json.dumps({"answer": None}), flush=True)
        continue
    print(json.dumps({"answer": {"pid": os.getpid(), "time": time.monotonic(), "words": words}}), flush=True)
"""


@pytest.fixture
def make_worker():
    """Make workers that ask the stand-in; they are closed after the test."""
    workers = []

    def make(**options) -> Worker:
        workers.append(Worker(command=[sys.executable, "-c", _STAND_IN], **options))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


def is_alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_for_end(pid: int, deadline_s: float = 10) -> None:
    """Wait until a process is gone."""
    end_s = time.monotonic() + deadline_s
    while is_alive(pid):
        assert time.monotonic() < end_s, f"process {pid} lives on"
        time.sleep(0.02)


def test_it_answers_as_the_command_line():
    """Catches an answer that is not the command's, a mistake told otherwise, and a process that outlives its server."""
    worker = Worker()
    words = ["--model_name_or_path", "examples/demo/base", "--dataset", "examples/demo/train.jsonl", "--cpu", "2"]
    words += ["--max_length", "128"]
    try:
        plan = worker.plan(words)
        assert plan["num_ranks"] == 2 and plan["names"][:2] == ["replicate", "shard"]
        assert any(note.startswith("dtype: ") for note in plan["notes"])  # what `auto`, the default, is here
        assert plan["rows"][0]["peak_bytes"] > plan["rows"][0]["rest_bytes"] > 10**6
        assert worker.describe_model("examples/demo/base").startswith("38 tensors")
        (row,) = worker.preview(words, 1)
        assert row["format"] == "messages" and 0 < row["num_supervised_tokens"] < row["num_tokens"]
        with pytest.raises(ConfigError, match="lora_r: expected a whole number, found 'x'"):
            worker.plan([*words, "--lora_r", "x"])
        with pytest.raises(ConfigError, match="does not exist"):
            worker.describe_model("./nowhere")
        process = worker._quick._process
        assert process is not None
        worker._quick._process = None
        process.stdin.close()  # as the kernel does when the server is killed
        assert process.wait(10) == 0
    finally:
        worker.close()


def test_one_process_answers_all_questions_and_the_same_once(make_worker):
    """Catches a process for each question, which costs seconds, and asking again what is known."""
    worker = make_worker()
    first, again, other = worker.plan(["a"]), worker.plan(["a"]), worker.plan(["b"])
    assert first == again
    assert other["pid"] == first["pid"] and other["time"] > first["time"]


def test_mistakes_are_the_persons_and_the_process_stays(make_worker):
    """Catches a mistake that costs the process, or that is kept as an answer."""
    worker = make_worker()
    pid = worker.plan(["a"])["pid"]
    for _ in range(2):
        with pytest.raises(ConfigError, match="^lora_r: expected a whole number, found 'x'$"):
            worker.plan(["wrong"])
    assert worker.plan(["b"])["pid"] == pid


def test_a_crash_is_told_and_the_next_question_is_answered(make_worker):
    """Catches a dead process that is asked for ever, and a crash without its reason."""
    worker = make_worker()
    with pytest.raises(ConfigError, match=r"the plan cannot be told: .* by signal 9 \(out of luck\): try again"):
        worker.plan(["crash"])
    pid = worker.plan(["a"])["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
    assert worker.plan(["b"])["pid"] != pid


def test_a_hang_ends_in_time(make_worker):
    """Catches a question that is waited for for ever, and a process that goes on with it."""
    worker = make_worker(timeout_s=2)
    pid = worker.plan(["a"])["pid"]
    with pytest.raises(ConfigError, match="took more than 2 s and was given up"):
        worker.plan(["hang"])
    assert not is_alive(pid)
    assert worker.plan(["b"])["pid"] != pid


def test_closing_ends_the_process_though_it_computes(make_worker):
    """Catches a close that waits for an answer, while a run waits for the GPU's memory."""
    worker = make_worker(timeout_s=60)
    pid = worker.plan(["a"])["pid"]
    said = []

    def ask() -> None:
        try:
            worker.plan(["hang"])
        except ConfigError as error:
            said.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.3)
    begin_s = time.monotonic()
    worker.close()
    assert time.monotonic() - begin_s < 5 and not is_alive(pid)
    thread.join(5)
    assert len(said) == 1 and "ended by signal 9" in said[0]
    assert worker.plan(["b"])["pid"] != pid


def test_closing_does_not_wait_for_those_who_wait(make_worker):
    """Catches a close that comes after the questions of other tabs, each of which takes its minutes."""
    worker = make_worker(timeout_s=20)
    is_over = threading.Event()

    def ask_again(number: int) -> None:
        while not is_over.is_set():
            with contextlib.suppress(ConfigError):
                worker.plan(["hang", str(number)])

    threads = [threading.Thread(target=ask_again, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    begin_s = time.monotonic()
    worker.close()
    elapsed_s = time.monotonic() - begin_s
    is_over.set()
    while any(thread.is_alive() for thread in threads):
        worker.close()
    assert elapsed_s < 10


def test_closing_turns_away_the_questions_that_wait(make_worker):
    """Catches a start that waits for a process to load torch anew, once for each question on the page."""
    worker = make_worker(timeout_s=60)
    worker.plan(["a"])
    said = []

    def ask() -> None:
        try:
            worker.plan(["hang"])
        except ConfigError as error:
            said.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    begin_s = time.monotonic()
    worker.close()
    for thread in threads:
        thread.join(5)
    assert time.monotonic() - begin_s < 5
    assert sum("since a run was started" in line for line in said) == 2


def test_an_idle_process_is_not_asked(make_worker):
    """Catches a question to a process that ends by itself in that moment."""
    worker = make_worker(idle_s=0.3)
    pid = worker.plan(["a"])["pid"]
    time.sleep(0.5)
    assert worker.plan(["b"])["pid"] != pid
    assert not is_alive(pid)


def test_the_process_ends_when_nobody_asks(monkeypatch):
    """Catches a process that keeps memory of a GPU for as long as the server lives."""
    monkeypatch.setattr("lorashard_ui.running.worker._IDLE_SLACK_S", 0.5)
    worker = Worker(idle_s=0.5)
    with pytest.raises(ConfigError, match="no model_name_or_path"):
        worker.plan([])
    process = worker._quick._process
    assert process is not None and process.wait(10) == 0
    worker.close()


def test_lines_of_a_check_come_one_by_one(make_worker):
    """Catches lines that come all at the end, and one that is left for the next question when nobody reads on."""
    worker = make_worker()
    assert list(worker.validate(["a"])) == ["line 0", "line 1", "line 2"]
    lines = worker.validate(["a"])
    assert next(lines) == "line 0"
    lines.close()
    assert list(worker.validate(["b"])) == ["line 0", "line 1", "line 2"]
    with pytest.raises(ConfigError, match="lora_r"):
        list(worker.validate(["wrong"]))


def test_threads_get_their_own_answers(make_worker):
    """Catches answers that go to the wrong browser."""
    worker = make_worker()
    answers = {}

    def ask(word: str) -> None:
        answers[word] = worker.plan([word])["words"]

    threads = [threading.Thread(target=ask, args=(f"word {number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert answers == {f"word {number}": [f"word {number}"] for number in range(8)}
