"""The origin of a derived base, as its folder records it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from peft import PeftConfig

from ..errors import CheckpointError
from .fingerprint import find_cache_dir

INITIAL_ADAPTER_NAME = "initial_adapter"
_FILE_NAME = "origin.json"


@dataclass(frozen=True)
class Origin:
    """The base whose weights an initialization has rewritten.

    Attributes:
        name: a folder or a hub id.
        files: the sha256 of its weight files, by name.
    """

    name: str
    revision: str | None
    files: dict[str, str]
    init_lora_weights: str

    def write(self, derived: Path) -> None:
        """Write this into the folder of a derived base.

        It is beside the first adapter, since files beside the weights are copied into a merged model.
        """
        text = json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"
        (derived / INITIAL_ADAPTER_NAME / _FILE_NAME).write_text(text, encoding="utf-8")

    def name_in(self, adapter: Path) -> None:
        """Let the config of an adapter that PEFT has converted for the original base name that base."""
        config = PeftConfig.from_pretrained(str(adapter))
        config.base_model_name_or_path, config.revision = self.name, self.revision
        config.save_pretrained(str(adapter))


def find_derived_dir() -> Path:
    """Return the folder for derived bases."""
    return find_cache_dir() / "derived"


def read_origin(folder: Path) -> Origin | None:
    """Return what a base was derived from; None for one that is not derived.

    Raises:
        CheckpointError: the file that records it is damaged.
    """
    file = folder / INITIAL_ADAPTER_NAME / _FILE_NAME
    if not file.is_file():
        return None
    try:
        return Origin(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"damaged ({error})", where=file, fix=f"delete the folder {folder}: the next start creates it again"
        ) from error
