"""Every family of the table in docs/models.md, sharded on 2 ranks, against plain transformers and PEFT.

`python tests/distributed/model/test_families.py` writes the table.
"""

from __future__ import annotations

import os
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import conftest  # noqa: F401

import pytest
import torch
import torch.distributed as dist
from helpers.families import FAMILIES, OTHERS, Family, load_plain, make_config, make_inputs, save_family
from helpers.forked_ranks import run_ranks
from helpers.odd import OddConfig, OddForCausalLM, register_odd
from helpers.paths import ROOT
from helpers.tiny import fill_adapter, find_differences, make_batch, take_gradients
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging
from trl.trainer.utils import add_fused_lm_head

import lorashard
from lorashard.model.units import LAYER

CPU_BUDGET_S = 400  # 64 models of their own classes in bfloat16, plain and on two ranks
DOCUMENT = ROOT / "docs/models.md"
BEGIN, END = "<!-- {}: written by tests/distributed/model/test_families.py -->\n", "\n<!-- end of {} -->"
QUICK = ("GPT-2", "Mixtral", "Qwen2.5-VL")
# What is compared, by the columns of the tables.
COLUMNS = ("logits", "gradients", "with activation checkpointing", "TRL's fused LM head", "generate")
# transformers draws random numbers of its own while it loads these, so a seed gives their adapters other numbers.
DRAWING = ("Falcon Mamba", "Mamba", "Mamba 2", "Qwen3-Next", "RecurrentGemma", "Zamba 2")

Results = dict[str, dict[str, torch.Tensor]]


def make_lora(family: Family) -> LoraConfig:
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return LoraConfig(**options | family.lora)


def build_plain(family: Family, folder: Path) -> PeftModel:
    base = load_plain(folder, torch.bfloat16)
    torch.manual_seed(7)
    return get_peft_model(base, make_lora(family))


def build_sharded(family: Family, folder: Path) -> PeftModel:
    torch.manual_seed(7)
    return lorashard.load(str(folder), make_lora(family), dtype=torch.bfloat16)


def run(family: Family, build: Callable[[Family, Path], PeftModel], folder: Path) -> Results:
    """Return what the model gives, by column, and how it was made."""
    model = build(family, folder)
    made = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
    results: Results = {"made": {} if family.name in DRAWING else made}
    results["made"] |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    fill_adapter(model)
    batches = [make_inputs(family, has_images) for has_images in ((True, False) if family.is_vision else (False,))]
    results["logits"], results["gradients"] = {}, {}
    for index, batch in enumerate(batches):
        output = model(**batch)
        results["logits"][str(index)] = output.logits.detach()
        gradients = differentiate(model, output.loss)
        results["gradients"] |= {f"batch {index}: {name}": gradient for name, gradient in gradients.items()}
    results["generate"] = {"tokens": generate(model, batches[0])}
    results["with activation checkpointing"] = take_checkpointed_gradients(model, batches[0])
    if family.has_fused_head:
        add_fused_lm_head(model.get_base_model())
        loss = -model(**batches[0], fused_lm_head=True).log_probs.sum()
        results["TRL's fused LM head"] = differentiate(model, loss)
    return results


def differentiate(model: PeftModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return every gradient of the adapter; some modules of some models are never called."""
    loss.backward()
    return take_gradients(model, needs_all=False)


def take_checkpointed_gradients(model: PeftModel, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    base = model.get_base_model()
    if not base.supports_gradient_checkpointing:
        return {}
    base.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()  # as trainers do
    gradients = differentiate(model, model(**batch, use_cache=False).loss)
    base.gradient_checkpointing_disable()
    return gradients


def generate(model: PeftModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    model.eval()
    prompts = {name: value for name, value in batch.items() if name != "labels"}
    tokens = model.generate(**prompts, max_new_tokens=3, do_sample=False)
    model.train()
    return tokens


def compare_on_rank(rank: int, folder: Path, expected: dict[str, Results]) -> dict[str, dict[str, str]]:
    """Return what came out for each family, by column."""
    outcomes = {}
    for family in (family for family in (*FAMILIES, *OTHERS) if family.name in expected):
        found = run(family, build_sharded, folder / family.name)
        outcomes[family.name] = {
            column: describe(found.get(column, {}), expected[family.name].get(column, {}))
            for column in ("made", *COLUMNS)
        }
    return outcomes


def describe(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> str:
    wrong = find_differences(found, expected)
    if wrong:
        return f"{len(wrong)} of {len(expected)} differ, such as {wrong[0]}"
    if not expected:
        return "-"
    return "equal" if len(expected) < 4 else f"{len(expected)} equal"


def compare(families: Iterable[Family], folder: Path) -> dict[str, dict[str, str]]:
    """Return what came out for each family on 2 ranks, by column; the plain models run before there are ranks."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        expected = {
            family.name: run(family, build_plain, save_family(family, folder / family.name)) for family in families
        }
        outcomes, others = run_ranks(compare_on_rank, 2, folder, expected)
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()
    assert outcomes == others
    return outcomes


def list_differences(outcomes: dict[str, dict[str, str]]) -> list[str]:
    return [f"{name}: {column}: {o}" for name, row in outcomes.items() for column, o in row.items() if "differ" in o]


