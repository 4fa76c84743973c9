"""What `dtype: auto` becomes, what is said of it, and what a run goes on with. The probe's answer is injected."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from helpers.forked_ranks import run_ranks
from helpers.tiny import build_base
from peft import LoraConfig

import lorashard
from lorashard.config.run_config import RunConfig
from lorashard.errors import ConfigError
from lorashard.planning.run_plan import settle_dtype_here
from lorashard.runs.checkpoints import place_partial, publish
from lorashard.runtime import dtypes
from lorashard.runtime.dtypes import choose_dtype, explain_slow_bfloat16, read_dtype
from lorashard.training.arguments import build_arguments
from lorashard.training.preparing import settle_dtype
from lorashard.training.resume import Facts

CPU = torch.device("cpu")
SLOW = "this CPU is slow"


def explain_none(device: torch.device) -> None:
    return None


def explain_slow(device: torch.device) -> str:
    return SLOW


def make_config(folder: Path, **options) -> RunConfig:
    return RunConfig(model_name_or_path="m", dataset="d", output_dir=str(folder), cpu=1, **options)


@pytest.mark.parametrize("explain, expected", [(explain_none, torch.bfloat16), (explain_slow, torch.float32)])
def test_auto_goes_by_the_device_and_says_so(explain, expected):
    """Catches bfloat16 on a CPU that takes 65 times as long with it, or a choice that nobody hears of."""
    dtype, sentence = choose_dtype("auto", CPU, explain)
    assert dtype == expected
    assert sentence is not None and str(expected).removeprefix("torch.") in sentence and "\n" not in sentence
    assert (SLOW in sentence) == (expected == torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_explicit_dtype_is_obeyed_and_only_a_slow_one_is_spoken_of(dtype):
    """Catches a dtype that is exchanged behind somebody's back, and a warning for those who need none."""
    assert choose_dtype(dtype, CPU, explain_none) == (dtype, None)
    found, warning = choose_dtype(dtype, CPU, explain_slow)
    assert found == dtype
    assert (warning is not None and SLOW in warning) == (dtype == torch.bfloat16)


def choose_on_ranks(rank: int) -> torch.dtype:
    return choose_dtype("auto", CPU, explain_slow if rank == 1 else explain_none)[0]


def test_one_rank_without_bfloat16_decides_for_all():
    """Catches ranks that gather one layer in two dtypes: the machines of a cluster may differ."""
    assert run_ranks(choose_on_ranks, 2) == [torch.float32, torch.float32]


@pytest.mark.parametrize(
    "is_known_to_onednn, has_avx512_bf16, is_slow",
    [(False, False, True), (False, True, True), (True, False, True), (True, True, False)],
)
def test_an_x86_cpu_needs_the_instructions_themselves(monkeypatch, is_known_to_onednn, has_avx512_bf16, is_slow):
    """oneDNN says yes to plain AVX-512, which converts each matmul; cpuinfo to what oneDNN may not use."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: is_known_to_onednn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_avx512_bf16)
    monkeypatch.setattr(dtypes.platform, "machine", lambda: "x86_64")
    text = explain_slow_bfloat16(CPU)
    assert (text is not None) == is_slow
    assert text is None or ("1.3 times" if is_known_to_onednn else "65 times") in text


@pytest.mark.parametrize("capability, is_slow", [((7, 5), True), ((8, 0), False), ((9, 0), False)])
def test_a_gpu_has_bfloat16_from_ampere_on(monkeypatch, capability, is_slow):
    """Catches bfloat16 on a T4, which emulates it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    assert (explain_slow_bfloat16(torch.device("cuda", 0)) is not None) == is_slow


def test_a_dtype_may_be_given_by_name():
    """Catches a name that torch is asked to load a model in, and a mistyped one that ends in an AttributeError."""
    names = {"bf16": torch.bfloat16, "float16": torch.float16, "fp32": torch.float32, torch.float64: torch.float64}
    assert {asked: read_dtype(asked) for asked in names} == names
    for asked in ("float33", "nn", None):
        with pytest.raises(ConfigError, match=r"expected auto.*float32.*found " + repr(asked)):
            read_dtype(asked)  # type: ignore[arg-type]


def save_checkpoint(folder: Path, dtype: str | None) -> Path:
    checkpoint = folder / "checkpoint-4"
    place_partial(checkpoint).mkdir(parents=True)
    (place_partial(checkpoint) / "trainer_state.json").write_text(json.dumps({"global_step": 4}))
    facts = asdict(Facts("sft", 1, 8, 8, 8, "", "", {}, {}, is_resumable=True, dtype=dtype))
    publish(checkpoint, {name: value for name, value in facts.items() if value is not None})
    return checkpoint


