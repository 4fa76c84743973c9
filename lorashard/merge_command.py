"""`lorashard merge`: merge on every rank, then upload if asked."""

from __future__ import annotations

from pathlib import Path

import torch
from huggingface_hub import HfApi

from . import api, dist
from .model.checkpoint import explain_hub_errors
from .output import give, say
from .use_options import MergeOptions


def merge(options: MergeOptions) -> None:
    """Merge, and say where the model is.

    Raises:
        UserError: as for `api.merge`; or the hub does not take the model, which is then still in its folder.

    Ranks: run by every rank.
    """
    device = api.join_launch()
    rank = dist.get_rank()
    if options.push_to_hub and rank == 0:
        with explain_hub_errors(options.push_to_hub, None):  # before hours of work, not after
            HfApi().create_repo(options.push_to_hub, private=options.hub_private_repo, exist_ok=True)
    report = api.merge(
        options.adapter,
        options.out,
        options.base,
        dtype=None if options.dtype == "auto" else getattr(torch, options.dtype),
        max_shard_size=options.max_shard_size,
        revision=options.model_revision,
        trust_remote_code=options.trust_remote_code,
        allow_base_mismatch=options.allow_base_mismatch,
        device=device,
    )
    lines = [
        f"{report.out}: {report.num_tensors} tensors in {report.num_files} files, {report.num_bytes / 2**30:.3f} GiB, "
        f"{str(report.dtype).removeprefix('torch.')}; the adapter changed {report.num_changed} of them"
    ]
    if options.push_to_hub and rank == 0:
        say(rank, f"uploading to {options.push_to_hub}")
        with explain_hub_errors(options.push_to_hub, None):
            url = HfApi().upload_folder(folder_path=Path(options.out), repo_id=options.push_to_hub)
        lines.append(f"uploaded: {url}")
    give(rank, {}, "\n".join(lines), as_json=False)
