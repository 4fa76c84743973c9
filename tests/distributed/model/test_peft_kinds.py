"""Every kind of adapter that PEFT has, and LoRA's options: equal to plain PEFT or refused, as docs/peft.md says."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers.forked_ranks import run_ranks
from helpers.paths import ROOT
from helpers.tiny import build_base, find_differences, make_batch
from peft import PeftConfig, PeftModel, PeftType, get_peft_model, initialize_lora_eva_weights
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.lora import config as lora_config
from transformers import AutoModelForCausalLM

import lorashard
from lorashard.errors import ConfigError

CPU_BUDGET_S = 90  # all of PEFT's kinds, in three ways each
Results = dict[str, torch.Tensor]
DOCUMENT = ROOT / "docs/peft.md"
WORKS = "equal"
# How an adapter comes to a sharded base: the table's columns, where the base rests, and on how many ranks.
WAYS = {"load": ("shard", 2), "shard": ("shard", 2), "load from files": ("file", 1)}
TARGETS = ["q_proj", "v_proj"]
TASK_IDS = {"task_ids": torch.tensor([0, 1])}


@dataclass(frozen=True)
class Case:
    """An adapter to try.

    Attributes:
        options: of its config, beside the usual ones.
        inputs: what its forward needs beside the tokens.
        prepare: what is done with the model when the adapter is on it.
        needs: a package without which PEFT cannot make it.
        draws_ahead: it draws the noise of its forwards when it is made, which each rank may do for itself.
        is_fast: whether it is tried in every run of the tests.
    """

    kind: str = "LORA"
    options: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    prepare: Callable[[PeftModel], object] | None = None
    needs: str | None = None
    draws_ahead: bool = False
    is_fast: bool = False

    def make_config(self) -> PeftConfig:
        cls = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(self.kind)]
        names = {field.name for field in dataclasses.fields(cls)}
        usual = {"task_type": "CAUSAL_LM"} | ({"target_modules": TARGETS} if "target_modules" in names else {})
        return cls(**usual | self.options)


def _initialize_eva(model: PeftModel) -> None:
    batches = [make_batch(seed=seed) for seed in range(3)]
    # Gathered, the ranks' inputs would be another data set than that of the one process to compare with.
    initialize_lora_eva_weights(model, batches, gather_distributed_inputs=False, show_progress_bar=False)


def _list_lora_cases() -> Iterator[tuple[str, Case]]:
    options: dict[str, dict[str, Any]] = {
        "": {},
        "use_rslora": {"use_rslora": True},
        "use_dora": {"use_dora": True},
        "init_lora_weights: gaussian, orthogonal, false": {"init_lora_weights": "orthogonal"},
        "init_lora_weights: pissa, olora": {"init_lora_weights": "pissa"},
        "kasa_config": {"kasa_config": lora_config.KasaConfig()},
        "on embed_tokens": {"target_modules": ["q_proj", "embed_tokens"]},
        "on lm_head": {"target_modules": ["q_proj", "lm_head"]},
        "modules_to_save": {"modules_to_save": ["embed_tokens", "lm_head", "input_layernorm"]},
        "trainable_token_indices": {"trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [1, 2]}},
        "target_parameters": {"target_modules": [], "target_parameters": ["q_proj.weight"]},
        "layers_to_transform": {"layers_to_transform": [1, 2]},
        "layer_replication": {"layer_replication": [[0, 2], [1, 3]]},
        "rank_pattern, alpha_pattern": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}},
        "exclude_modules": {"exclude_modules": ["layers.0.self_attn.q_proj"]},
        "bias": {"bias": "all"},
        "lora_bias": {"lora_bias": True},
        "alora_invocation_tokens": {"alora_invocation_tokens": [5, 6]},
        "use_qalora": {"use_qalora": True, "qalora_group_size": 4},
        "use_bdlora": {
            "use_bdlora": lora_config.BdLoraConfig(
                target_modules_bd_a=["q_proj"], target_modules_bd_b=["v_proj"], nblocks=2
            )
        },
        "velora_config": {"velora_config": lora_config.VeloraConfig(num_groups=4)},
        "monteclora_config": {"monteclora_config": lora_config.MontecloraConfig()},
        "arrow_config": {"arrow_config": lora_config.ArrowConfig()},
    }
    fast = ("use_rslora", "use_dora", "init_lora_weights: pissa, olora", "on lm_head", "modules_to_save", "kasa_config")
    for label, given in options.items():
        draws_ahead = label == "monteclora_config"
        yield f"LORA {label}".strip(), Case(options=given, draws_ahead=draws_ahead, is_fast=label in fast)
    eva = {"init_lora_weights": "eva", "r": 2, "eva_config": lora_config.EvaConfig(rho=1.0)}
    yield "LORA init_lora_weights: eva", Case(options=eva, prepare=_initialize_eva)


CASES = dict(_list_lora_cases()) | {
    "ADALORA": Case("ADALORA", {"total_step": 10, "tinit": 1, "tfinal": 2}),
    "ADAMSS": Case("ADAMSS", needs="sklearn"),
    "ADAPTION_PROMPT": Case("ADAPTION_PROMPT", {"adapter_len": 4, "adapter_layers": 2, "target_modules": None}),
    "BEFT": Case("BEFT"),
    "BOFT": Case("BOFT", {"boft_block_size": 4}),
    "C3A": Case("C3A", {"block_size": 16}),
    "CARTRIDGE": Case("CARTRIDGE", {"num_virtual_tokens": 4}),
    "CPT": Case("CPT", {"cpt_token_ids": [1, 2, 3], "cpt_tokens_type_mask": [1, 2, 3], "num_virtual_tokens": 3}),
    "DEFT": Case("DEFT"),
    "DELORA": Case("DELORA"),
    "FOURIERFT": Case("FOURIERFT", {"n_frequency": 20}),
    "FROD": Case("FROD"),
    "GLORA": Case("GLORA"),
    "GRALORA": Case("GRALORA"),
    "HIRA": Case("HIRA"),
    "HRA": Case("HRA", {"r": 4}),
    "IA3": Case("IA3", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}, is_fast=True),
    "LILY": Case("LILY"),
    "LN_TUNING": Case("LN_TUNING", {"target_modules": ["input_layernorm"]}),
    "LOHA": Case("LOHA"),
    "LOKR": Case("LOKR"),
    "MISS": Case("MISS", {"r": 4}),
    "MULTITASK_PROMPT_TUNING": Case("MULTITASK_PROMPT_TUNING", {"num_virtual_tokens": 4, "num_tasks": 2}, TASK_IDS),
    "OFT": Case("OFT", {"oft_block_size": 4, "r": 0}),
    "OSF": Case("OSF"),
    "PEANUT": Case("PEANUT"),
    "POLY": Case("POLY", {"r": 4, "n_tasks": 2, "n_skills": 2}, TASK_IDS),
    "PREFIX_TUNING": Case("PREFIX_TUNING", {"num_virtual_tokens": 4}, is_fast=True),
    "PROMPT_TUNING": Case("PROMPT_TUNING", {"num_virtual_tokens": 4}),
    "PSOFT": Case("PSOFT", {"r": 4}),
    "PVERA": Case("PVERA", {"r": 8, "target_modules": ["q_proj", "o_proj"]}),
    "P_TUNING": Case("P_TUNING", {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
    "RANDLORA": Case("RANDLORA", {"r": 4, "target_modules": ["q_proj", "o_proj"]}),
    "ROAD": Case("ROAD", {"group_size": 8}),
    "SHADOW": Case("SHADOW", {"target_modules": None}, is_fast=True),
    "SHIRA": Case("SHIRA", {"r": 4}),
    "SUPERTUNING": Case("SUPERTUNING"),
    "TINYLORA": Case("TINYLORA"),
    "TRAINABLE_TOKENS": Case("TRAINABLE_TOKENS", {"target_modules": ["embed_tokens"], "token_indices": [1, 2]}),
    "UNILORA": Case("UNILORA"),
    "VBLORA": Case("VBLORA", {"num_vectors": 8, "vector_length": 16, "topk": 2}),
    "VERA": Case("VERA", {"r": 8, "target_modules": ["q_proj", "o_proj"]}, is_fast=True),
    "WAVEFT": Case("WAVEFT", {"n_frequency": 20}),
    "XLORA": Case("XLORA", {"hidden_size": 32, "adapters": {"0": "nowhere"}}),
}


def train(model: PeftModel, case: Case) -> Results:
    """Return gradients and losses of two steps, and logits with the adapter on and off."""
    if case.prepare is not None:
        case.prepare(model)
    torch.manual_seed(2)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for parameter in trained.values():  # many begin as zero
        parameter.data += 0.02 * torch.randn(parameter.shape).to(parameter.dtype)
    model.train()
    torch.manual_seed(3)
    found = {}
    for number in range(2):
        loss = model(**make_batch(seed=number), **case.inputs).loss
        loss.backward()
        found[f"loss {number}"] = loss.detach()
        for name, parameter in trained.items():
            if parameter.grad is not None:
                found[f"{name} {number}"] = parameter.grad.clone()
                parameter.data -= 0.1 * parameter.grad
                parameter.grad = None
    assert len(found) > 2
    model.eval()
    ids = make_batch()["input_ids"]
    with torch.no_grad():
        found["on"] = model(input_ids=ids, **case.inputs).logits
        if case.kind not in ("POLY", "MULTITASK_PROMPT_TUNING"):  # PEFT's base does not know task_ids
            with model.disable_adapter():
                found["off"] = model(input_ids=ids).logits
    return {name: tensor.nan_to_num(12345.0) for name, tensor in found.items()}


def put_on_plain_base(folder: str, case: Case) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return get_peft_model(base, case.make_config())


def try_cases(rank: int, folder: str, way: str, labels: list[str], expected: dict[str, Results]) -> dict[str, str]:
    """Return the verdict on each case: WORKS, what differs, or why it is refused."""
    verdicts = {}
    for label in labels:
        case = CASES[label]
        torch.manual_seed(7 if case.draws_ahead else 7 + rank)  # ranks that draw other values must end with rank 0's
        try:
            if way == "shard":
                model = lorashard.shard(put_on_plain_base(folder, case), WAYS[way][0])
            else:
                model = lorashard.load(folder, case.make_config(), WAYS[way][0], dtype=torch.float32)
        except ConfigError as error:
            verdicts[label] = f"refused: {error}"
            continue
        different = find_differences(train(model, case), expected[label])
        verdicts[label] = f"differs in {different[:3]}" if different else WORKS
    return verdicts


def read_table() -> dict[str, dict[str, str]]:
    """Return the verdicts that the document gives, by label and column."""
    rows = re.findall(r"^\| (`.+?`) \| (.+?) \| (.+?) \|", DOCUMENT.read_text(), re.MULTILINE)
    return {
        label: {"load": load, "shard": shard, "load from files": load}
        for labels, load, shard in rows
        for label in re.findall("`(.+?)`", labels)
    }


def test_the_table_lists_every_kind():
    """A kind that a new PEFT brings must be tested before the document says that it works."""
    installed = {kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING}
    assert installed <= {case.kind for case in CASES.values()}
    assert sorted(read_table()) == sorted(CASES)


@pytest.mark.parametrize(
    ("way", "is_full"),
    [("load", False), *(pytest.param(way, True, marks=pytest.mark.slow) for way in WAYS)],
)
def test_each_kind_equals_plain_peft_or_is_refused(tmp_path, way, is_full):
    """Users rely on the table; a wrong gradient shows in no loss curve."""
    build_base(num_hidden_layers=3).save_pretrained(tmp_path)
    table = read_table()
    installed = {kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING}
    labels, expected = [], {}
    for label, case in CASES.items():
        is_there = case.kind in installed and (case.needs is None or importlib.util.find_spec(case.needs))
        if way == "shard" and case.kind == "XLORA":
            continue  # PEFT makes it from adapters that are saved
        if not is_there or not (is_full or case.is_fast) or table[label][way].startswith("not tried"):
            continue
        labels.append(label)
        if not table[label][way].startswith("refused"):
            torch.manual_seed(7)
            expected[label] = train(put_on_plain_base(str(tmp_path), case), case)
    for verdicts in run_ranks(try_cases, WAYS[way][1], str(tmp_path), way, labels, expected):
        for label, found in verdicts.items():
            stated = table[label][way].removeprefix("refused: ")
            assert found.startswith(WORKS) == (stated == WORKS) and stated in found, f"{label}: {found}"
