"""Who has which devices of this machine: each run holds a ticket, and one that is queued waits for its turn.

A ticket is a file in one folder of this user and machine, which its run's launcher keeps locked. It says which devices
the run may take, which it has, and who it is. The kernel lets go of the lock when the launcher dies, however it dies,
so a ticket that nobody has locked counts for nothing. Tickets are looked at and changed under one more lock, that of
the folder. Imports no torch: a run may wait for days.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from ..errors import ConfigError
from ..runs.status import Status
from ..runtime.devices import RankChoice
from ..runtime.gpus import Gpu, list_gpus
from ..runtime.output import warn

FOLDER_VARIABLE = "LORASHARD_QUEUE_DIR"
# A GPU on which programs that have no ticket keep more than the rest of this is busy, for a run that takes any.
FREE_SHARE = 0.8

_INTERVAL_S = 0.5
_GPU_INTERVAL_S = 5.0  # asking the driver costs some milliseconds
_PATIENCE_S = 3.0  # with another that looks at the tickets
_CPU = "cpu"


@dataclass(frozen=True)
class Ticket:
    """What a run wants of this machine's devices, by names that are the same in every process, and what it has.

    Attributes:
        number: of its turn.
        run: its folder's name.
        wanted: any `count` of these.
        held: empty while it waits.
    """

    number: int
    run: str
    pid: int
    begin_s: float
    wanted: tuple[str, ...]
    count: int
    held: tuple[str, ...] = ()

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.begin_s))
        return f"the run {self.run} (process {self.pid}, since {since})"


@dataclass(frozen=True)
class Wait:
    """Why a ticket's turn has not come: how many are before it with itself, and a sentence."""

    place: int
    waits_for: str


def find_folder() -> Path:
    """Return where this user's tickets on this machine are."""
    given = os.environ.get(FOLDER_VARIABLE)
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "lorashard", "queue", platform.node())  # homes are shared by machines


@contextmanager
def hold_devices(
    run: str, choice: RankChoice, status: Status, *, is_count: bool, is_queued: bool
) -> Iterator[RankChoice]:
    """Have a run's devices to its end; with `is_queued` wait first until they are free and it is its turn.

    A run that is not queued has its devices at once, whoever else has them; the queued ones see it.

    Args:
        run: the name of its folder.
        status: is told why it waits.
        is_count: whether any of the visible GPUs will do.

    Returns:
        The choice, with the GPUs that the run has been given.

    Raises:
        ConfigError: it is to be queued, and there can be no tickets here.
        RunStopped, KeyboardInterrupt: a signal ended the waiting.
    """
    gpus = list_gpus() if choice.device_type == "cuda" else []
    names = _name_devices(choice, gpus)
    with ExitStack() as stack:
        try:
            queue = _Queue(find_folder())
            has_choice = is_count and is_queued
            wanted = names if has_choice else _pick(names, choice)
            count = choice.num_ranks if has_choice else len(wanted)
            number = stack.enter_context(queue.draw(run, wanted, count, is_queued))
            held = _await_turn(queue, number, names, status) if is_queued else ()
        except OSError as error:
            _explain_no_tickets(error, is_queued)
            held = ()
        if held and choice.device_type == "cuda":
            choice = replace(choice, gpu_ids=tuple(sorted(names.index(name) for name in held)))
        yield choice


