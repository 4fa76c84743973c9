"""A script in a process of its own, which says a line now and then and goes on when it is told to."""

from __future__ import annotations

import subprocess
import sys


class Talking:
    """Such a process: it prints what `read` returns, and waits for lines on its stdin."""

    def __init__(self, code: str, *words: str) -> None:
        command = [sys.executable, "-c", code, *words]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def read(self) -> str:
        """Wait for a line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        """Tell it to."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> str:
        """Tell it to go on for the last time; return what it said on stderr."""
        return self.process.communicate("\n", timeout=30)[1]

    def kill(self) -> None:
        """End it with SIGKILL, if it lives, and wait for that."""
        self.process.kill()
        self.process.communicate()
