"""Which kernels `numerics: fused` takes, by what is possible; the machine's answers are injected."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers.forked_ranks import run_ranks
from helpers.tiny import build_base, build_model
from torch._inductor import config as inductor

import lorashard
from lorashard.config.quantization_options import Quantization
from lorashard.config.run_config import RunConfig
from lorashard.errors import ConfigError
from lorashard.model import compiling, fusing
from lorashard.model.fusing import Numerics, choose_numerics
from lorashard.runs.checkpoints import place_partial, publish
from lorashard.training.arguments import build_arguments
from lorashard.training.preparing import settle_numerics
from lorashard.training.resume import Facts

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
NF4 = Quantization("nf4")


def install(monkeypatch: pytest.MonkeyPatch, has_triton: bool, liger_types: tuple[str, ...] | None) -> None:
    """Let this machine have Triton or not, and Liger with kernels for some types of models or not."""
    monkeypatch.setattr(compiling, "has_triton", lambda: has_triton)
    monkeypatch.setattr(fusing, "is_liger_kernel_available", lambda: liger_types is not None)
    table = ModuleType("liger_kernel.transformers.monkey_patch")
    table.MODEL_TYPE_TO_APPLY_LIGER_FN = dict.fromkeys(liger_types or ())  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers", table.__name__):
        monkeypatch.setitem(sys.modules, name, table)


@pytest.mark.parametrize(
    ("device", "quantization", "has_triton", "liger_types", "before", "kernels", "told"),
    [
        (GPU, None, True, ("llama",), None, "compile", "besides"),
        (GPU, None, True, None, None, "compile", "not installed"),
        (GPU, None, False, ("llama",), None, "liger", "Triton"),
        (GPU, NF4, True, ("llama",), None, "liger", "quantized"),
        (GPU, None, True, ("llama",), "liger", "liger", "began"),
        (CPU, None, False, None, None, "compile", "GPUs"),
    ],
)
def test_fused_takes_what_is_possible(
    monkeypatch, device, quantization, has_triton, liger_types, before, kernels, told
):
    """Catches the slower of two, kernels that are not there, and a resumed run that changes them."""
    install(monkeypatch, has_triton, liger_types)
    found = choose_numerics(device, "llama", quantization, before)
    assert found.kernels == kernels and told in found.reason and "\n" not in str(found)


@pytest.mark.parametrize(
    ("device", "quantization", "liger_types", "before", "told"),
    [
        (GPU, NF4, None, None, ["quantized", "pip install liger-kernel"]),
        (GPU, NF4, ("qwen3",), None, ["quantized", "none for llama"]),
        (CPU, NF4, None, None, ["quantized", "GPUs"]),
        (CPU, None, None, None, ["g++", "GPUs"]),
        (CPU, None, None, "liger", ["GPUs", "as the run began"]),
    ],
)
def test_where_nothing_is_possible_one_line_says_what_is_lacking(
    monkeypatch, device, quantization, liger_types, before, told
):
    """Catches a run that was asked to be fast, and quietly is not."""
    install(monkeypatch, True, liger_types)
    with inductor.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(ConfigError) as caught:
        choose_numerics(device, "llama", quantization, before)
    assert caught.value.option == "numerics" and "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in [*told, "numerics: exact"])


def choose_without_compiler(rank: int) -> str:
    """Return what a rank says of itself and of the others, where the last one alone has no C++ compiler."""
    with inductor.patch({"cpp.cxx": ("no-such-compiler",)} if rank == 1 else {}):
        try:
            return choose_numerics(CPU, "llama", None).kernels
        except ConfigError as error:
            return str(error)


def test_ranks_choose_alike():
    """Catches ranks that compute with different kernels, or wait for one that has given up."""
    first, second = run_ranks(choose_without_compiler, 2)
    assert first == second and "g++" in first


@pytest.mark.parametrize("asked", ["fast", "compile"])
def test_another_word_is_refused(asked):
    """Catches a misspelled choice that computes exactly, without a word."""
    with pytest.raises(ConfigError, match="exact or fused"):
        lorashard.shard(build_model(), numerics=asked)


def test_kernels_are_chosen_by_hand_or_by_fused(tmp_path):
    """Catches two choices of which one is dropped; and `exact`, every run's default, that refuses those by hand."""
    options = dict(model_name_or_path="m", dataset="d", output_dir=str(tmp_path), dtype="float32")
    with pytest.raises(ConfigError, match="torch_compile"):
        RunConfig(**options, numerics="fused", torch_compile=True)
    with pytest.raises(ConfigError, match="use_liger_kernel"):
        build_arguments(RunConfig(**options, numerics="fused", use_liger_kernel=True), use_cpu=False)
    with pytest.raises(ConfigError, match="torch_compile"):
        lorashard.shard(build_model(), numerics="fused", torch_compile=True)
    assert RunConfig(**options, numerics="exact", torch_compile=True).compile_options() is True


def save_checkpoint(folder: Path, numerics: str) -> Path:
    facts = Facts("sft", 1, 8, 8, 8, "", "", {}, {}, is_resumable=True, numerics=numerics)
    place_partial(folder / "checkpoint-4").mkdir(parents=True)
    (place_partial(folder / "checkpoint-4") / "trainer_state.json").write_text('{"global_step": 4}')
    publish(folder / "checkpoint-4", vars(facts))
    return folder / "checkpoint-4"


def test_a_run_says_what_fused_became_and_goes_on_with_it(tmp_path):
    """Catches a resumed run that takes other kernels than it began with, as it would on another machine."""
    build_base(num_hidden_layers=1).config.save_pretrained(tmp_path / "model")
    options = dict(model_name_or_path=str(tmp_path / "model"), dataset="d", output_dir=str(tmp_path), cpu=1)
    told: list[str] = []
    fused = RunConfig(**options, numerics="fused")
    assert settle_numerics(fused, CPU, None, told.append).kernels == "compile"
    assert "numerics: fused, by torch.compile: " in told[0] and len(told) == 1
    assert settle_numerics(fused, CPU, save_checkpoint(tmp_path / "a", "compile"), told.append).kernels == "compile"
    assert "as the run began" in told[1]
    liger = save_checkpoint(tmp_path / "b", "liger")
    with pytest.raises(ConfigError, match="as the run began"):
        settle_numerics(fused, CPU, liger, told.append)
    assert settle_numerics(RunConfig(**options), CPU, liger, told.append) == Numerics()
