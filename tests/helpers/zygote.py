"""A Python that has imported everything, and that forks a process for each program it is asked to run.

It serves requests on a socket; `helpers.warm` is at its other end. It is a fork of the tests' own process, made before
the first test (`be_zygote`), or, for programs whose settings are other ones, `python zygote.py FD`. In the processes
that it forks, a Python that is started (`subprocess.Popen`, torch's elastic launcher) is forked as well, and one that
is exec'ed (`os.execvp`) runs in place. All else is real: words, environment, folder, pipes, signals, sessions, exit
codes. An interpreter that starts and imports torch, transformers and TRL takes six seconds of a core, a fork a tenth of
one.

A `sitecustomize.py` in PYTHONPATH is run in a forked process too, in a rank twice, and may find everything imported.

What a fork cannot show: the order of imports, what happens at an interpreter's end (`atexit`), and sets whose order
another process would have changed. So the real starts that are left compare both ways.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import io
import json
import logging
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

# Imported lazily by runs, or by what they import: each would cost every rank the same milliseconds again.
MODULES = (
    "accelerate.commands.accelerate_cli",
    "torch.distributed.run",
    "torch.distributed.launcher.api",
    "torch.utils.tensorboard",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.trainer",
    "trl.trainer.sft_trainer",
    "trl.trainer.dpo_trainer",
    "peft.tuners.lora",
    "lorashard.api",
    "lorashard.cli",
    "lorashard.inference.chat",
    "lorashard.inference.evaluation",
    "lorashard.inference.generation",
    "lorashard.launch.launcher",
    "lorashard.export.merge_command",
    "lorashard.training.train",
    "lorashard.diagnostics.validate",
    "lorashard.diagnostics.verify",
)
_REQUEST_BYTES = 2**20
_PR_SET_NAME = 15  # linux/prctl.h
RANK_NAME = "rank-"
_BASE_PATH = [entry for entry in sys.path if entry.startswith((sys.prefix, sys.base_prefix))]
_kept: list[Any] = []  # streams of a parent, which must not be flushed again where they are forgotten


class ForkingPopen(subprocess.Popen):
    """`subprocess.Popen` that forks this process where a Python is to be started."""

    def __init__(self, args: Any, *more: Any, start_new_session: bool = False, **options: Any) -> None:
        self._has_own_session = start_new_session
        super().__init__(args, *more, start_new_session=start_new_session, **options)

    def _execute_child(  # type: ignore[override]
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Any,
        cwd: Any,
        env: Mapping[str, str] | None,
        startupinfo: Any,
        creationflags: Any,
        shell: bool,
        *rest: Any,
    ) -> None:
        words = [args] if isinstance(args, str) else [os.fsdecode(word) for word in args]
        if shell or pass_fds or not is_python(words):
            asked = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell)
            super()._execute_child(*asked, *rest)  # type: ignore[misc]
            return
        pipes = rest[:6]
        given = (pipes[0], pipes[3], pipes[5])
        streams = [number if pipe == -1 else pipe for number, pipe in enumerate(given)]
        environment = dict(os.environ if env is None else env)
        self.pid = self._fork(words, environment, os.fspath(cwd or os.getcwd()), streams)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _fork(self, words: list[str], environment: dict[str, str], folder: str, streams: Sequence[int]) -> int:
        pid = os.fork()
        if pid == 0:
            be_started(words, environment, folder, streams, self._has_own_session)
        return pid


def is_python(words: Sequence[str]) -> bool:
    """Tell whether a command is a Python of this environment, or a script that it has installed."""
    if words[0] != sys.executable:
        return len(words) > 0 and Path(words[0]).name in ("lorashard", "torchrun", "accelerate")
    return bool(_split(words)[1])


def _split(words: Sequence[str]) -> tuple[bool, list[str]]:
    """Return whether the folder stays out of `sys.path`, and what is to be run; nothing for unknown flags."""
    rest, is_safe = list(words[1:]), False
    while rest and rest[0] in ("-P", "-u"):
        is_safe |= rest.pop(0) == "-P"
    known = rest and (rest[0] in ("-m", "-c") or not rest[0].startswith("-"))
    return is_safe, rest if known else []


def be_started(
    words: list[str], environment: dict[str, str], folder: str, streams: Sequence[int], has_own_session: bool
) -> NoReturn:
    """Be the process, just forked, that a command was to start."""
    try:
        if has_own_session:
            os.setsid()
        _take_streams(streams)
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_DFL, signal.SIG_IGN, None):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        logging.disable(logging.NOTSET)  # lorashard's launcher is silent while it forks
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        if "RANK" in environment:
            ctypes.CDLL(None).prctl(_PR_SET_NAME, f"{RANK_NAME}{environment['RANK']}".encode())
        # Torch makes its thread pool anew after a fork, and threads that find it gone at one moment fail.
        torch = sys.modules["torch"]
        torch.set_num_threads(torch.get_num_threads())
        become(words)
    finally:
        os._exit(255)


def _take_streams(streams: Sequence[int]) -> None:
    """Make `streams` this process's first three descriptors, and lose those that an exec would have closed."""
    copies = [os.dup(stream) for stream in streams]
    for number, copy in enumerate(copies):
        os.dup2(copy, number)
    nothing = os.open(os.devnull, os.O_RDWR)
    for entry in os.listdir("/proc/self/fd"):
        number = int(entry)
        with suppress(OSError):
            # Not closed: an object of the parent's may close its number later, which would then be another's.
            if number > 2 and number != nothing and not os.get_inheritable(number):
                os.dup2(nothing, number, inheritable=False)


