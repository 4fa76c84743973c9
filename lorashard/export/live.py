"""A live model that is to be merged: its adapter is saved, and its frozen base is that of its files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

import torch
from peft import PeftModel

from ..config.quantization_options import Quantization
from ..engine import Engine
from ..errors import CheckpointError, ConfigError
from ..model.saved import count_labels, read_config
from ..model.sharding import ENGINE_ATTRIBUTE
from ..runtime import dist
from ..runtime.agreement import raise_on_all_ranks
from ..runtime.disk import describe_fault, find_fault
from ..weights.fingerprint import open_adapter
from ..weights.model_folder import shorten
from ..weights.safetensors_files import Checkpoint
from .base_plan import plan_base
from .base_values import describe
from .quantized_base import find_quantized
from .targets import to_base_name


@contextmanager
def save_active_adapter(model: PeftModel) -> Iterator[Path]:
    """Yield a folder with the active adapter of a sharded model; it is removed when the block ends.

    Raises:
        ConfigError: `model` is not sharded.
        CheckpointError: the disk for temporary files is full.

    Ranks: collective over all ranks, each of which has a folder of its own.
    """
    if ENGINE_ATTRIBUTE not in model.__dict__:
        raise ConfigError(
            f"this {type(model).__name__} is not sharded",
            option="adapter",
            expected="a folder, or a model from lorashard.load, load_adapter or shard",
            fix="PEFT's own merge_and_unload merges a model that is in memory as a whole",
        )
    name = model.active_adapter
    with ExitStack() as stack:

        def save() -> str:
            folder = stack.enter_context(TemporaryDirectory())
            model.save_pretrained(folder, selected_adapters=[name])
            return folder

        try:
            folder = raise_on_all_ranks(save)
        except Exception as error:
            if find_fault(error) is None:
                raise
            place = Path(gettempdir())
            raise CheckpointError(
                f"the adapter could not be saved for merging ({describe_fault(error, place)})",
                where=place,
                fix="make room, or set TMPDIR to a folder with room",
            ) from error
        assert folder is not None
        yield Path(folder, "" if name == "default" else name)


def check_live_base(
    model: PeftModel,
    base_folder: Path,
    adapter: Path,
    quantization: Quantization | None,
    trust_remote_code: bool = False,
) -> None:
    """Refuse files that do not hold the base that `lorashard.shard` was given in memory.

    Args:
        adapter: the folder of the model's saved adapter: what it holds may differ from the base.
        quantization: what the base was quantized to.

    Raises:
        ConfigError: a weight has another value in the files.

    Ranks: collective over all ranks. Each compares every weight of its share of the units.
    Memory: a copy of a unit, and of one of its weights as the files have it.
    """
    engine: Engine = model.__dict__[ENGINE_ATTRIBUTE]
    live = model.get_base_model()
    with open_adapter(adapter) as opened:
        saved = {to_base_name(key) for key in opened.keys()}  # noqa: SIM118
    differing: list[str] = []
    with Checkpoint.open(base_folder) as checkpoint:
        config = read_config(adapter)
        skeleton, weights = plan_base(
            base_folder, checkpoint, config, live.dtype, trust_remote_code, count_labels(adapter)
        )
        quantized = find_quantized(skeleton, weights, quantization, describe(skeleton).ties)

        def is_same(name: str, value: torch.Tensor) -> bool:
            if name in saved:
                return True
            if name not in weights.names:
                return False
            return torch.equal(quantized.restore(name, weights.read(name).to(value.device)), value)

        for index, unit in enumerate(engine.units):
            values = engine.reader.read([(unit, number) for number in range(len(unit.weights))])
            names = [to_base_name(weight.placeholder.full_name) for weight in unit.weights]
            own = zip(names, values, strict=True) if index % dist.get_world_size() == dist.get_rank() else ()
            with weights.unit(names):
                found = raise_on_all_ranks(lambda: [name for name, value in own if not is_same(name, value)])  # noqa: B023
            differing += found or []
    everywhere = [name for names in dist.gather_objects(differing) for name in names]
    if everywhere:
        raise ConfigError(
            "the base in memory is not the one in the files",
            option="base",
            where=base_folder,
            expected="the values that lorashard.shard was given",
            found=f"others in {len(everywhere)} weights ({shorten(everywhere, 3)})",
            fix="save the base with save_pretrained before PEFT wraps it, and give that folder as base; of an adapter "
            "that PEFT began with PiSSA or OLoRA, merge what "
            "save_pretrained(path_initial_model_for_weight_conversion=...) saves",
        )
