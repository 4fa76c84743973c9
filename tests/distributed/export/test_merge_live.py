"""A sharded model in memory, merged: PEFT's own merge, bit for bit, and the model stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.forked_ranks import run_ranks
from helpers.merging import (
    merge_untied,
    merge_with_peft,
    read_tensors,
    save_adapter,
    save_base,
)
from helpers.tiny import build_base, find_differences, make_batch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import lorashard
from lorashard.errors import ConfigError, LorashardError

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _quiet():
    transformers_logging.disable_progress_bar()


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
    "LoRA": ("llama", {}, (("load", "shard"), ("load", "file"), ("shard", "host"), ("shard", "replicate"))),
    "tied": ("llama-tied", {}, (("shard", "shard"),)),
    "modules_to_save": (
        "llama",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        (("shard", "shard"),),
    ),
    "experts": (
        "mixtral",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
        (("shard", "shard"),),
    ),
    "embedding, tied": ("llama-tied", {"target_modules": ["embed_tokens"]}, (("load", "shard"),)),
}


def test_a_live_model_merges_under_every_placement_and_stays_as_it_is(tmp_path):
    """A live model that is changed; an adapter saved without a part of it; files that are called another base.

    And two ranks that share the work: a tensor that no rank writes stays zero.
    """
    cases = []
    for name, (family, options, ways) in LIVE.items():
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