def _name_devices(choice: RankChoice, gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """Return the machine's own names of all visible devices, in the order of `--gpus`."""
    if choice.device_type == "cpu":
        return (_CPU,)
    num_gpus = max(choice.num_ranks, 1 + max(choice.gpu_ids or (0,)))
    if len(gpus) >= num_gpus:
        return tuple(gpu.uuid for gpu in gpus)
    # No driver that tells of them: what the variables say is all that is known.
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return tuple(visible if len(visible) >= num_gpus else map(str, range(num_gpus)))


def _pick(names: tuple[str, ...], choice: RankChoice) -> tuple[str, ...]:
    """Return those that a run has without a queue: the ones it names, or the first."""
    if choice.device_type == "cpu":
        return names
    ids = choice.gpu_ids if choice.gpu_ids is not None else range(choice.num_ranks)
    return tuple(names[index] for index in ids)


def _explain_no_tickets(error: Exception, is_queued: bool) -> None:
    reason = getattr(error, "strerror", None) or str(error)
    message = f"{find_folder()} cannot hold the tickets of runs ({reason})"
    advice = f"set {FOLDER_VARIABLE} to a folder on a local disk"
    if is_queued:
        raise ConfigError(message, option="queue", fix=f"{advice}, or leave queue out") from error
    warn(f"{message}, so queued runs will not wait for this one: {advice}")


def _await_turn(queue: _Queue, number: int, names: Sequence[str], status: Status) -> tuple[str, ...]:
    """Return the devices that a ticket has been given, when its turn has come."""
    busy = _BusyGpus()
    said: Wait | None = None
    while True:
        found = queue.ask(number, names, busy)
        if not isinstance(found, Wait):
            return found
        if found != said:
            tell = status.add if said else partial(status.enter, "queue")
            tell(queue=asdict(found))
            warn(f"queued, place {found.place}: {found.waits_for}")
            said = found
        time.sleep(_INTERVAL_S)


class _BusyGpus:
    """Which GPUs programs without a ticket use, asked for now and then."""

    def __init__(self) -> None:
        self._asked_s = -_GPU_INTERVAL_S
        self._found: dict[str, str] = {}

    def find(self) -> dict[str, str]:
        """Return what is used of each GPU that is busy, in words, by its name."""
        if time.monotonic() - self._asked_s >= _GPU_INTERVAL_S:
            self._asked_s = time.monotonic()
            self._found = {
                gpu.uuid: f"{_show(gpu.total_bytes - gpu.free_bytes)} of the {_show(gpu.total_bytes)} GiB"
                for gpu in list_gpus()
                if gpu.free_bytes < FREE_SHARE * gpu.total_bytes
            }
        return self._found


def _show(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"


class _Queue:
    """The tickets in a folder.

    Raises:
        OSError: the folder cannot be used, or its file system has no flock.
    """

    def __init__(self, folder: Path) -> None:
        if folder.parts[0] == "~":
            raise OSError("this user has no home folder")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    @contextmanager
    def draw(self, run: str, wanted: tuple[str, ...], count: int, is_queued: bool) -> Iterator[int]:
        """Hold a ticket; give its number. One that is not queued has what it wants at once."""
        with self._locked(_PATIENCE_S):
            number = 1 + max((ticket.number for ticket in self._read()), default=0)
            path = self._folder / f"{number}.ticket"
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = () if is_queued else wanted
                self._write(Ticket(number, run, os.getpid(), time.time(), wanted, count, held))
            except BaseException:
                os.close(self._descriptor)
                raise
        try:
            yield number
        finally:
            path.unlink(missing_ok=True)
            os.close(self._descriptor)

    def ask(self, number: int, names: Sequence[str], busy: _BusyGpus) -> tuple[str, ...] | Wait:
        """Return the devices that a queued ticket has from now on, or why it waits.

        Args:
            names: of all visible devices, in the order in which they are numbered.
        """
        try:
            with self._locked(_INTERVAL_S):
                tickets = self._read()
                own = next((ticket for ticket in tickets if ticket.number == number), None)
                if own is None:
                    raise FileNotFoundError("the run's own was deleted")
                found = choose(own, tickets, names, busy.find)
                if not isinstance(found, Wait):
                    self._write(replace(own, held=found))
                return found
        except TimeoutError:
            return Wait(1, "another run looks at the tickets")

    @contextmanager
    def _locked(self, patience_s: float) -> Iterator[None]:
        """Let no other look at the tickets or change them."""
        descriptor = os.open(self._folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline_s = time.monotonic() + patience_s
        try:
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() > deadline_s:
                    raise TimeoutError("another process keeps the folder locked")
                time.sleep(0.02)
            yield
        finally:
            os.close(descriptor)

    def _read(self) -> list[Ticket]:
        """Return the tickets of runs that live, by their turn; remove those of the dead. Needs the folder's lock."""
        tickets = []
        for path in self._folder.glob("*.ticket"):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:  # its run has just ended
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            except BlockingIOError:
                with suppress(ValueError, TypeError, KeyError):  # another version's
                    facts = json.loads(path.read_text(encoding="utf-8"))
                    tickets.append(Ticket(**facts | {name: tuple(facts[name]) for name in ("wanted", "held")}))
            finally:
                os.close(descriptor)
        return sorted(tickets, key=lambda ticket: ticket.number)

    def _write(self, ticket: Ticket) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(asdict(ticket)).encode(), 0)


def choose(
    own: Ticket, tickets: Sequence[Ticket], names: Sequence[str], find_busy: Callable[[], dict[str, str]]
) -> tuple[str, ...] | Wait:
    """Return the devices for a ticket whose turn it is, or why it waits.

    Args:
        tickets: of all runs that live, by their turn.
        names: of all devices that its run sees, in the order in which they are numbered.
        find_busy: says what programs without a ticket use of devices; asked only where it decides.
    """
    before = [
        ticket
        for ticket in tickets
        if ticket.number < own.number and not ticket.held and not set(ticket.wanted).isdisjoint(own.wanted)
    ]
    promised = {name for ticket in before for name in ticket.wanted}
    holders = {name: ticket for ticket in tickets if ticket.number != own.number for name in ticket.held}
    free = [name for name in own.wanted if name not in holders and name not in promised]
    has_choice = own.count < len(own.wanted)
    busy = find_busy() if has_choice and len(free) >= own.count else {}
    free = [name for name in free if name not in busy]
    if len(free) >= own.count:
        return tuple(free[: own.count])
    if before:
        reasons = [f"{before[-1]} came first, and waits for {_name_all(before[-1].wanted, names)} too"]
    else:
        reasons = [f"{_name_all([name], names)} is held by {holders[name]}" for name in own.wanted if name in holders]
        reasons += [
            f"other programs use {used} of {_name_all([name], names)}"
            for name, used in busy.items()
            if name in own.wanted
        ]
    return Wait(1 + len(before), "; ".join(reasons))


def _name_all(devices: Sequence[str], names: Sequence[str]) -> str:
    """Name devices as the person knows them: those that this run sees by their numbers."""
    if list(devices) == [_CPU]:
        return "the CPU"
    ids = [str(names.index(device)) if device in names else device for device in devices]
    return f"GPU{'s' if len(ids) > 1 else ''} {', '.join(ids)}"
