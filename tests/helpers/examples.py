"""Run a script of examples/ under a real launcher, as it is and without lorashard, and compare the two runs."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from helpers import warm
from helpers.bases import write_small_base
from helpers.paths import EXAMPLES

LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone"],
    "accelerate": ["-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--main_process_port", "0"],
}
NUM_RANKS_OPTION = {"torchrun": "--nproc_per_node", "accelerate": "--num_processes"}
FLOAT32_BY_DEFAULT = ("trainer", "accelerate_loop")  # TRL's trainers take bf16 unless they are told otherwise
# What a script without lorashard needs, and what it tells in the place of lorashard.stats: how many ranks there are.
PLAIN_IMPORTS = """\
from accelerate import PartialState
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
"""
PLAIN_STATS = "PartialState()"


@dataclass(frozen=True)
class Run:
    """What a script left behind."""

    folder: Path
    output: str  # stdout of all ranks, and stderr
    steps: list[dict[str, float]]  # one for each logged step: loss, grad_norm and what else the trainer logs
    evaluations: list[dict[str, float]]
    adapter: dict[str, torch.Tensor]


def list_training_scripts() -> list[Path]:
    """Return the examples that load one model with lorashard, in the place of a line of a script without it."""
    others = ("ui_client.py", "sweep_trainer.py")  # the client of the web UI's API; several models on one base
    return sorted(path for path in EXAMPLES.glob("*.py") if path.name not in others)


def make_plain(source: str) -> str:
    """Return the source of an example with its one line put back as it was before lorashard.

    The line, `model = lorashard.load(...)`, stands below one or more comments, `# was: ...`, each of which holds a line
    of the script without lorashard. Nothing else may differ, but for the print of what lorashard did.
    """
    assert source.count("\nimport lorashard\n") == 1
    source = source.replace("\nimport lorashard\n", "\n" + PLAIN_IMPORTS)
    source, count = re.subn(
        r"(( *# was: .*\n)+).*lorashard\.load\(.*\)\n", lambda m: m[1].replace("# was: ", ""), source
    )
    assert count == 1, "expected one lorashard.load, below a comment that says what it was"
    assert source.count("lorashard.stats(model)") == 1
    source = source.replace("lorashard.stats(model)", PLAIN_STATS)
    assert "lorashard." not in source.split('"""', 2)[2], "a second line differs"
    return source


def run_example(
    name: str,
    arguments: dict[str, object],
    launcher: str,
    folder: Path,
    *,
    is_plain: bool = False,
    job: str = "",
    num_ranks: int = 2,
    timeout_s: float = 200,
) -> Run:
    """Run `examples/NAME.py` on CPU ranks, on a small base, and read what it left.

    Args:
        arguments: the script's options; True stands for a flag. `output_dir` is made in `folder` if not named.
        launcher: a key of LAUNCHERS.
        folder: where the run's own folder goes.
        is_plain: run the script without lorashard.
        job: the one to read, of a script that trains several.
    """
    kind = "plain" if is_plain else "sharded"
    script = EXAMPLES / f"{name}.py"
    if is_plain:
        source = make_plain(script.read_text())
        script = folder / f"plain_{name}.py"
        script.write_text(source)
    options = {"model": write_small_base(folder / "base"), "output_dir": folder / kind} | arguments
    words = [w for key, value in options.items() for w in ([f"--{key}"] if value is True else [f"--{key}", str(value)])]
    command = [sys.executable, *LAUNCHERS[launcher], NUM_RANKS_OPTION[launcher], str(num_ranks), str(script), *words]
    output = _run(command, folder, timeout_s)
    if is_plain:
        assert f"Num processes: {num_ranks}" in output, output
    else:
        is_bfloat16 = str(arguments.get("bf16", name not in FLOAT32_BY_DEFAULT)) == "True"
        _check_stats(output, num_ranks, Path(str(options["model"])), 2 if is_bfloat16 else 4)
    return read_run(Path(str(options["output_dir"])) / job, output)


def read_run(out: Path, output: str = "") -> Run:
    """Read the adapter and the steps, from Trainer's `trainer_state.json` or a loop's `steps.json`, of an ended run."""
    if (out / "trainer_state.json").exists():
        history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    else:
        history = json.loads((out / "steps.json").read_text())
    return Run(
        folder=out,
        output=output,
        steps=[line for line in history if "grad_norm" in line],
        evaluations=[line for line in history if any(key.startswith("eval_") for key in line)],
        adapter=load_file(out / "adapter_model.safetensors"),
    )


def assert_same_run(sharded: Run, plain: Run, num_steps: int) -> None:
    """Compare losses, gradient norms and evaluations of each step, and every tensor of the adapter, bit for bit."""
    assert len(plain.steps) == num_steps
    assert [_numbers(line) for line in sharded.steps] == [_numbers(line) for line in plain.steps]
    assert [_numbers(line) for line in sharded.evaluations] == [_numbers(line) for line in plain.evaluations]
    assert_same_adapter(sharded, plain)
    assert any(tensor.abs().max() > 0 for name, tensor in plain.adapter.items() if "lora_B" in name), "nothing learned"


def assert_same_adapter(one: Run, other: Run) -> None:
    assert one.adapter.keys() == other.adapter.keys()
    assert [n for n, tensor in one.adapter.items() if not torch.equal(tensor, other.adapter[n])] == []


def _numbers(line: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in line.items() if not key.endswith(("runtime", "_per_second", "step_time"))}


def _check_stats(output: str, num_ranks: int, model: Path, item_bytes: int) -> None:
    found = re.findall(r"^Stats\(num_gathers=(\d+),.* bytes_at_rest=(\d+),", output, re.MULTILINE)
    assert len(found) == 1, f"expected the line of rank 0, found {len(found)}\n{output}"
    num_gathers, bytes_at_rest = map(int, found[0])
    with safe_open(model / "model.safetensors", "pt") as file:
        numel = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    assert num_gathers > 0
    # Small tensors begin at multiples of 256 bytes.
    assert 0.95 < bytes_at_rest * num_ranks / (numel * item_bytes) < 1.15


def _run(command: list[str], folder: Path, timeout_s: float) -> str:
    """Run a launcher and return all that was said; none of its ranks outlives it."""
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "HF_HOME": str(folder / "hf")}
    process = warm.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException as error:
        launcher = psutil.Process(process.pid)
        for started in [*launcher.children(recursive=True), launcher]:  # ranks have sessions of their own
            started.kill()
        said, _ = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise AssertionError(f"not finished in {timeout_s} s: {' '.join(command)}\n{said}") from None
        raise
    assert process.returncode == 0, output
    return output
