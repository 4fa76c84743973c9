"""Models that the web UI loads to talk to: real processes of `lorashard chat`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from helpers.chat_task import build_task
from helpers.forked_ranks import wait_for_end

from lorashard.errors import ConfigError
from lorashard_ui.running.chats import Chats
from lorashard_ui.running.chatting import Chat, End, Piece

MANY_TOKENS = 3000
GREEDY = {"max_new_tokens": 8, "do_sample": False}
LONG = {"max_new_tokens": MANY_TOKENS, "do_sample": False}
CPU = ["--cpu", "1", "--dtype", "float32"]


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return build_task(tmp_path_factory.mktemp("task"), num_positions=2 * MANY_TOKENS)


@pytest.fixture
def chats(task, monkeypatch) -> Iterator[Chats]:
    monkeypatch.chdir(task)
    monkeypatch.setenv("HF_HOME", str(task / "hf"))
    chats = Chats(task / "runs", idle_s=600, max_loaded=1)
    yield chats
    chats.close()
    assert not chats.list()


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def ask(chat: Chat, asker: str, settings: dict, *sources: str) -> tuple[dict[str, str], list[End], list[str]]:
    """Return each source's answer, how they ended, and what one was told while waiting."""
    texts = dict.fromkeys(sources, "")
    ends, waits = [], []
    for event in chat.answer(asker, {source: say("w30") for source in sources}, settings):
        if isinstance(event, Piece):
            texts[event.source] += event.text
        elif isinstance(event, End):
            ends.append(event)
        else:
            waits.append(event.sentence)
    return texts, ends, waits


def wait_for(condition, timeout_s: float = 30.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until_s, "it has not come"
        time.sleep(0.05)


def test_two_who_ask_share_the_model_and_not_the_answers(chats):
    """Catches a second process for the same run, answers that go to whom has not asked, one who waits without a word,
    and a Stop that ends another's answer."""
    chat = chats.load("answers", CPU)
    assert chats.load("answers", CPU) is chat
    with pytest.raises(ConfigError, match="unload it first"):
        chats.load("answers", ["--cpu", "2"])
    with pytest.raises(ConfigError, match=r"1 models are loaded \(answers\)"):
        chats.load("plain", CPU)
    first, _, waits = ask(chat, "a", GREEDY, "base", "adapter")
    assert first["base"] != first["adapter"] and any("loading" in sentence for sentence in waits)
    assert chat.state == "ready" and chat.describe().startswith("placement: ")

    found = {}
    long = threading.Thread(daemon=True, target=lambda: found.update(a=ask(chat, "a", LONG, "adapter", "base")))
    long.start()
    wait_for(lambda: chat.state == "answering")
    other = threading.Thread(daemon=True, target=lambda: found.update(b=ask(chat, "b", GREEDY, "adapter")))
    other.start()
    time.sleep(0.7)
    chat.cancel("c")
    assert long.is_alive() and other.is_alive()
    chat.cancel("a")
    long.join(20)
    other.join(20)
    ends = found["a"][1]
    assert [end.is_cancelled for end in ends] == [True, True] and ends[0].num_tokens > 0
    assert found["b"][0] == {"adapter": first["adapter"]}
    assert any("another tab" in sentence for sentence in found["b"][2])

    with pytest.raises(ConfigError, match="max_new_tokens: "):
        ask(chat, "a", {"max_new_tokens": 0}, "adapter")
    listener = chat.answer("a", {"adapter": say("w30")}, LONG)
    while not isinstance(next(listener), Piece):
        pass
    listener.close()  # whoever stops listening cancels
    wait_for(lambda: chat.state == "ready", 10)

    assert first == ask(chat, "a", GREEDY, "base", "adapter")[0]
    chat.unload()
    assert chat.state == "ended" and chats.list() == [] and chat.describe() == "unloaded"
    with pytest.raises(ConfigError, match="unloaded"):
        ask(chat, "a", GREEDY, "adapter")


def test_what_cannot_be_loaded_is_told_in_the_words_of_the_cli(chats, task):
    """Catches a page that waits for ever for a process that has ended, and a reason that only its log has."""
    for name, reason in (("../runs", "name of a run"), ("nowhere", "no run"), ("empty", "no adapter yet")):
        (task / "runs" / "empty").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match=reason):
            chats.load(name)
    broken = task / "runs" / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text("{}")
    chat = chats.load("broken", CPU)
    with pytest.raises(ConfigError, match="adapter_model.safetensors missing"):
        ask(chat, "a", GREEDY, "adapter")
    assert chat.state == "ended" and "exit code" not in chat.describe()


@pytest.mark.slow
def test_a_process_that_dies_says_so_and_an_idle_one_is_unloaded(task, monkeypatch, list_children):
    """Catches an answer that never ends when the kernel kills the process, a run that can then not be loaded, GPUs that
    stay full after everybody has gone home, and an answer that is taken for idleness."""
    monkeypatch.chdir(task)
    chats = Chats(task / "runs", idle_s=1.0)
    chat = chats.load("answers", CPU)
    events = chat.answer("a", {"adapter": say("w30")}, LONG)
    while not isinstance(next(events), Piece):
        pass
    (child,) = list_children()
    child.kill()
    with pytest.raises(ConfigError, match="cut off: SIGKILL"):
        list(events)
    assert chat.state == "ended"

    chat = chats.load("answers", CPU)
    _, ends, _ = ask(chat, "a", LONG | {"max_new_tokens": 500}, "adapter")
    assert ends[0].num_tokens == 500 or not ends[0].is_cut
    wait_for(lambda: chat.state == "ended", 5)
    assert "without a question" in chat.describe()
    chat.wait()
    assert list_children() == []


@pytest.mark.slow
def test_it_ends_with_a_server_that_is_killed(task):
    """Catches a model that stays in memory after the server was killed with SIGKILL."""
    code = (
        "from pathlib import Path; from lorashard_ui.running.chats import Chats\n"
        f"chat = Chats(Path('runs')).load('answers', {CPU!r})\n"
        f"for event in chat.answer('a', {{'adapter': {say('w20')!r}}}, {LONG!r}): print(event, flush=True)"
    )
    server = subprocess.Popen([sys.executable, "-c", code], cwd=task, stdout=subprocess.PIPE, text=True)
    try:
        while "Piece" not in server.stdout.readline():
            pass
        (child,) = psutil.Process(server.pid).children()
    finally:
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        server.stdout.close()
    assert child.is_running()
    wait_for_end(child.pid, 20)
