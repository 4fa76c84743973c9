"""`lorashard merge`: merge on every rank, then upload if asked to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, HTTPError

from ..config.use_options import MergeOptions
from ..errors import CheckpointError
from ..model.saved import find_adapter
from ..runtime import dist
from ..runtime.join import join_launch
from ..runtime.output import give, say
from ..runtime.progress import told_progress
from .merge import merge as merge_adapter
from .staging import check_target


def merge(options: MergeOptions) -> None:
    """Merge, and print where the model is.

    Raises:
        UserError: as for `api.merge`; or the hub does not take the model, which is then still in its folder.

    Ranks: run by every rank.
    """
    device = join_launch()
    rank = dist.get_rank()
    find_adapter(options.adapter)
    check_target(Path(options.out))
    if options.push_to_hub and rank == 0:
        with _explained_upload(options.push_to_hub):  # before hours of work, not after
            HfApi().create_repo(options.push_to_hub, private=options.hub_private_repo, exist_ok=True)
    size = options.max_shard_size
    with told_progress("merging", rank == 0) as progress:
        report = merge_adapter(
            options.adapter,
            options.out,
            options.base,
            dtype=None if options.dtype == "auto" else getattr(torch, options.dtype),
            max_shard_size=int(size) if size.isdigit() else size,
            revision=options.model_revision,
            trust_remote_code=options.trust_remote_code,
            allow_base_mismatch=options.allow_base_mismatch,
            quantization=options.quantization,
            requantize=options.requantize,
            device=device,
            advance=lambda done, total: progress(done, total, "units"),
        )
    lines = [
        f"{report.out}: {report.num_tensors} tensors in {report.num_files} files, {report.num_bytes / 2**30:.3f} GiB, "
        f"{str(report.dtype).removeprefix('torch.')}; the adapter changed {report.num_changed} of them"
    ]
    if options.push_to_hub and rank == 0:
        say(rank, f"uploading to {options.push_to_hub}")
        with _explained_upload(options.push_to_hub):
            url = HfApi().upload_folder(folder_path=Path(options.out), repo_id=options.push_to_hub)
        lines.append(f"uploaded: {url}")
    give(rank, {}, "\n".join(lines), as_json=False)


@contextmanager
def _explained_upload(repo_id: str) -> Iterator[None]:
    try:
        yield
    except (HTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(
            f"the upload failed ({' '.join(str(error).split())})",
            option="push_to_hub",
            expected="an id of yours, org/name, and a token that may write",
            found=repo_id,
            fix="log in with `hf auth login` or set HF_TOKEN",
        ) from error