def become(words: list[str]) -> NoReturn:
    """Run a Python program in this process, as an interpreter of its own would; end with its exit code."""
    code = 1
    try:
        _prepare(words)
        _run(words)
        code = 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            code = (error.code or 0) & 0xFF
        else:
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        _end(code)


def _prepare(words: list[str]) -> None:
    """Make what an interpreter makes of its environment when it starts."""
    is_safe, program = _split(words) if words[0] == sys.executable else (False, [words[0]])
    _kept.extend([sys.stdin, sys.stdout, sys.stderr])
    buffering = 0 if os.environ.get("PYTHONUNBUFFERED") else -1
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)  # type: ignore[misc]
    for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        binary = os.fdopen(number, "wb", buffering, closefd=False)
        is_by_line = number == 2 or os.isatty(number)
        stream = io.TextIOWrapper(binary, "utf-8", errors, write_through=buffering == 0, line_buffering=is_by_line)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable(2)
    tempfile.tempdir = None
    random.seed()
    _set_home(os.environ.get("HF_HOME", os.path.expanduser("~/.cache/huggingface")))
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    first = os.getcwd() if program[0] in ("-m", "-c") else os.path.dirname(os.path.realpath(program[0]))
    sys.path[:] = [*([] if is_safe else [first]), *added, *_BASE_PATH]
    site = next((Path(entry, "sitecustomize.py") for entry in added if Path(entry, "sitecustomize.py").exists()), None)
    if site is not None:
        sys.modules["sitecustomize"] = module = types.ModuleType("sitecustomize")
        module.__file__ = str(site)
        exec(compile(site.read_text(), str(site), "exec"), module.__dict__)


def _run(words: list[str]) -> None:
    program = _split(words)[1] if words[0] == sys.executable else list(words)
    if program[0] == "-c":
        sys.argv = ["-c", *program[2:]]
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(program[1], "<string>", "exec"), module.__dict__)
    elif program[0] == "-m":
        sys.argv = ["-m", *program[2:]]
        sys.modules.pop(program[1], None)  # or runpy warns that it is there
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(program)
        sys.modules["__main__"] = types.ModuleType("__main__")
        runpy.run_path(program[0], run_name="__main__")


def _end(code: int) -> NoReturn:
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _execvp(file: str, words: Sequence[str]) -> None:
    if is_python(list(words)):
        _kept.append(sys._getframe())
        become(list(words))
    _real_execvp(file, words)


_real_execvp = os.execvp
_real_popen = subprocess.Popen
_home_places: list[tuple[types.ModuleType, str, str]] = []


def _find_home_places(home: str) -> None:
    """Find the constants that libraries have made of HF_HOME when they were imported."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if type(value) in (str, type(Path())) and str(value).startswith(home):
                _home_places.append((module, name, str(value).removeprefix(home)))


def _set_home(home: str) -> None:
    for module, name, rest in _home_places:
        setattr(module, name, type(getattr(module, name))(home + rest))


def serve(requests: socket.socket) -> None:
    """Fork a process for each request; give its id back once it is a child of the process that asked.

    That process is the subreaper: it inherits what a process leaves that ends between.
    """
    while True:
        content, streams, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 3)
        for stream in streams:
            os.set_inheritable(stream, False)  # or what the process starts would hold its pipes open
        if not content:
            return
        request = json.loads(content)
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid:
                os.write(writer, str(pid).encode())
                os._exit(0)
            be_started(request["words"], request["environment"], request["folder"], streams, request["has_own_session"])
        os.waitpid(between, 0)
        os.close(writer)
        requests.send(os.read(reader, 100))
        for number in (reader, *streams):
            os.close(number)


def _warm_up() -> None:
    """Plan a run of a tiny model: it fills the caches of transformers, and of the tensors that planning traces with."""
    from transformers import LlamaConfig

    from lorashard.cli import main as run_command

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(
            **sizes, num_hidden_layers=2, vocab_size=300, tie_word_embeddings=True, architectures=["LlamaForCausalLM"]
        ).save_pretrained(folder)
        output, sys.stdout = sys.stdout, io.StringIO()
        try:
            code = run_command(["plan", "--model", folder, "--cpu", "2", "--dtype", "float32"])
        finally:
            sys.stdout = output
    assert code == 0 and threading.active_count() == 1


def prepare() -> None:
    """Become a process to fork from: import what is not there yet, and fork where a Python is to be started."""
    from lorashard.runtime.output import leave_out_notices

    gc.disable()
    leave_out_notices()
    for name in MODULES:
        importlib.import_module(name)
    for module in list(sys.modules.values()):  # some have a name of their own for it
        if getattr(module, "__dict__", {}).get("Popen") is _real_popen:
            module.Popen = ForkingPopen  # type: ignore[attr-defined]
    os.execvp = _execvp  # type: ignore[assignment]
    _find_home_places(importlib.import_module("huggingface_hub.constants").HF_HOME)
    os.environ["HF_HOME"] = os.path.join(tempfile.gettempdir(), "lorashard-tests-home-of-nobody")
    _set_home(os.environ["HF_HOME"])
    _warm_up()
    gc.collect()
    gc.freeze()
    gc.enable()


def be_zygote(requests: socket.socket) -> NoReturn:
    """Serve requests in a process that was just forked from the tests' own, once there is one."""
    try:
        faulthandler.disable()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        select.select([requests], [], [])
        if requests.recv(1, socket.MSG_PEEK):
            prepare()
            serve(requests)
    except BaseException:
        os.write(2, traceback.format_exc().encode())  # the tests' own streams are not for this process
    finally:
        os._exit(0)


if __name__ == "__main__":
    sys.modules["zygote"] = sys.modules["__main__"]  # stays, whatever becomes the main module
    prepare()
    given = socket.socket(fileno=int(sys.argv[1]))
    given.set_inheritable(False)
    serve(given)
