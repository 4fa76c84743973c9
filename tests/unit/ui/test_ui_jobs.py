"""Commands in the background: real processes that end in every way, and an upload to a stand-in hub."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers.hub_server import HubServer

from lorashard.errors import ConfigError
from lorashard_ui.running import jobs as jobs_module
from lorashard_ui.running.jobs import Job, Jobs, merge_words, push_words, verify_words

# Says how far it is, starts another in a session of its own, and waits.
WORKER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
try:
    print(f"child {child.pid}", flush=True)
    print("lorashard: 3 of 12 units merged", flush=True)
    time.sleep(300)
except KeyboardInterrupt:
    print("cleared up", flush=True)
    sys.exit(130)
"""


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """Jobs of a root, of which none is left alive."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    jobs = Jobs(tmp_path / "runs")
    yield jobs
    for job in jobs.list():
        if job.state == "running":
            pid = json.loads((job.log_path.parent / "process.json").read_text())["pid"]
            os.killpg(pid, signal.SIGKILL)


def run_python(script: str, *words: str) -> list[str]:
    return [sys.executable, "-c", script, *words]


def wait_for(jobs: Jobs, job_id: str, state: str, timeout_s: float = 100) -> Job:
    deadline_s = time.monotonic() + timeout_s
    while (job := jobs.get(job_id)).state != state:
        assert job.state == "running" and time.monotonic() < deadline_s, (job, job.log_path.read_text())
        time.sleep(0.05)
    return job


def wait_for_line(jobs: Jobs, job_id: str, line: str) -> Job:
    deadline_s = time.monotonic() + 30
    while (job := jobs.get(job_id)).last_line != line:
        assert time.monotonic() < deadline_s and job.state == "running", job
        time.sleep(0.05)
    return job


def find_pid(job: Job) -> int:
    return json.loads((job.log_path.parent / "process.json").read_text())["pid"]


def build_run(folder: Path) -> Path:
    """Make a run's folder that holds an adapter as `hf upload` sees it."""
    folder.mkdir(parents=True)
    for name in ("adapter_config.json", "tokenizer.json", "config.yaml", "metrics.jsonl"):
        (folder / name).write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"0" * 64)
    (folder / "logs").mkdir()
    (folder / "logs" / "launcher.log").write_text("what was said")
    return folder


def test_a_job_ends_as_its_command_does(jobs, list_children):
    """A merge that failed and is shown as done, or one that leaves a zombie in the server."""
    good = jobs.start("merge", "first", run_python("print('all good')"))
    bad = jobs.start("verify", "second", run_python("import sys; print('token hf_abcdefghijkl'); sys.exit(3)"))
    assert list_children() == []
    done = wait_for(jobs, good, "done")
    failed = wait_for(jobs, bad, "failed")
    assert (done.exit_code, done.progress, done.last_line, done.run_name) == (0, 1.0, "all good", "first")
    assert failed.exit_code == 3 and "abcdefghijkl" not in failed.last_line
    assert done.end_s is not None and done.begin_s <= done.end_s
    assert [job.id for job in Jobs(jobs._folder.parent).list()] == [bad, good]
    nothing = jobs.start("push", "third", ["/does/not/exist"])
    assert "cannot be started" in wait_for(jobs, nothing, "failed").last_line


@pytest.mark.parametrize(
    ("said", "progress"),
    [
        ("lorashard: 3 of 12 units merged\nlorashard: another line", 0.25),
        ("model.safetensors:  40%|####      | 4.0M/10M\rmodel.safetensors:  50%|#####     | 5.0M/10M", 0.5),
        ("lorashard: loading", None),
        ("\x1b[32m9 of 9\x1b[0m", 1.0),
        ("0 of 0 rows", None),
    ],
)
def test_progress_is_what_the_command_says(jobs, said, progress):
    """A bar that stands still, jumps, or goes beyond its end."""
    job_id = jobs.start("merge", "first", run_python("import sys, time; print(sys.argv[1]); time.sleep(300)", said))
    assert jobs.get(job_id).state == "running"
    (jobs.get(job_id).log_path).write_text(said)
    assert jobs.get(job_id).progress == progress


