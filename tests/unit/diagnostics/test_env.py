"""`lorashard env`, and the checks of `lorashard doctor` that need one process: what is broken is found and named."""

from __future__ import annotations

import importlib.metadata
import json
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from helpers.hub_server import HubServer
from helpers.paths import ROOT
from huggingface_hub import constants

from lorashard.cli import main
from lorashard.config.use_options import DoctorOptions
from lorashard.diagnostics.checks import Check, has_failed, merge_ranks, summarize
from lorashard.diagnostics.doctor import machine
from lorashard.diagnostics.env import (
    describe_environment,
    describe_variables,
    hide_secrets,
    read_available_bytes,
    read_memory_limit,
)

SECRETS = {
    "HF_TOKEN": "hf_abcdefghijklmnop",
    "HUGGING_FACE_HUB_TOKEN": "hf_qrstuvwxyzabcdef",
    "WANDB_API_KEY": "0123456789abcdef",
    "NCCL_TEST_SECRET": "tellnobody",
    "TORCH_PASSWORD": "hunter2",
    "HTTPS_PROXY": "http://me:letmein@proxy:3128",
    "HF_ENDPOINT": "https://hub.test/?t=hf_ghijklmnopqrstu",
}
GIB = 2**30


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)


def test_env_is_complete_and_holds_no_secret(monkeypatch, capsys):
    """Catches a token in a public issue, a report that is not JSON, and a checkout that is not recognized."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert main(["env", "--json"]) == 0
    shown = capsys.readouterr().out

    secrets = ("abcdefghijklmnop", "qrstuvwxyz", "0123456789abcdef", "tellnobody", "hunter2", "letmein", "ghijklmnop")
    assert [value for value in secrets if value in text + shown] == []
    sections = json.loads(shown)
    assert sections["variables"]["NCCL_DEBUG"] == "INFO" and sections["variables"]["HF_TOKEN"] == "set, not shown"
    assert sections["packages"]["torch"] == importlib.metadata.version("torch")
    assert (sections["lorashard"]["commit"] == "not from a checkout") == (not (ROOT / ".git").exists())
    assert sections["memory and limits"]["RAM"]["total_bytes"] > GIB
    assert text.startswith("```text\n") and text.endswith("```\n")
    assert all(f"[{title}]" in text for title in sections)


def test_env_answers_where_torch_cannot_be_imported(tmp_path):
    """Catches a report that fails with what it should report."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    script = "import sys; sys.path.insert(0, 'broken'); from lorashard.cli import main; sys.exit(main(['env']))"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    assert "ImportError: libcudart.so.12" in done.stdout
    assert "[disk]" in done.stdout


def test_env_names_an_accelerate_config_that_shards(tmp_path):
    """Catches a report that hides why the run was refused, and a doctor that does not see it."""
    file = tmp_path / "hf/accelerate/default_config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nnum_processes: 8\n")

    section = describe_environment()["accelerate"]

    assert (section["distributed_type"], section["plugins"]) == ("FSDP", "fsdp_config")
    [check] = machine.check_environment(DoctorOptions(cpu=1), {})
    assert (check.result, "distributed_type FSDP" in check.found) == ("warn", True)


def test_only_what_changes_a_run_is_shown():
    """Catches a user's whole environment in a public issue."""
    shown = {"HF_TOKEN": "", "OMP_NUM_THREADS": "2", "https_proxy": "http://proxy"}

    found = describe_variables(shown | {"EDITOR": "vi", "AWS_SESSION": "x"})

    assert found == shown | {"HF_TOKEN": "empty"}


def test_addresses_lose_their_secrets_and_paths_the_home_folder(monkeypatch):
    """Catches a password or a user's name in a public issue, and a folder that only begins like the home folder."""
    monkeypatch.setenv("HOME", "/people/ada")
    secrets = ["joe:sesame@proxy:8080", "http://joe:p@sesame@proxy:1", "http://u:sesame/w@h:1"]
    secrets += ["https://mirror/?token=sesame", "ghp_sesame123456"]

    assert [secret for secret in secrets if "sesame" in hide_secrets(secret)] == []
    assert hide_secrets("/people/ada/models:/people/ada /people/adam") == "~/models:~ /people/adam"


@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_limit_is_that_of_every_group_around(version, tmp_path):
    """Catches a limit of an outer group, such as a job's, that is missed: the kernel keeps to the least."""
    top, file, used, line = {
        1: (tmp_path / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "4:memory:/job/step"),
        2: (tmp_path, "memory.max", "memory.current", "0::/job/step"),
    }[version]
    (top / "job/step").mkdir(parents=True)
    (top / "job" / file).write_text(f"{2**26}\n")
    (top / "job" / used).write_text(f"{2**25}\n")
    (top / "job/memory.stat").write_text(f"anon 5\ninactive_file {2**24}\n")
    (top / "job/step" / file).write_text("max\n" if version == 2 else f"{2**63 - 4096}\n")
    membership = tmp_path / "membership"
    membership.write_text(f"1:cpu:/elsewhere\n{line}\n")

    assert read_memory_limit(tmp_path, membership) == 2**26
    assert read_available_bytes(tmp_path, membership) == 2**26 - 2**25 + 2**24
    membership.write_text("0::/\n")
    assert read_memory_limit(tmp_path, membership) is None


def test_memory_beyond_the_containers_limit_is_a_warning(monkeypatch):
    """Catches plans that count on memory for which the kernel kills the rank."""
    monkeypatch.setattr(machine, "read_memory_limit", lambda: 12 * GIB)
    monkeypatch.setattr(machine, "read_available_bytes", lambda: 10 * GIB)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 100 * GIB}))

    [check] = machine.check_memory()

    assert (check.result, check.figures) == ("warn", {"free_bytes": 10 * GIB})
    assert "12.0 GiB" in check.found and "100.0 GiB" in check.found


