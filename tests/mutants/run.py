"""Make mistakes in copies of the repository, and see whether the short tests notice: `python tests/mutants/run.py`.

By hand; all of them take half an hour. Names, such as `run.py "no wait" orphan`, choose from `mistakes.py`. Words after
`--` are given to pytest in place of each mistake's own tests; an `-m` among them holds in place of `-m "not slow"`.

What is imported once is inherited by a process for each mistake, which ends at the first test that fails. The Python
that it starts others with is one of its own, in which the copy is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import conftest  # noqa: E402, F401  # the environment of tests, before torch
from mistakes import MUTANTS, Mutant  # noqa: E402

SHORT = ("-m", "not slow")
_LONGEST_S = 1200


def mutate(folder: Path, mutant: Mutant) -> None:
    """Make a copy of the repository with a mistake.

    Raises:
        ValueError: the line is not there, or more than once.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    file = folder / mutant.file
    text = file.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} has {mutant.old!r} {text.count(mutant.old)} times")
    file.write_text(text.replace(mutant.old, mutant.new))


def install(folder: Path) -> Path:
    """Make a Python that has what this one has, but imports lorashard from `folder`; return it."""
    venv.EnvBuilder(symlinks=True).create(folder / ".venv")
    (packages,) = (folder / ".venv" / "lib").glob("python*/site-packages")
    everything_else = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
    (packages / "copy.pth").write_text(f"{folder}\n{everything_else}\n")
    python = folder / ".venv" / "bin" / "python"
    for name in ("lorashard", "torchrun", "accelerate"):
        script = Path(sysconfig.get_path("scripts"), name)
        own = python.with_name(name)
        own.write_text(re.sub("^#!.*", f"#!{python}", script.read_text()))
        own.chmod(0o755)
    return python


class Failed:
    """Notes the tests that fail, in a file; a file that is over its CPU budget fails when it is done, and is none."""

    def __init__(self, notes: Path) -> None:
        self._notes = notes

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and report.when != "teardown":
            with self._notes.open("a") as file:
                file.write(f"{report.nodeid}\n")


def run_tests(folder: Path, notes: Path, words: Sequence[str]) -> None:
    """Run tests against the copy in `folder`; exit with pytest's code, 0 where they all pass."""
    import pytest

    os.setsid()  # so that all of it can be ended
    os.chdir(folder)
    del sys.modules["conftest"]
    sys.path[:] = [str(folder), *(path for path in sys.path if path not in ("", str(ROOT), str(ROOT / "tests")))]
    sys.executable = str(install(folder))
    multiprocessing.set_executable(sys.executable)
    with (folder / "tests.log").open("w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        import lorashard

        assert Path(lorashard.__file__).is_relative_to(folder), lorashard.__file__
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *words], plugins=[Failed(notes)])
    os._exit(code)


def judge(mutant: Mutant, words: Sequence[str]) -> tuple[bool, str]:
    """Return whether tests catch a mistake, and what is to be said of it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder, notes = Path(scratch), Path(scratch, "failed.log")
        try:
            mutate(folder, mutant)
        except ValueError as error:
            return False, f"NOT MADE: {error}"
        process = multiprocessing.get_context("fork").Process(target=run_tests, args=(folder, notes, words))
        process.start()
        process.join(_LONGEST_S)
        is_hanging = process.is_alive()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.join()
        if notes.exists():
            return True, f"caught by {notes.read_text().splitlines()[0]}"
        if is_hanging:
            return True, f"caught: no end after {_LONGEST_S} s"
        return False, f"SURVIVED (pytest's exit code {process.exitcode}): {' '.join(words)}"


def main() -> None:
    own, given = _split(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", metavar="NAME", nargs="*", help="a mistake; by default all of them")
    names = parser.parse_args(own).names or list(MUTANTS)
    unknown = [name for name in names if name not in MUTANTS]
    if unknown:
        parser.error(f"no such mistake: {', '.join(unknown)}; there are: {', '.join(MUTANTS)}")
    # lorashard's own modules are left to the copies.
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import transformers  # noqa: F401
    import trl.trainer.sft_trainer  # noqa: F401

    survived = []
    for name in names:
        mutant = MUTANTS[name]
        is_caught, verdict = judge(mutant, [*SHORT, *(given or mutant.tests)])
        survived += [] if is_caught else [name]
        print(f"{name} ({mutant.breaks}): {verdict}", flush=True)
    print(f"{len(names) - len(survived)} of {len(names)} caught{': all but ' if survived else ''}{', '.join(survived)}")
    sys.exit(1 if survived else 0)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Return what is before `--` and what is behind."""
    position = words.index("--") if "--" in words else len(words)
    return words[:position], words[position + 1 :]


if __name__ == "__main__":
    main()
