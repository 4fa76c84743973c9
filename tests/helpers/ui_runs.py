"""Folders of runs, made up, and processes that own them, for the tests of the web UI."""

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

OWN = """
import sys
from pathlib import Path
from lorashard.runs.lock import lock_run
with lock_run(Path(sys.argv[1])):
    print("owned", flush=True)
    sys.stdin.read()
"""


def write_lines(path: Path, rows, mode: str = "a") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.writelines(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)


def make_steps(steps, begin_s: float = 1000.0, pace_s: float = 2.0, **more):
    return [{"step": step, "time": begin_s + step * pace_s, "loss": 10.0 / step} | more for step in steps]


def make_rank_lines(steps, wait_s: float = 0.1, begin_s: float = 1000.0, pace_s: float = 2.0, **more):
    """What a rank writes that waits so long for gathers in each step."""
    return [
        {"step": step, "time": begin_s + step * pace_s, "wait_s": step * wait_s, "rss_bytes": 1000 + step} | more
        for step in steps
    ]


def make_run(root: Path, name: str = "one", steps: int = 10, num_ranks: int = 2, phase: str = "done", **status) -> Path:
    """Write the folder of a run that says it is in `phase`; nobody owns it."""
    folder = root / name
    (folder / "logs").mkdir(parents=True)
    (folder / "config.yaml").write_text("model_name_or_path: org/model\ndataset: rows.jsonl\nmethod: sft\nlora_r: 16\n")
    write_lines(folder / "metrics.jsonl", make_steps(range(1, steps + 1)))
    for rank in range(num_ranks):
        write_lines(folder / f"ranks/rank_{rank}.jsonl", make_rank_lines(range(1, steps + 1)))
        (folder / f"logs/rank_{rank}.log").write_text(f"hello from rank {rank}\n")
    said = {"phase": phase, "step": steps, "max_steps": 100, "world_size": num_ranks, "time": time.time()}
    if phase not in ("done", "failed", "stopped"):
        said["time"] += 5  # it is owned in a moment, and says this then
    write_status(folder, said | {"error": None} | status)
    return folder


def make_sweep(root: Path, name: str = "sweep", phase: str = "done", **states: str) -> Path:
    """Write the folder of a sweep over lora_r and learning_rate whose four jobs are in `states`; nobody owns it.

    A job that waits has no folder yet; one that is halved or stopped has stopped at half of the others' steps.
    """
    folder = make_run(root, name, 0, phase=phase)
    entries = []
    for number, job in enumerate("abcd"):
        state = states.get(job, phase if phase == "done" else "running")
        options = {"lora_r": 8 * (1 + number % 2), "learning_rate": (1e-4, 3e-3)[number // 2]}
        step, value = (20 if state in ("halved", "stopped") else 40), 1.5 - 0.1 * number
        entry = {"name": job, "options": options, "state": state, "step": step, "max_steps": 100, "value": value}
        why = "its eval_loss was among the worst half at step 20" if state == "halved" else ""
        entries.append(json.dumps(entry | ({"step": 0, "value": None} if state == "waiting" else {}) | {"why": why}))
        if state == "waiting":
            continue
        place = make_run(folder, job, 0, phase={"running": "train", "halved": "stopped"}.get(state, state), step=step)
        more = {"learning_rate": options["learning_rate"]}
        lines = make_steps(range(1, step + 1), **more) + [{"step": step, "time": 1100.0, "eval_loss": value}]
        write_lines(place / "metrics.jsonl", lines)
        (place / "config.yaml").write_text((place / "config.yaml").read_text() + f"lora_dropout: {number}\n")
    (folder / "sweep.json").write_text('{"metric": "eval_loss", "jobs": [\n' + ",\n".join(entries) + "\n]}")
    return folder


def write_status(folder: Path, status) -> None:
    (folder / "status.json").write_text(json.dumps(status))


@contextmanager
def owned(folder: Path, since_s: float | None = None):
    """While the body runs, another process owns a run's folder, as a run's launcher does; it can be killed.

    Args:
        since_s: it says that it has owned it since then, on another machine, where that can be.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", OWN, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "owned\n"
        if since_s is not None:
            (folder / ".owner.json").write_text(json.dumps({"pid": 1, "host": "elsewhere", "begin_s": since_s}))
        yield process
    finally:
        process.kill()
        process.communicate()
