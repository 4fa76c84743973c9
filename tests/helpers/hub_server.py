"""A stand-in for the Hugging Face hub: folders served as model and dataset repos, over real HTTP on this machine.

It answers what huggingface_hub and datasets ask in order to download: a repo's commit, its tree, its files by range. As
on the hub, large files are redirected to another host, and a gated repo shows its file names to everybody. It takes
uploads from those who have a token, all files in one commit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

LARGE_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pth", ".parquet")
_BRANCH = "main"


@dataclass
class HubRepo:
    """A folder as a repo with one commit on one branch.

    Attributes:
        is_gated: Nobody may download its files.
        cut_at_byte: By path, where every connection breaks that sends this file.
        bytes_per_s: How fast each connection sends large files; None for as fast as it can.
    """

    folder: Path
    is_gated: bool = False
    cut_at_byte: dict[str, int] = field(default_factory=dict)
    bytes_per_s: int | None = None

    @cached_property
    def files(self) -> dict[str, Path]:
        """Every file by its path in the repo."""
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path for path in paths}

    @cached_property
    def commit(self) -> str:
        """The commit's hash, which changes with any file."""
        whole = hashlib.sha1()
        for name, path in self.files.items():
            whole.update(name.encode() + b"\0" + path.read_bytes())
        return whole.hexdigest()

    def describe(self, name: str) -> dict[str, Any]:
        """Return a file's or folder's entry in the tree."""
        if name not in self.files:
            return {"type": "directory", "path": name, "size": 0, "oid": hashlib.sha1(name.encode()).hexdigest()}
        content = self.files[name].read_bytes()
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": blob}
        if name.endswith(LARGE_SUFFIXES):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return entry

    def list_tree(self, folder: str, is_recursive: bool) -> list[dict[str, Any]]:
        """Return the entries of a folder, or of all folders below it too."""
        names = {name for path in self.files for name in (path, *map(str, PurePosixPath(path).parents)) if name != "."}
        prefix = f"{folder}/" if folder else ""
        inside = [name for name in names if name.startswith(prefix)]
        return [self.describe(name) for name in sorted(inside) if is_recursive or "/" not in name[len(prefix) :]]


@dataclass(frozen=True)
class Request:
    """One request that the server answered; `path` is that of a file, or empty for a question about a repo."""

    method: str
    url: str
    status: int
    repo: str = ""
    path: str = ""
    sent_bytes: int = 0


