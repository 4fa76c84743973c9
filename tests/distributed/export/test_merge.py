"""An adapter merged into its base a unit at a time: PEFT's own merge, bit for bit, in the original files' layout."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate.state import PartialState
from helpers.cases import slow
from helpers.forked_ranks import read_status_bytes, run_ranks
from helpers.merging import (
    disturb,
    merge_with_peft,
    read_tensors,
    save_adapter,
    save_base,
)
from helpers.tiny import build_base, find_differences, make_batch
from helpers.words import make_tokenizer
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, Concatenate, Transpose, WeightConverter
from transformers.utils import logging as transformers_logging

import lorashard
from lorashard.errors import CheckpointError, ConfigError, LorashardError
from lorashard.export import merger, writing
from lorashard.export.merger import merge_checkpoint
from lorashard.runtime.atomic_folder import list_partials

BF16, FP32 = torch.bfloat16, torch.float32
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
WHOLE = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
CASES = {
    "LoRA": ("llama", {}),
    "LoRA, tied": ("llama-tied", {}),
    "rsLoRA": ("llama", {"use_rslora": True}),
    "DoRA": ("llama", {"use_dora": True}),
    "embedding and head": ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "modules_to_save": ("llama", WHOLE),
    "single tokens": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1, 3]}}),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral", {"target_modules": ["q_proj", "v_proj"]}),
    "qwen3-moe": ("qwen3-moe", {"target_modules": ["q_proj", "v_proj"]}),
    "mixtral experts": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "qwen3-moe experts": ("qwen3-moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS[:1]}),
}


@pytest.fixture(autouse=True)
def _quiet():
    transformers_logging.disable_progress_bar()


MORE_CASES = ("rsLoRA", "embedding and head", "qwen3", "mixtral", "qwen3-moe", "qwen3-moe experts")


@pytest.fixture(
    params=[slow(name) if name in MORE_CASES else name for name in CASES], ids=lambda name: name.replace(" ", "-")
)
def case(request, tmp_path) -> tuple[Path, Path]:
    family, options = CASES[request.param]
    base = save_base(tmp_path / "base", family)
    return base, save_adapter(tmp_path / "adapter", base, **options)


@pytest.mark.parametrize("dtype", (None, slow(FP32)), ids=("own-dtype", "fp32"))
def test_merged_equals_pefts_own_merge(case, tmp_path, dtype):
    """A wrong scaling, order of casts, range of an expert or key; a tensor left out; a magnitude not loaded."""
    base, adapter = case
    report = merge_checkpoint(adapter, tmp_path / "out", base, dtype=dtype, max_shard_size="30KB")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == (dtype or BF16)
    expected = merge_with_peft(base, adapter, dtype or BF16)
    assert find_differences(loaded.state_dict(), expected) == []
    original, made = read_tensors(base), read_tensors(tmp_path / "out")
    assert {key: tensor.shape for key, tensor in made.items()} == {key: t.shape for key, t in original.items()}
    assert report.num_files > 1 and report.num_tensors == len(original) and not report.is_untied


@pytest.mark.parametrize(
    "config",
    (
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        peft.LNTuningConfig(target_modules=["input_layernorm"]),
        slow(peft.LoHaConfig(r=2, target_modules=["q_proj"])),
        slow(peft.LoKrConfig(r=2, target_modules=["q_proj"])),
        slow(peft.VeraConfig(r=2, target_modules=["q_proj"])),
        slow(peft.OFTConfig(oft_block_size=8, target_modules=["q_proj"])),
        slow(peft.HRAConfig(r=2, target_modules=["q_proj"])),
    ),
    ids=lambda config: config.peft_type.value,
)
def test_other_adapters_merge_as_peft_merges_them(tmp_path, config):
    """Merging that knows LoRA alone."""
    base = save_base(tmp_path / "base", "llama", FP32)
    config.task_type = "CAUSAL_LM"
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    disturb(model)
    model.save_pretrained(tmp_path / "adapter")
    merge_checkpoint(tmp_path / "adapter", tmp_path / "out", base)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert find_differences(loaded, merge_with_peft(base, tmp_path / "adapter", FP32)) == []


def test_biases_and_a_saved_embedding_in_the_adapter_are_merged(tmp_path):
    """What PEFT writes into the base itself, not beside it, is lost if the base is read from its files alone."""
    base = tmp_path / "base"
    build_base("llama", attention_bias=True, num_hidden_layers=2).save_pretrained(base)
    for bias in ("lora_only", "all"):
        adapter = save_adapter(tmp_path / bias, base, target_modules=["q_proj", "embed_tokens"], bias=bias)
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
        model.save_pretrained(adapter, save_embedding_layers=True)
        merge_checkpoint(adapter, tmp_path / f"out-{bias}", base)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / f"out-{bias}").state_dict()
        expected = merge_with_peft(base, adapter, FP32)
        bias_name = "model.layers.0.self_attn.q_proj.bias"
        assert not torch.equal(expected[bias_name], read_tensors(base)[bias_name])
        assert find_differences(loaded, expected) == []


CONVERSIONS = {
    "attn.qk.weight": WeightConverter("attn.qk.weight", ["attn.q_proj.weight", "attn.k_proj.weight"], [Chunk(dim=0)]),
    "attn.o_t.weight": WeightConverter("attn.o_t.weight", "attn.o_proj.weight", [Transpose(0, 1)]),
    "mlp.u0.weight": WeightConverter(["mlp.u0.weight", "mlp.u1.weight"], "mlp.up_proj.weight", [Concatenate(dim=1)]),
}


@pytest.fixture
def fused(tmp_path) -> Iterator[Path]:
    """A Llama whose files hold fused, transposed and split tensors that transformers converts back."""
    folder = tmp_path / "base"
    build_base("llama", num_hidden_layers=2, num_key_value_heads=4).save_pretrained(folder)
    register_checkpoint_conversion_mapping("LlamaForCausalLM", list(CONVERSIONS.values()), overwrite=True)
    tensors = read_tensors(folder)
    for i in range(2):
        layer = f"model.layers.{i}"
        q, k = tensors.pop(f"{layer}.self_attn.q_proj.weight"), tensors.pop(f"{layer}.self_attn.k_proj.weight")
        up = tensors.pop(f"{layer}.mlp.up_proj.weight")
        tensors[f"{layer}.self_attn.qk.weight"] = torch.cat([q, k])
        tensors[f"{layer}.self_attn.o_t.weight"] = tensors.pop(f"{layer}.self_attn.o_proj.weight").T.contiguous()
        tensors[f"{layer}.mlp.u0.weight"], tensors[f"{layer}.mlp.u1.weight"] = up.chunk(2, dim=1)
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    yield folder
    register_checkpoint_conversion_mapping("LlamaForCausalLM", [], overwrite=True)


@pytest.mark.parametrize(
    "modules, dtype", ((["q_proj"], BF16), (["v_proj"], None), (["o_proj"], BF16), (["up_proj", "k_proj"], None))
)
def test_fused_and_transposed_tensors_come_out_as_they_were_stored(tmp_path, fused, modules, dtype):
    """Half of a fused tensor lost, an untouched one lost or not cast, a transposed one written as the model has it."""
    adapter = save_adapter(tmp_path / "adapter", fused, target_modules=modules)
    merge_checkpoint(adapter, tmp_path / "out", fused, dtype=dtype)
    original, made = read_tensors(fused), read_tensors(tmp_path / "out")
    assert {key: tensor.shape for key, tensor in made.items()} == {key: t.shape for key, t in original.items()}
    assert {tensor.dtype for tensor in made.values()} == {dtype or FP32}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert find_differences(loaded, merge_with_peft(fused, adapter, dtype or FP32)) == []


def test_a_conversion_that_cannot_be_undone_is_refused_where_the_adapter_meets_it(tmp_path, fused, monkeypatch):
    """A tensor written under a key, or in an order, that the original does not have."""
    adapters = [save_adapter(tmp_path / name, fused, target_modules=[name]) for name in ("q_proj", "o_proj", "up_proj")]
    monkeypatch.setattr(Transpose, "reverse_op", property(lambda self: Transpose(0, 0)))
    monkeypatch.setattr(Concatenate, "reverse_op", property(lambda self: Concatenate(1)))
    merge_checkpoint(adapters[0], tmp_path / "out", fused)
    assert torch.equal(*(read_tensors(f)["model.layers.0.self_attn.o_t.weight"] for f in (fused, tmp_path / "out")))
    for adapter in adapters[1:]:
        with pytest.raises(ConfigError, match=adapter.name):
            merge_checkpoint(adapter, tmp_path / "none", fused)


def test_an_embedding_that_the_adapter_carries_counts_for_its_tied_head_too(tmp_path):
    """PEFT loads such an embedding into the base, of which a tied head is a part."""
    base = save_base(tmp_path / "base", "llama-tied", FP32)
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors["base_model.model.model.embed_tokens.weight"] = read_tensors(base)["model.embed_tokens.weight"] + 1
    save_file(tensors, adapter / "adapter_model.safetensors")
    report = merge_checkpoint(adapter, tmp_path / "out", base)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert find_differences(loaded, merge_with_peft(base, adapter, FP32)) == [] and not report.is_untied


def merge_untied(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    loaded = AutoModelForCausalLM.from_pretrained(base)
    loaded.config.tie_word_embeddings = False
    loaded.lm_head.weight = torch.nn.Parameter(loaded.lm_head.weight.detach().clone())
    return PeftModel.from_pretrained(loaded, adapter).merge_and_unload().state_dict()


@pytest.mark.parametrize(
    "options",
    (
        {"target_modules": ["embed_tokens"]},
        slow({"target_modules": ["lm_head", "q_proj"]}),
        slow({"target_modules": ["embed_tokens", "lm_head"]}),
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        slow({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    ),
    ids=("embedding", "head", "both", "saved-head", "saved-embedding"),
)
def test_an_adapter_on_one_of_two_tied_weights_unties_them(tmp_path, caplog, options):
    """PEFT's merge in place changes the other weight too: the merged model is not the trained one."""
    base = save_base(tmp_path / "base", "llama-tied", FP32)
    adapter = save_adapter(tmp_path / "adapter", base, **options)
    with caplog.at_level(logging.WARNING):
        report = merge_checkpoint(adapter, tmp_path / "out", base)
    assert report.is_untied and "tie_word_embeddings: false" in caplog.text
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert read_tensors(tmp_path / "out").keys() == read_tensors(base).keys() | {"lm_head.weight"}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert find_differences(loaded.state_dict(), merge_untied(base, adapter)) == []
    trained = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    torch.testing.assert_close(loaded(**make_batch()).logits, trained(**make_batch()).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    (
        slow(
            {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}
        ),
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "ensure_weight_tying": True},
        slow({"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]}),
        {"target_modules": ["q_proj"]},
    ),
    ids=("saved", "LoRA", "tokens", "untouched"),
)
def test_weights_that_stay_equal_stay_tied(tmp_path, options):
    """A merged model with one weight stored twice, or counted twice, or without its tie."""
    base = save_base(tmp_path / "base", "llama-tied", FP32)
    adapter = save_adapter(tmp_path / "adapter", base, **options)
    report = merge_checkpoint(adapter, tmp_path / "out", base)
    assert not report.is_untied and read_tensors(tmp_path / "out").keys() == read_tensors(base).keys()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    trained = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    torch.testing.assert_close(loaded(**make_batch()).logits, trained(**make_batch()).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("difference, is_untied", ((1e-4, False), (0.5, True)))
def test_rounding_does_not_untie_what_is_meant_to_be_tied(tmp_path, monkeypatch, difference, is_untied):
    """On some devices the embedding's and the head's one product are added up in another order."""
    base = save_base(tmp_path / "base", "llama-tied", FP32)
    options = {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}
    adapter = save_adapter(tmp_path / "adapter", base, **options)

    def merge_target(model, target, read):
        merged = original(model, target, read)
        return {name: value + difference * (target.path == "lm_head") for name, value in merged.items()}

    original = merger.merge_target
    monkeypatch.setattr(merger, "merge_target", merge_target)
    assert merge_checkpoint(adapter, tmp_path / "out", base).is_untied is is_untied


@pytest.mark.parametrize("num_labels", (1, slow(2)))
def test_a_sequence_classifier_merges_with_its_new_head(tmp_path, num_labels):
    """The head is in the adapter alone, and the base's LM head has no place in the model."""
    base = save_base(tmp_path / "base", "llama")
    model = AutoModelForSequenceClassification.from_pretrained(base, dtype=FP32, num_labels=num_labels)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS")
    model = get_peft_model(model, lora)
    disturb(model)
    model.save_pretrained(tmp_path / "adapter")
    merge_checkpoint(tmp_path / "adapter", tmp_path / "out", base)
    merged, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert merged.config.architectures == ["LlamaForSequenceClassification"]
    plain = AutoModelForSequenceClassification.from_pretrained(base, dtype=BF16, num_labels=num_labels)
    expected = PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload().state_dict()
    assert find_differences(merged.state_dict(), expected) == []


def test_tokenizer_and_configs_come_along(tmp_path):
    """A merged folder that cannot be served as it lies there."""
    base = save_base(tmp_path / "base", "llama", FP32)
    (base / "modeling_own.py").write_text("# code")
    config = json.loads((base / "config.json").read_text()) | {"known_to_nobody": 7, "torch_dtype": "float32"}
    (base / "config.json").write_text(json.dumps(config))
    (base / "merges.txt").write_text("of the base's tokenizer")
    adapter = save_adapter(tmp_path / "adapter", base, target_modules=["q_proj"])
    merge_checkpoint(adapter, tmp_path / "plain", base)
    assert AutoTokenizer.from_pretrained(tmp_path / "plain").chat_template == "base"
    make_tokenizer(template="adapter").save_pretrained(adapter)
    merge_checkpoint(adapter, tmp_path / "out", base, dtype=BF16)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == "adapter"
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (made["dtype"], made["known_to_nobody"], "torch_dtype" in made) == ("bfloat16", 7, False)
    assert {"generation_config.json", "modeling_own.py"} <= {file.name for file in (tmp_path / "out").iterdir()}
    assert not any("adapter" in file.name or file.name == "merges.txt" for file in (tmp_path / "out").iterdir())


def fail_on(rank_to_fail: int, rank: int, error: BaseException) -> None:
    original = writing.TensorWriter.write

    def write(self, key, begin, values):
        if rank == rank_to_fail and "layers.0" in key:
            raise error
        original(self, key, begin, values)

    writing.TensorWriter.write = write


def check_failure(rank: int, adapter: str, out: str, base: str) -> str:
    fail_on(1, rank, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(CheckpointError) as caught:
        merge_checkpoint(Path(adapter), Path(out), Path(base))
    return str(caught.value)


def test_a_rank_that_fails_ends_all_and_leaves_nothing(tmp_path):
    """Ranks that wait for one that has failed; `rank 1 failed` in place of what the disk has refused; half a model."""
    base = save_base(tmp_path / "base", "llama")
    adapter = save_adapter(tmp_path / "adapter", base)
    before = {file: file.read_bytes() for file in adapter.iterdir()}
    messages = run_ranks(check_failure, 2, str(adapter), str(tmp_path / "out"), str(base))
    assert all(os.strerror(errno.ENOSPC) in message and "\n" not in message for message in messages)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
    assert before == {file: file.read_bytes() for file in adapter.iterdir()}


@pytest.mark.parametrize("error", (KeyboardInterrupt(), RuntimeError("a bug")), ids=("ctrl-c", "bug"))
def test_an_interrupted_merge_leaves_nothing(tmp_path, monkeypatch, error):
    """Litter beside the target after Ctrl-C."""
    base = save_base(tmp_path / "base", "llama")
    adapter = save_adapter(tmp_path / "adapter", base)
    monkeypatch.setattr(writing.TensorWriter, "write", writing.TensorWriter.write)  # put back afterward
    fail_on(0, 0, error)
    with pytest.raises(type(error)):
        merge_checkpoint(adapter, tmp_path / "new" / "deep" / "out", base)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def merge_slowly(folder: Path, how: str, is_writing: Event, store: Path, rank: int) -> None:
    """Merge, and stop in the middle: in a process of its own."""
    PartialState._reset_state()
    if how == "rank":
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    original = writing.TensorWriter.write

    def write(self, key, begin, values):
        original(self, key, begin, values)
        if how == "wait" and "layers.1" in key or how == "rank" and rank == 1:
            is_writing.set()
            time.sleep(60)

    writing.TensorWriter.write = write
    merge_checkpoint(folder / "adapter", folder / "out", folder / "base")


def start(tmp_path: Path, how: str, rank: int = 0) -> tuple[multiprocessing.Process, Event]:
    """Return a forked process that merges, and what is set when it stands still."""
    context: Any = multiprocessing.get_context("fork")
    is_writing = context.Event()
    store = tmp_path / "adapter" / "store"
    process = context.Process(target=merge_slowly, args=(tmp_path, how, is_writing, store, rank), daemon=True)
    process.start()
    return process, is_writing


def prepare(tmp_path: Path) -> None:
    save_base(tmp_path / "base", "llama", max_shard_size="1GB")
    save_adapter(tmp_path / "adapter", tmp_path / "base")


def names_in(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir())


def test_sigterm_leaves_nothing(tmp_path):
    """Job schedulers send SIGTERM, which ends Python without any finally."""
    prepare(tmp_path)
    process, is_writing = start(tmp_path, "wait")
    assert is_writing.wait(60)
    process.terminate()
    process.join(timeout=60)
    assert process.exitcode == 128 + signal.SIGTERM
    assert names_in(tmp_path) == ["adapter", "base"]


def test_ranks_that_survive_a_killed_one_leave_nothing(tmp_path):
    """A rank that waits for ever for one that is gone, or leaves the folder that they shared."""
    prepare(tmp_path)
    (first, _), (second, is_writing) = (start(tmp_path, "rank", rank) for rank in range(2))
    try:
        assert is_writing.wait(60)
        second.kill()
        first.join(timeout=60)
        assert first.exitcode not in (0, None)
    finally:
        for process in (first, second):
            process.kill()
            process.join()
    assert names_in(tmp_path) == ["adapter", "base"]


def test_what_a_killed_merge_left_is_removed_by_the_next(tmp_path):
    """Nobody can clean up after SIGKILL but the next one to come."""
    prepare(tmp_path)
    process, is_writing = start(tmp_path, "wait")
    assert is_writing.wait(60)
    process.kill()
    process.join()
    assert not (tmp_path / "out").exists() and len(list_partials(tmp_path / "out")) == 1
    (tmp_path / "out").mkdir()  # an empty folder is no reason to stop
    merge_checkpoint(tmp_path / "adapter", tmp_path / "out", tmp_path / "base")
    assert names_in(tmp_path) == ["adapter", "base", "out"] and (tmp_path / "out" / "model.safetensors").is_file()


def test_a_target_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch):
    """Hours of work, then no place to put it; or somebody's files overwritten.

    A container's volume is a mount point, to which nothing can be renamed.
    """
    monkeypatch.setattr(merger, "read_config", lambda folder: pytest.fail("work began"))
    for name in ("out", "mounted"):
        (tmp_path / name).mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "mounted")
    for name in ("out", "file", "mounted"):
        with pytest.raises(ConfigError) as error:
            merge_checkpoint(tmp_path / "adapter", tmp_path / name, tmp_path / "base")
        assert error.value.where == tmp_path / name
    assert (tmp_path / "out" / "precious").read_text() == "x"


def test_what_peft_cannot_merge_is_refused_before_anything_is_written(tmp_path):
    """An error after an hour; a merge that leaves out what it does not understand."""
    base = save_base(tmp_path / "base", "llama", FP32)
    loaded = AutoModelForCausalLM.from_pretrained(base)
    prompt = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    get_peft_model(loaded, prompt).save_pretrained(tmp_path / "prompt")
    adapters = {"PROMPT_TUNING": tmp_path / "prompt"}
    adapters["no bias"] = save_adapter(tmp_path / "biased", base, target_modules=["q_proj"], lora_bias=True)
    adapters["rewrites the base"] = save_adapter(tmp_path / "pissa", base, target_modules=["q_proj"])
    config = json.loads((tmp_path / "pissa" / "adapter_config.json").read_text())
    (tmp_path / "pissa" / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": "pissa"}))
    for reason, adapter in adapters.items():
        with pytest.raises(LorashardError, match=reason) as caught:
            merge_checkpoint(adapter, tmp_path / "out", base)
        assert isinstance(caught.value, ConfigError) and "\n" not in str(caught.value)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def measure_merge(rank: int, small: Path, large: Path) -> int:
    """Return the bytes that merging the large one takes at its peak."""
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: what is freed leaves the process at once
    merge_checkpoint(small / "adapter", small / "out", small / "base")  # caches
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = read_status_bytes("VmRSS")
    merge_checkpoint(large / "adapter", large / "out", large / "base", max_shard_size="32MB")
    return read_status_bytes("VmHWM") - before


@pytest.mark.slow
def test_merging_holds_a_small_part_of_the_model(tmp_path):
    """A merge that holds the model, a file of it, or all that it has merged so far, cannot merge a larger one."""
    save_base(tmp_path / "small" / "base", "llama")
    save_adapter(tmp_path / "small" / "adapter", tmp_path / "small" / "base")
    large = tmp_path / "large"
    sizes = dict(hidden_size=512, intermediate_size=2048, vocab_size=2048, num_hidden_layers=18)
    model = build_base("llama", BF16, **sizes)
    model.save_pretrained(large / "base", max_shard_size="32MB")
    model_bytes = sum(p.numel() * 2 for p in model.parameters())
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(model, lora).save_pretrained(large / "adapter")
    unit_bytes = max(sum(p.numel() * 2 for p in layer.parameters()) for layer in model.base_model.layers)
    del model
    (grown,) = run_ranks(measure_merge, 1, tmp_path / "small", large)
    allowed = 2 * unit_bytes + 20 * 2**20
    assert grown < allowed < model_bytes / 3, f"{grown / 2**20:.0f} MiB of {model_bytes / 2**20:.0f}"


def check_live(rank: int, cases: list[tuple[str, str, str, str]], folder: str) -> list[str]:
    problems = []
    for number, (base, adapter, how, placement) in enumerate(cases):
        out = Path(folder, f"live-{number}")
        if how == "load":
            model = lorashard.load_adapter(adapter, base, placement, dtype=BF16)
        else:
            plain = AutoModelForCausalLM.from_pretrained(base, dtype=BF16)
            model = lorashard.shard(PeftModel.from_pretrained(plain, adapter), placement)
        before = model(**make_batch()).logits
        report = lorashard.merge(model, out, max_shard_size="30KB")
        if not torch.equal(model(**make_batch()).logits, before):
            problems.append(f"{how}, {placement}: the live model has changed")
        if rank == 0:
            loaded = AutoModelForCausalLM.from_pretrained(out).state_dict()
            if report.is_untied:
                wrong = find_differences(loaded, merge_untied(Path(base), Path(adapter)))
            else:
                wrong = find_differences(loaded, merge_with_peft(Path(base), Path(adapter), BF16))
            added = {"lm_head.weight"} if report.is_untied else set()
            wrong += sorted(read_tensors(out).keys() ^ (read_tensors(Path(base)).keys() | added))
            problems += [f"{how}, {placement}: {name}" for name in wrong]
    return problems


LIVE = {
    "LoRA": (("load", "shard"), ("load", "file"), ("shard", "host"), ("shard", "replicate")),
    "LoRA, tied": (("shard", "shard"),),
    "modules_to_save": (("shard", "shard"),),
    "mixtral experts": (("shard", "shard"),),
    "embedding, tied": (("load", "shard"),),
}


def test_a_live_model_merges_under_every_placement_and_stays_as_it_is(tmp_path):
    """A live model that is changed; an adapter saved without a part of it; files that are called another base.

    And two ranks that share the work: a tensor that no rank writes stays zero.
    """
    cases = []
    for name, ways in LIVE.items():
        family, options = (CASES | {"embedding, tied": ("llama-tied", {"target_modules": ["embed_tokens"]})})[name]
        base = save_base(tmp_path / name / "base", family)
        adapter = save_adapter(tmp_path / name / "adapter", base, **options)
        cases += [(str(base), str(adapter), *way) for way in ways]
    assert run_ranks(check_live, 2, cases, str(tmp_path)) == [[], []]


def check_other_base(rank: int, base: str, folder: str) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    for number, name in enumerate(("layers.1.mlp.up_proj", "embed_tokens")):
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=BF16)
        torch.manual_seed(0)
        if number:
            plain.resize_token_embeddings(plain.config.vocab_size + 3)
        else:
            plain.get_submodule(f"model.{name}").weight.data[-1, -1] += 1
        own = f"{folder}/{name}"
        plain.save_pretrained(own)  # which rank 0 alone does
        torch.distributed.barrier()
        model = lorashard.shard(get_peft_model(plain, lora), "shard")
        with pytest.raises(LorashardError, match=name):
            lorashard.merge(model, f"{folder}/out")
        lorashard.merge(model, f"{folder}/out-{number}", own)
        if rank == 0:
            merged = AutoModelForCausalLM.from_pretrained(f"{folder}/out-{number}").state_dict()
            assert find_differences(merged, AutoModelForCausalLM.from_pretrained(own).state_dict()) == []
    model = lorashard.shard(get_peft_model(build_base("llama"), lora), "shard")
    with pytest.raises(ConfigError, match="--base"):
        lorashard.merge(model, f"{folder}/out")


def test_a_live_base_that_is_not_in_the_files_is_refused(tmp_path):
    """The adapter merged into weights that are not the model's: those of the files, before a script changed them."""
    base = save_base(tmp_path / "base", "llama")
    run_ranks(check_other_base, 2, str(base), str(tmp_path))
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_sharded_is_refused(tmp_path):
    """A KeyError for what looks like a right call."""
    model = get_peft_model(build_base("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="merge_and_unload"):
        lorashard.merge(model, tmp_path / "out")
