"""What a trainer reads from a checkpoint that it resumes from, looked at before: whole, and nothing that runs code."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers.trainer_pt_utils import safe_globals

from ..errors import CheckpointError
from ..model.saved import check_adapter_files, read_config
from ..weights.model_folder import INDEX_NAME, WEIGHTS_NAME, read_json_object

_STATE_NAME = "trainer_state.json"
# The trainer would load these in place of the adapter.
_WHOLE_MODELS = (WEIGHTS_NAME, INDEX_NAME, "pytorch_model.bin", "pytorch_model.bin.index.json")
_PICKLES = ("*.pt", "*.pth")  # of the optimizer, the schedule, the loss scale and each rank's random state


def check_checkpoint(checkpoint: Path) -> None:
    """Refuse a checkpoint that cannot be resumed from, before there is anything to lose.

    Raises:
        CheckpointError: a file is missing, damaged, or a pickle that would run code when it is loaded.
    """
    for name in _WHOLE_MODELS:
        if (checkpoint / name).exists():
            raise CheckpointError(
                expected="the checkpoint of an adapter, which holds no model",
                found=name,
                where=checkpoint,
                fix="give another",
            )
    read_json_object(checkpoint / _STATE_NAME)
    # TRL's reference adapter lies in a folder of its own.
    for folder in dict.fromkeys([checkpoint, *(file.parent for file in checkpoint.glob("*/adapter_*"))]):
        check_adapter_files(folder)
        read_config(folder)
    for pattern in _PICKLES:
        for file in sorted(checkpoint.glob(pattern)):
            _check_pickle(file)


def _check_pickle(file: Path) -> None:
    """Load a file as the trainer will: tensors and plain values alone.

    Memory: none; tensors are not read.
    """
    try:
        with safe_globals():  # numpy's random state
            torch.load(file, map_location="meta", weights_only=True)
    except Exception as error:  # torch has many words for a damaged file
        forbidden = re.search(r"GLOBAL (\S+)", str(error))
        found = f"it asks for {forbidden[1]}" if forbidden else type(error).__name__
        raise CheckpointError(
            expected="tensors and plain values",
            found=f"a damaged file or a pickle that runs code ({found}), which is not loaded",
            where=file,
            fix="take another checkpoint, and do not trust this one if it is another's",
        ) from error
