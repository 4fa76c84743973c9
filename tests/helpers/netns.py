"""Two nodes on one machine: network namespaces with a wire between them, whose bytes are counted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from helpers import warm

NODES = ("node-0", "node-1")
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_INTERFACE = "wire"  # its name in each namespace
_ON_NODE = Path(warm.__file__).with_name("on_node.py")
# `ip netns exec` shows a namespace the files below its name as those of /etc.
_ETC = Path("/etc/netns")


def explain_missing() -> str | None:
    """Return why namespaces cannot be made here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            return f"network namespaces need the program `{program}`"
    name = f"lorashard-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"`ip netns add` fails: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return None


class TwoNodes:
    """Two namespaces, each with a loopback, one end of the wire, and a hostname that both know."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def count_bytes(self) -> int:
        """Return how many bytes have crossed the wire, both ways."""
        files = [f"/sys/class/net/{_INTERFACE}/statistics/{name}_bytes" for name in ("tx", "rx")]
        command = ["ip", "netns", "exec", self._names[0], "cat", *files]
        counts = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return sum(map(int, counts.split()))

    def run(
        self, commands: Sequence[Sequence[str]], env: Mapping[str, str], folder: Path, timeout_s: float = 280
    ) -> tuple[list[int], list[str]]:
        """Run a command on each node at once; return the exit codes, and what each said."""
        logs = [folder / f"{node}.log" for node in NODES]
        processes = []
        for name, node, command, log in zip(self._names, NODES, commands, logs, strict=True):
            with log.open("w") as file:
                processes.append(
                    warm.Popen(
                        [sys.executable, str(_ON_NODE), name, node, *command],
                        env=dict(env) | {"GLOO_SOCKET_IFNAME": _INTERFACE},
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
        deadline_s = time.monotonic() + timeout_s
        try:
            codes = [process.wait(max(0.1, deadline_s - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired as error:
            said = "\n".join(log.read_text()[-3000:] for log in logs)
            raise AssertionError(f"the nodes did not finish in {timeout_s} s:\n{said}") from error
        finally:
            self.end_processes()
            for process in processes:
                process.wait()
        return codes, [log.read_text() for log in logs]

    def end_processes(self) -> None:
        """Kill what still runs on the nodes."""
        for name in self._names:
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
            for pid in pids.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


@contextmanager
def make_two_nodes() -> Iterator[TwoNodes]:
    """Make the namespaces and the wire; leave nothing behind."""
    names = [f"lorashard-{os.getpid()}-{node}" for node in NODES]
    hosts = "".join(f"{address} {node}\n" for node, address in zip(NODES, _ADDRESSES, strict=True))
    nodes = TwoNodes(names)
    try:
        for name in names:
            _ip("netns", "add", name)
            (_ETC / name).mkdir(parents=True)
            (_ETC / name / "hosts").write_text("127.0.0.1 localhost\n" + hosts)
        end, other_end = (["name", _INTERFACE, "netns", name] for name in names)
        _ip("link", "add", *end, "type", "veth", "peer", *other_end)
        for name, address in zip(names, _ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", _INTERFACE)
            for interface in ("lo", _INTERFACE):
                _ip("-n", name, "link", "set", interface, "up")
        yield nodes
    finally:
        nodes.end_processes()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(_ETC / name, ignore_errors=True)
        with suppress(OSError):  # others' are there
            _ETC.rmdir()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
