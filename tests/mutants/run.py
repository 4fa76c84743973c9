"""Make mistakes in copies of lorashard, and see whether the tests notice: `python tests/mutants/run.py [NAME ...]`.

By hand, from the repository's root; it takes minutes. Words after `--` are given to pytest in place of each mistake's
own tests. What is imported once is inherited by a process for each mistake, which ends at the first test that fails.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import conftest  # noqa: E402, F401  # the environment of tests, before torch
from mistakes import MUTANTS, Mutant  # noqa: E402


def mutate(folder: Path, mutant: Mutant) -> None:
    """Make a copy of lorashard with a mistake."""
    shutil.copytree(ROOT / "lorashard", folder / "lorashard", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "lorashard" / mutant.file
    text = file.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file}: {mutant.old!r} is there {text.count(mutant.old)} times"
    file.write_text(text.replace(mutant.old, mutant.new))


def run_tests(folder: Path, log: Path, words: list[str]) -> None:
    """Run tests against the copy in `folder`; exit with pytest's code, 0 where they all pass."""
    import pytest

    os.chdir(ROOT)
    sys.path[:] = [str(folder), *(path for path in sys.path if path not in ("", str(ROOT)))]
    with log.open("w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        import lorashard

        assert Path(lorashard.__file__).is_relative_to(folder), lorashard.__file__
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *words])
    os._exit(code)


def main() -> None:
    own, _, given = " ".join(sys.argv[1:]).partition("--")
    names = [name for name in MUTANTS if not own.strip() or name in own]
    # lorashard's own modules are left to the copies.
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import transformers  # noqa: F401
    import trl.trainer.sft_trainer  # noqa: F401

    survived = []
    for name in names:
        mutant = MUTANTS[name]
        with tempfile.TemporaryDirectory() as scratch:
            folder, log = Path(scratch), Path(scratch, "log")
            mutate(folder, mutant)
            words = given.split() or list(mutant.tests)
            process = multiprocessing.get_context("fork").Process(target=run_tests, args=(folder, log, words))
            process.start()
            process.join(timeout=900)
            is_hanging = process.is_alive()
            process.kill()
            process.join()
            verdict = "caught" if process.exitcode == 1 or is_hanging else f"SURVIVED (exit {process.exitcode})"
            survived += [] if verdict == "caught" else [name]
            failed = [line for line in log.read_text().splitlines() if line.startswith("FAILED")]
            print(f"{name}: {verdict}: {mutant.breaks}; {' '.join(failed) or words}", flush=True)
    print(f"{len(names) - len(survived)} of {len(names)} caught")
    sys.exit(1 if survived else 0)


if __name__ == "__main__":
    main()
