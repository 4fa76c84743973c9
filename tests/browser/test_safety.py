"""What the web UI's server gives to whom, asked over real connections and in a real browser."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from filelock import FileLock
from gradio_client import Client
from gradio_client.exceptions import AuthenticationError
from helpers.browser import UiServer, check_no_overflow, open_page
from helpers.paths import ROOT as REPOSITORY
from helpers.waiting import wait_until
from playwright.sync_api import Request

from lorashard.cli import main

PAGES = ["", "new", "run", "compare", "chat", "export"]
BEFORE_LOGIN = ["/config", "/theme.css", "/gradio_api/info", "/gradio_api/openapi.json", "/gradio_api/app_id"]
BEFORE_LOGIN += ["/gradio_api/heartbeat/abc", "/gradio_api/startup-events", "/assets/x.js", "/gradio_api/file=x"]
HUB_TOKEN = "hf_" + "Secret" * 6
PASSWORD = "correct horse"
_IS_FOCUSED = "(name) => document.activeElement.name === name"  # a field that is focused by the page, as it is drawn


@pytest.fixture(scope="module")
def guarded_ui(start_ui, make_place, tmp_path_factory):
    """A server that asks for a password, in a folder of runs where others were killed, and one lives; the file's last
    test ends it."""
    accounts = tmp_path_factory.mktemp("auth") / "users"
    accounts.write_text(f"# who may come in\nada:{PASSWORD}\nbo:other:with colon\n")
    accounts.chmod(0o600)
    place = make_place()
    (place / "runs/.serving-killed/uploads").mkdir(parents=True)
    (place / "runs/.serving-alive/uploads").mkdir(parents=True)
    with FileLock(place / "runs/.serving-alive/.lock"):
        return start_ui("--auth", str(accounts), "--max_upload_size", "1MB", place=place, HF_TOKEN=HUB_TOKEN)


@pytest.fixture
def client(ui_server):
    """A program that asks the server without a browser."""
    with httpx.Client(base_url=ui_server.url, headers=ui_server.headers, timeout=20) as client:
        yield client


def find_serving(root: Path) -> Path:
    """Return the folder of a server's uploads."""
    (folder,) = root.resolve().glob(".serving-*")
    return folder


def log_in(client: httpx.Client, **asked: Any) -> httpx.Response:
    return client.post("/login", data={"username": "ada", "password": PASSWORD}, **asked)


def test_a_tab_holds_no_connection(page, ui_server):
    """A browser opens six connections to a server: where each tab holds one, the seventh waits for ever."""
    open_requests: set[Request] = set()

    def begin(request: Request) -> None:
        if request.url.startswith(ui_server.url):
            open_requests.add(request)

    def end(request: Request) -> None:
        open_requests.discard(request)

    listeners = {"request": begin, "requestfinished": end, "requestfailed": end}
    for event, listener in listeners.items():
        page.on(event, listener)
    open_page(page)
    wait_until(
        lambda: page.wait_for_timeout(50) or not open_requests, lambda: str([request.url for request in open_requests])
    )
    for event, listener in listeners.items():
        page.remove_listener(event, listener)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7860", "127.0.0.1.evil.example", "", "192.168.1.9"])
