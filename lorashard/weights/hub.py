"""A folder for a model id: one that is there, or the hub's snapshot, downloaded with its progress told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import tqdm

from ..errors import CheckpointError
from .model_folder import INDEX_NAME, WEIGHTS_NAME, check_links, read_json_object, read_weight_map

# Everything but weights: configuration, tokenizer, chat template, custom code.
_SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py"]
_FOREIGN_FILES = ["original/*", "onnx/*", "openvino/*", "gguf/*"]


def resolve_folder(
    model_name_or_path: str | Path,
    revision: str | None = None,
    *,
    allow_download: bool = True,
    may_link: bool = False,
    progress: Callable[[int, int | None, str], None] | None = None,
) -> Path:
    """Return the local folder of a model, downloading it from the hub where it is not on disk yet.

    Only `model.safetensors`, or the files that its index names, and the small files beside them are downloaded:
    never `.bin`, `.gguf`, `consolidated.safetensors` or other copies of the weights.

    Args:
        model_name_or_path: A folder, or a hub id such as `org/model`. A folder that exists wins.
        revision: Branch, tag or commit of a hub id; has no meaning for a folder.
        allow_download: False takes only what is in the hub's cache.
        may_link: Files of a folder may be links to anywhere: lorashard has made it itself.
        progress: Told, while weights are downloaded, how many bytes are there, of how many, and "bytes"; from threads,
            one at a time. What it raises ends the download.

    Raises:
        CheckpointError: The folder is missing or has links that lead out of it, or the hub has no such model, or it
            cannot be reached.
    """
    name = str(model_name_or_path)
    if "://" in name:  # it may hold a password, so it is not repeated
        raise CheckpointError("Expected a model folder or a hub id such as org/model, found an address with '://'.")
    path = Path(name).expanduser()
    if path.is_dir():
        if not may_link:
            check_links(path)
        return path
    if path.exists():
        raise CheckpointError(f"Expected a model folder or a hub id, found a file: {path}. Give the folder it lies in.")
    if path.is_absolute() or name.startswith((".", "~")) or name.endswith("/") or name.count("/") > 1:
        raise CheckpointError(
            f"Model folder {path} does not exist (seen from {Path.cwd()}). "
            "Check the path, or give a hub id such as org/model."
        )
    is_online = allow_download and not constants.HF_HUB_OFFLINE
    with explain_hub_errors(name, revision):
        folder = _download(name, revision, _SMALL_FILES, is_online)
        index = folder / INDEX_NAME
        weights = sorted(set(read_weight_map(index).values())) if index.is_file() else [WEIGHTS_NAME]
        bar = None if progress is None else _make_bar(progress, _find_missing_bytes(folder, index, weights))
        # The same commit again, should the branch move between the two calls.
        folder = _download(name, folder.name, weights, is_online, bar)
        # The cache may hold the tokenizer alone, which others downloaded: the hub's client does not notice.
        if not is_online and not all((folder / weight).is_file() for weight in weights):
            raise LocalEntryNotFoundError("the weights are missing")
    return folder


def _find_missing_bytes(folder: Path, index: Path, weights: Sequence[str]) -> int:
    """Return how many bytes of weights are not there yet, as far as the index tells; 0 where it does not."""
    if not index.is_file():
        return 0
    total = (read_json_object(index).get("metadata") or {}).get("total_size")
    there = sum((folder / name).stat().st_size for name in weights if (folder / name).is_file())
    return max(0, total - there) if isinstance(total, int) else 0


def _make_bar(progress: Callable[[int, int | None, str], None], least_bytes: int) -> type[tqdm]:
    """Return a progress bar for the hub's client, which is shown as ever and also tells `progress`.

    Args:
        least_bytes: of all files; the client counts only those that it has begun with.
    """
    lock = threading.Lock()

    class Bar(tqdm):
        def __init__(self, *args: Any, name: str | None = None, **kwargs: Any) -> None:
            # Beside the files' bytes the client counts files, and bytes on the network.
            self._counts = kwargs.get("unit") == "B" and not (name or "").endswith(".transfer")
            self._done_bytes = 0
            super().__init__(*args, name=name, **kwargs)

        def refresh(self, *args: Any, **kwargs: Any) -> bool | None:
            self._tell(0)  # a file is begun
            return super().refresh(*args, **kwargs)

        def update(self, n: float | None = 1) -> bool | None:
            self._tell(int(n or 0))
            return super().update(n)

        def _tell(self, num_bytes: int) -> None:
            if self._counts and self.total:
                with lock:
                    self._done_bytes += num_bytes
                    progress(self._done_bytes, max(int(self.total), least_bytes, self._done_bytes), "bytes")

    return Bar


def _download(
    repo_id: str, revision: str | None, patterns: list[str], is_online: bool, bar: type[tqdm] | None = None
) -> Path:
    folder = snapshot_download(
        repo_id,
        revision=revision,
        allow_patterns=patterns,
        ignore_patterns=_FOREIGN_FILES,
        local_files_only=not is_online,
        tqdm_class=bar,
    )
    return Path(folder)


@contextmanager
def explain_hub_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turn what the hub's client raises about a model into one line that says what to do.

    Raises:
        CheckpointError: The hub has no such model, or does not give it, or it cannot be reached.
    """
    where = f"{repo_id} (revision {revision or 'main'})"
    try:
        yield
    except HFValidationError as error:
        raise CheckpointError(
            f"Model {repo_id!r} is neither a folder here nor a hub id of the form org/model. Check the spelling."
        ) from error
    except GatedRepoError as error:
        raise CheckpointError(
            f"The hub does not let you read {where}: it is gated. Ask for access at https://huggingface.co/{repo_id}, "
            "then log in with `hf auth login` or set HF_TOKEN."
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(_explain_unseen(repo_id)) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"The hub's {repo_id} has no revision {revision!r}. Give a branch, tag or commit that it has."
        ) from error
    except LocalEntryNotFoundError as error:
        reason = _in_one_line(error.__cause__) if error.__cause__ else "offline, or downloads are switched off"
        raise CheckpointError(
            f"There is no folder {repo_id!r} here, and {where} is not whole in the hub's cache while the hub cannot be "
            f"asked ({reason}). Check the path, or go online once and download it."
        ) from error
    except (HTTPError, OSError) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code == 401:
            raise CheckpointError(_explain_unseen(repo_id)) from error
        raise CheckpointError(
            f"{where} could not be downloaded from the hub: {_in_one_line(error)}. Try again (files that arrived whole "
            "are kept), or give a local folder."
        ) from error


def _explain_unseen(repo_id: str) -> str:
    return (
        f"There is no folder {repo_id!r} here and no model {repo_id} on the hub that you may see. "
        "Check the spelling; for a private model log in with `hf auth login` or set HF_TOKEN."
    )


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
