"""How large a model is: its units, in the order of a forward, and its adapter, from its config alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub import get_safetensors_metadata, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, NotASafetensorsRepoError
from peft import LoraConfig, PeftModel, TaskType

from ..config.quantization_options import Quantization
from ..engine import Layout
from ..model.adapters import base_test, inject
from ..model.embeddings import put_saved_embeddings
from ..model.quantizing import quantize_structure
from ..model.skeleton import build_skeleton
from ..model.sources import plan_unit
from ..model.units import LAYER, FoundUnit, find_structure, size_class
from ..weights.hub import explain_hub_errors
from ..weights.model_folder import CONFIG_NAME, read_config_json
from ..weights.safetensors_files import Checkpoint
from ..weights.stored_formats import StoredFormat, find_stored_format


@dataclass(frozen=True)
class QuantizedSize:
    """A quantized weight.

    Attributes:
        numel: of the weight itself.
        stored_numel: of the tensors that it is stored as.
        unpacked_bytes: of its values, in the dtype that they are computed with.
    """

    numel: int
    stored_numel: int
    unpacked_bytes: int


@dataclass(frozen=True)
class UnitSize:
    """What is gathered at once; `layout` is that of one shard.

    Attributes:
        quantized: those of its weights that are; the layout has the tensors that they are stored as.
    """

    name: str
    kind: str
    layout: Layout
    quantized: tuple[QuantizedSize, ...] = ()

    @property
    def num_parameters(self) -> int:
        stored = sum(math.prod(field.shape) for field in self.layout.fields)
        return stored + sum(weight.numel - weight.stored_numel for weight in self.quantized)

    @property
    def size_class(self) -> str:
        return size_class(self.kind)

    def shard_over(self, num_shards: int) -> UnitSize:
        """Return it with the layout of that many shards."""
        return replace(self, layout=replace(self.layout, num_shards=num_shards))

    def shard_bytes(self, num_shards: int) -> int:
        """Return what each of `num_shards` ranks keeps of it, padding included."""
        return replace(self.layout, num_shards=num_shards).shard_bytes

    def total_bytes(self, num_shards: int) -> int:
        """Return the bytes that it takes unsharded, padding included."""
        return replace(self.layout, num_shards=num_shards).total_bytes


@dataclass(frozen=True)
class ModelSize:
    """A model's units, and its adapter.

    Attributes:
        units: each once.
        visits: the schedule of a forward: each unit, and its role there; a tied embedding's unit comes first and last.
        adapter_parameters: how many parameters train.
        adapter_bytes: of these parameters alone.
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
        """The most that the values of one quantized weight take."""
        return max((weight.unpacked_bytes for unit in self.units for weight in unit.quantized), default=0)

    @property
    def layers(self) -> tuple[UnitSize, ...]:
        return tuple(unit for unit in self.units if unit.kind == LAYER)

    def first_layers(self, num_layers: int) -> ModelSize:
        """Return the size of the model with only its first decoder layers."""
        left_out = {unit.name for unit in self.layers[num_layers:]}
        return replace(
            self,
            units=tuple(unit for unit in self.units if unit.name not in left_out),
            visits=tuple(visit for visit in self.visits if visit[0].name not in left_out),
            adapter_parameters=self.adapter_parameters * num_layers // len(self.layers),
            adapter_bytes=self.adapter_bytes * num_layers // len(self.layers),
        )


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
        CheckpointError: the config cannot be found.
    """
    folder = find_config(model_name_or_path, revision)
    task_type = TaskType(lora.task_type) if lora.task_type else None
    # Plan also for a machine that has a kernel package which is not installed here.
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
        quantization: what the base is quantized to.
        stored: the format of files that are quantized already; the modules that it skips stay as they are.
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
        adapter_bytes=sum(parameter.nbytes for parameter in trainable),
        quantization=quantization,
    )


def _measure_unit(unit: FoundUnit) -> UnitSize:
    quantized = tuple(
        QuantizedSize(
            numel=weight.parameter.numel(),
            stored_numel=sum(math.prod(part.shape) for part in weight.parts()),
            unpacked_bytes=weight.parameter.nbytes,
        )
        for weight in unit.weights
        if weight.quantizer is not None
    )
    return UnitSize(unit.name, unit.kind, plan_unit(unit, 1), quantized)


def find_stored(model_name_or_path: str, revision: str | None = None) -> StoredFormat | None:
    """Return the quantized format of a model's files, by its config; None where they are not quantized.

    Raises:
        CheckpointError: the config cannot be found, or the format cannot be read.
    """
    return find_stored_format(read_config_json(find_config(model_name_or_path, revision)), model_name_or_path)


def find_model_type(model_name_or_path: str, revision: str | None = None) -> str | None:
    """Return the `model_type` of a model's config.

    Raises:
        CheckpointError: the config cannot be found.
    """
    return read_config_json(find_config(model_name_or_path, revision)).get("model_type")


def find_max_positions(model_name_or_path: str, revision: str | None = None) -> int | None:
    """Return the tokens of the longest sequences that a model was made for, by its config; None where it has none.

    Raises:
        CheckpointError: the config cannot be found.
    """
    values = read_config_json(find_config(model_name_or_path, revision))
    found = (values.get("text_config") or values).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def find_stored_dtype(model_name_or_path: str, revision: str | None = None) -> str | None:
    """Return the name of the dtype of a model's files, by its config; None where it has none.

    Raises:
        CheckpointError: the config cannot be found.
    """
    values = read_config_json(find_config(model_name_or_path, revision))
    parts = (values, values.get("text_config") or {})
    return next(
        (part[key] for part in parts for key in ("dtype", "torch_dtype") if isinstance(part.get(key), str)), None
    )


def compare_with_headers(size: ModelSize, revision: str | None = None) -> str | None:
    """Return a sentence if the weight files' headers describe another model than the config, or cannot be read."""
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


def find_config(model_name_or_path: str, revision: str | None) -> Path:
    """Return the folder that a model's config.json is in, which is fetched where the model is the hub's."""
    folder = Path(model_name_or_path).expanduser()
    if folder.is_dir():
        read_config_json(folder)
        return folder
    with explain_hub_errors(model_name_or_path, revision):
        return Path(hf_hub_download(model_name_or_path, CONFIG_NAME, revision=revision)).parent