def test_a_cancelled_job_ends_with_all_that_it_started(jobs):
    """Half a model on the disk, or ranks that go on computing it."""
    job_id = jobs.start("merge", "first", run_python(WORKER))
    job = wait_for_line(jobs, job_id, "lorashard: 3 of 12 units merged")
    assert job.progress == 0.25
    child = psutil.Process(int(job.log_path.read_text().splitlines()[0].split()[1]))
    jobs.cancel(job_id)
    job = wait_for(jobs, job_id, "cancelled", timeout_s=30)
    assert job.last_line == "cleared up" and job.exit_code == 130
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    with pytest.raises(ConfigError, match="does not run any more: it is cancelled"):
        jobs.cancel(job_id)


def test_a_job_that_does_not_hear_is_killed(jobs, monkeypatch):
    """A button that does nothing for a command that hangs."""
    monkeypatch.setattr(jobs_module, "_STOPS", tuple((number, 0.3) for number, _ in jobs_module._STOPS))
    deaf = (
        "import signal, time\n"
        "for n in (signal.SIGINT, signal.SIGTERM): signal.signal(n, signal.SIG_IGN)\n"
        "print('deaf', flush=True)\ntime.sleep(300)"
    )
    job_id = jobs.start("merge", "first", run_python(deaf))
    wait_for_line(jobs, job_id, "deaf")
    jobs.cancel(job_id)
    assert wait_for(jobs, job_id, "cancelled", timeout_s=30).exit_code == 128 + signal.SIGKILL


def test_a_job_that_ended_without_a_word_is_lost(jobs):
    """A job that is shown as running for ever, because the machine went down with it."""
    job_id = jobs.start("merge", "first", run_python(WORKER))
    pid = find_pid(wait_for_line(jobs, job_id, "lorashard: 3 of 12 units merged"))
    psutil.Process(psutil.Process(pid).ppid()).kill()  # who waits for it
    assert jobs.get(job_id).state == "running"
    psutil.Process(pid).kill()
    job = wait_for(jobs, job_id, "lost", timeout_s=10)
    assert job.exit_code is None
    left = json.loads((job.log_path.parent / "process.json").read_text())
    (job.log_path.parent / "process.json").write_text(json.dumps(left | {"pid": os.getpid(), "begin_s": 1.0}))
    assert jobs.get(job_id).state == "lost"  # not a process that has its number now


def test_a_job_is_not_over_before_its_end_is_written(jobs):
    """A merge that is shown as lost, or as cancelled without a code, for the moment in which its end is written."""
    job_id = jobs.start("merge", "first", run_python("import time; time.sleep(300)"))
    process = psutil.Process(find_pid(jobs.get(job_id)))
    waiter = process.parent()
    waiter.suspend()
    try:
        process.kill()
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert jobs.get(job_id).state == "running"
        with pytest.raises(ConfigError, match="it is ending"):
            jobs.cancel(job_id)
    finally:
        waiter.resume()
    assert wait_for(jobs, job_id, "failed").exit_code == 128 + signal.SIGKILL


def test_a_job_that_is_being_started_is_not_lost(jobs):
    """Another tab looks between the folder and the process of a job, and shows it as lost."""
    folder = jobs._folder / "20261121-000000-00000000"
    folder.mkdir(parents=True)
    for begin_s, state in ((time.time(), "running"), (time.time() - 1000, "lost")):
        facts = {"kind": "merge", "run_name": "first", "command": [], "begin_s": begin_s}
        (folder / "job.json").write_text(json.dumps(facts))
        assert jobs.get(folder.name).state == state


