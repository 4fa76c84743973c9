"""A derived base: what PiSSA and OLoRA leave of a base's weights (the residual), made once and kept as a checkpoint.

PEFT itself computes it, on placeholders: it reads one weight after another and writes its residual.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import Linear, LoraLayer
from peft.tuners.lora.variants import DoraLinearVariant
from transformers import PreTrainedModel

from ..config.initialization import check_initialization, without_rewriting
from ..engine import Placeholder
from ..errors import CheckpointError, ConfigError
from ..model.adapters import check_coverage, inject
from ..model.refusals import check_config, check_frozen
from ..model.skeleton import put_placeholders
from ..runtime import dist
from ..runtime.agreement import raise_on_all_ranks
from ..runtime.disk import describe_fault, show_bytes
from ..runtime.progress import Progress, told_progress
from ..weights.build_once import make_once
from ..weights.conversion import Group
from ..weights.derived_from import INITIAL_ADAPTER_NAME, Origin, find_derived_dir
from ..weights.fingerprint import ADAPTER_NAME, BaseIdentity, hash_file
from ..weights.hub import resolve_folder
from ..weights.safetensors_files import Checkpoint
from ..weights.weights import BaseWeights
from .base_plan import copy_stored, plan_base
from .base_values import describe
from .companions import write_companions
from .stored_layout import OriginalLayout
from .targets import to_base_name
from .writing import TensorWriter, plan_files

# Count up when the same files give other weights than before.
_RECIPE_VERSION = 1
_MAX_FILE_SIZE = "5GB"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DerivedBase:
    """The residual base of an adapter's initialization.

    Attributes:
        lora: the adapter's config, with an initialization that leaves the base alone.
        initial_adapter: the folder of the adapter before training.
    """

    folder: Path
    lora: LoraConfig

    @property
    def initial_adapter(self) -> Path:
        return self.folder / INITIAL_ADAPTER_NAME


def derive(
    model_name_or_path: str,
    lora: LoraConfig,
    device: torch.device,
    *,
    dtype: torch.dtype,
    revision: str | None = None,
    trust_remote_code: bool = False,
    num_labels: int | None = None,
    progress: Progress | None = None,
) -> DerivedBase:
    """Return the derived base of a new adapter, made if it is not there yet.

    With the same random state its weights and the adapter's equal those of `get_peft_model` on the unsharded base on
    the same device.

    Args:
        device: where to compute.
        dtype: of the model, and of the derived base's files.
        progress: called on the rank that makes it with how many weights are rewritten, of how many; by default a bar
            is shown.

    Raises:
        ConfigError: the initialization cannot be had on these modules, or on a base that is stored quantized.
        CheckpointError: files are missing or damaged, there is no room for the copy, or machines made different ones.

    Ranks: collective over all ranks. Of the processes on a machine the first to come makes it, the others wait.
    Memory: the adapter, and one weight, a few times in float32.
    """
    with ExitStack() as stack:
        job = raise_on_all_ranks(
            lambda: _Derivation(
                stack, model_name_or_path, lora, dtype, revision, trust_remote_code, num_labels, progress
            )
        )
        assert job is not None
        identity = BaseIdentity.of(job.weights.files)
        state: torch.Tensor = dist.broadcast_object(torch.get_rng_state())
        folder = find_derived_dir() / job.name(identity, state)
        was_there = folder.is_dir()
        origin = Origin(_name(model_name_or_path), revision, dict(identity.files), str(lora.init_lora_weights))
        raise_on_all_ranks(lambda: job.make(folder, origin, state, device))
    made = DerivedBase(folder, without_rewriting(lora))
    if len(set(dist.gather_objects(hash_file(made.initial_adapter / ADAPTER_NAME)))) > 1:
        raise CheckpointError(
            "the machines have made different derived bases",
            where=folder,
            fix="set HF_HOME to a folder that they share, or copy the folder of one machine to the others",
        )
    if dist.get_rank() == 0:
        _logger.warning(
            "init_lora_weights: '%s' trains on a base that is derived from %s: %s (%s, %s). The adapter belongs to "
            "that base: keep the folder. `lorashard merge` makes one model of both; "
            "save_pretrained(path_initial_model_for_weight_conversion=%r) saves an adapter for the original base",
            lora.init_lora_weights,
            model_name_or_path,
            folder,
            show_bytes(sum(file.stat().st_size for file in folder.iterdir())),
            "found there" if was_there else "made now",
            str(made.initial_adapter),
        )
    return made


class _Derivation:
    """One derived base: what is known of it before any weight is read, and how it is made."""

    def __init__(
        self,
        stack: ExitStack,
        model_name_or_path: str,
        lora: LoraConfig,
        dtype: torch.dtype,
        revision: str | None,
        trust_remote_code: bool,
        num_labels: int | None,
        progress: Progress | None,
    ) -> None:
        check_initialization(lora.init_lora_weights, is_new=True)
        check_config(without_rewriting(lora))
        self._lora, self._dtype, self._progress = lora, dtype, progress
        self._base = resolve_folder(model_name_or_path, revision, progress=progress)

        def plan(folder: Path, checkpoint: Checkpoint) -> tuple[PreTrainedModel, BaseWeights]:
            return plan_base(folder, checkpoint, lora, dtype, trust_remote_code, num_labels)

        self._plan = plan
        checkpoint = stack.enter_context(Checkpoint.open(self._base))
        self._skeleton, self.weights = plan(self._base, checkpoint)
        if self.weights.stored_format is not None:
            raise ConfigError(
                f"'{lora.init_lora_weights}' decomposes the base's own weights",
                where=self._base,
                option="init_lora_weights",
                expected="an unquantized base",
                found=f"weights that are stored in {self.weights.stored_format.description}",
                fix="give the unquantized model; its residual can be quantized while it is read",
            )
        with torch.random.fork_rng(devices=[]):
            probe = inject(plan(self._base, checkpoint)[0], without_rewriting(lora), low_cpu_mem_usage=True)
        check_frozen(probe)
        check_coverage(probe, lora)
        check_derivable(probe, lora)
        self._ties = {name: names for names in describe(self._skeleton).ties for name in names}
        self._scalings = {name: layer.scaling["default"] for name, layer in find_rewritten(probe).items()}
        for name in self._scalings:
            if name in self._ties or isinstance(self.weights.stored_as(name), Group | None):
                tied = self._ties.get(name)
                raise ConfigError(
                    f"'{lora.init_lora_weights}' cannot rewrite a weight that is not stored by itself",
                    option="init_lora_weights",
                    found=f"{name}, which is {'tied: ' + ' and '.join(tied) if tied else 'converted from others'}",
                    fix="leave it out of target_modules",
                )
        self._form = {n: [*p.shape] for n, p in probe.named_parameters() if p.requires_grad}
        self._layout = OriginalLayout(self._skeleton, self.weights, (), {})
        self._file_plan = plan_files(self._layout.tensors, _MAX_FILE_SIZE)

    def name(self, identity: BaseIdentity, state: torch.Tensor) -> str:
        """Return a hash of all that the weights depend on."""
        is_random = "niter" in str(self._lora.init_lora_weights) or bool(self.weights.missing)
        made_of = {
            "recipe": _RECIPE_VERSION,
            "files": sorted([*identity.files.values(), hash_file(self._base / "config.json")]),
            "dtype": str(self._dtype),
            "task_type": str(self._lora.task_type),
            "init_lora_weights": str(self._lora.init_lora_weights),
            "scalings": self._scalings,
            "adapter": self._form,
            "random": hashlib.sha256(state.numpy().tobytes()).hexdigest() if is_random else None,
        }
        return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:32]

    def make(self, folder: Path, origin: Origin, state: torch.Tensor, device: torch.device) -> None:
        """Write the folder if it is not there, atomically."""
        try:
            make_once(folder, partial(self._check_room, folder), partial(self._fill, folder, origin, state, device))
        except OSError as error:
            raise CheckpointError(
                f"the derived base could not be written ({describe_fault(error, folder.parent)}), and nothing of it is "
                "left",
                where=folder,
                fix="make room, or set HF_HOME to a folder that you may write to",
            ) from error

    def _check_room(self, folder: Path, free_bytes: int) -> None:
        if free_bytes < self._file_plan.total_bytes:
            raise CheckpointError(
                f"'{self._lora.init_lora_weights}' keeps a rewritten copy of the base",
                where=folder.parent,
                option="init_lora_weights",
                expected=f"{show_bytes(self._file_plan.total_bytes)} of free space",
                found=show_bytes(free_bytes),
                fix="make room, set HF_HOME to a folder with more, or choose another initialization",
            )
        _logger.warning("deriving %s of base once, into %s", show_bytes(self._file_plan.total_bytes), folder)

    def _fill(self, folder: Path, origin: Origin, state: torch.Tensor, device: torch.device, out: Path) -> None:
        """Write to `out` what will be in `folder`."""
        writer = TensorWriter(out, self._file_plan)
        writer.create()
        self._copy(writer)
        model = self._rewrite(folder, writer, state, device)
        model.save_pretrained(str(out / INITIAL_ADAPTER_NAME), save_embedding_layers=False)
        origin.write(out)
        write_companions(out, self._skeleton, self._dtype, False, self._base, None)
        with Checkpoint.open(out) as made:  # every tensor finds its place again, or nothing is published
            self._plan(out, made)

    def _copy(self, writer: TensorWriter) -> None:
        """Write all tensors that the initialization does not rewrite."""
        for name in self.weights.names:
            if name not in self._scalings and self._layout.batches([name]):
                for key, begin, value in self._layout.store({name: self.weights.read(name)}):
                    writer.write(key, begin, value)
        for key in self._layout.copied:
            copy_stored(self.weights, self.weights.stored[key], writer)

    def _rewrite(self, folder: Path, writer: TensorWriter, state: torch.Tensor, device: torch.device) -> PeftModel:
        """Let PEFT make the adapter, and write the residual of each weight."""
        num_done = 0
        last: Placeholder | None = None

        def write(weight: Placeholder, value: torch.Tensor) -> None:
            nonlocal num_done, last
            for key, begin, piece in self._layout.store({weight.full_name: value}):
                writer.write(key, begin, piece)
            if last is not None:
                last.reader = None  # its values are in the file, and nobody reads them again
            weight.reader, last = lambda: value, weight
            num_done += 1
            tell(num_done, len(self._scalings), "units")

        skeleton = self._skeleton
        skeleton.name_or_path = skeleton.config.name_or_path = str(folder)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.set_rng_state(state)
            if device.type == "cuda":
                torch.cuda.manual_seed(torch.initial_seed())
            put_placeholders(skeleton, self.weights, device)
            for name in self._scalings:
                module = skeleton.get_submodule(name.removesuffix(".weight"))
                placeholder = module._parameters["weight"]
                assert isinstance(placeholder, Placeholder)
                module._parameters["weight"] = _Rewritable.of(placeholder, write)
            with told_progress("deriving the base", given=self._progress) as tell:
                model = inject(skeleton, copy.copy(self._lora))
        if num_done != len(self._scalings):
            raise CheckpointError(
                "PEFT has not rewritten every weight",
                option="init_lora_weights",
                expected=f"{len(self._scalings)} weights",
                found=num_done,
                fix="use the version of PEFT that lorashard was tested with",
            )
        model.peft_config["default"].init_lora_weights = True
        return model


class _Rewritable(Placeholder):
    """A weight that PEFT may assign to: the values are handed to a function."""

    _write: Callable[[Placeholder, torch.Tensor], None]

    @staticmethod
    def of(placeholder: Placeholder, write: Callable[[Placeholder, torch.Tensor], None]) -> _Rewritable:
        made = Placeholder.__new__(
            _Rewritable, placeholder.full_name, placeholder.shape, placeholder.dtype, placeholder.device
        )
        assert isinstance(made, _Rewritable)
        made.reader, made._write = placeholder.reader, write
        return made

    @property
    def data(self) -> torch.Tensor:
        assert self.reader is not None
        return self.reader()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, Placeholder):  # what OLoRA assigns in float32: it has written in place before
            self._write(self, value)


def find_rewritten(model: PeftModel) -> dict[str, LoraLayer]:
    """Return the layers whose base weight an initialization rewrites, by that weight's name in the base."""
    layers = {path: module for path, module in model.named_modules() if isinstance(module, LoraLayer)}
    return {f"{to_base_name(path)}.weight": layer for path, layer in layers.items() if "default" in layer.r}


