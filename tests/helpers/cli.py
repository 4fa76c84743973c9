"""Run the command line in a fresh process, and tell what it imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import lorashard

HEAVY = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "numpy")
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_ERROR_FILE")
SCRIPT = """
import json, sys
from lorashard.cli import main
code = main(json.loads(sys.argv[1]))
print(json.dumps({"code": code, "imported": sorted(set(sys.modules) & set(json.loads(sys.argv[2])))}))
"""


def run_cli(*words: str, **environment: str) -> tuple[int, list[str], str, str]:
    """Run the command line in a fresh process; return its exit code, heavy imports, stdout and stderr."""
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    root = str(Path(lorashard.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(words), json.dumps(HEAVY)],
        env=inherited | {"PYTHONPATH": root} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    *output, last = done.stdout.splitlines()
    result = json.loads(last)
    return result["code"], result["imported"], "\n".join(output), done.stderr
