"""What the web UI reads of a real run on two CPU ranks while it starts, trains, is killed and goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lorashard_ui.reading.runs import Runs

REPOSITORY = Path(__file__).parents[2]
WORDS = "finetune --config examples/demo/demo.yaml --cpu 2 --logging_steps 1 --save_strategy steps --save_steps 5"


def start(root: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "lorashard", *WORDS.split(), "--output_dir", str(root / "live"), *words]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for(tell, what: str, process: subprocess.Popen) -> None:
    deadline_s = time.monotonic() + 180
    while not tell():
        assert time.monotonic() < deadline_s and process.poll() is None, what
        time.sleep(0.1)


@pytest.mark.slow
def test_a_run_is_followed_through_its_death_and_its_return(tmp_path):
    """Each part may read what it was told in a test, and none what a run writes."""
    runs = Runs(tmp_path)
    process = start(tmp_path, "--max_steps", "300")
    try:
        wait_for(lambda: any(row.name == "live" and row.state == "starting" for row in runs.list()), "start", process)
        reader = runs.get("live")
        wait_for(lambda: (reader.summary().step or 0) >= 12, "steps", process)
        summary = reader.summary()
        assert (summary.state, summary.phase, summary.max_steps, summary.num_ranks) == ("running", "train", 300, 2)
        assert summary.eta_s > 1 and summary.tokens_per_s > 1 and 0 < summary.loss < 10
        assert reader.progress().sentence.startswith("Training: step ")
        assert [alert for alert in reader.alerts() if alert.severity == "error"] == []
        first, second = reader.ranks()
        assert (first.rank, second.rank, first.state) == (0, 1, "running") and second.memory_bytes > 1 << 20
        assert 0 <= second.wait_share <= 1
        assert reader.checkpoints()[-1].name == "checkpoint-5" and reader.checkpoints()[-1].problem is None

        # A rank is killed.
        ranks = [
            one for one in psutil.Process(process.pid).children(recursive=True) if one.environ().get("RANK") == "1"
        ]
        ranks[0].send_signal(signal.SIGKILL)
        process.wait(60)
        summary = reader.summary()
        assert summary.state == "failed" and "rank 1 was killed by SIGKILL" in summary.error
        (alert,) = reader.alerts()
        assert (alert.rank, alert.severity) == (1, "error") and "resume goes on from checkpoint-" in alert.sentence
        assert "killed by SIGKILL" in reader.log(1)

        # It goes on, and the machine dies.
        last_step = reader.checkpoints()[0].step
        process = start(tmp_path, "--max_steps", "300", "--resume", "auto")
        wait_for(lambda: reader.summary().state == "running" and reader.summary().step > last_step + 2, "more", process)
        xs = reader.series(["loss"])["loss"][0]
        assert xs == list(range(1, len(xs) + 1))
        process.kill()
        process.wait(60)
        summary = reader.summary()
        assert summary.state == "dead" and "resume goes on from checkpoint-" in summary.error
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(60)