def format_tables(outcomes: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return the table and the list of the document, by the name of its markers."""
    lines = [["family", "model type", "as in", "tied", "files", "adapter on", *COLUMNS]]
    lines.append(["---"] * len(lines[0]))
    for family in FAMILIES:
        config = make_config(family)
        cells = [family.name, f"`{config.model_type}`", f"`{family.hub_id}`"]
        cells += ["yes" if config.tie_word_embeddings else "no", family.stored or "as in the model", family.covers]
        lines.append([*cells, *(outcomes[family.name][column] for column in COLUMNS)])
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    others = ", ".join(_describe(family, outcomes[family.name]) for family in OTHERS) + "."
    return {"families": table, "other families": textwrap.fill(others, 150, break_on_hyphens=False)}


def _describe(family: Family, outcome: dict[str, str]) -> str:
    number = outcome["gradients"].removesuffix(" equal")
    unlike = [
        f"{column}: {outcome[column]}" for column in COLUMNS if outcome[column].removeprefix(f"{number} ") != "equal"
    ]
    return f"{family.name} ({', '.join([f'`{make_config(family).model_type}`', number, *unlike])})"


def find_table(text: str, name: str) -> tuple[int, int]:
    """Return where a table begins and ends."""
    begin = text.index(BEGIN.format(name)) + len(BEGIN.format(name))
    return begin, text.index(END.format(name))


def test_some_families_load_and_train_as_plain_ones(tmp_path):
    """Masks in the files, buffers in none, fused experts, two towers: what one of these has, most families have."""
    families = [family for family in (*FAMILIES, *OTHERS) if family.name in QUICK]
    assert list_differences(compare(families, tmp_path)) == []


def build_cases(folder: Path) -> list[tuple[str, dict, dict]]:
    """Return (folder of a base, options of its adapter, options of its placement) of what is named by its paths."""
    register_odd()
    cases = []
    for keeping, paths in (("attributes", ["block_*"]), ("pairs", None)):
        torch.manual_seed(0)
        OddForCausalLM(OddConfig(keeping)).save_pretrained(folder / keeping)
        for placement in ("shard", "file"):
            cases.append((str(folder / keeping), {}, {"placement": placement, "unit_paths": paths}))
    mixtral = next(family for family in FAMILIES if family.name == "Mixtral")
    save_family(mixtral, folder / "mixtral")
    parts = ["model.layers.*.self_attn", "model.layers.*.mlp"]
    for placement in ("shard", "file"):
        cases.append((str(folder / "mixtral"), mixtral.lora, {"placement": placement, "unit_paths": parts}))
    return cases


def train_once(model: PeftModel) -> dict[str, torch.Tensor]:
    output = fill_adapter(model)(**make_batch())
    gradients = differentiate(model, output.loss)
    base = model.get_base_model()
    if base.supports_gradient_checkpointing:
        gradients |= {f"again {n}": g for n, g in take_checkpointed_gradients(model, make_batch()).items()}
    return gradients | {"logits": output.logits.detach()}


def compare_named(rank: int, cases: list, expected: list, out: str) -> list[str]:
    register_odd()
    wrong = []
    for (base, lora, placement), results in zip(cases, expected, strict=True):
        options = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | lora
        model = lorashard.load(base, LoraConfig(**options), dtype=torch.float32, **placement)
        num_layers = sum(unit.size_class == LAYER for unit in lorashard.api.engine_of(model).units)
        assert num_layers == (6 if "mixtral" in base else 4)
        wrong += [f"{Path(base).name} {placement}: {name}" for name in find_differences(train_once(model), results)]
        if base == cases[0][0] and placement["placement"] == "shard":
            wrong += [f"merged: {name}" for name in compare_merged(rank, model, base, Path(out))]
    return wrong


def compare_merged(rank: int, model: PeftModel, base: str, out: Path) -> list[str]:
    """Save the adapter and merge it: neither knows how the units were named."""
    if rank == 0:
        model.save_pretrained(out / "adapter")
    dist.barrier()
    lorashard.merge(out / "adapter", out / "merged")
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out / "adapter").merge_and_unload()
    merged = AutoModelForCausalLM.from_pretrained(out / "merged")
    return find_differences(merged.state_dict(), plain.state_dict())


def test_units_that_are_named_change_no_bit(tmp_path):
    """Weights between the named modules, or on the model itself, read while sharded, or stale."""
    cases = build_cases(tmp_path)
    known: dict[str, dict[str, torch.Tensor]] = {}
    for base, lora, _ in cases:
        if base not in known:
            options = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | lora
            plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
            known[base] = train_once(get_peft_model(plain, LoraConfig(**options)))
    expected = [known[base] for base, _, _ in cases]
    assert run_ranks(compare_named, 2, cases, expected, str(tmp_path)) == [[], []]


@pytest.mark.slow
def test_the_table_of_families_is_what_comes_out(tmp_path):
    """A family that transformers changed, or that a change here broke, while the document still promises it."""
    outcomes = compare([*FAMILIES, *OTHERS], tmp_path)
    assert list_differences(outcomes) == []
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, table in format_tables(outcomes).items():
        begin, end = find_table(text, name)
        assert text[begin:end] == table, f"write it anew: python {os.path.relpath(__file__)}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        tables = format_tables(compare([*FAMILIES, *OTHERS], Path(name)))
    document = DOCUMENT.read_text(encoding="utf-8")
    for name, table in tables.items():
        begin, end = find_table(document, name)
        document = document[:begin] + table + document[end:]
    DOCUMENT.write_text(document, encoding="utf-8")
