"""The process that answers what needs torch: how it begins, ends, is killed, and what it says of mistakes.

Most tests put a small program in the process's place, which speaks as it does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from helpers.waiting import wait_until

from lorashard.errors import ConfigError
from lorashard_ui.running.worker import Canceled, Worker

_STAND_IN = """
import json, os, sys, time
from multiprocessing.connection import Connection
questions, answers = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
def send(message):
    answers.send_bytes(json.dumps(message).encode())
while True:
    name, *arguments = json.loads(questions.recv_bytes())
    words = arguments[0]
    if "crash" in words:
        print("out of luck", file=sys.stderr)
        os.kill(os.getpid(), 9)
    if "hang" in words:
        open(words[1], "w").close()
        time.sleep(60)
    if "slow" in words:
        open(words[1], "w").close()
        while not os.path.exists(words[2]):
            time.sleep(0.01)
    if "wrong" in words:
        send({"error": {"type": "ConfigError", "option": "lora_r", "found": "'x'", "fix": str(time.monotonic())}})
        continue
    if name == "validate":
        for number in range(3):
            send({"line": f"line {number}"})
        send({"answer": None})
        continue
    send({"answer": {"pid": os.getpid(), "time": time.monotonic(), "words": words}})
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


def test_it_answers_as_the_command_line(forks, tmp_path):
    """Catches an answer that is not the command's, and a mistake told otherwise."""
    worker = Worker()
    words = ["--model_name_or_path", "examples/demo/base", "--dataset", "examples/demo/train.jsonl", "--cpu", "2"]
    words += ["--max_length", "128"]
    try:
        plan = worker.plan(words)
        assert plan["num_ranks"] == 2 and {"replicate", "shard"} < set(plan["names"])
        assert any(note.startswith("dtype: ") for note in plan["notes"])  # what `auto`, the default, is here
        elsewhere = worker.plan(words, "rtx4090", 4)  # the 2 ranks are those of the run, not of the plan
        assert elsewhere["cluster"] == "4 x rtx4090" and elsewhere["num_ranks"] == 4
        assert elsewhere["rows"][0]["adapter_bytes"] > 0
        assert plan["rows"][0]["peak_bytes"] > plan["rows"][0]["rest_bytes"] > 10**6
        assert worker.describe_model("examples/demo/base").startswith("LlamaForCausalLM, 4 layers, 1.84 M parameters, ")
        (row,) = worker.preview(words, 1)
        (sequence,) = row["sequences"]
        found = worker.estimate(words)
        assert (found["num_examples"], found["is_complete"]) == (4800, False)
        assert found["num_steps"] == 900 and found["least_s"] < found["train_s"] < found["most_s"]
        assert found["peak_bytes"] == plan["rows"][plan["chosen"]]["peak_bytes"]
        assert row["format"] == "messages" and 0 < sequence["num_supervised_tokens"] < sequence["num_tokens"]
        with pytest.raises(ConfigError, match="lora_r: .*'x'"):
            worker.plan([*words, "--lora_r", "x"])
        few = [word.replace("train", "test") for word in words]
        assert any("model" in line for line in worker.validate([*few, "--output_dir", str(tmp_path / "run")]))
        with pytest.raises(ConfigError, match="nowhere"):
            worker.describe_model("./nowhere")
    finally:
        worker.close()


def test_one_process_answers_all_questions_and_the_same_once(make_worker):
    """Catches a process for each question, which costs seconds, and asking again what is known."""
    worker = make_worker()
    first, again, other = worker.plan(["a"]), worker.plan(["a"]), worker.plan(["b"])
    assert first == again
    assert other["pid"] == first["pid"] and other["time"] > first["time"]


