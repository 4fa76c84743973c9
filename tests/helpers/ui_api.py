"""The endpoints of the web UI, as its document and as the app itself tell them."""

from __future__ import annotations

import re
from pathlib import Path

from lorashard_ui.app import build_app
from lorashard_ui.app_context import AppContext


def list_documented(document: Path) -> dict[str, list[str]]:
    """Return the arguments of each endpoint in the document's table; those that may be left out end in `=`."""
    rows = re.findall(r"^\| `/(\w+)` \|([^|]*)\|", document.read_text(), re.MULTILINE)
    return {name: re.findall(r"`(\w+=?)", arguments) for name, arguments in rows}


def list_endpoints(root: Path) -> dict[str, list[str]]:
    """Return the same of the app."""
    context = AppContext.open(root)
    info = build_app(context).get_api_info()
    context.close()
    assert not info["unnamed_endpoints"]
    return {
        name.strip("/"): [p["parameter_name"] + "=" * p["parameter_has_default"] for p in endpoint["parameters"]]
        for name, endpoint in info["named_endpoints"].items()
    }
