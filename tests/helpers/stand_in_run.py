"""In the place of a run's launcher: owns a run's folder, says that it trains, and obeys its signals; without torch.

python stand_in_run.py FOLDER, which holds a checkpoint of another run.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from pathlib import Path

from lorashard.errors import RunStopped
from lorashard.runs.checkpoints import MANIFEST_NAME, list_checkpoints, place_partial, publish, read_manifest
from lorashard.runs.lock import lock_run
from lorashard.runs.status import Status
from lorashard.runtime.failures import Failure

MAX_STEPS = 10_000
STEP_S = 0.2
_STOPS = {signal.SIGUSR1: "SIGUSR1", signal.SIGTERM: "SIGTERM", signal.SIGQUIT: "SIGQUIT"}
_STOPPED_EXIT_CODE = 75


def main() -> int:
    """Do steps until a signal ends it; return the exit code."""
    folder = Path(sys.argv[1])
    heard: list[int] = []
    for number in (*_STOPS, signal.SIGUSR2):
        signal.signal(number, lambda number, _: heard.append(number))
    with lock_run(folder):
        status = Status.begin(folder)
        step = 100
        status.enter("train", step=step, max_steps=MAX_STEPS, world_size=2)
        while True:
            time.sleep(STEP_S)
            step += 1
            status.advance(step, MAX_STEPS, "steps")
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "time": time.time(), "loss": 100 / step}) + "\n")
            if not heard:
                continue
            number = heard.pop(0)
            if number != signal.SIGQUIT:
                _save(folder, step)
            if number in _STOPS:
                stop = RunStopped(signal=_STOPS[number], step=step, checkpoint=f"checkpoint-{step}")
                status.end("stopped", Failure.of_error(stop))
                return _STOPPED_EXIT_CODE


def _save(folder: Path, step: int) -> None:
    earlier = list_checkpoints(folder)[0]
    checkpoint = folder / f"checkpoint-{step}"
    partial = place_partial(checkpoint)
    shutil.copytree(earlier, partial, ignore=shutil.ignore_patterns(MANIFEST_NAME))
    publish(checkpoint, read_manifest(earlier).facts)


if __name__ == "__main__":
    sys.exit(main())
