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
from helpers.waiting import wait_until

from lorashard.errors import ConfigError
from lorashard_ui.running.jobs import Job, Jobs, merge_words, push_words, verify_words

# Says how far it is, starts another in a session of its own, and waits.
WORKER = """
import subprocess, sys, time
from lorashard.runtime.progress import told_progress
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
try:
    print(f"child {child.pid}", flush=True)
    with told_progress("merging") as progress:
        progress(3, 12, "units")
    print("a quarter", flush=True)
    time.sleep(300)
except KeyboardInterrupt:
    print("cleared up", flush=True)
    sys.exit(130)
"""


@pytest.fixture
def root(tmp_path):
    return tmp_path / "runs"


@pytest.fixture
def jobs(root, monkeypatch):
    """Jobs of a root, of which none is left alive."""
    monkeypatch.setenv("HF_HOME", str(root.parent / "hf"))
    jobs = Jobs(root)
    yield jobs
    for job in jobs.list():
        if job.state == "running":
            os.killpg(find_pid(job), signal.SIGKILL)


def run_python(script: str, *words: str) -> list[str]:
    return [sys.executable, "-c", script, *words]


def wait_for(jobs: Jobs, job_id: str, state: str) -> Job:
    wait_until(lambda: jobs.get(job_id).state in (state, "done", "failed", "canceled", "lost"))
    job = jobs.get(job_id)
    assert job.state == state, (job, job.log_path.read_text())
    return job


def wait_for_line(jobs: Jobs, job_id: str, line: str) -> Job:
    wait_until(lambda: jobs.get(job_id).last_line == line, lambda: str(jobs.get(job_id)))
    return jobs.get(job_id)


def find_pid(job: Job) -> int:
    return json.loads((job.log_path.parent / "process.json").read_text())["pid"]


def find_child(job: Job) -> psutil.Process:
    """Return what WORKER has started."""
    return psutil.Process(int(job.log_path.read_text().split()[1]))


def build_run(folder: Path) -> Path:
    """Make a run's folder that holds an adapter as `hf upload` sees it."""
    folder.mkdir(parents=True)
    for name in ("adapter_config.json", "tokenizer.json", "config.yaml", "metrics.jsonl"):
        (folder / name).write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"0" * 64)
    (folder / "logs").mkdir()
    (folder / "logs" / "launcher.log").write_text("what was said")
    return folder


def test_a_job_ends_as_its_command_does(jobs, root, list_children, monkeypatch):
    """A merge that failed and is shown as done, one that leaves a zombie in the server, or one that is misled by the
    server's own variables."""
    monkeypatch.setenv("GRADIO_SERVER_PORT", "1")
    monkeypatch.setenv("RANK", "0")
    theirs = "import os; assert not {'RANK', 'GRADIO_SERVER_PORT'} & os.environ.keys() and os.environ['HF_HOME']"
    good = jobs.start("merge", "first", run_python(f"{theirs}; print('all good')"))
    bad = jobs.start("verify", "second", run_python("import sys; print('token hf_abcdefghijkl'); sys.exit(3)"))
    wait_until(lambda: list_children() == [], lambda: str(list_children()))
    done = wait_for(jobs, good, "done")
    failed = wait_for(jobs, bad, "failed")
    assert (done.exit_code, done.progress, done.last_line, done.run_name) == (0, 1.0, "all good", "first")
    assert failed.exit_code == 3 and "abcdefghijkl" not in failed.last_line
    assert done.end_s is not None and done.begin_s <= done.end_s
    assert [job.id for job in Jobs(root).list()] == [bad, good]
    nothing = jobs.start("push", "third", ["/does/not/exist"])
    assert "cannot be started" in wait_for(jobs, nothing, "failed").last_line


@pytest.mark.parametrize(
    ("written", "output", "progress"),
    [
        ('{"what": "merging", "done": 3, "total": 12, "unit": "units"}', "9 of 12 files checked", 0.25),
        ('{"done": 15, "total": 12}', "", 1.0),
        ('{"done": 3, "total": null}', "", None),
        ('{"done": 0, "total": 0}', "", None),
        ("{", "", None),
        (None, "x: 40%|####      | 4.0M/10M\rx: 50%|#####     | 5.0M/10M", 0.5),
        (None, "verified 99% of the tokens", None),
    ],
)
def test_progress_is_what_the_command_writes(jobs, root, written, output, progress):
    """A bar that stands still, jumps with each line of output, or goes beyond its end."""
    write_job(root, "20261121-000000-00000000", 0)
    folder = root / ".jobs/20261121-000000-00000000"
    (folder / "output.log").write_text(output)
    if written is not None:
        (folder / "progress.json").write_text(written)
    assert jobs.get(folder.name).progress == progress


def test_a_canceled_job_ends_with_all_that_it_started(jobs):
    """Half a model on the disk, or ranks that go on computing it."""
    job_id = jobs.start("merge", "first", run_python(WORKER))
    job = wait_for_line(jobs, job_id, "a quarter")
    assert job.progress == 0.25
    child = find_child(job)
    jobs.cancel(job_id)
    job = wait_for(jobs, job_id, "canceled")
    assert job.last_line == "cleared up" and job.exit_code == 130
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    with pytest.raises(ConfigError, match="canceled"):
        jobs.cancel(job_id)