def test_jobs_of_long_ago_are_forgotten(jobs, monkeypatch):
    """Each look at the jobs of a server that has been used for months reads thousands of folders."""
    monkeypatch.setattr(jobs_module, "_MOST_ENDED", 2)
    for number in range(4):
        folder = jobs._folder / f"20261121-00000{number}-00000000"
        folder.mkdir(parents=True)
        facts = {"kind": "merge", "run_name": f"old {number}", "command": [], "begin_s": float(number)}
        (folder / "job.json").write_text(json.dumps(facts))
    new = jobs.start("merge", "new", run_python("import time; time.sleep(300)"))
    assert [job.run_name for job in jobs.list()] == ["new", "old 3", "old 2"]
    assert jobs.get(new).state == "running"


def test_jobs_outlive_the_server(tmp_path):
    """A merge of hours that ends with the server, or that the next one does not know."""
    script = (
        "import sys, time; from pathlib import Path; from lorashard_ui.running.jobs import Jobs; "
        "command = [sys.executable, '-c', 'import time; time.sleep(3); print(1 + 1)']; "
        "print(Jobs(Path(sys.argv[1])).start('merge', 'first', command), flush=True); time.sleep(100)"
    )
    words = run_python(script, str(tmp_path))
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert server.stdout is not None
    job_id = server.stdout.readline().strip()
    os.killpg(server.pid, signal.SIGKILL)
    server.communicate()
    jobs = Jobs(tmp_path)
    assert jobs.get(job_id).state == "running"
    assert wait_for(jobs, job_id, "done").last_line == "2"


@pytest.mark.parametrize("job_id", ["", "..", "../../etc", "20261121-000000-00000000"])
def test_an_unknown_job_is_said(jobs, job_id):
    """A traceback, or a file elsewhere that is read."""
    assert jobs.list() == []
    folder = jobs._folder.parent
    folder.mkdir()
    facts = {"kind": "merge", "run_name": "first", "command": [], "begin_s": 0}
    (folder / "job.json").write_text(json.dumps(facts))  # which `..` would find
    for ask in (jobs.get, jobs.cancel):
        with pytest.raises(ConfigError, match="there is no job"):
            ask(job_id)


def test_commands_hold_all_that_was_asked(tmp_path):
    """An option that is lost on the way, or a token that every user of the machine can see."""
    run = build_run(tmp_path / "runs" / "first")
    assert merge_words(run, tmp_path / "out", ["--dtype", "auto"])[-4:] == [
        str(run),
        str(tmp_path / "out"),
        "--dtype",
        "auto",
    ]
    assert verify_words(run, ["--cpu", "1"])[-4:] == ["verify", str(run), "--cpu", "1"]
    words = push_words(run, "me/first", is_private=True)
    assert (
        "--private" in words
        and str(run) in words
        and not [word for word in words if "token" in word and "." not in word]
    )
    with pytest.raises(ConfigError, match="no adapter yet"):
        push_words(tmp_path, "me/first", is_private=True)


def test_an_adapter_is_pushed_without_the_rest_of_its_run(jobs, tmp_path, monkeypatch):
    """Logs, metrics and configuration, with paths of this machine, that everybody can read on the hub."""
    run = build_run(tmp_path / "runs" / "first")
    with HubServer({}, {}) as hub:
        for name, value in {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_secret"}.items():
            monkeypatch.setenv(name, value)
        job = wait_for(jobs, jobs.start("push", "first", push_words(run, "me/first", is_private=True)), "done")
    assert set(hub.uploaded["me/first"]) == {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    assert "hf_secret" not in job.log_path.read_text() + " ".join(job.command)


@pytest.mark.parametrize(
    ("line", "expected"), [("lorashard: loading: 1,200 of 4,800 rows", 0.25), ("0 of 0 units", None)]
)
def test_counts_with_thousands_are_read_whole(line, expected):
    """Catches `1,200 of 4,800` shown as 200 of 4, a job that is done when it has hardly begun."""
    assert jobs_module._find_progress([line]) == expected