def test_a_name_that_was_made_to_point_here_is_refused(client, host):
    """A site whose name is changed to mean this machine (DNS rebinding) would be of this origin, and read all."""
    for path in ("/", "/config", "/gradio_api/info"):
        assert client.get(path, headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost", "localhost:9000", "127.0.0.1:9000", "[::1]:9000"])
def test_a_tunnel_from_any_port_of_this_machine_comes_in(client, host):
    """`ssh -L 9000:127.0.0.1:7860` keeps the person out if the port is compared too."""
    assert client.get("/config", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:3000", "http://127.0.0.1"])
def test_another_sites_page_starts_nothing(client, origin):
    """A page anywhere on the web can post to 127.0.0.1, also without reading the answer: that starts programs."""
    body = {"data": [], "fn_index": 0, "session_hash": "abc"}
    for path in ("queue/join", "call/list_runs", "api/list_runs", "run/list_runs", "upload", "cancel", "reset"):
        for content_type in ("application/json", "text/plain"):
            answer = client.post(
                f"/gradio_api/{path}", json=body, headers={"Origin": origin, "Content-Type": content_type}
            )
            assert answer.status_code == 403, path
            assert "access-control-allow-origin" not in answer.headers
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    assert client.options("/gradio_api/queue/join", headers=headers).status_code == 403


def test_another_sites_page_reads_nothing(client):
    """Images, scripts and event streams are asked for without an Origin; a link that a person follows is no such."""
    for site in ("cross-site", "same-site"):
        for path in ("/gradio_api/queue/data?session_hash=abc", "/config", "/theme.css", "/gradio_api/file=x", "/new"):
            headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"}
            assert client.get(path, headers=headers).status_code == 403
        headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
        assert client.get("/new", headers=headers).status_code == 200
        assert client.get("/gradio_api/file=x", headers=headers).status_code == 403
        assert client.get("/new", headers=headers | {"Sec-Fetch-Dest": "iframe"}).status_code == 403


def test_no_file_is_given_that_was_not_uploaded(client, ui_server):
    """Gradio serves files by their path."""
    run = ui_server.root / "private"
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text("a: 1\n")
    serving = find_serving(ui_server.root)
    (serving / "link").symlink_to("/etc/passwd")
    names = [
        "/etc/passwd",
        "../../../../../../etc/passwd",
        str(run / "config.yaml"),
        f"{serving}/../private/config.yaml",
        f"{serving}/link",
        str(Path.home() / ".ssh/id_rsa"),
        str(REPOSITORY / "pyproject.toml"),
        "pyproject.toml",
        "./lorashard/cli.py",
        "file:///etc/passwd",
        "http://127.0.0.1:1/x",
        "https://example.com/",
        "//etc/passwd",
    ]
    for name in names:
        for written in (name, name.replace("/", "%2F"), name.replace("..", "%2e%2e")):
            for route in ("file=", "file/"):
                answer = client.get(f"/gradio_api/{route}{written}")
                assert answer.status_code in (403, 404), (route, written, answer.text)


def test_no_event_takes_a_file_that_was_not_uploaded(client, ui_server):
    """A browser names the file that it has uploaded, and may name any: Gradio copies it to where it serves files."""
    config = client.get("/config").json()
    takes_files = {one["id"] for one in config["components"] if one["type"] in ("file", "uploadbutton")}
    events = [event for event in config["dependencies"] if takes_files & set(event["inputs"])]
    assert events, "no page takes files any more: then this test can go"
    for event in events:
        file = {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}, "orig_name": "rows.jsonl"}
        data = [file if one in takes_files else None for one in event["inputs"]]
        body = {"data": data, "fn_index": event["id"], "session_hash": f"files{event['id']}"}
        assert client.post("/gradio_api/queue/join", json=body).status_code == 200
        said = client.get("/gradio_api/queue/data", params={"session_hash": f"files{event['id']}"}).text
        assert '"success":false' in said and "root:" not in said
    assert [path for path in find_serving(ui_server.root).rglob("passwd*") if path.is_file()] == []


def test_what_the_app_does_not_need_is_not_there(client):
    """Gradio's own tools: reload, monitoring, proxy, an editor of the app's code, stored runs."""
    paths = [
        "monitoring",
        "monitoring/summary",
        "docs",
        "openapi.json",
        "gradio_api/dev/reload",
        "gradio_api/vibe-code",
    ]
    paths += ["gradio_api/proxy=https://x.hf.space/a", "gradio_api/runs", "gradio_api/run-history/buckets"]
    paths += ["gradio_api/token", "gradio_api/deep_link?session_hash=a", "gradio_api/custom_component/a/b/c/d", ".env"]
    for path in paths:
        assert client.get(f"/{path}").status_code == 404, path
    for path in ("gradio_api/vibe-edit", "gradio_api/process_recording", "gradio_api/run-history/connect"):
        assert client.post(f"/{path}", json={}).status_code == 404, path


def test_uploads_stay_in_their_folder(client, ui_server):
    """A file whose name climbs would be written anywhere."""
    serving = find_serving(ui_server.root)
    for name in ("../../climbed.jsonl", "/tmp/climbed.jsonl", "..\\climbed.jsonl", ".bashrc", "a\x00b.jsonl"):
        answer = client.post("/gradio_api/upload", files={"files": (name, b"{}")})
        if answer.status_code == 200:
            stored = Path(answer.json()[0])
            assert stored.resolve().is_relative_to(serving), name
    assert serving.stat().st_mode & 0o077 == 0
    assert [path.name for path in ui_server.root.iterdir() if "climbed" in path.name] == []


def test_every_answer_has_the_headers_that_browsers_obey(client):
    """A page that may be framed is clicked unseen; a script of another host would run as the person."""
    for path in ("/", "/config", "/theme.css", "/gradio_api/file=x", "/nothing"):
        headers = client.get(path).headers
        assert headers["x-frame-options"] == "DENY" and headers["x-content-type-options"] == "nosniff"
        assert "default-src 'self'" in headers["content-security-policy"]
        assert "http" not in headers["content-security-policy"]
        assert headers["referrer-policy"] == "same-origin"
        assert "server" not in headers


def test_nothing_is_answered_before_the_login(guarded_ui):
    """Gradio alone gives its page with the whole API, and more, to anybody who asks."""
    with httpx.Client(base_url=guarded_ui.url, timeout=20) as client:
        for path in BEFORE_LOGIN:
            assert client.get(path).status_code == 401, path
        for path in ("queue/join", "upload", "cancel", "reset", "call/list_runs"):
            assert client.post(f"/gradio_api/{path}", json={}).status_code == 401, path
        answer = client.get("/run?name=a%20b", headers={"Accept": "text/html"})
        assert answer.status_code == 303 and answer.headers["location"] == "login?next=run%3Fname%3Da%2520b"


def test_nothing_is_answered_without_the_token(ui_server):
    """Every user of this machine reaches 127.0.0.1: without the token, they start programs as the one who serves."""
    wrong = {"Authorization": f"Bearer {ui_server.token[:-1]}"}
    for headers in ({}, wrong, {"Authorization": "Bearer"}, {"Cookie": f"lorashard_{urlsplit(ui_server.url).port}=x"}):
        with httpx.Client(base_url=ui_server.url, headers=headers, timeout=20) as client:
            for path in (*BEFORE_LOGIN, "/", "/run?name=a&token=wrong"):
                assert client.get(path).status_code in (401, 303), path
                assert "gradio" not in client.get(path, follow_redirects=True).text.lower(), path
            for path in ("queue/join", "upload", "cancel", "reset", "call/list_runs"):
                assert client.post(f"/gradio_api/{path}", json={"data": []}).status_code == 401, path
    with pytest.raises((AuthenticationError, ValueError)):
        Client(ui_server.url, verbose=False)
    assert any(ui_server.connect().view_api(return_format="dict", print_info=False)["named_endpoints"])


def test_the_printed_address_opens_a_session(ui_server):
    """A token that stays in the address is in the browser's history, and in a link that is passed on; one that every
    visit must name breaks all links."""
    with httpx.Client(base_url=ui_server.url, timeout=20) as client:
        answer = client.get("/run", params={"name": "a b", "token": ui_server.token})
        assert answer.status_code == 303 and answer.headers["location"] == "run?name=a%20b"
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=lax" in cookie and ui_server.token.lower() not in cookie
        assert cookie.startswith(f"lorashard_{urlsplit(ui_server.url).port}=")
        assert client.get("/config").status_code == 200
        assert client.get("/config", headers={"Host": "evil.example"}).status_code == 403
        client.get("/logout")
        assert client.get("/config").status_code == 401
        answer = client.post("/login", data={"password": ui_server.token}, headers={"Accept": "text/html"})
        assert answer.status_code == 303 and client.get("/config").status_code == 200


def test_a_password_opens_a_session_and_a_wrong_one_takes_its_time(guarded_ui):
    """Programs log in as gradio_client does; guesses must cost time."""
    assert Client(guarded_ui.url, auth=("bo", "other:with colon"), verbose=False).view_api(return_format="dict")
    with pytest.raises((AuthenticationError, ValueError)):
        Client(guarded_ui.url, auth=("ada", "wrong"), verbose=False)
    with httpx.Client(base_url=guarded_ui.url, timeout=20) as client:
        for user, password in (("ada", "wrong"), ("nobody", PASSWORD), ("ada", ""), ("", "")):
            begin = time.monotonic()
            answer = client.post("/login", data={"username": user, "password": password})
            assert answer.status_code == 401 and time.monotonic() - begin >= 1
        assert client.get("/config").status_code == 401
        answer = log_in(client)
        cookie = answer.headers["set-cookie"].lower()
        assert answer.status_code == 200 and "httponly" in cookie and "samesite=lax" in cookie
        assert client.get("/config").status_code == 200
        copied = dict(client.cookies)
        assert client.get("/logout").status_code == 303
        assert httpx.get(f"{guarded_ui.url}config", cookies=copied).status_code == 401


def test_another_sites_page_logs_nobody_in(guarded_ui):
    """A page that logs the person in as somebody else sees what they then type."""
    with httpx.Client(base_url=guarded_ui.url, timeout=20) as client:
        assert log_in(client, headers={"Origin": "https://evil.example"}).status_code == 403


@pytest.mark.parametrize("target", ["//evil.example", "https://evil.example", "javascript:alert(1)", '"><script>'])
def test_the_login_leads_to_no_other_site(guarded_ui, target):
    """A link to this server's login that ends at a copy of it elsewhere steals the password."""
    with httpx.Client(base_url=guarded_ui.url, timeout=20) as client:
        answer = client.get("/login", params={"next": target})
        assert "evil" not in answer.text and "<script>" not in answer.text and "javascript" not in answer.text
        answer = log_in(client, params={"next": target}, headers={"Accept": "text/html"})
        assert answer.status_code == 303 and answer.headers["location"] == "./"


def test_a_file_that_is_too_large_is_refused(guarded_ui):
    """Whoever may upload could fill the disk at once."""
    with httpx.Client(base_url=guarded_ui.url, timeout=30) as client:
        log_in(client)
        answer = client.post("/gradio_api/upload", files={"files": ("a.jsonl", b"x" * 2_000_000)})
        assert answer.status_code == 413
        body = b'{"data": ["' + b"x" * 20_000_000 + b'"]}'
        assert client.post("/gradio_api/queue/join", content=body).status_code == 413


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.4", "gpu-box", "localhost.evil.example", "127.1.evil"])
def test_another_address_needs_a_password(tmp_path, capsys, host):
    """Whoever reaches the server starts programs as the person who started it; and a name that only begins like this
    machine's is another's."""
    assert main(["ui", "--root", str(tmp_path / "runs"), f"--host={host}", "--port", "0"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "--auth FILE" in said.err
    assert "ssh -L PORT:127.0.0.1:PORT " in said.err
    assert not (tmp_path / "runs").exists()


def test_mistakes_are_answered_in_one_line(tmp_path, ui_server, capsys):
    """A traceback tells nobody that the port is taken."""
    port = ui_server.url.rsplit(":", 1)[1].strip("/")
    (tmp_path / "file").write_text("")
    (tmp_path / "users").write_text("ada:secret\n")
    (tmp_path / "users").chmod(0o644)
    cases = [
        (["--port", port], f"127.0.0.1:{port} "),
        (["--root", str(tmp_path / "file")], "cannot be written"),
        (["--root", "/proc/runs"], "cannot be written"),
        (["--auth", str(tmp_path / "users")], "chmod 600"),
        (["--auth", str(tmp_path / "none")], "cannot be read"),
        (["--auth", ":secret"], "expected user:password"),
        (["--allow", str(tmp_path / "none")], "expected a folder"),
        (["--auth", "ada:secret", "--no-token"], "no_token"),
        (["--max_upload_size", "much"], "max_upload_size"),
        (["--port", "70000"], "port"),
        (["--host", "gpu-box.invalid", "--auth", "ada:secret"], "gpu-box.invalid"),
        (["--host", "192.0.2.1", "--auth", "ada:secret"], "192.0.2.1:"),
    ]
    for words, expected in cases:
        root = [] if "--root" in words else ["--root", str(tmp_path / "runs")]
        assert main(["ui", *words, *root]) == 2
        said = capsys.readouterr().err
        assert expected in said and said.count("\n") == 1 and "secret" not in said


def test_no_token_is_shown(guarded_ui):
    """The token of the hub is in the server's environment, and in none of its answers."""
    with httpx.Client(base_url=guarded_ui.url, timeout=20) as client:
        log_in(client)
        for path in [f"/{page}" for page in PAGES] + ["/config", "/gradio_api/info", "/gradio_api/openapi.json"]:
            answer = client.get(path)
            assert answer.status_code == 200 and HUB_TOKEN not in answer.text, path
    assert HUB_TOKEN not in guarded_ui.log_path.read_text()


def test_what_a_killed_server_has_left_goes(guarded_ui):
    """Uploads and packed adapters of gigabytes pile up; or those of another server that lives are removed."""
    left = sorted(path.name for path in guarded_ui.root.glob(".serving-*"))
    assert len(left) == 2 and ".serving-alive" in left and ".serving-killed" not in left


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_at_once(start_ui, number):
    """A service manager, or a terminal that is closed, would leave a server or its folder."""
    check_end(start_ui(), number)


def check_end(server: UiServer, number: int) -> None:
    """Send a server a signal, and see it end with all that is its own."""
    assert server.stop(number) == 0
    assert "Traceback" not in server.log_path.read_text()
    assert server.list_processes() == [] and list(server.root.glob(".serving-*")) == []
    wait_until(lambda: not os.path.exists(f"/proc/{server.process.pid}"))


def test_a_person_logs_in_and_ctrl_c_ends_the_server_at_once(open_tab, guarded_ui, page_errors):
    """Whoever follows a link to a run must come out at that run; a link that logs nobody out leaves the pages to the
    next person; and open pages hold connections, which a server that waits for them never ends."""
    shutil.rmtree(guarded_ui.root / ".serving-alive")
    page = open_tab(guarded_ui, viewport={"width": 390, "height": 844})
    page.goto("compare?runs=a,b")
    page.wait_for_function(_IS_FOCUSED, arg="username")
    check_no_overflow(page)
    page.keyboard.type("ada")
    page.keyboard.press("Tab")
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    page.get_by_role("alert").wait_for()
    page.wait_for_function(_IS_FOCUSED, arg="password")
    page.keyboard.type(PASSWORD)
    page.keyboard.press("Enter")
    page.wait_for_url("**/compare?runs=a,b")
    page.wait_for_selector(".gradio-container nav")
    page.get_by_role("link", name="Runs").first.click()
    page.get_by_role("link", name="Log out").click()
    page.wait_for_url("**/login*")
    page.goto("new")
    page.wait_for_url("**/login?next=new")
    page.wait_for_function(_IS_FOCUSED, arg="username")
    page.keyboard.type("ada")
    page.keyboard.press("Tab")
    page.keyboard.type(PASSWORD)
    page.keyboard.press("Enter")
    page.wait_for_url("**/new")
    page.wait_for_selector(".gradio-container nav")
    page.wait_for_timeout(500)
    check_end(guarded_ui, signal.SIGINT)
    page.close()
    page_errors.clear()  # it has lost its server
