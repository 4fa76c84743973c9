"""`lorashard doctor`: what would stop or slow a run here, and how to fix it.

Read in this order: `..checks` (what a check is), `machine` (checks of one process), `ranks` (checks of all ranks),
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
from typing import Any

from ...config.use_options import DoctorOptions
from ...errors import ConfigError, VerificationError
from ...launch.elastic import run_ranks
from ...launch.launcher import build_rank_command, take_place
from ...runtime.devices import VisibleGpus, build_environment, choose_ranks, find_gpus, find_launcher
from ...runtime.failures import Failure, record_failure
from ...runtime.importing import quick_imports
from ...runtime.output import RESULT_FILE_VARIABLE, give
from ..checks import Check, has_failed, merge_ranks, summarize
from .machine import check_machine

__all__ = ["diagnose"]

_GRACE_S = 3
_NEEDED_BY_RANKS = ("GPUs", "temporary files")


def diagnose(options: DoctorOptions) -> int:
    """Check this machine, and ranks on it, which are started here or by a launcher; report what is wrong.

    Returns:
        The exit code: 0; 1 if a check failed; 128 + n after signal n.
    """
    launcher = find_launcher(os.environ)
    if launcher is None:
        return _check_here(options)
    if launcher.is_lorashard:
        with quick_imports():
            from .ranks import check_ranks

        merged = merge_ranks(check_ranks(options.timeout_s, [], _hand_over_failure))
        give(launcher.rank, _to_json(merged), "", as_json=True)
    else:
        take_place(options, launcher)
        checks = list(check_machine(options)) if os.environ.get("LOCAL_RANK", "0") == "0" else []
        from .ranks import check_ranks

        merged = merge_ranks(check_ranks(options.timeout_s, checks, lambda found: _print_all(0, found, options)))
        _print_all(launcher.rank, merged, options)
    from ...runtime.dist import leave_group

    leave_group()
    return 0 if launcher.is_lorashard else int(has_failed(merged))


def _check_here(options: DoctorOptions) -> int:
    """Check the machine in this process, and start ranks: this process reports it if they die."""
    checks: list[Check] = []

    def add(check: Check) -> None:
        checks.append(check)
        if not options.as_json:
            print(check.render(), flush=True)

    for check in check_machine(options):
        add(check)
    failure, logs_dir = None, None
    if broken := [check.name for check in checks if check.has_failed and check.name in _NEEDED_BY_RANKS]:
        add(Check("ranks", "skip", f"not started without {' and '.join(broken)}"))
    else:
        logs_dir = Path(tempfile.mkdtemp(prefix="lorashard-doctor-"))
        found, failure = _start_ranks(options, logs_dir)
        for check in found:
            add(check)
        if failure is None or failure.is_stop:
            shutil.rmtree(logs_dir)
    if failure is not None and failure.is_stop:
        return failure.exit_code
    logs = f"; the ranks' logs: {logs_dir}" if failure else ""
    print(json.dumps(_to_json(checks), indent=1) if options.as_json else summarize(checks) + logs, flush=True)
    return int(has_failed(checks))


def _start_ranks(options: DoctorOptions, logs_dir: Path) -> tuple[list[Check], Failure | None]:
    """Return the ranks' findings, and what ended the ranks early."""
    try:
        choice = choose_ranks(options, find_gpus() if options.cpu is None else VisibleGpus(0))
    except ConfigError as error:
        return [Check.of_error("ranks", error)], None
    os.environ.update(build_environment(choice, os.environ))
    result_file = logs_dir / "result"
    os.environ[RESULT_FILE_VARIABLE] = str(result_file)
    command = build_rank_command("doctor", options, logs_dir)
    try:
        failure = run_ranks(command, choice.num_ranks, logs_dir, grace_s=_GRACE_S, mirror=sys.stderr)
    finally:
        del os.environ[RESULT_FILE_VARIABLE]
    if failure is not None:
        failure.report()
    found = []
    if result_file.is_file():
        found = [Check(**check) for check in json.loads(result_file.read_text(encoding="utf-8"))["checks"]]
    if failure is not None and not failure.is_stop and not has_failed(found):  # the rank died without a report
        found.append(Check.failed("ranks", failure.message, "see its log"))
    return found, failure


def _hand_over_failure(checks: Sequence[Check]) -> None:
    """Leave this rank's findings where the launcher looks for them, as for any rank's failure.

    The first report stays: a rank that was stopped runs again once another has said so, and blames what it waited for.
    """
    if Path(os.environ[RESULT_FILE_VARIABLE]).exists():
        return
    record_failure(VerificationError(checks[-1].found, where=checks[-1].name), 1, is_plain=True)
    give(0, _to_json(checks), "", as_json=True)


def _print_all(rank: int, checks: Sequence[Check], options: DoctorOptions) -> None:
    lines = [*(check.render() for check in checks), summarize(checks)]
    give(rank, _to_json(checks), "\n".join(lines), options.as_json)


def _to_json(checks: Sequence[Check]) -> dict[str, Any]:
    return {"is_ok": not has_failed(checks), "checks": [check.to_json() for check in checks]}
