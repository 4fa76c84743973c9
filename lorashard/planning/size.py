"""How large a model is: its units, in the order of a forward, and its adapter, from its config alone."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import get_safetensors_metadata, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, NotASafetensorsRepoError
from peft import LoraConfig, PeftModel, TaskType

from ..config.quantization_options import Quantization
from ..engine import Layout
from ..errors import CheckpointError
from ..model.adapters import base_test, inject
from ..model.embeddings import put_saved_embeddings
from ..model.quantizing import quantize_structure
from ..model.skeleton import build_skeleton
from ..model.sources import plan_unit
from ..model.units import EMBEDDING, HEAD, LAYER, FoundUnit, find_structure
from ..weights.model_folder import read_config_json
from ..weights.safetensors_files import Checkpoint
from ..weights.stored_formats import StoredFormat, find_stored_format


@dataclass(frozen=True)
class PackedSize:
    """A quantized weight.

    Attributes:
        numel: its numbers.
        parts_numel: numbers of the tensors that keep it.
        unpacked_bytes: as it is computed with.
    """

    numel: int
    parts_numel: int
    unpacked_bytes: int


@dataclass(frozen=True)
class UnitSize:
    """What is gathered at once; `layout` is that of one shard.

    Attributes:
        packed: the weights among its own that are quantized, whose parts are in the layout.
    """

    name: str
    kind: str
    layout: Layout
    packed: tuple[PackedSize, ...] = ()

    @property
    def num_parameters(self) -> int:
        stored = sum(math.prod(field.shape) for field in self.layout.fields)
        return stored + sum(weight.numel - weight.parts_numel for weight in self.packed)

    def shard_bytes(self, num_shards: int) -> int:
        """Return what each of `num_shards` ranks keeps of it, padding included."""
        return dataclasses.replace(self.layout, num_shards=num_shards).shard_bytes

    def total_bytes(self, num_shards: int) -> int:
        """Return the bytes that a gather makes whole."""
        return dataclasses.replace(self.layout, num_shards=num_shards).total_bytes


@dataclass(frozen=True)
class ModelSize:
    """A model's units, and its adapter.

    Attributes:
        units: each once.
        visits: the unit at each stop of a forward, and as what; a tied embedding's unit comes first and last.
        adapter_parameters: what trains.
        adapter_bytes: of these parameters themselves.
        quantization: of the base.
    """

    name: str
    units: tuple[UnitSize, ...]
    visits: tuple[tuple[UnitSize, str], ...]
    adapter_parameters: int
    adapter_bytes: int
    quantization: Quantization | None = None

    @property
    def num_parameters(self) -> int:
        return sum(unit.num_parameters for unit in self.units)

    @property
    def base_bytes(self) -> int:
        return sum(unit.total_bytes(1) for unit in self.units)

    @property
    def workspace_bytes(self) -> int:
        """The most that one weight is unpacked to."""
        return max((weight.unpacked_bytes for unit in self.units for weight in unit.packed), default=0)

    @property
    def layers(self) -> tuple[UnitSize, ...]:
        return tuple(unit for unit in self.units if unit.kind == LAYER)


def build_meta_model(
    model_name_or_path: str,
    lora: LoraConfig,
    dtype: torch.dtype,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    adapter: Path | None = None,
) -> PeftModel:
    """Return a model with its adapter, all on the meta device, from its config alone.

    Args:
        model_name_or_path: a folder with a config.json, or a hub id, of which only the config is fetched.
        adapter: the folder of a saved one, which may have embeddings of another size.

    Raises:
        CheckpointError: there is no config to be had.
    """
    folder = _find_config(model_name_or_path, revision)
    task_type = TaskType(lora.task_type) if lora.task_type else None
    # A kernel package that is missing here must not keep anybody from planning for a machine that has it.
    attention = attn_implementation if attn_implementation in ("eager", "sdpa") else None
    skeleton = build_skeleton(model_name_or_path, folder, task_type, dtype, trust_remote_code, attention)
    if adapter is not None:
        put_saved_embeddings(skeleton, adapter, torch.device("meta"))
    return inject(skeleton, lora, low_cpu_mem_usage=True)


def measure_model(
    model: PeftModel, quantization: Quantization | None = None, stored: StoredFormat | None = None
) -> ModelSize:
    """Return the sizes of a model's units and adapter; its weights are never read.

    Args:
        quantization: what the base is to be quantized to.
        stored: of files that are quantized already; the modules that it skips stay as they are.
    """
    structure = find_structure(model, base_test(model))
    quantize_structure(structure, quantization)
    for weight in (weight for unit in structure.units for weight in unit.weights):
        if stored is not None and stored.skips(weight.name.rpartition(".")[0]):
            weight.quantizer = None
    sizes = {id(unit): _measure_unit(unit) for unit in structure.units}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return ModelSize(
        name=str(model.get_base_model().config.name_or_path),
        units=tuple(sizes.values()),
        visits=tuple((sizes[id(visit.unit)], visit.kind) for visit in structure.visits),
        adapter_parameters=sum(parameter.numel() for parameter in trainable),
        adapter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in trainable),
        quantization=quantization,
    )


def _measure_unit(unit: FoundUnit) -> UnitSize:
    packed = [
        PackedSize(
            weight.parameter.numel(),
            sum(math.prod(part.shape) for part in weight.parts()),
            weight.parameter.numel() * weight.parameter.element_size(),
        )
        for weight in unit.weights
        if weight.quantizer is not None
    ]
    return UnitSize(unit.name, unit.kind, plan_unit(unit, 1), tuple(packed))


def find_stored(model_name_or_path: str, revision: str | None = None) -> StoredFormat | None:
    """Return in which quantized format a model's files are, as its config tells; None for plain numbers.

    Raises:
        CheckpointError: there is no config to be had, or the format cannot be read.
    """
    return find_stored_format(read_config_json(_find_config(model_name_or_path, revision)), model_name_or_path)


def find_stored_dtype(model_name_or_path: str, revision: str | None = None) -> str | None:
    """Return the name of the dtype that a model's files are in, as its config tells; None where it does not.

    Raises:
        CheckpointError: there is no config to be had.
    """
    values = read_config_json(_find_config(model_name_or_path, revision))
    parts = (values, values.get("text_config") or {})
    return next(
        (part[key] for part in parts for key in ("dtype", "torch_dtype") if isinstance(part.get(key), str)), None
    )


def compare_with_headers(size: ModelSize, revision: str | None = None) -> str | None:
    """Return a sentence if the weight files' headers tell of another model than the config, or cannot be read."""
    folder = Path(size.name)
    if folder.is_dir():
        if not any(folder.glob("*.safetensors")):
            return f"{size.name} holds no weights: planned from config.json alone"
        with Checkpoint.open(folder) as checkpoint:
            stored = sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    else:
        try:
            metadata = get_safetensors_metadata(size.name, revision=revision)
        except (NotASafetensorsRepoError, HfHubHTTPError, OSError) as error:
            return (
                f"the headers of {size.name} could not be read ({type(error).__name__}): planned from its config alone"
            )
        stored = sum(metadata.parameter_count.values())
    if stored == size.num_parameters:
        return None
    return f"the weight files hold {stored:,} parameters, the model that the config describes {size.num_parameters:,}"


def _find_config(model_name_or_path: str, revision: str | None) -> Path:
    folder = Path(model_name_or_path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"Expected a config.json in {folder}, found none. Give the folder of a model.")
        return folder
    try:
        return Path(hf_hub_download(model_name_or_path, "config.json", revision=revision)).parent
    except HFValidationError as error:
        raise CheckpointError(
            f"Model {model_name_or_path!r} is neither a folder here nor a hub id of the form org/model. "
            "Check the spelling."
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"There is no folder {model_name_or_path!r} here, and its config is not in the hub's cache while the hub "
            "cannot be asked. Check the path, or go online once."
        ) from error
    except HfHubHTTPError as error:
        raise CheckpointError(
            f"The hub has no config.json of {model_name_or_path} for you: {str(error).splitlines()[0]} "
            "Check the spelling; for a gated or private model log in with `hf auth login` or set HF_TOKEN."
        ) from error


__all__ = [
    "EMBEDDING",
    "HEAD",
    "LAYER",
    "ModelSize",
    "PackedSize",
    "UnitSize",
    "build_meta_model",
    "compare_with_headers",
    "find_stored",
    "find_stored_dtype",
    "measure_model",
]
