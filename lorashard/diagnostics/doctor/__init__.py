"""`lorashard doctor`: what would stop or slow a run here, and how to fix it.

Read in this order: `checks` (what a check is), `machine` (those that need one process), `ranks` (those that need all),
`watch` (how a rank leaves a collective that never ends).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...config.use_options import DoctorOptions
from ...errors import ConfigError, VerificationError
from ...launch.elastic import find_python_flags, run_ranks
from ...launch.launcher import take_place
from ...runtime.devices import VisibleGpus, build_environment, choose_ranks, find_gpus, find_launcher
from ...runtime.failures import Failure, record_failure
from ...runtime.importing import quick_imports
from ...runtime.output import RESULT_FILE_VARIABLE, give
from .checks import Check, has_failed, merge_ranks, report, summarize
from .machine import check_machine

__all__ = ["diagnose"]

_GRACE_S = 3
_NEEDED_BY_RANKS = ("GPUs", "temporary files")


def diagnose(options: DoctorOptions, arguments: Sequence[str]) -> int:
    """Check this machine, and ranks on it, which are started here or by a launcher; say what is wrong.

    Args:
        arguments: The words of the command line that say the same to a rank.

    Returns:
        The exit code: 0; 1 if a check failed; 128 + n after signal n.
    """
    launcher = find_launcher(os.environ)
    if launcher is None:
        return _check_here(options, arguments)
    if launcher.is_lorashard:
        with quick_imports():
            from .ranks import check_ranks

        merged = merge_ranks(check_ranks(options.timeout_s, [], _hand_over_failure))
        give(launcher.rank, report(merged), "", as_json=True)
    else:
        take_place(options, launcher)
        checks = list(check_machine(options)) if os.environ.get("LOCAL_RANK", "0") == "0" else []
        from .ranks import check_ranks

        merged = merge_ranks(check_ranks(options.timeout_s, checks, lambda found: _give(0, found, options)))
        _give(launcher.rank, merged, options)
    from ...runtime.dist import leave_group

    leave_group()
    return 0 if launcher.is_lorashard else int(has_failed(merged))


def _check_here(options: DoctorOptions, arguments: Sequence[str]) -> int:
    """Check the machine in this process, and start ranks, whose death then leaves somebody to tell of it."""
    checks = []
    for check in check_machine(options):
        checks.append(check)
        _show(check, options)
    broken = [check.name for check in checks if check.result == "FAIL" and check.name in _NEEDED_BY_RANKS]
    if broken:
        found, failure, logs_dir = [Check("ranks", "skip", f"not started without {' and '.join(broken)}")], None, None
    else:
        logs_dir = Path(tempfile.mkdtemp(prefix="lorashard-doctor-"))
        found, failure = _start_ranks(options, arguments, logs_dir)
    for check in found:
        checks.append(check)
        _show(check, options)
    if logs_dir is not None and (failure is None or failure.is_stop):
        shutil.rmtree(logs_dir)
    if failure is not None and failure.is_stop:
        return failure.exit_code
    logs = f"; the ranks' logs: {logs_dir}" if failure else ""
    print(json.dumps(report(checks), indent=1) if options.as_json else summarize(checks) + logs, flush=True)
    return int(has_failed(checks))


def _start_ranks(
    options: DoctorOptions, arguments: Sequence[str], logs_dir: Path
) -> tuple[list[Check], Failure | None]:
    """Return what ranks found, and what ended them early."""
    try:
        choice = choose_ranks(options, find_gpus() if options.cpu is None else VisibleGpus(0))
    except ConfigError as error:
        return [Check("ranks", "FAIL", str(error))], None
    os.environ.update(build_environment(choice, os.environ))
    result_file = logs_dir / "result"
    os.environ[RESULT_FILE_VARIABLE] = str(result_file)
    command = [sys.executable, *find_python_flags(), "-m", "lorashard", *arguments]
    try:
        failure = run_ranks(command, choice.num_ranks, logs_dir, grace_s=_GRACE_S, mirror=sys.stderr)
    finally:
        del os.environ[RESULT_FILE_VARIABLE]
    if failure is not None:
        failure.report()
    found = []
    if result_file.is_file():
        found = [Check(**check) for check in json.loads(result_file.read_text(encoding="utf-8"))["checks"]]
    if failure is not None and not failure.is_stop and not has_failed(found):  # it died before it could tell
        found.append(Check("ranks", "FAIL", failure.message, "its log has more"))
    return found, failure


def _hand_over_failure(checks: Sequence[Check]) -> None:
    """Leave what this rank found where the launcher looks for it, as for any rank's failure."""
    record_failure(VerificationError(f"{checks[-1].name}: {checks[-1].found}"), 1, is_plain=True)
    give(0, report(checks), "", as_json=True)


def _give(rank: int, checks: Sequence[Check], options: DoctorOptions) -> None:
    lines = [*(check.render() for check in checks), summarize(checks)]
    give(rank, report(checks), "\n".join(lines), options.as_json)


def _show(check: Check, options: DoctorOptions) -> None:
    if not options.as_json:
        print(check.render(), flush=True)
