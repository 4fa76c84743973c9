"""An adapter of a quantized base on ranks: it answers, merges and verifies as plain transformers and PEFT have it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cases import slow
from helpers.forked_ranks import run_ranks
from helpers.tiny import build_base, disturb, find_differences
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import lorashard
from lorashard.config.use_options import VerifyOptions
from lorashard.diagnostics.verify import verify
from lorashard.errors import VerificationError
from lorashard.runtime.output import RESULT_FILE_VARIABLE

functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is the reference")

CPU, BF16 = torch.device("cpu"), torch.bfloat16


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """A base, its copy with weights that were quantized to nf4 and back, and an adapter of the quantized base."""
    transformers_logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("task")
    # bitsandbytes' CPU kernel is wrong where a row is shorter than a block of 64.
    model = build_base("llama", BF16, num_hidden_layers=2, hidden_size=64, intermediate_size=128)
    model.save_pretrained(folder / "base")
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            packed = functional.quantize_4bit(module.weight.data, quant_type="nf4")
            module.weight.data = functional.dequantize_4bit(*packed)
    model.save_pretrained(folder / "dequantized")
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    made = lorashard.load(str(folder / "base"), config, "replicate", dtype=BF16, device=CPU, quantization="nf4")
    disturb(made)
    made.save_pretrained(folder / "adapter")
    return folder


def load_reference(task: Path) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(task / "dequantized", dtype=BF16)
    return PeftModel.from_pretrained(base, task / "adapter").eval()


@pytest.mark.parametrize(
    "world_size, placements",
    ((2, ("shard", "file")), slow(2, ("auto", "host")), slow(1, ("auto", "replicate", "file"))),
)
def test_an_adapter_answers_and_merges_as_it_was_trained(task, tmp_path, world_size, placements):
    """Catches an unquantized base where the adapter was trained on a quantized one, and ranks that each write half."""
    ids = torch.tensor([[5, 6, 7], [1, 2, 3]])
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, pad_token_id=0)
    reference = load_reference(task)
    expected = reference.generate(input_ids=ids, eos_token_id=None, **options)

    def body(rank):
        for placement in placements:
            model = lorashard.load_adapter(task / "adapter", placement=placement, dtype=BF16, device=CPU)
            found = model.generate(input_ids=ids, eos_token_id=None, **options)
            assert torch.equal(found, expected), placement
        return lorashard.merge(task / "adapter", tmp_path / "merged").num_dequantized

    assert run_ranks(body, world_size) == [14] * world_size
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert find_differences(merged, reference.merge_and_unload().state_dict()) == []


def verify_here(result: Path, *words: object) -> Any:
    """Return what was found on this rank, or what was wrong."""
    os.environ[RESULT_FILE_VARIABLE] = str(result)
    try:
        verify(VerifyOptions.read([*map(str, words), "--json"]))
    except VerificationError as error:
        return str(error)
    finally:
        del os.environ[RESULT_FILE_VARIABLE]
    return json.loads(result.read_text()) if result.exists() else {}


def test_verifying_knows_the_quantized_base(task, tmp_path):
    """A merged model that is compared with the base as its files have it."""
    lorashard.merge(task / "adapter", tmp_path / "merged")
    lorashard.merge(task / "adapter", tmp_path / "original", quantization="none")

    def verify_merged(name, *words):
        words = ["--dtype", "float32", "--merged", tmp_path / name, *words]
        return verify_here(tmp_path / "result", task / "adapter", *words)

    merged, original = verify_merged("merged"), verify_merged("original")
    as_advised = verify_merged("original", "--quantization", "none")
    assert merged["checks"]["merged logits"]["difference_from_adapter"] < 0.01
    assert "merged logits" in original and "--quantization none" in original
    assert as_advised["checks"]["merged logits"]["difference_from_adapter"] < 0.01


@pytest.mark.slow
def test_gradients_are_verified_on_the_quantized_base(task, tmp_path):
    """A reference on the base as its files have it differs in each gradient."""

    def body(rank):
        words = ["--model", task / "base", "--quantization", "nf4", "--dtype", "bfloat16"]
        return verify_here(tmp_path / f"result-{rank}", *words)

    gradients = run_ranks(body, 2)[0]
    assert gradients["is_right"] and "nf4" in gradients["checks"]["model"]["verdict"]
