"""The options of `lorashard ui`. Imports neither torch nor Gradio."""

from __future__ import annotations

import ipaddress
import socket
from typing import Self

from pydantic import Field, model_validator

from lorashard.config.use_options import CommandWords
from lorashard.errors import ConfigError


class UiOptions(CommandWords):
    """`lorashard ui`."""

    short_names = {"open_browser": "open"}

    root: str = "runs"
    """The folder of the runs; created if it does not exist."""
    host: str = "127.0.0.1"
    """The address to listen on. Any but a loopback address (127.0.0.1) needs `auth`."""
    port: int = Field(default=7860, ge=0, le=65535)
    """The port to listen on; 0 picks a free one."""
    auth: str | None = None
    """Who may log in: a file with a line `user:password` for each user, readable only by you; or one such pair, which
    every user of this machine can see in the process list."""
    no_token: bool = False
    """Do not ask for the token that is in the printed address. Then every user of this machine can start programs as
    you, delete your runs and use your Hugging Face account: only for a machine that is yours alone."""
    allow: list[str] | None = None
    """Folders from which the browser may use models and datasets, besides `root`, the Hugging Face cache and, on
    loopback, what is not hidden in the folder where the server is started."""
    trust_remote_code: bool = False
    """Let the browser start runs with code from a model, and with rewards by import path."""
    max_upload_size: str = Field(default="2GB", pattern=r"^\d+ ?([KMGT]i?B)?$")
    """The largest file that may be uploaded: bytes, or such as 2GB or 500MB."""
    open_browser: bool = False
    """Open the page in your browser."""

    @model_validator(mode="after")
    def _check_host(self) -> Self:
        if self.auth is None and not is_loopback(self.host):
            port = self.port or "PORT"  # 0 is any that is free
            raise ConfigError(
                f"{self.host} lets others on the network start programs here",
                option="host",
                fix="give --auth FILE with a line user:password (passwords and pages are sent unencrypted: there is no "
                f"TLS), or keep 127.0.0.1 and use `ssh -L {port}:127.0.0.1:{port} THIS_MACHINE`",
            )
        if self.auth is not None and self.no_token:
            raise ConfigError(
                "with --auth passwords are asked for, and no token", option="no_token", fix="leave it out"
            )
        return self


def is_loopback(host: str) -> bool:
    """Return whether an address or host name is a loopback address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def name_host(host: str) -> str:
    """Return how an address to listen on is called in a URL: by this machine's name, where it is all addresses."""
    if host in ("0.0.0.0", "::"):
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host
