"""A saved adapter: find its folder, read its config, load its tensors into a model."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from huggingface_hub import constants, snapshot_download
from peft import PeftConfig, PeftModel, load_peft_weights, set_peft_model_state_dict

from ..config.quantization_options import Quantization, describe_quantization, read_quantization
from ..engine import Placeholder
from ..errors import CheckpointError, ConfigError
from ..runs.checkpoints import find_newest, list_checkpoints
from ..runtime import dist
from ..weights.derived_from import find_derived_dir
from ..weights.fingerprint import ADAPTER_NAME, open_adapter, read_quantization_of
from ..weights.hub import explain_hub_errors
from ..weights.model_config import describe_error
from ..weights.model_folder import check_links, read_json_object, shorten
from .adapter_files import find_not_finite

CONFIG_NAME = "adapter_config.json"
_logger = logging.getLogger(__name__)
# PEFT reports these as missing, and restores them by itself.
_PROMPT_NAMES = ("prompt_encoder.", "prompt_embeddings")
_PICKLE_NAME = "adapter_model.bin"
# What PEFT does not check when it reads a config, and fails on later.
_FIELD_TYPES: dict[str, type | tuple[type, ...]] = {
    "base_model_name_or_path": str,
    "revision": str,
    "target_modules": (str, list, set, tuple),
    "modules_to_save": (list, set, tuple),
    "rank_pattern": dict,
    "alpha_pattern": dict,
}
_FILES = (CONFIG_NAME, "adapter_model.*", "*token*", "chat_template*", "*.jinja", "vocab*", "merges*", "special_*")


def find_adapter(name: str | Path) -> Path:
    """Return the folder of an adapter: one itself, a run's, a run's last checkpoint if it has not ended, or the hub's.

    Raises:
        CheckpointError: there is none, files are missing, or a link leads out of its folder.
    """
    expected = "an adapter's folder, a run's or a hub id"
    if "://" in str(name):  # it may hold a password, so it is not repeated
        raise CheckpointError(expected=expected, found="an address with '://'")
    folder = Path(name).expanduser()
    if not folder.exists() and _is_hub_id(str(name)):
        with explain_hub_errors(str(name), None):
            folder = Path(
                snapshot_download(
                    str(name), allow_patterns=list(_FILES), local_files_only=bool(constants.HF_HUB_OFFLINE)
                )
            )
    if not folder.is_dir():
        raise CheckpointError(expected=expected, found=f"nothing at {name}")
    if not (folder / CONFIG_NAME).is_file():
        checkpoints = list_checkpoints(folder)
        if not checkpoints:
            raise CheckpointError(
                expected=f"{CONFIG_NAME} or a run's checkpoints",
                found="neither",
                where=folder,
                fix="give the folder of an adapter, or of a run that has saved one",
            )
        # Those of a bare Trainer have no manifest to show that they are complete.
        taken = find_newest(folder) or next((path for path in checkpoints if not _find_absent(path)), checkpoints[0])
        if taken != checkpoints[0]:
            _logger.warning("%s is incomplete: using %s", checkpoints[0], taken)
        folder = taken
    check_adapter_files(folder)
    return folder


def check_adapter_files(folder: Path) -> None:
    """Refuse the folder of an adapter that is incomplete, or from which a link leads elsewhere.

    Raises:
        CheckpointError: naming the file that is missing or damaged, or the link.
    """
    absent = _find_absent(folder)
    if absent:
        pickled = " (adapter_model.bin is a pickle, which is not read)" if (folder / _PICKLE_NAME).is_file() else ""
        raise CheckpointError(
            f"the adapter is incomplete: {' and '.join(absent)} missing{pickled}", where=folder, fix="save it again"
        )
    check_links(folder)
    with open_adapter(folder):
        pass


def _find_absent(folder: Path) -> list[str]:
    return [file for file in (CONFIG_NAME, ADAPTER_NAME) if not (folder / file).is_file()]


def find_base(folder: Path, config: PeftConfig, base: str | None, revision: str | None) -> tuple[str, str | None]:
    """Return the name and revision of an adapter's base: those that are given, or those that the adapter knows.

    Raises:
        ConfigError: it knows none, or a folder that is not there.
    """
    name = base or config.base_model_name_or_path
    if not name:
        raise ConfigError(
            "it does not say on which base it was trained", option="base", where=folder, fix="give base (--base)"
        )
    if base is None and not _is_hub_id(name) and not Path(name).is_dir():
        is_derived = Path(name).parent.name == find_derived_dir().name
        raise ConfigError(
            f"it was trained on the base in {name}, which is not there",
            option="base",
            where=folder,
            fix="if it has moved, give base (--base)"
            + ("; PiSSA or OLoRA derived it: starting the run again with its config derives it again" * is_derived),
        )
    return name, revision or (None if base else config.revision)


def choose_quantization(folder: Path, asked: str | Quantization | None) -> Quantization | None:
    """Return what to quantize the base of a saved adapter to: what it was in training, unless `asked` says otherwise.

    The name of the format that it was trained in means that format with the options of training. For another one there
    is a warning.

    Raises:
        ConfigError: there is no such format.
        CheckpointError: the adapter's file is damaged.
    """
    trained_on = read_quantization_of(folder)
    if asked is None or (trained_on is not None and asked == trained_on.format):
        return trained_on
    meant = read_quantization(asked)
    if meant != trained_on and dist.get_rank() == 0:
        _logger.warning(
            "%s was trained on its base %s, and is loaded on it %s, by the option quantization: its answers may differ",
            folder,
            describe_quantization(trained_on),
            describe_quantization(meant),
        )
    return meant


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def read_config(folder: Path) -> PeftConfig:
    """Return the config of the adapter in a folder.

    Raises:
        CheckpointError: it cannot be read.
    """
    read_json_object(folder / CONFIG_NAME)
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, LookupError, AttributeError, ImportError) as error:
        raise CheckpointError(
            f"it cannot be read ({describe_error(error)})", where=folder / CONFIG_NAME, fix="save the adapter again"
        ) from error
    for name, expected in _FIELD_TYPES.items():
        value = getattr(config, name, None)
        if value is not None and not isinstance(value, expected):
            raise CheckpointError(
                f"{name} cannot be {value!r}", where=folder / CONFIG_NAME, fix="save the adapter again"
            )
    return config


def count_labels(folder: Path) -> int | None:
    """Return the number of labels of the classification head in an adapter's file; None if it holds no head.

    Raises:
        CheckpointError: the file is damaged.
    """
    with open_adapter(folder) as opened:
        for name in ("score", "classifier"):
            key = f"base_model.model.{name}.weight"
            if key in opened.keys():  # noqa: SIM118
                return int(opened.get_slice(key).get_shape()[0])
    return None


def restore(model: PeftModel, folder: Path) -> None:
    """Load the tensors of the adapter in a folder into `model`, whose adapter was made from its config.

    PEFT writes the embedding and the head into an adapter that targets them: these must equal the base's, unless they
    are of another size (`put_saved_embeddings`).

    Args:
        model: with placeholders for the base that can be read.

    Raises:
        CheckpointError: tensors are missing, of another shape, hold NaN or infinity, or have no place.
    """
    tensors = load_peft_weights(str(folder), device="cpu")
    not_finite = find_not_finite(tensors)
    if not_finite:
        raise CheckpointError(
            "it is damaged, or its training has diverged",
            expected="finite values",
            found=f"NaN or infinity in {shorten(not_finite, 2)}",
            where=folder / ADAPTER_NAME,
            fix="take another checkpoint, or save or download the adapter again",
        )
    base = {n: p for n, p in model.named_parameters(remove_duplicate=False) if isinstance(p, Placeholder)}
    for name in tensors.keys() & base.keys():
        if not _is_equal(tensors.pop(name), base[name]):
            raise CheckpointError(
                f"the adapter holds a weight of the base, '{name}', that differs from this base's",
                where=folder,
                fix="give the base that it was trained on, saved as a base of its own if it was changed",
            )
    problem = "the adapter does not fit its base"
    try:
        result = set_peft_model_state_dict(model, tensors)
    except (RuntimeError, KeyError) as error:  # torch's for shapes, PEFT's for what a kind of adapter must have
        raise CheckpointError(f"{problem}: {' '.join(str(error).split())}", where=folder) from error
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    faults = {"are missing": trainable.intersection(result.missing_keys), "have no place": result.unexpected_keys}
    for fault, names in faults.items():
        wrong = sorted(name for name in names if not name.startswith(_PROMPT_NAMES))
        if wrong:
            raise CheckpointError(
                f"{problem}: {len(wrong)} tensors {fault}, such as '{wrong[0]}'",
                where=folder,
                fix="give the base that it was trained on, and the complete adapter",
            )


def _is_equal(tensor: torch.Tensor, weight: Placeholder) -> bool:
    assert weight.reader is not None
    return tensor.shape == weight.shape and torch.equal(tensor.to(weight.dtype), weight.reader().cpu())
