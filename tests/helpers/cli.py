"""Run the command line in a fresh process, and tell what it imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import lorashard

HEAVY = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "numpy")
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE")
SCRIPT = """
import contextlib, io, json, sys
from lorashard.cli import main
for words in json.loads(sys.argv[1]):
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main(words)
    imported = sorted(set(sys.modules) & set(json.loads(sys.argv[2])))
    print(json.dumps([code, imported, output.getvalue(), errors.getvalue()]))
"""


def run_cli(*commands: Sequence[str]) -> list[tuple[int, list[str], str, str]]:
    """Run commands one after another in a fresh process; return their exit codes, heavy imports, stdout and stderr."""
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(commands), json.dumps(HEAVY)],
        env=inherited | {"PYTHONPATH": str(Path(lorashard.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]