class HubServer:
    """Serves repos while the context is open.

    Attributes:
        log: Every request so far.
        uploaded: Files that were committed, by repo and path.
    """

    def __init__(self, models: Mapping[str, HubRepo], datasets: Mapping[str, HubRepo]) -> None:
        self.repos = {f"models/{name}": repo for name, repo in models.items()}
        self.repos |= {f"datasets/{name}": repo for name, repo in datasets.items()}
        self.log: list[Request] = []
        self.uploaded: dict[str, dict[str, bytes]] = {}

    def __enter__(self) -> HubServer:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        """What HF_ENDPOINT must be."""
        # By name: datasets asks for a subdomain of it, and a subdomain of localhost never leaves the machine.
        return f"http://localhost:{self._server.server_port}"

    @property
    def large_files_endpoint(self) -> str:
        """Where large files are redirected: to the client, another host."""
        return f"http://127.0.0.1:{self._server.server_port}/large"

    def list_sent(self, repo: str) -> list[Request]:
        """Return the requests that sent bytes of a repo's files; `repo` is such as `models/org/name`."""
        return [request for request in self.log if request.repo == repo and request.sent_bytes]


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection; `hub` is set by the server's own subclass."""

    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        form = parse_qs(body)
        url = urlsplit(self.path)
        match [unquote(part) for part in url.path.strip("/").split("/")]:
            case ["api", "repos", "create"]:
                self._create(json.loads(body))
            case ["api", "models", org, name, "preupload", _]:
                paths = [file["path"] for file in json.loads(body)["files"]]
                files = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
                self._send_json({"files": files})
            case ["api", "models", org, name, "commit", _]:
                self._commit(f"{org}/{name}", [json.loads(line) for line in body.splitlines()])
            case ["api", ("models" | "datasets") as kind, org, name, *question]:
                self._answer_question(f"{kind}/{org}/{name}", question, parse_qs(url.query), form)
            case ["large", kind, org, name, *path]:
                self._send_file(f"{kind}/{org}/{name}", "/".join(path))
            case ["datasets", org, name, "resolve", revision, *path]:
                self._resolve(f"datasets/{org}/{name}", revision, "/".join(path))
            case [org, name, "resolve", revision, *path]:
                self._resolve(f"models/{org}/{name}", revision, "/".join(path))
            case _:
                self._refuse(404, "", "Not Found")

    def _answer_question(self, key: str, question: list[str], query: dict, form: dict) -> None:
        about, revision = (question or ["revision"])[0], question[1] if len(question) > 1 else _BRANCH
        repo = self._find(key, revision)
        if repo is None:
            return
        match about, self.command:
            case "revision", "GET":
                siblings = [{"rfilename": name} for name in repo.files]
                facts = {"_id": "0", "id": key.partition("/")[2], "sha": repo.commit, "siblings": siblings}
                facts |= {"private": False, "gated": "manual" if repo.is_gated else False, "disabled": False}
                self._send_json(facts | {"tags": [], "downloads": 0, "likes": 0})
            case "tree", "GET":
                entries = repo.list_tree("/".join(question[2:]), query.get("recursive", [""])[0].lower() == "true")
                if entries:
                    self._send_json(entries)
                else:
                    self._refuse(404, "EntryNotFound", "Entry not found")
            case "paths-info", "POST":
                known = {entry["path"] for entry in repo.list_tree("", is_recursive=True)}
                self._send_json([repo.describe(path) for path in form.get("paths", []) if path in known])
            case _:
                self._refuse(404, "", "Not Found")

    def _create(self, wanted: dict[str, Any]) -> None:
        repo = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        if "Authorization" not in self.headers:
            self._refuse(401, "", "Invalid username or password.")
        else:
            self.hub.uploaded.setdefault(repo, {})
            self._send_json({"url": f"{self.hub.endpoint}/{repo}", "id": repo, "name": repo})

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        files = [line["value"] for line in lines if line["key"] == "file"]
        self.hub.uploaded[repo] |= {file["path"]: base64.b64decode(file["content"]) for file in files}
        url = f"{self.hub.endpoint}/{repo}"
        self._send_json({"commitUrl": f"{url}/commit/abc", "commitOid": "abc", "success": True, "hookOutput": ""})

    def _resolve(self, key: str, revision: str, path: str) -> None:
        repo = self._find(key, revision)
        if repo is None:
            return
        headers = {"X-Repo-Commit": repo.commit}
        if repo.is_gated:
            self._refuse(403, "GatedRepo", "Access to this repo is restricted and you are not on its list", headers)
        elif path not in repo.files:
            self._refuse(404, "EntryNotFound", "Entry not found", headers)
        elif path.endswith(LARGE_SUFFIXES):
            entry = repo.describe(path)
            headers |= {"X-Linked-Size": str(entry["size"]), "X-Linked-ETag": f'"{entry["lfs"]["oid"]}"'}
            headers["Location"] = f"{self.hub.large_files_endpoint}/{quote(f'{key}/{path}')}"
            self._send(302, headers, b"", key, path)
        else:
            self._send_file(key, path, headers | {"ETag": f'"{repo.describe(path)["oid"]}"'})

    def _find(self, key: str, revision: str) -> HubRepo | None:
        repo = self.hub.repos.get(key)
        if repo is None:  # to those who are not logged in, the hub does not tell missing repos from private ones
            self._refuse(401, "RepoNotFound", "Invalid username or password.")
        elif revision not in (_BRANCH, repo.commit):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repo
        return None

    def _send_file(self, key: str, path: str, headers: Mapping[str, str] | None = None) -> None:
        repo = self.hub.repos[key]
        content = repo.files[path].read_bytes()
        begin, end, status = 0, len(content), 200
        headers = {**(headers or {}), "Accept-Ranges": "bytes"}
        if "Range" in self.headers:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            begin, end, status = int(first), min(int(last) + 1, len(content)) if last else len(content), 206
            if begin >= len(content):
                self._send(416, {"Content-Range": f"bytes */{len(content)}"}, b"", key, path)
                return
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
        self._send(status, headers, content[begin:end], key, path, repo.cut_at_byte.get(path, len(content)) - begin)

    def _send_json(self, value: Any) -> None:
        self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _refuse(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        headers = {**(headers or {}), "X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(status, headers, json.dumps({"error": message}).encode())

    def _send(
        self,
        status: int,
        headers: Mapping[str, str],
        body: bytes,
        repo: str = "",
        path: str = "",
        cut_at_byte: int | None = None,
    ) -> None:
        sent = b"" if self.command == "HEAD" else body[: None if cut_at_byte is None else max(cut_at_byte, 0)]
        self.close_connection = len(sent) < len(body) and self.command != "HEAD"
        # Noted first: the client may be done before this thread runs again.
        num_bytes = len(sent) if path else 0
        self.hub.log.append(Request(self.command, self.path, status, repo, path, num_bytes))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        speed = self.hub.repos[repo].bytes_per_s if path.endswith(LARGE_SUFFIXES) else None
        if speed is None:
            self.wfile.write(sent)
            return
        with suppress(ConnectionError):  # the client wants no more
            for begin in range(0, len(sent), speed // 10):
                self.wfile.write(sent[begin : begin + speed // 10])
                time.sleep(0.1)
