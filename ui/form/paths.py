"""Which paths and which code the options of a browser may use.

Anybody who reaches the server may send options. Many of them open files (a dataset, a chat template, TRL's options),
and some run code. All are checked here, by their values and not only by their names.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from lorashard.errors import ConfigError

# May be a path, or the id of something on the hub.
_HUB_OPTIONS = frozenset(
    ("model_name_or_path", "dataset", "eval_dataset", "reward_model_name_or_path", "chat_template_path", "base")
)
# A path if it is text at all. `accelerator_config` is a JSON file's where it is not the mapping itself.
_PATH_OPTIONS = frozenset(("output_dir", "resume_from_checkpoint", "accelerator_config")) | _HUB_OPTIONS
_DATASETS = ("dataset", "eval_dataset")
# Free text, and patterns of module names: nothing opens a file by them.
_FREE_TEXT = frozenset(
    ("sample_prompts", "lora_target_modules", "lora_target_parameters", "lora_modules_to_save", "unit_paths")
    + ("optim_target_modules", "eos_token", "dataset_text_field", "run_name", "project")
)
_RESUMES = ("auto", "true", "false")
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# In any mapping that is passed on to a library.
_CODE_KEYS = ("trust_remote_code", "custom_generate", "remote_code", "use_kernels")
_NAMED_REWARDS = re.compile(r"\w+")


class Allowed:
    """The values that a browser may give to options.

    Args:
        root: the folder of the runs; everything in it may be read.
        folders: other folders, chosen by the user who started the server.
        trusts_code: whether models' own code and functions by import path may run.
        start: the folder where the server was started, whose models and datasets may be read too, but nothing that is
            hidden, of which a home has keys and tokens. None: it is not to be read.
    """

    def __init__(
        self, root: Path, folders: Sequence[Path] = (), trusts_code: bool = False, start: Path | None = None
    ) -> None:
        # Not the whole of HF_HOME, which holds tokens.
        caches = [constants.HF_HUB_CACHE, _find_datasets_cache()]
        self._root = os.path.realpath(root)
        self._own = [self._root, *(os.path.realpath(folder) for folder in folders)]
        self._folders = [*self._own, *(os.path.realpath(folder) for folder in caches)]
        self._start = os.path.realpath(start) if start is not None else None
        if self._start == os.sep:  # all of the machine
            self._start = None
        self.trusts_code = trusts_code

    @property
    def browsable(self) -> list[str]:
        """The folders whose files are offered: that of the start, and those chosen by who started the server."""
        return list(dict.fromkeys([*([self._start] if self._start else []), *self._own[1:]]))

    def check(self, path: str, option: str) -> None:
        """Refuse a path that leads elsewhere, with links resolved; Hub ids pass if the option takes them.

        Raises:
            ConfigError: it lies outside. The error does not reveal whether it exists.
        """
        if "://" in path or "\0" in path:  # may contain a password, so it is not repeated
            raise ConfigError(
                option=option, expected="a path or a Hub id such as org/name", found="an address with '://'"
            )
        if option in _HUB_OPTIONS and _HUB_ID.fullmatch(path) and ".." not in path and not os.path.lexists(path):
            if option in _DATASETS and path in _list_builders():  # they take the files of the server's own folder
                raise ConfigError(
                    option=option,
                    expected="a file, a folder or a Hub id",
                    found=f"{path!r}, a builder of the datasets library",
                )
            return
        real = os.path.realpath(os.path.expanduser(path))
        if not any(_lies_in(real, folder) for folder in self._folders) and not self._is_seen(real, option):
            shown = [*self._own, *([f"{self._start} (nothing hidden)"] if self._start else [])]
            raise ConfigError(
                option=option,
                expected=f"a path in {', '.join(shown)} or the Hugging Face cache",
                found=repr(path),
                fix="use one of these folders, or start the server with --allow FOLDER",
            )

    def _is_seen(self, real: str, option: str) -> bool:
        """Return whether a path lies in the folder of the start, is not hidden, and is of an option that only reads."""
        if self._start is None or option not in _HUB_OPTIONS or not _lies_in(real, self._start):
            return False
        return not any(part.startswith(".") for part in os.path.relpath(real, self._start).split(os.sep) if part != ".")

    def check_options(self, values: Mapping[str, Any]) -> None:
        """Refuse options that use files or code that are not allowed.

        Args:
            values: of options by canonical names, parsed.

        Raises:
            ConfigError: the first that is refused.
        """
        for name, value in values.items():
            if not self.trusts_code:
                _refuse_code(name, value)
            for text in _find_texts(value):
                if name == "output_dir" and os.path.dirname(os.path.realpath(text)) != self._root:
                    raise ConfigError(
                        option="output_dir", expected=f"the folder of a run in {self._root}", found=repr(text)
                    )
                if name in _PATH_OPTIONS:
                    if text and not (name == "resume_from_checkpoint" and text in _RESUMES):
                        self.check(text, name)
                elif name not in _FREE_TEXT and _looks_like_path(text):
                    self.check(text, name)


def _refuse_code(name: str, value: Any) -> None:
    advice = "start the server with --trust_remote_code if you trust everybody who can reach it"
    if name == "trust_remote_code" and value:
        raise ConfigError("this server runs no code from models", option=name, fix=advice)
    if name == "reward_funcs":
        for reward in value or []:
            if not _NAMED_REWARDS.fullmatch(str(reward)):
                raise ConfigError(option=name, expected="the name of a TRL reward", found=repr(reward), fix=advice)
    # A hub repository with compiled kernels, which transformers downloads and runs.
    if name == "attn_implementation" and isinstance(value, str) and not re.fullmatch(r"\w+(\|\w+)?", value):
        raise ConfigError(
            "this server runs no code from the Hub",
            option=name,
            expected="a name such as sdpa or flash_attention_2",
            found=repr(value),
            fix=advice,
        )
    for key, inner in _find_pairs(value):
        if key in _CODE_KEYS and inner:
            raise ConfigError(f"this server runs no code from models or the Hub ({key})", option=name, fix=advice)


def _lies_in(real: str, folder: str) -> bool:
    return real == folder or real.startswith(folder.rstrip(os.sep) + os.sep)


def _looks_like_path(text: str) -> bool:
    if text.startswith(("/", "~", ".")) or "://" in text or "\0" in text or ".." in re.split(r"[/\\]", text):
        return True
    return ("/" in text or "." in text) and len(text) < 4096 and os.path.lexists(text)


def _find_texts(value: Any) -> Iterator[str]:
    """Yield every string in a value, also of keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _find_texts(key)
            yield from _find_texts(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _find_texts(inner)


def _find_pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key and its value, at any depth."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key), inner
            yield from _find_pairs(inner)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            yield from _find_pairs(inner)


def _find_datasets_cache() -> str:
    """Return the cache of the datasets library, which is slow to import."""
    return os.environ.get("HF_DATASETS_CACHE") or os.path.join(constants.HF_HOME, "datasets")


def _list_builders() -> list[str]:
    """Return the names that the datasets library resolves to its own builders before it asks the Hub."""
    spec = importlib.util.find_spec("datasets")
    if spec is None or spec.origin is None:
        return []
    return [entry.name for entry in (Path(spec.origin).parent / "packaged_modules").iterdir() if entry.is_dir()]
