"""Write into each recipe of `configs/` what `lorashard plan` says of it.

    python benchmarks/recipes.py   bring the headers up to date

A recipe begins with a line of what it is for and a line of hardware in the spelling of `lorashard plan`; the lines of
comment after these are made here, and a test keeps them so. Models are planned from their config.json, which lies in
`tests/models`.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from common import ROOT

from lorashard.config.run_config import RunConfig
from lorashard.planning.choose import name_placement
from lorashard.planning.hardware import Cluster, find_gpu_type, usable_bytes
from lorashard.planning.run_plan import plan_run

MODELS = ROOT / "tests" / "models"
HARDWARE = "# Hardware: "


def list_recipes() -> list[Path]:
    """Return the configurations that say what hardware they are for."""
    return [path for path in sorted((ROOT / "configs").glob("*.yaml")) if HARDWARE in path.read_text()]


def make_recipe(path: Path) -> str:
    """Return the recipe with its header as the plan has it."""
    title, hardware, *rest = path.read_text().splitlines()
    body = rest[next(index for index, line in enumerate(rest) if not line.startswith("#")) :]
    words = shlex.split(hardware.removeprefix(HARDWARE))
    wanted = dict(zip(words[::2], words[1::2], strict=True))
    gpus, nodes = int(wanted["--gpus"]), int(wanted["--nodes"])
    config = RunConfig.resolve(path, ["--gpus", str(gpus)], required=("model_name_or_path",))
    local = config.model_copy(update={"model_name_or_path": str(MODELS / config.model_name_or_path)})
    gpu = find_gpu_type(wanted["--gpu_type"])
    plan = plan_run(local, Cluster(gpu, gpus, nodes, usable_bytes(gpu.memory_bytes)))
    row = plan.choice
    parts = {"base": row.rest_bytes, "slots": row.slot_bytes, "adapter and optimizer": row.adapter_bytes}
    parts |= {"workspace": row.workspace_bytes} if row.workspace_bytes else {}
    parts |= {"activations": row.activation_bytes, "logits": row.logits_bytes}
    figures = ", ".join(f"{name} {num_bytes / 2**30:.1f}" for name, num_bytes in parts.items())
    run = f"finetune --config {path.relative_to(ROOT)} --dataset D --output_dir O"
    launcher = f"torchrun --nnodes {nodes} --nproc_per_node {gpus} --rdzv_backend c10d --rdzv_endpoint HOST:29500 -m "
    header = [
        title,
        hardware,
        f"# Plan: {name_placement(row.placement, gpus * nodes)}, {row.tokens_per_s:,.0f} tokens/s (a prediction).",
        f"# GiB on each GPU: {figures}; at most {row.peak_bytes / 2**30:.1f} of {plan.free_bytes / 2**30:.1f}.",
        f"# GiB in the host's memory for each GPU: {row.host_bytes / 2**30:.1f}.",
        f"# Start: {launcher if nodes > 1 else ''}lorashard {run}",
    ]
    return "\n".join([*header, *body]) + "\n"


def main() -> None:
    for path in list_recipes():
        path.write_text(make_recipe(path))
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
