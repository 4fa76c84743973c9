"""Who is let in, and what the command `lorashard ui` is told."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import subprocess
import sys
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers.paths import ROOT

from lorashard.cli import main
from lorashard.errors import ConfigError
from lorashard_ui.serving.accounts import SESSION_S, Accounts
from lorashard_ui.serving.guard import Guard
from lorashard_ui.serving.options import UiOptions, name_host

PASSWORD = "pass:word with spaces "


def run_apart(coroutine: Coroutine) -> Any:
    """Run a coroutine in a thread: where a browser's tests were here before, this one's event loop is theirs."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def ask(guard: Guard, path: str, *parts: bytes, method: str = "GET", **headers: str) -> int:
    """Send a request, its body in parts, and return the status of the answer."""
    sent: list[dict[str, Any]] = []
    bodies = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    bodies.append({"type": "http.request", "body": b"", "more_body": False})
    headers = {"host": "127.0.0.1:7860"} | {name.replace("_", "-"): value for name, value in headers.items()}

    async def receive() -> dict[str, Any]:
        return bodies.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    run_apart(guard(scope, receive, send))
    return sent[0]["status"]


async def read_all(scope, receive, send) -> None:
    """An app that reads the whole body, and says whether it came to its end."""
    message = await receive()
    while message.get("more_body"):
        message = await receive()
    status = 200 if message["type"] == "http.request" else 499
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def open_guard() -> Guard:
    return Guard(read_all, None, frozenset({"/", "/new"}), 7860)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "::1", "[::1]", "127.0.0.2"])
def test_addresses_of_this_machine_need_no_password(host):
    """Whoever tries it at home would have to invent a password."""
    assert UiOptions.read(["--host", host]).host == host
    assert UiOptions.read(["--host=0.0.0.0", "--auth", "users"]).auth == "users"


def test_the_printed_address_leads_here_from_elsewhere():
    """Catches 127.0.0.1 in the address of a server that listens for other machines, and an IPv6 address as it is."""
    assert {name_host("0.0.0.0"), name_host("::")} == {socket.gethostname()}
    assert (name_host("::1"), name_host("192.0.2.5")) == ("[::1]", "192.0.2.5")


def test_a_file_of_users_is_read(tmp_path):
    """A colon in a password, or a blank at its end, is part of it."""
    path = tmp_path / "users"
    path.write_text(f"# team\n\nada:{PASSWORD.strip()}\n bo:x\n")
    path.chmod(0o600)
    accounts = Accounts.read(str(path))
    assert accounts.open_session("ada", PASSWORD.strip()) and accounts.open_session("bo", "x")
    assert Accounts.read(f"ada:{PASSWORD}").open_session("ada", PASSWORD)
    for user, password in (("ada", "x"), ("bo", ""), ("", ""), ("eve", "x"), ("# team", "")):
        assert accounts.open_session(user, password) is None


@pytest.mark.parametrize(
    "text", ["", "# nobody\n", "ada\n", "ada:\n", ":secret\n", "ada:secret\nada:other\n", "\udcff"]
)
def test_a_wrong_file_of_users_lets_nobody_in(tmp_path, text):
    """An empty password would let in whoever knows a name; no message may repeat a password."""
    path = tmp_path / "users"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    path.chmod(0o600)
    with pytest.raises(ConfigError) as error:
        Accounts.read(str(path))
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_a_file_that_others_read_is_refused(tmp_path, mode):
    """On a machine of many users, the password would be everybody's."""
    path = tmp_path / "users"
    path.write_text("ada:secret\n")
    path.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        Accounts.read(str(path))


def test_sessions_end(monkeypatch):
    """A cookie that is copied must not open the server for ever."""
    accounts = Accounts.read("ada:x")
    session, other = accounts.open_session("ada", "x"), accounts.open_session("ada", "x")
    assert session and other and session != other and accounts.has_session(session)
    accounts.close_session(session)
    assert not accounts.has_session(session) and accounts.has_session(other) and not accounts.has_session("")
    monkeypatch.setattr("time.monotonic", lambda: SESSION_S * 10.0)
    assert not accounts.has_session(other)


def test_a_body_that_does_not_say_its_length_ends_too(open_guard):
    """A request in chunks would fill the memory."""
    part = b"x" * 2**20
    assert ask(open_guard, "/gradio_api/queue/join", *[part] * 15, method="POST") == 200
    assert ask(open_guard, "/gradio_api/queue/join", *[part] * 17, method="POST") == 499
    assert ask(open_guard, "/gradio_api/queue/join", method="POST", content_length="99999999") == 413


