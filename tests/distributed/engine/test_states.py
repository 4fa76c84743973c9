"""What accelerate's `save_state`, and everyone who asks for a state_dict, gets of a model whose base is not theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from helpers.forked_ranks import run_ranks
from helpers.tiny import add_lora, build_base, build_model, find_differences, make_batch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from trl.trainer.utils import hash_module

import lorashard
from lorashard.errors import CheckpointError

PLACEMENTS = ("shard", "replicate", "host", "file")
LORA: dict[str, Any] = dict(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def load(folder: str, placement: str, seed: int, **lora: Any) -> torch.nn.Module:
    torch.manual_seed(seed)
    return lorashard.load(f"{folder}/base", LoraConfig(**LORA | lora), placement, dtype=torch.float32)


def save_and_load(rank: int, folder: str) -> list:
    """Train a step, save, and load on every other placement: what differs, and what was written."""
    wrong: list = []
    accelerator = Accelerator()
    for saved, loaded in zip(PLACEMENTS, PLACEMENTS[1:] + PLACEMENTS[:1], strict=True):
        models = {}
        for name, seed in ((saved, 1), (loaded, 2)):
            model = load(folder, name, seed, modules_to_save=["lm_head"])
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            models[name] = accelerator.prepare(model, torch.optim.AdamW(trained, lr=0.1))
            batch = make_batch(rank)
            accelerator.backward(models[name][0](**batch).loss)
            models[name][1].step()
            if name == saved:
                accelerator.save_state(f"{folder}/{saved}")
                accelerator.free_memory()
        accelerator.load_state(f"{folder}/{saved}")
        accelerator.free_memory()
        before, after = (
            {n: p.detach() for n, p in models[name][0].named_parameters() if p.requires_grad}
            for name in (saved, loaded)
        )
        wrong += [(saved, loaded, name) for name in find_differences(after, before)]
        keys = load_file(f"{folder}/{saved}/model.safetensors").keys()
        wrong += [
            (saved, key)
            for key in keys
            if ".lora_" not in key and ".modules_to_save." not in key and key != "base_sha256"
        ]
        wrong += [(saved, "nothing saved")] * (not keys)
    return wrong


def test_a_saved_state_is_the_adapters_and_loads_on_any_placement(tmp_path: Path) -> None:
    """Catches `save_state` writing or wanting the base, and a strict `load_state` that misses it."""
    build_base(num_hidden_layers=2).save_pretrained(tmp_path / "base")
    assert run_ranks(save_and_load, 2, str(tmp_path)) == [[], []]


def test_a_missing_adapter_tensor_is_still_missed() -> None:
    """Catches strictness that is lost with the base's names."""
    model = lorashard.shard(build_model())
    state = model.state_dict()
    lost = next(name for name in state if "lora_A" in name)
    del state[lost]
    with pytest.raises(RuntimeError, match=lost):
        model.load_state_dict(state)


def test_a_state_with_the_base_is_refused() -> None:
    """Catches a checkpoint of the plain script that would be loaded in part, or fail with a line for each weight."""
    plain = build_model().state_dict()
    with pytest.raises(CheckpointError, match="load_adapter"):
        lorashard.shard(build_model()).load_state_dict(plain)


def save_two_bases(folder: Path) -> None:
    base = build_base(num_hidden_layers=2)
    base.save_pretrained(folder / "base")
    with torch.no_grad():
        base.lm_head.weight.mul_(2)
    base.save_pretrained(folder / "other" / "base")


def test_a_state_of_another_base_is_refused(tmp_path: Path) -> None:
    """Catches an adapter that continues silently on a base that it was not trained on."""
    save_two_bases(tmp_path)
    state = load(str(tmp_path), "shard", seed=1).state_dict()
    again = load(str(tmp_path), "file", seed=2)
    again.load_state_dict(state)
    assert find_differences(dict(again.state_dict()), dict(state)) == []
    with pytest.raises(CheckpointError, match="another base"):
        load(str(tmp_path / "other"), "shard", seed=1).load_state_dict(state)
    lorashard.shard(add_lora(build_base(num_hidden_layers=2))).load_state_dict(
        state
    )  # nobody knows the base of one made in memory


def test_trl_takes_another_base_for_another_model(tmp_path: Path) -> None:
    """Catches the log-probabilities of one base, which TRL caches, taken for those of another."""
    save_two_bases(tmp_path)
    hashes = [hash_module(load(str(folder), "shard", seed=1)) for folder in (tmp_path, tmp_path, tmp_path / "other")]
    assert hashes[0] == hashes[1] != hashes[2]


def test_an_adapter_that_came_later_is_saved_too() -> None:
    """TRL adds a second adapter to a sharded model: it renames base weights, which must stay out."""
    model = lorashard.shard(build_model(target_modules=["q_proj"]))
    model.add_adapter("ref", LoraConfig(**LORA))
    names = model.state_dict().keys()
    assert names and all(".lora_" in name for name in names)
    assert any(".up_proj.lora_A.ref." in name for name in names)


@pytest.mark.parametrize("placement", ["host", "replicate"])
def test_a_prompt_is_saved_without_the_embedding_that_peft_keeps_beside_it(placement: str, tmp_path: Path) -> None:
    """PEFT holds the base's embedding by a second path, which `named_modules` does not go."""
    config = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = lorashard.shard(get_peft_model(build_base(), config), placement)
    assert list(model.state_dict()) == ["prompt_encoder.default.embedding.weight"]
    torch.save(model.state_dict(), tmp_path / "state")
    model.load_state_dict(torch.load(tmp_path / "state"))
