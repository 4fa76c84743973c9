"""The environment of every test and of the processes it starts, set before anything imports torch or transformers."""

import gc
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest
from helpers import warm

os.environ.update(
    OMP_NUM_THREADS="1",  # a process that used more OpenMP threads hangs the ranks it forks
    TOKENIZERS_PARALLELISM="false",  # likewise, a tokenizer's threads do not survive a fork
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    # Runs of tests neither wait for those of the person nor are waited for.
    LORASHARD_QUEUE_DIR=os.path.join(tempfile.gettempdir(), f"lorashard-test-queue-{os.getuid()}"),
)


for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)  # whoever started the tests: no run of theirs is a rank of that


gc.disable()  # while collecting imports everything: see lorashard.runtime.importing


def pytest_collection_finish() -> None:
    gc.freeze()  # or a forked rank that collects its garbage would write to each page that it shares
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest catches what is logged, which a fork would go on doing
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """Fork what the tests' programs are forked from (`helpers.warm`), while no test has changed or started anything."""
    if session.items and not session.config.option.collectonly:
        warm.fork_zygote()
    return (yield)


@contextmanager
def _keep_environment() -> Iterator[None]:
    """Take back what is set: transformers' arguments leave ACCELERATE_MIXED_PRECISION for the whole process."""
    before = dict(os.environ)
    yield
    for name in before.keys() | os.environ.keys():
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]


@pytest.fixture(scope="module", autouse=True)
def environment_of_a_file() -> Iterator[None]:
    """Keep what a file's fixtures have set from the next file."""
    with _keep_environment():
        yield


@pytest.fixture(autouse=True)
def environment_of_a_test() -> Iterator[None]:
    """Keep what a test has set from the next test."""
    with _keep_environment():
        yield


@pytest.fixture
def list_children() -> Callable[[], list[psutil.Process]]:
    """List what the test has started and is left: `list_children()`.

    What other files' tests have left for the rest of the session, such as a fork server, is none of it.
    """
    before = psutil.Process().children(recursive=True)
    return lambda: [child for child in psutil.Process().children(recursive=True) if child not in before]


# --- The CPU budget of each file: CPU-seconds do not depend on what else the machine does, so growth fails, not load.

_DEFAULT_BUDGET_S = 60.0
_spent_s = pytest.StashKey[dict[str, float]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_spent_s] = {}
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.register(_WorkerSums(config))


@pytest.fixture(scope="module", autouse=True)
def cpu_budget(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a file whose processes took more CPU-seconds than the default, or than the `CPU_BUDGET_S` that it states."""
    begin_s = _used_s()
    yield
    spent_s = _used_s() - begin_s
    budget_s = getattr(request.module, "CPU_BUDGET_S", _DEFAULT_BUDGET_S)
    request.config.stash[_spent_s][str(request.path.relative_to(request.config.rootpath))] = spent_s
    if spent_s > budget_s:
        pytest.fail(f"{request.path.name} took {spent_s:.0f} CPU-seconds of {budget_s:.0f}", pytrace=False)


def _used_s() -> float:
    """Return the CPU-seconds of this process, of its ended children and of its running descendants with theirs."""
    total_s = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total_s += usage.ru_utime + usage.ru_stime
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total_s += times.user + times.system + times.children_user + times.children_system
    return total_s


class _WorkerSums:
    """Brings what each worker of pytest-xdist has measured to the summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["cpu_s"] = self._config.stash[_spent_s]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        self._config.stash[_spent_s].update(getattr(node, "workeroutput", {}).get("cpu_s", {}))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Give each file to one worker, and all files of tests/browser to the same: they share a server and a browser."""
    from xdist.scheduler import LoadFileScheduling

    class FilesAndBrowser(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/browser" if nodeid.startswith("tests/browser/") else super()._split_scope(nodeid)

    return FilesAndBrowser(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    spent_s = sorted(config.stash[_spent_s].items(), key=lambda item: -item[1])
    if not spent_s:
        return
    terminalreporter.section("CPU-seconds by file")
    for path, seconds in spent_s[: 20 if config.option.verbose < 1 else None]:
        terminalreporter.line(f"{seconds:7.1f}  {path}")
    terminalreporter.line(f"{sum(seconds for _, seconds in spent_s):7.1f}  in all {len(spent_s)} files")