def test_what_two_panels_ask_at_once_is_answered_once(make_worker, tmp_path):
    """Catches a plan that is made twice, since the figures before the start ask for it too."""
    worker, heard, go = make_worker(), tmp_path / "heard", tmp_path / "go"
    answers = []
    words = ["slow", str(heard), str(go)]
    threads = [threading.Thread(target=lambda: answers.append(worker.plan(words))) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(heard.exists)
    go.touch()
    for thread in threads:
        thread.join()
    assert answers[0] == answers[1]


def test_an_estimate_waits_while_somebody_types(make_worker, tmp_path):
    """Catches an estimate that is made of options which change while it is, and that the next plan waits for."""
    worker, heard, go = make_worker(rest_s=1.0), tmp_path / "heard", tmp_path / "go"
    planning = threading.Thread(target=worker.plan, args=(["slow", str(heard), str(go)],))
    planning.start()
    wait_until(heard.exists)
    waiting = threading.Thread(target=worker.wait_for_rest)
    waiting.start()
    waiting.join(1.25)
    assert waiting.is_alive()  # the plan is not there yet
    end_s = time.monotonic()
    go.touch()
    waiting.join()
    assert time.monotonic() - end_s > 1.0  # nor was there time to look at it
    planning.join()


def test_mistakes_are_the_persons_and_the_process_stays(make_worker):
    """Catches a mistake that costs the process, that is kept as an answer, or is worked out anew for each panel."""
    worker = make_worker()
    pid = worker.plan(["a"])["pid"]
    times = set()
    for _ in range(2):
        with pytest.raises(ConfigError) as error:
            worker.plan(["wrong"])
        assert (error.value.option, error.value.found) == ("lora_r", "'x'")
        times.add(error.value.fix)
    assert len(times) == 1
    assert worker.plan(["b"])["pid"] == pid


def test_a_crash_is_told_and_the_next_question_is_answered(make_worker):
    """Catches a dead process that is asked for ever, and a crash without its reason."""
    worker = make_worker()
    with pytest.raises(ConfigError, match=r"signal 9 \(out of luck\)"):
        worker.plan(["crash"])
    pid = worker.plan(["a"])["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid))
    assert worker.plan(["b"])["pid"] != pid


def test_a_hang_ends_in_time(make_worker, tmp_path):
    """Catches a question that is waited for for ever, and a process that goes on with it."""
    worker = make_worker(timeout_s=1)
    pid = worker.plan(["a"])["pid"]
    with pytest.raises(ConfigError, match="1 s"):
        worker.plan(["hang", str(tmp_path / "heard")])
    assert not is_alive(pid)
    assert worker.plan(["b"])["pid"] != pid


def ask_at_once(worker: Worker, folder: Path, is_over: threading.Event) -> tuple[list[threading.Thread], list[str]]:
    """Have three ask what takes a minute, again and again until it is over; return when one is being answered."""
    said: list[str] = []
    asked: list[Path] = []
    begin = threading.Barrier(3)

    def ask(place: Path) -> None:
        begin.wait()
        while True:
            asked.append(place)
            try:
                worker.plan(["hang", str(place)])
            except ConfigError as error:
                said.append(str(error))
            if is_over.is_set():
                return

    threads = [threading.Thread(target=ask, args=(folder / str(number),)) for number in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: list(folder.iterdir()) and len(asked) == 3)
    return threads, said


def test_closing_ends_the_process_and_turns_away_who_waits(make_worker, tmp_path, monkeypatch):
    """Catches a close that waits for an answer while a run waits for the GPU's memory, and a process that loads torch
    anew for each question that was on the page."""
    started = []
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: started.append(args) or start(*args, **options))
    worker = make_worker(timeout_s=60)
    pid = worker.plan(["a"])["pid"]
    is_over = threading.Event()
    is_over.set()
    threads, said = ask_at_once(worker, tmp_path, is_over)
    worker.close()
    for thread in threads:
        thread.join()
    assert not is_alive(pid) and len(started) == 1
    assert sum("signal 9" in line for line in said) == 1 and sum("a run was" in line for line in said) == 2
    assert worker.plan(["b"])["pid"] != pid


def test_no_process_begins_for_the_rest_of_an_estimate(make_worker, monkeypatch):
    """Catches a process that plans beside the run that has just been started, since an estimate is three questions."""
    worker, started, start = make_worker(), [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: started.append(args) or start(*args, **options))

    class Words:
        def __iter__(self):  # read when the plan has been answered
            worker.close()
            return iter(["a"])

    with pytest.raises(Canceled, match="a run was started"):
        worker.estimate(["a"], data_words=Words())
    assert len(started) == 1


def test_closing_does_not_wait_for_those_who_ask_again(make_worker, tmp_path):
    """Catches a close that comes after the questions of other tabs, each of which takes its minutes."""
    worker = make_worker(timeout_s=60)
    is_over = threading.Event()
    threads, _ = ask_at_once(worker, tmp_path, is_over)
    worker.close()
    is_over.set()
    while any(thread.is_alive() for thread in threads):
        worker.close()


def test_an_idle_process_is_not_asked(make_worker):
    """Catches a question to a process that ends by itself in that moment."""
    worker = make_worker(idle_s=0.3)
    pid = worker.plan(["a"])["pid"]
    time.sleep(0.5)
    assert worker.plan(["b"])["pid"] != pid
    assert not is_alive(pid)


def test_the_process_ends_when_nobody_asks_and_with_its_server(list_children):
    """Catches a process that keeps memory of a GPU for as long as the server lives, or longer."""
    worker = Worker(idle_s=0.5)
    with pytest.raises(ConfigError, match="model_name_or_path"):
        worker.plan([])
    (child,) = list_children()
    *command, idle_s = child.cmdline()
    worker.close()
    assert list_children() == [] and 0.5 < float(idle_s) < 60
    with subprocess.Popen([*command, "0.3"], stdin=subprocess.PIPE) as idle:
        assert idle.wait(20) == 0
    with subprocess.Popen([*command, "600"], stdin=subprocess.PIPE) as orphan:
        orphan.stdin.close()  # as the kernel does when the server is killed
        assert orphan.wait(20) == 0


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