def test_a_run_writes_what_auto_became_and_goes_on_with_it(tmp_path):
    """Catches a run that changes its dtype half-way, as it would on another machine, and TRL flags that do not fit."""
    told: list[str] = []
    config = settle_dtype(make_config(tmp_path), CPU, None, told.append, explain_slow)
    assert yaml.safe_load(config.to_yaml())["dtype"] == "float32" and len(told) == 1
    assert not build_arguments(config, use_cpu=True).bf16
    resumed = settle_dtype(make_config(tmp_path), CPU, save_checkpoint(tmp_path, "float32"), told.append, explain_none)
    assert resumed.dtype == "float32" and len(told) == 2
    anew = settle_dtype(make_config(tmp_path), CPU, None, told.append, explain_none)
    assert anew.dtype == "bfloat16" and build_arguments(anew, use_cpu=True).bf16
    explicit = make_config(tmp_path, dtype="float32")
    assert settle_dtype(explicit, CPU, save_checkpoint(tmp_path / "other", "bfloat16"), told.append) is explicit


def test_a_checkpoint_from_before_says_no_dtype(tmp_path):
    """Catches old checkpoints that can no longer be gone on from."""
    config = settle_dtype(make_config(tmp_path), CPU, save_checkpoint(tmp_path, None), print, explain_slow)
    assert config.dtype == "float32"


def test_a_plan_knows_what_auto_is_here(tmp_path):
    """Catches a plan of another dtype than the run will have; GPUs that are not here have bfloat16."""
    config, notes = settle_dtype_here(make_config(tmp_path), CPU, explain_slow)
    assert config.dtype == "float32" and len(notes) == 1
    config, notes = settle_dtype_here(make_config(tmp_path, dtype="bfloat16"), CPU, explain_slow)
    assert config.dtype == "bfloat16" and SLOW in notes[0]
    config, notes = settle_dtype_here(make_config(tmp_path), None, explain_slow)
    assert config.dtype == "bfloat16" and not notes


def test_flags_and_auto_agree():
    """Catches `bf16: true` beside `dtype: auto` taken for a contradiction, as in a file of another tool."""
    assert RunConfig(model="m", dataset="d", bf16=True, dtype="auto").dtype == "bfloat16"
    with pytest.raises(ConfigError, match="contradict"):
        RunConfig(model="m", dataset="d", bf16=True, dtype="float32")


@pytest.fixture
def tiny_base(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    build_base(num_hidden_layers=1).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_load_warns_once_of_a_slow_bfloat16(tiny_base, monkeypatch, caplog):
    """Catches silence, where each step takes 65 times as long, and a warning for each layer."""
    monkeypatch.setattr(dtypes, "explain_slow_bfloat16", explain_slow)
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with caplog.at_level(logging.WARNING, "lorashard"):
        model = lorashard.load(str(tiny_base), lora, "replicate", dtype=torch.bfloat16)
        assert len([record for record in caplog.records if SLOW in record.getMessage()]) == 1
        assert model.get_base_model().dtype == torch.bfloat16
        assert lorashard.load(str(tiny_base), lora, "replicate").get_base_model().dtype == torch.float32
    by_name = lorashard.load(str(tiny_base), lora, "replicate", dtype="fp16")
    assert by_name.get_base_model().dtype == torch.float16


def test_autocast_to_a_slow_bfloat16_is_told_once(tiny_base, monkeypatch, caplog):
    """Catches TRL's default bf16=True on the float32 base of `dtype="auto"`: 65 times as long, and no word of it."""
    monkeypatch.setattr("lorashard.api.explain_slow_bfloat16", explain_slow)
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")

    def count(*, has_grad: bool, is_autocast: bool) -> int:
        with torch.set_grad_enabled(has_grad), torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            model(input_ids=torch.tensor([[1, 2]]))
        return sum("bf16=False" in record.getMessage() for record in caplog.records)

    model = lorashard.load(str(tiny_base), lora, "replicate", dtype=torch.float32)
    assert count(has_grad=False, is_autocast=True) == 0
    assert [count(has_grad=True, is_autocast=True) for _ in range(2)] == [1, 1]
    caplog.clear()
    for dtype, is_autocast in ((torch.float32, False), (torch.bfloat16, True)):
        model = lorashard.load(str(tiny_base), lora, "replicate", dtype=dtype)
        assert count(has_grad=True, is_autocast=is_autocast) == 0


def log_on_ranks(rank: int, base: str) -> int:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("lorashard").addHandler(handler)
    dtypes.explain_slow_bfloat16 = explain_slow
    lorashard.load(base, LoraConfig(r=2, target_modules=["q_proj"]), "replicate", dtype=torch.bfloat16)
    return sum(SLOW in record.getMessage() for record in records)


def test_rank_0_alone_warns(tiny_base):
    """Catches the same warning from each of eight ranks."""
    assert run_ranks(log_on_ranks, 2, str(tiny_base)) == [1, 0]