def test_packages_that_are_missing_or_old_are_named(monkeypatch):
    """Catches a doctor that accepts an old library."""
    assert [check.result for check in machine.check_packages()] == ["ok"]
    needs = ["torch>=99", "no-such-package>=1,<2", 'gradio>=6; extra == "ui"', "pyyaml>=6"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needs)

    [check] = machine.check_packages()

    assert check.result == "FAIL" and "no-such-package" in check.found
    assert check.fix == "pip install 'torch>=99' 'no-such-package<2,>=1'"


def test_a_good_folder_is_measured_and_left_as_it_was(tmp_path):
    """Catches a probe that leaves files, or the folder of a run that never started."""
    [check] = machine.check_folder("output_dir", tmp_path / "runs/mine", 8 * 2**20)

    assert check.result in ("ok", "warn") and check.figures["write_bytes_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_folders_place_is_named(tmp_path):
    """Catches an error that names neither the file nor what to do."""
    (tmp_path / "runs").write_text("")

    for folder in (tmp_path / "runs", tmp_path / "runs/mine"):
        [check] = machine.check_folder("output_dir", folder, 2**22)
        assert check.result == "FAIL" and str(folder) in check.found and "file" in (check.fix or "")


def test_a_limit_on_file_sizes_is_found(tmp_path):
    """Catches a probe that is content with an empty file: weights do not fit under the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        [check] = machine.check_folder("output_dir", tmp_path, 2**23)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert check.result == "FAIL" and "ulimit -f" in (check.fix or "")


@pytest.mark.parametrize(("option", "fix"), [("size=2m", "space"), ("ro", "write")])
def test_a_disk_that_is_full_or_read_only_is_found(option, fix, tmp_path):
    """Catches a probe that does not reach the disk."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount a file system")
    try:
        [check] = machine.check_folder("output_dir", tmp_path, 2**23)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)

    assert check.result == "FAIL" and fix in (check.fix or "")


def test_a_file_system_without_locks_is_found(tmp_path, monkeypatch):
    """Catches network file systems that grant every lock to everybody."""
    monkeypatch.setattr("fcntl.flock", lambda descriptor, operation: None)

    [check] = machine.check_folder("output_dir", tmp_path, 2**22)

    assert check.result == "FAIL" and "lock" in check.found


def test_a_check_that_hangs_or_crashes_is_a_finding():
    """Catches a doctor that hangs on a dead network file system, or dies of the first thing that is broken."""
    release = threading.Event()

    def hang() -> Iterator[Check]:
        release.wait()
        yield Check("disk", "ok", "")

    def crash() -> Iterator[Check]:
        raise OSError("stale file handle")
        yield

    [hung] = machine.run_bounded("disk", hang, 0.2)
    release.set()
    [crashed] = machine.run_bounded("disk", crash, 60)

    assert hung.result == "FAIL" and "0.2 s" in hung.found
    assert crashed.result == "FAIL" and "stale file handle" in crashed.found


@pytest.mark.parametrize(
    ("environ", "result", "word"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "FAIL", "FSDP"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "FAIL", "DeepSpeed"),
        ({"GLOO_SOCKET_IFNAME": "nope0"}, "FAIL", "nope0"),
        ({"NCCL_SOCKET_IFNAME": "=l"}, "FAIL", "NCCL_SOCKET_IFNAME"),
        ({"NCCL_P2P_DISABLE": "1"}, "warn", "NCCL_P2P_DISABLE"),
        ({"OMP_NUM_THREADS": "500"}, "warn", "500 for each of 2 ranks"),
        ({"TORCH_DISTRIBUTED_DEBUG": "detail"}, "warn", "TORCH_DISTRIBUTED_DEBUG"),
        ({"ACCELERATE_USE_FSDP": "false", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "l"}, "ok", ""),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo", "NCCL_P2P_DISABLE": "0", "OMP_NUM_THREADS": "1"}, "ok", ""),
    ],
)
def test_a_variable_that_stops_or_slows_a_run_is_named(environ, result, word):
    """Catches a forgotten setting of another cluster, and good settings that are called bad."""
    [check] = machine.check_environment(DoctorOptions(cpu=2), environ)

    assert (check.result, word in check.found) == (result, True), check


def test_the_hub_is_asked(monkeypatch):
    """Catches a doctor that accepts a hub which does not answer."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with HubServer({}, {}) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        [answered] = machine.check_hub()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")  # nothing listens there
    [refused] = machine.check_hub()

    assert answered.result == "ok" and server.endpoint in answered.found
    assert refused.result == "warn" and "HTTPS_PROXY" in (refused.fix or "")


def test_the_worst_finding_of_all_ranks_is_reported():
    """Catches a report of rank 0 while rank 1's link is broken, and the findings of one check mixed up."""
    healthy = [Check("env", "warn", "a", "fix a"), Check("env", "warn", "b", "fix b"), Check("links", "ok", "fast")]
    ill = [Check("env", "ok", "a"), Check("env", "warn", "b"), Check("links", "FAIL", "wrong bytes", "stop")]

    merged = merge_ranks([healthy, ill])

    assert [check.found for check in merged] == ["rank 0: a", "b", "rank 1: wrong bytes"]
    assert has_failed(merged) and summarize(merged) == "1 of 3 checks failed, 2 warnings"
    assert not has_failed(healthy) and summarize(healthy).startswith("3 checks: 2 warnings")
    assert merge_ranks([healthy[:1], []])[0].found == "rank 0: a", "the other rank has not come so far"