@pytest.mark.parametrize("host", ["127.0.0.1/favicon.ico?", "127.0.0.1:7860/favicon.ico#", "a@b/favicon.ico?x="])
def test_the_address_is_that_of_the_request_alone(host):
    """An address that is read out of the Host header, and one that nobody need log in for is let through."""
    guard = Guard(read_all, Accounts.read("ada:x"), frozenset({"/"}), 7860)
    assert ask(guard, "/favicon.ico") == 200
    assert ask(guard, "/config", host=host) == ask(guard, "/favicon.ico?/config") == 401


def test_slow_logins_count_from_their_beginning():
    """A thousand requests that send their bodies at the same moment are a thousand guesses in a second; and each would
    wait, and be answered."""
    guard = Guard(read_all, Accounts.read("ada:x"), frozenset({"/"}), 7860, login_s=0.3)
    scope = {"type": "http", "method": "POST", "path": "/login", "query_string": b"", "headers": []}

    async def never() -> dict[str, Any]:
        await asyncio.sleep(60)
        raise AssertionError

    async def log_in() -> int:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await guard(dict(scope), never, send)
        return sent[0]["status"]

    async def log_in_often() -> list[int]:
        return await asyncio.gather(*(log_in() for _ in range(12)))

    assert sorted(run_apart(log_in_often())) == [408] * 8 + [429] * 4
    assert ask(guard, "/login", b"username=ada&password=x", method="POST") == 200
    assert ask(guard, "/login", b"x" * 5000, method="POST") == 413


@pytest.mark.parametrize("path", ["/gradio_api/later", "/new/../config", "/gradio_api/file", "/static/", "//", "/NEW"])
def test_only_known_addresses_are_handed_on(open_guard, path):
    """What a later Gradio answers at a new address, nobody here has looked at."""
    assert ask(open_guard, "/new") == 200 and ask(open_guard, "/gradio_api/heartbeat/abc123") == 200
    assert ask(open_guard, path) == 404


def test_websockets_are_refused(open_guard):
    """A page of another site may open one to this machine."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    run_apart(open_guard({"type": "websocket", "path": "/", "headers": []}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_without_gradio_one_line_says_what_to_install(monkeypatch, capsys):
    """Most who train need no web UI, and have not installed it."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gradio" else find_spec(name))
    assert main(["ui"]) == 2
    said = capsys.readouterr().err
    assert "pip install 'lorashard[ui]'" in said and said.count("\n") == 1


def test_reading_and_asking_need_no_torch_and_help_no_gradio():
    """A server with torch in it holds a gigabyte, and a CUDA context where one slips in; and the options of the UI must
    not load Gradio for those who ask what there is."""
    script = (
        "import sys; from lorashard.cli import main\n"
        "assert main(['--help']) == 0 and 'lorashard_ui' not in sys.modules\n"
        "assert main(['ui', '--help']) == 0\n"
        "assert main(['watch', '--help']) == 0\n"
        "import lorashard_ui.terminal.commands, lorashard_ui.reading.runs, lorashard_ui.reading.comparing\n"
        "import lorashard_ui.form.form, lorashard_ui.form.choices, lorashard_ui.running.worker\n"
        "assert not {'gradio', 'torch', 'transformers', 'uvicorn', 'plotly'} & sys.modules.keys()"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for option in UiOptions.find_own_names():
        assert f"--{UiOptions.short_names.get(option, option)}" in result.stdout
    assert "--gpus" not in result.stdout.partition("Options of the")[2]


def test_the_endpoints_are_those_of_the_document(tmp_path):
    """A program is written after docs/ui.md."""
    pytest.importorskip("gradio")
    from helpers.ui_api import list_documented, list_endpoints

    assert list_documented(ROOT / "docs/ui.md") == list_endpoints(tmp_path)


def test_no_event_redraws_the_links_over_the_runs(tmp_path):
    """Catches "Log out" that comes late, in the place of "New run": a click that was meant for one does the other."""
    pytest.importorskip("gradio")
    from lorashard_ui.app import build_app
    from lorashard_ui.app_context import AppContext

    context = AppContext.open(tmp_path, has_login=True)
    app = build_app(context)
    context.close()
    heads = {block for block in app.blocks.values() if 'href="logout"' in str(getattr(block, "value", ""))}
    assert len(heads) == 1
    assert not heads & {block for event in app.fns.values() for block in event.outputs}
