"""Programs with Triton and without a GPU: in its interpreter, or as far as its compiler goes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .paths import ROOT

# `make test` installs it there: TRL, transformers and torch's compiler behave otherwise where they can import Triton.
FOLDER = ROOT / ".venv/triton"


def run(module: str, interpret: bool, cache: Path | None = None) -> str:
    """Run `python -m module` with Triton, and return what it printed; skip without it, or fail where CI is set.

    Args:
        module: in `tests`, or installed.
        interpret: whether kernels run in the interpreter, on tensors of the CPU.
        cache: where compiled kernels go.
    """
    if not (FOLDER / "triton").is_dir():
        message = "needs Triton in .venv/triton, where `make test` installs it"
        if os.environ.get("CI"):
            pytest.fail(message, pytrace=False)
        pytest.skip(message)
    path = os.pathsep.join(str(folder) for folder in (FOLDER, ROOT / "tests"))
    environ = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": str(int(interpret)), "OMP_NUM_THREADS": "1"}
    environ |= {"TRITON_CACHE_DIR": str(cache)} if cache else {}
    done = subprocess.run([sys.executable, "-m", module], env=environ, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
