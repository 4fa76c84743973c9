"""`lorashard ui`: run the web server."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import FrameType

import uvicorn
from filelock import FileLock, Timeout

from lorashard.errors import ConfigError
from lorashard.runtime.importing import quick_imports

from ..app_context import AppContext
from .accounts import Accounts
from .guard import Guard
from .options import UiOptions, is_loopback, name_host

_OWN_PREFIX = ".serving-"
_LOCK_NAME = ".lock"
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(options: UiOptions) -> int:
    """Serve the web UI until a signal ends it, and return the exit code. Runs and jobs continue.

    Raises:
        ConfigError: an address that is taken, a folder that cannot be written, accounts that cannot be read.
    """
    token = secrets.token_urlsafe(32) if options.auth is None and not options.no_token else ""
    accounts = Accounts.of_token(token) if token else None
    if options.auth is not None:
        accounts = Accounts.read(options.auth)
    folders = [_find_folder(folder) for folder in options.allow or ()]
    root = _make_root(Path(options.root).expanduser())
    with ExitStack() as stack:
        listener = stack.enter_context(_listen(options.host, options.port))
        port = listener.getsockname()[1]
        url = f"http://{name_host(options.host)}:{port}/" + (f"?token={token}" if token else "")
        uploads = stack.enter_context(_own_folder(root))
        _confine_gradio(uploads)
        with quick_imports():
            from ..app import build_asgi  # Gradio reads some variables when it is imported

        start = Path.cwd() if is_loopback(options.host) else None
        has_login = accounts is not None
        context = stack.enter_context(
            closing(AppContext.open(root, folders, options.trust_remote_code, start, has_login))
        )
        app, pages = build_asgi(context, options.max_upload_size)
        config = uvicorn.Config(
            Guard(app, accounts, pages, port),
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,  # pages hold a connection open as long as they are shown
        )
        _Server(config, lambda: _welcome(url, root, options, Path(uploads)), context.close).run(sockets=[listener])
    return 0


class _Server(uvicorn.Server):
    """A server that ends at the first signal, and does not raise the signal again afterward."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None], on_end: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start
        self._on_end = on_end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # open pages are expected
        await super().shutdown(sockets)
        # Otherwise the event loop would wait for threads that still answer, such as a check of a large dataset.
        await asyncio.to_thread(self._on_end)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._note) for number in _END_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def _welcome(url: str, root: Path, options: UiOptions, own_folder: Path) -> None:
    print(f"lorashard ui: {url} serves the runs in {root}; Ctrl-C stops the server, not the runs", flush=True)
    if options.no_token:
        print("lorashard ui: --no-token: every user of this machine can start programs as you, and delete your runs")
    if options.auth is not None and not is_loopback(options.host):
        print("lorashard ui: passwords and pages are sent unencrypted (no TLS); an ssh tunnel encrypts them")
    if options.auth is not None and ":" in options.auth and not Path(options.auth).is_file():
        print("lorashard ui: other users of this machine see the password in the process list; give --auth FILE")
    if options.open_browser:
        # By a file: every user of this machine can read the words that a browser is started with.
        page = own_folder / "open.html"
        page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={url}">')
        threading.Thread(target=webbrowser.open, args=(page.as_uri(),), daemon=True).start()


@contextmanager
def _own_folder(root: Path) -> Iterator[str]:
    """Create a folder that lasts as long as the server, and remove those of servers that were killed."""
    for left in root.glob(f"{_OWN_PREFIX}*"):
        with suppress(OSError, Timeout), FileLock(left / _LOCK_NAME, blocking=False):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_OWN_PREFIX, dir=root) as folder, FileLock(Path(folder, _LOCK_NAME)):
        yield folder


def _confine_gradio(folder: str) -> None:
    """Keep Gradio's files in a folder, and turn its telemetry off."""
    for name in [name for name in os.environ if name.startswith("GRADIO_")]:
        del os.environ[name]  # they could allow paths, share a link, or set another address
    os.environ["GRADIO_TEMP_DIR"] = folder
    os.environ["GRADIO_EXAMPLES_CACHE"] = os.path.join(folder, "examples")
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"


def _make_root(root: Path) -> Path:
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root.resolve()
    except OSError as error:
        raise ConfigError(
            f"{root} cannot be written ({error.strerror})", option="root", fix="use another folder"
        ) from error


def _find_folder(name: str) -> Path:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ConfigError(option="allow", expected="a folder", found=name)
    return folder.resolve()


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that already listens, so that no other server can take the port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"{host} is not an address of this machine ({error.strerror})", option="host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror})",
            option="port",
            fix="use another port, or 0 for a free one",
        ) from error
    return listener
