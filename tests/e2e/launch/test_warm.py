"""Forked programs of tests (`helpers.warm`) beside the same ones in interpreters of their own: nothing may differ."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import warm
from helpers.ranks import find_ranks

SHOW = """
import json, os, sys
words = [sys.argv[1:], os.getcwd(), os.environ.get("SHOWN"), sys.stdin.read(), __name__]
print(json.dumps([*words, os.getsid(0) == os.getpid()]))
print("on stderr", file=sys.stderr)
sys.exit(3)
"""
NESTED = """
import os, subprocess, sys
code = "import os, sys; print(os.environ['SHOWN'], flush=True); sys.exit(4)"
os.environ["SHOWN"] = str(subprocess.run([sys.executable, "-c", code]).returncode)
code = "import os; print(os.environ['SHOWN'], flush=True); os.kill(os.getpid(), 9)"
os.execvp(sys.executable, [sys.executable, "-c", code])
"""
DESCRIPTORS = """
import subprocess, sys
code = "import os, sys; n = os.listdir('/proc/self/fd'); "
code += "sys.exit(any('held' in os.path.realpath('/proc/self/fd/' + number) for number in n))"
with open("held", "w") as held:
    sys.exit(subprocess.run([sys.executable, "-c", code]).returncode + 5)
"""

# A shell that starts the tests in the background has them ignore Ctrl-C.
INTERRUPT = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (SHOW, 3),
        (NESTED, -signal.SIGKILL),
        (DESCRIPTORS, 5),
        ("raise ValueError('boom')", 1),
        (INTERRUPT, -signal.SIGINT),
        ("import sys; sys.exit('a sentence')", 1),
        ("import os, signal; print(os.environ['TMPDIR']); os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_a_forked_program_does_as_a_started_one(tmp_path: Path, code: str, expected: int):
    """Catches words, environment, folder, streams or signals that a fork has of the process that it comes from."""
    found = []
    for run in (subprocess.run, warm.run):
        result = run(
            [sys.executable, "-c", code, "one", "$two"],
            input="from stdin",
            cwd=tmp_path,
            env=os.environ | {"SHOWN": "its own", "TMPDIR": str(tmp_path)},
            start_new_session=True,
            capture_output=True,
            text=True,
        )
        found.append((result.returncode, result.stdout, result.stderr.strip().splitlines()[-1:]))
    assert found[0] == found[1] and found[1][0] == expected


def test_the_home_of_the_hugging_face_libraries_is_the_programs_own(tmp_path: Path):
    """Catches runs that share a cache of tokens, though each was given its own folder."""
    code = "import datasets.config as d, huggingface_hub.constants as h; print(d.HF_DATASETS_CACHE, h.HF_HUB_CACHE)"
    environment = os.environ | {"HF_HOME": str(tmp_path)}
    result = warm.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.stdout.split() == [str(tmp_path / "datasets"), str(tmp_path / "hub")]


@pytest.mark.parametrize("start", [subprocess.Popen, warm.Popen])
def test_ranks_are_found_and_killed_by_their_number(start: type[subprocess.Popen]):
    """Catches a signal that goes to the launcher, or to another rank."""
    rank = [sys.executable, "-c", "print(1, flush=True); import time; time.sleep(60)"]
    code = f"import os, subprocess; subprocess.run({rank}, env=os.environ | {{'RANK': '1'}})"
    with start([sys.executable, "-c", code], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None and launcher.stdout.readline() == b"1\n"
        ranks = find_ranks(launcher.pid)
        assert ranks.keys() == {1}
        ranks[1].kill()
        assert launcher.wait(60) == 0