def check_derivable(model: PeftModel, lora: LoraConfig) -> None:
    """Refuse an adapter whose initialization PEFT cannot do, or that would rewrite a weight twice.

    Args:
        model: with the adapter in its form, initialized in another way.

    Raises:
        ConfigError: naming the option or the module.
    """
    init = f"'{lora.init_lora_weights}'"
    for option in ("layer_replication", "target_parameters"):
        if getattr(lora, option, None):
            raise ConfigError(
                f"init_lora_weights {init} rewrites linear modules with a weight of their own",
                option=option,
                fix="leave one of the two out",
            )
    for name, layer in find_rewritten(model).items():
        weight = getattr(layer.get_base_layer(), "weight", None)
        variant = layer.lora_variant.get("default")
        if type(layer) is not Linear or weight is None or weight.dim() != 2:
            raise ConfigError(
                option="init_lora_weights",
                expected=f"linear layers for {init}",
                found=f"a {type(layer).__name__} on {name.removesuffix('.weight')} "
                f"({type(layer.get_base_layer()).__name__})",
                fix="leave it out of target_modules",
            )
        if variant is not None and not isinstance(variant, DoraLinearVariant):
            raise ConfigError(
                f"{init} was not tried with this variant of LoRA",
                option="init_lora_weights",
                found=type(variant).__name__,
                fix="leave the variant's option out",
            )
        if layer.r["default"] > min(weight.shape):
            raise ConfigError(
                option="r",
                expected=f"at most {min(weight.shape)} for {init} of {name}",
                found=layer.r["default"],
                fix="lower r, or leave the module out of target_modules",
            )


def _name(model_name_or_path: str) -> str:
    return os.path.abspath(model_name_or_path) if Path(model_name_or_path).is_dir() else model_name_or_path
