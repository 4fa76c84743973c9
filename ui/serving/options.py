"""The options of `lorashard ui`. Imports neither torch nor Gradio."""

from __future__ import annotations

import ipaddress
from typing import Self

from pydantic import Field, model_validator

from lorashard.config.use_options import CommandWords
from lorashard.errors import ConfigError


class UiOptions(CommandWords):
    """`lorashard ui`."""

    short_names = {"open_browser": "open"}

    root: str = "runs"
    """The folder of the runs; it is made where it is not there."""
    host: str = "127.0.0.1"
    """The address to listen on. Any other than this machine's own (127.0.0.1) needs `auth`."""
    port: int = Field(default=7860, ge=0, le=65535)
    """The port to listen on; 0 takes a free one."""
    auth: str | None = None
    """Who may come in: a file with a line `user:password` for each, which nobody but you can read; or one such pair,
    which everybody on this machine can read in the list of processes."""
    allow: list[str] | None = None
    """Folders whose models and datasets may be named in the browser, besides `root` and the Hugging Face cache."""
    trust_remote_code: bool = False
    """Let the browser start runs with code that comes with a model, and rewards by import path."""
    max_upload_size: str = Field(default="2GB", pattern=r"^\d+ ?([KMGT]i?B)?$")
    """The largest file that may be uploaded: bytes, or such as 2GB or 500MB."""
    open_browser: bool = False
    """Open the page in your browser."""

    @model_validator(mode="after")
    def _check_host(self) -> Self:
        if self.auth is None and not is_loopback(self.host):
            raise ConfigError(
                f"{self.host} lets others on the network start programs here",
                option="host",
                fix="give --auth FILE with a line user:password (passwords and pages are sent unencrypted: there is no "
                f"TLS), or keep 127.0.0.1 and use `ssh -L {self.port}:127.0.0.1:{self.port} THIS_MACHINE`",
            )
        return self


def is_loopback(host: str) -> bool:
    """Say whether an address, or the name of one, can be reached from this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