def test_a_job_that_does_not_hear_is_killed(jobs):
    """A button that does nothing for a command that hangs."""
    deaf = (
        "import signal, time\n"
        "for n in (signal.SIGINT, signal.SIGTERM): signal.signal(n, signal.SIG_IGN)\n"
        "print('deaf', flush=True)\ntime.sleep(300)"
    )
    job_id = jobs.start("merge", "first", run_python(deaf))
    wait_for_line(jobs, job_id, "deaf")
    jobs.cancel(job_id, patience_s=0.3)
    assert wait_for(jobs, job_id, "canceled").exit_code == 128 + signal.SIGKILL


def test_a_job_that_ended_without_a_word_is_lost(jobs):
    """A job that is shown as running for ever, because the machine went down with it."""
    job_id = jobs.start("merge", "first", run_python(WORKER))
    pid = find_pid(wait_for_line(jobs, job_id, "a quarter"))
    psutil.Process(psutil.Process(pid).ppid()).kill()  # who waits for it
    assert jobs.get(job_id).state == "running"
    psutil.Process(pid).kill()
    job = wait_for(jobs, job_id, "lost")
    find_child(job).kill()
    assert job.exit_code is None
    left = json.loads((job.log_path.parent / "process.json").read_text())
    (job.log_path.parent / "process.json").write_text(json.dumps(left | {"pid": os.getpid(), "begin_s": 1.0}))
    assert jobs.get(job_id).state == "lost"  # not a process that has its number now


def test_a_job_is_not_over_before_its_end_is_written(jobs):
    """A merge that is shown as lost, or as canceled without a code, for the moment in which its end is written."""
    job_id = jobs.start("merge", "first", run_python("import time; time.sleep(300)"))
    process = psutil.Process(find_pid(jobs.get(job_id)))
    waiter = process.parent()
    waiter.suspend()
    wait_until(lambda: waiter.status() == psutil.STATUS_STOPPED)
    try:
        process.kill()
        wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE)
        assert jobs.get(job_id).state == "running"
        with pytest.raises(ConfigError, match="ending"):
            jobs.cancel(job_id)
    finally:
        waiter.resume()
    assert wait_for(jobs, job_id, "failed").exit_code == 128 + signal.SIGKILL


def write_job(root: Path, job_id: str, begin_s: float, run_name: str = "first") -> None:
    """Write what a job leaves whose process has not begun."""
    folder = root / ".jobs" / job_id
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"kind": "merge", "run_name": run_name, "command": [], "begin_s": begin_s}
    (folder / "job.json").write_text(json.dumps(facts))


def test_a_job_that_is_being_started_is_not_lost(jobs, root):
    """Another tab looks between the folder and the process of a job, and shows it as lost."""
    job_id = "20261121-000000-00000000"
    for begin_s, state in ((time.time(), "running"), (time.time() - 1000, "lost")):
        write_job(root, job_id, begin_s)
        assert jobs.get(job_id).state == state


def test_jobs_of_long_ago_are_forgotten(jobs, root):
    """Each look at the jobs of a server that has been used for months reads thousands of folders."""
    for number in range(4):
        write_job(root, f"20261121-00000{number}-00000000", float(number), f"old {number}")
    new = Jobs(root, most_ended=2).start("merge", "new", run_python("import time; time.sleep(300)"))
    assert [job.run_name for job in jobs.list()] == ["new", "old 3", "old 2"]
    assert jobs.get(new).state == "running"


def test_jobs_outlive_the_server(tmp_path):
    """A merge of hours that ends with the server, or that the next one does not know."""
    script = (
        "import sys, time; from pathlib import Path; from lorashard_ui.running.jobs import Jobs; "
        "command = [sys.executable, '-c', 'import sys; open(sys.argv[1]).read(); print(1 + 1)', sys.argv[2]]; "
        "print(Jobs(Path(sys.argv[1])).start('merge', 'first', command), flush=True); time.sleep(100)"
    )
    os.mkfifo(tmp_path / "go")
    words = run_python(script, str(tmp_path), str(tmp_path / "go"))
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert server.stdout is not None
    job_id = server.stdout.readline().strip()
    os.killpg(server.pid, signal.SIGKILL)
    server.communicate()
    jobs = Jobs(tmp_path)
    assert jobs.get(job_id).state == "running"
    (tmp_path / "go").write_text("")  # which the job waits for
    assert wait_for(jobs, job_id, "done").last_line == "2"


@pytest.mark.parametrize("job_id", ["", "..", "../../etc", "20261121-000000-00000000"])
def test_an_unknown_job_is_said(jobs, root, job_id):
    """A traceback, or a file elsewhere that is read."""
    assert jobs.list() == []
    write_job(root, "..", 0)  # which `..` would find
    for ask in (jobs.get, jobs.cancel):
        with pytest.raises(ConfigError, match="no job"):
            ask(job_id)


def test_commands_hold_all_that_was_asked(tmp_path):
    """An option that is lost on the way, or a token that every user of the machine can see."""
    run = build_run(tmp_path / "runs" / "first")
    out = tmp_path / "out"
    assert merge_words(run, out, ["--dtype", "auto"])[-4:] == [str(run), str(out), "--dtype", "auto"]
    assert verify_words(run, ["--cpu", "1"])[-4:] == ["verify", str(run), "--cpu", "1"]
    words = push_words(run, "me/first", is_private=True)
    assert "--private" in words and str(run) in words
    assert not [word for word in words if "token" in word and "." not in word]
    with pytest.raises(ConfigError, match="no adapter"):
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
