"""Models that the web UI loads to talk to: processes of `lorashard chat`, forked from one that has imported torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from helpers.chat_task import build_task
from helpers.forked_ranks import wait_for_end
from helpers.waiting import wait_until

from lorashard.errors import ConfigError
from lorashard_ui.running.chats import Chats
from lorashard_ui.running.chatting import Chat, End, Event, Piece, Waiting

MANY_TOKENS = 3000
GREEDY = {"max_new_tokens": 8, "do_sample": False}
LONG = {"max_new_tokens": MANY_TOKENS, "do_sample": False}
CPU = ["--cpu", "1", "--dtype", "float32"]


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return build_task(tmp_path_factory.mktemp("task"), num_positions=2 * MANY_TOKENS)


@pytest.fixture
def chats(task, monkeypatch, forks) -> Iterator[Chats]:
    monkeypatch.chdir(task)
    monkeypatch.setenv("HF_HOME", str(task / "hf"))
    chats = Chats(task / "runs", idle_s=600, max_loaded=1)
    yield chats
    chats.close()
    assert not chats.list()


def has_heard(heard: list[Event], kind: type, word: str = "") -> bool:
    return any(isinstance(event, kind) and word in str(event) for event in heard)


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def ask(
    chat: Chat, asker: str, settings: dict, *sources: str, heard: list[Event] | None = None
) -> tuple[dict[str, str], list[End]]:
    """Return each source's answer and how they ended; `heard` gets what comes when it comes."""
    texts = dict.fromkeys(sources, "")
    ends = []
    heard = [] if heard is None else heard
    for event in chat.answer(asker, {source: say("w30") for source in sources}, settings):
        heard.append(event)
        if isinstance(event, Piece):
            texts[event.source] += event.text
        elif isinstance(event, End):
            ends.append(event)
    return texts, ends


def test_two_who_ask_share_the_model_and_not_the_answers(chats, list_children):
    """Catches a second process for the same run, answers that go to whom has not asked, one who waits without a word,
    and a Stop that ends another's answer."""
    chat = chats.load("answers", CPU)
    assert chats.load("answers", CPU) is chat
    with pytest.raises(ConfigError, match="unload"):
        chats.load("answers", ["--cpu", "2"])
    with pytest.raises(ConfigError, match="answers"):
        chats.load("plain", CPU)
    (child,) = list_children()
    child.suspend()
    heard: dict[str, list[Event]] = {name: [] for name in "abc"}
    found = {}

    def begin(asker: str, settings: dict, *sources: str) -> threading.Thread:
        def work() -> None:
            found[asker] = ask(chat, asker, settings, *sources, heard=heard[asker])

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    early = begin("c", GREEDY, "base", "adapter")
    wait_until(lambda: has_heard(heard["c"], Waiting, "loading"))
    child.resume()
    early.join()
    first = found["c"][0]
    assert first["base"] != first["adapter"]
    assert chat.state == "ready" and chat.describe().startswith("placement: ")

    long = begin("a", LONG, "adapter", "base")
    wait_until(lambda: has_heard(heard["a"], Piece))
    other = begin("b", GREEDY, "adapter")
    wait_until(lambda: has_heard(heard["b"], Waiting, "another tab"))
    chat.cancel("c")
    assert long.is_alive() and other.is_alive()
    chat.cancel("a")
    long.join(20)
    other.join(20)
    ends = found["a"][1]
    assert [end.is_canceled for end in ends] == [True, True] and ends[0].num_tokens > 0
    assert found["b"][0] == {"adapter": first["adapter"]}

    with pytest.raises(ConfigError, match="max_new_tokens: "):
        ask(chat, "a", {"max_new_tokens": 0}, "adapter")
    listener = chat.answer("a", {"adapter": say("w30")}, LONG)
    while not isinstance(next(listener), Piece):
        pass
    listener.close()  # whoever stops listening cancels
    wait_until(lambda: chat.state == "ready")

    assert first == ask(chat, "a", GREEDY, "base", "adapter")[0]
    chat.unload()
    assert chat.state == "ended" and chats.list() == [] and chat.describe() == "unloaded"
    with pytest.raises(ConfigError, match="unloaded"):
        ask(chat, "a", GREEDY, "adapter")


def test_what_cannot_be_loaded_is_told_in_the_words_of_the_cli(chats, task):
    """Catches a page that waits for ever for a process that has ended, and a reason that only its log has."""
    for name, reason in (("../runs", "name of"), ("nowhere", "no run"), ("empty", "no adapter")):
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


def test_a_process_that_dies_says_so_and_an_idle_one_is_unloaded(task, monkeypatch, forks, list_children):
    """Catches an answer that never ends when the kernel kills the process, a run that can then not be loaded, GPUs that
    stay full after everybody has gone home, and an answer that is taken for idleness."""
    monkeypatch.chdir(task)
    chats = Chats(task / "runs", idle_s=0.5)
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
    _, ends = ask(chat, "a", LONG | {"max_new_tokens": 100}, "adapter")
    assert ends[0].num_tokens == 100 or not ends[0].is_cut
    wait_until(lambda: chat.state == "ended")
    assert "without a question" in chat.describe()
    chat.wait()
    assert list_children() == []


def test_it_ends_with_a_server_that_is_killed(task, forks):
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
