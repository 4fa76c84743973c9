"""The local folder of a model: one that exists, or the hub's snapshot, downloaded with its progress reported."""

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
    """Return the local folder of a model; download it from the hub if it is not on disk yet.

    Downloads only `model.safetensors`, or the files that the index names, and the small files beside them: never
    `.bin`, `.gguf`, `consolidated.safetensors` or other copies of the weights.

    Args:
        model_name_or_path: A folder, or a hub id such as `org/model`. A folder that exists wins.
        revision: Branch, tag or commit of a hub id; ignored for a folder.
        allow_download: False uses only the hub's cache.
        may_link: Whether files of a folder may be links to other folders: lorashard has created it itself.
        progress: Called while weights are downloaded with the bytes that have arrived, their total, and "bytes"; from
            several threads, one at a time. An exception of its own ends the download.

    Raises:
        CheckpointError: The folder is missing or has links that lead out of it, or the hub has no such model, or
            cannot be reached.
    """
    name = str(model_name_or_path)
    if "://" in name:  # it may hold a password, so it is not repeated
        raise CheckpointError(expected="a model folder or a hub id such as org/model", found="an address with '://'")
    path = Path(name).expanduser()
    if path.is_dir():
        if not may_link:
            check_links(path)
        return path
    if path.exists():
        raise CheckpointError(
            expected="a model folder or a hub id", found=f"a file: {path}", fix="give the folder that holds it"
        )
    if path.is_absolute() or name.startswith((".", "~")) or name.endswith("/") or name.count("/") > 1:
        raise CheckpointError(
            f"the model folder does not exist (seen from {Path.cwd()})",
            where=path,
            fix="check the path, or give a hub id such as org/model",
        )
    is_online = allow_download and not constants.HF_HUB_OFFLINE
    with explain_hub_errors(name, revision):
        folder = _download(name, revision, _SMALL_FILES, is_online)
        index = folder / INDEX_NAME
        weights = sorted(set(read_weight_map(index).values())) if index.is_file() else [WEIGHTS_NAME]
        bar = None if progress is None else _make_bar(progress, _find_missing_bytes(folder, index, weights))
        # The same commit again: the branch may have moved between the two calls.
        folder = _download(name, folder.name, weights, is_online, bar)
        # The hub's client does not notice where the cache holds a tokenizer alone, which others have downloaded.
        if not is_online and not all((folder / weight).is_file() for weight in weights):
            raise LocalEntryNotFoundError("the weights are missing")
    return folder


def _find_missing_bytes(folder: Path, index: Path, weights: Sequence[str]) -> int:
    """Return how many bytes of weights must be downloaded according to the index; 0 where it does not say."""
    if not index.is_file():
        return 0
    total = (read_json_object(index).get("metadata") or {}).get("total_size")
    present = sum((folder / name).stat().st_size for name in weights if (folder / name).is_file())
    return max(0, total - present) if isinstance(total, int) else 0


def _make_bar(progress: Callable[[int, int | None, str], None], least_bytes: int) -> type[tqdm]:
    """Return a progress bar for the hub's client that also calls `progress`.

    Args:
        least_bytes: the least total; the client counts only the files that it has begun to download.
    """
    lock = threading.Lock()

    class Bar(tqdm):
        def __init__(self, *args: Any, name: str | None = None, **kwargs: Any) -> None:
            # The client has other bars, which count files and bytes on the network.
            self._counts = kwargs.get("unit") == "B" and not (name or "").endswith(".transfer")
            self._done_bytes = 0
            super().__init__(*args, name=name, **kwargs)

        def refresh(self, *args: Any, **kwargs: Any) -> bool | None:
            self._report(0)  # a download has begun
            return super().refresh(*args, **kwargs)

        def update(self, n: float | None = 1) -> bool | None:
            self._report(int(n or 0))
            return super().update(n)

        def _report(self, num_bytes: int) -> None:
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
    """Turn an error of the hub's client about a model into one line that says what to do.

    Raises:
        CheckpointError: The hub has no such model, or refuses it, or cannot be reached.
    """
    where = f"{repo_id} (revision {revision or 'main'})"
    try:
        yield
    except HFValidationError as error:
        raise CheckpointError(
            expected="a folder, or a hub id of the form org/model", found=repr(repo_id), fix="check the spelling"
        ) from error
    except GatedRepoError as error:
        raise CheckpointError(
            "gated: the hub does not let you read it",
            where=where,
            fix=f"ask for access at https://huggingface.co/{repo_id}, then log in with `hf auth login` or set HF_TOKEN",
        ) from error
    except RepositoryNotFoundError as error:
        raise _explain_unseen(repo_id) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            "the hub has no such revision", where=where, fix="give a branch, tag or commit of the model"
        ) from error
    except LocalEntryNotFoundError as error:
        reason = _in_one_line(error.__cause__) if error.__cause__ else "offline, or downloads are switched off"
        raise CheckpointError(
            f"no such folder, the hub's cache is incomplete, and the hub cannot be reached ({reason})",
            where=where,
            fix="check the path, or go online once and download it",
        ) from error
    except (HTTPError, OSError) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code == 401:
            raise _explain_unseen(repo_id) from error
        raise CheckpointError(
            f"could not be downloaded from the hub ({_in_one_line(error)})",
            where=where,
            fix="try again (files that have arrived completely are kept), or give a local folder",
        ) from error


def _explain_unseen(repo_id: str) -> CheckpointError:
    return CheckpointError(
        "neither a folder here nor a model on the hub that you may read",
        where=repo_id,
        fix="check the spelling; for a private model log in with `hf auth login` or set HF_TOKEN",
    )


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
