"""Embeddings of a vocabulary that was resized belong into the saved adapter: they are in no file of the base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from helpers.cases import slow
from helpers.forked_ranks import run_ranks
from helpers.tiny import VOCAB_SIZE, build_base, fill_lora_b, find_differences, make_batch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Trainer, TrainerState, TrainingArguments

import lorashard
from lorashard.config.quantization_options import Quantization
from lorashard.errors import CheckpointError, ConfigError, ShardError
from lorashard.model.saved import restore
from lorashard.planning.size import build_meta_model

CPU_BUDGET_S = 40.0
NEW_SIZE = VOCAB_SIZE + 3
SIZES = dict(num_hidden_layers=2)
LORAS = {
    "linear": dict(target_modules=["q_proj", "v_proj"]),
    "targeted": dict(target_modules=["q_proj", "embed_tokens"]),
    "tokens": dict(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [3, VOCAB_SIZE + 1]}),
    "whole": dict(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]),
}
EMBEDDING, HEAD = "base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    folders = {family: tmp_path_factory.mktemp(family) for family in ("llama", "llama-tied")}
    for family, folder in folders.items():
        build_base(family, **SIZES).save_pretrained(folder)
    return folders


def build(folder: Path, seed: int = 4, **lora) -> PeftModel:
    """Return a plain model with new tokens, as a script makes it."""
    base = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(seed)
    base.resize_token_embeddings(NEW_SIZE)
    torch.manual_seed(5)
    model = get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM", **lora))
    fill_lora_b(model)
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    input_ids = make_batch()["input_ids"].clone()
    input_ids[:, -3:] = VOCAB_SIZE + 1
    with torch.no_grad():
        return model.eval()(input_ids=input_ids).logits


def load_plain(folder: Path, adapter: Path) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(99)  # the new embeddings before training must not count
    base.resize_token_embeddings(NEW_SIZE)
    return PeftModel.from_pretrained(base, adapter)


def save_and_read_back(rank: int, folder: Path, lora: dict, placements: list[str], out: Path) -> dict[str, bool]:
    plain = build(folder, **lora)
    expected = logits(plain)
    facts = {}
    for placement in placements:
        model = lorashard.shard(build(folder, **lora), placement=placement)
        adapter = out / placement
        if rank == 0:  # as Trainer does
            model.save_pretrained(adapter)
        torch.distributed.barrier()
        loaded = lorashard.load_adapter(adapter, dtype=torch.float32, placement=placement)
        facts[f"{placement}: logits"] = torch.equal(logits(model), expected)
        facts[f"{placement}: load_adapter"] = torch.equal(logits(loaded), expected)
        facts[f"{placement}: plain PEFT"] = torch.equal(logits(load_plain(folder, adapter)), expected)
        if rank == 0:
            loaded.save_pretrained(adapter / "again")
            again = load_file(adapter / "again" / "adapter_model.safetensors")
            facts[f"{placement}: again"] = (
                find_differences(again, load_file(adapter / "adapter_model.safetensors")) == []
            )
        torch.distributed.barrier()
    if len(placements) > 1:
        mapped = lorashard.load_adapter(out / "shard", dtype=torch.float32, placement="file")
        facts["file: load_adapter"] = torch.equal(logits(mapped), expected)
    return facts


@pytest.mark.parametrize(
    "family, kind",
    [("llama", "linear"), ("llama-tied", "linear"), *(slow("llama", kind) for kind in LORAS if kind != "linear")],
)
def test_a_resized_vocabulary_is_saved_and_read_back(tmp_path, bases, family, kind):
    """An adapter that gives other logits when it is loaded, since its new tokens were left behind in the run."""
    placements = ["shard", "replicate"] if kind == "linear" else ["shard"]
    for facts in run_ranks(save_and_read_back, 2, bases[family], LORAS[kind], placements, tmp_path):
        assert all(facts.values()), facts
    if kind == "linear":
        plain = build(bases[family], **LORAS[kind])
        plain.save_pretrained(tmp_path / "plain")
        files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("shard", "plain")]
        assert find_differences(*files) == [] and {EMBEDDING, HEAD} <= files[0].keys()


def resume(rank: int, folder: Path, out: Path) -> list[bool]:
    expected = logits(build(folder, **LORAS["linear"]))
    options = TrainingArguments(output_dir=str(out), use_cpu=True, report_to=[], max_steps=1)
    found = []
    for placement in ("shard", "replicate"):
        model = lorashard.shard(build(folder, seed=50, **LORAS["linear"]), placement=placement)
        other = logits(model)
        Trainer(model, options, train_dataset=[{}]).train(resume_from_checkpoint=str(out / "checkpoint"))
        found += [not torch.equal(other, expected), torch.equal(logits(model), expected)]
        model.save_pretrained(out / f"{placement}-{rank}")
        names = (f"{placement}-{rank}", "checkpoint")
        saved = [load_file(out / name / "adapter_model.safetensors") for name in names]
        found.append(find_differences(*saved) == [])
    return found


def test_resuming_takes_the_embeddings_of_the_checkpoint(tmp_path, bases):
    """New embeddings are random: a run that resumes with others than it has trained with is another run."""
    build(bases["llama"], **LORAS["linear"]).save_pretrained(tmp_path / "checkpoint")
    state = TrainerState(global_step=1, max_steps=1, train_batch_size=8)  # no step is left
    state.save_to_json(str(tmp_path / "checkpoint" / "trainer_state.json"))
    for found in run_ranks(resume, 2, bases["llama"], tmp_path):
        assert all(found), found


def save_state(rank: int, bases: dict[str, Path], out: Path) -> list[str]:
    wrong = []
    accelerator = Accelerator(cpu=True)
    for family, saved, loaded in (("llama", "shard", "replicate"), ("llama-tied", "replicate", "shard")):
        path, expected = bases[family], logits(build(bases[family], **LORAS["linear"]))
        accelerator.prepare(lorashard.shard(build(path, **LORAS["linear"]), placement=saved))
        accelerator.save_state(f"{out}/{family}")
        accelerator.free_memory()
        model = lorashard.shard(build(path, seed=50, **LORAS["linear"]), placement=loaded)
        accelerator.prepare(model)
        wrong += [f"{family}: drawn alike"] * torch.equal(logits(model), expected)
        accelerator.load_state(f"{out}/{family}")
        accelerator.free_memory()
        wrong += [f"{family}: logits"] * (not torch.equal(logits(model), expected))
        state = model.state_dict()
        del state[EMBEDDING], state[HEAD]
        try:
            model.load_state_dict(state)
            wrong.append(f"{family}: not missed")
        except RuntimeError as error:
            wrong += [f"{family}: {error}"] * (EMBEDDING not in str(error))
    return wrong


def test_a_saved_state_has_the_embeddings_of_a_resized_vocabulary(tmp_path, bases):
    """accelerate's `load_state` without an error, onto new random embeddings: the run resumes as another one."""
    assert run_ranks(save_state, 2, bases, tmp_path) == [[], []]


def test_quantized_embeddings_of_a_resized_vocabulary_are_not_read_back_and_say_so(bases):
    """An error that calls the script's own state one without lorashard."""
    quantization = Quantization("int8", has_vocabulary=True)
    model = lorashard.shard(build(bases["llama"], **LORAS["linear"]), placement="host", quantization=quantization)
    with pytest.raises(CheckpointError, match="include_input_output_embeddings"):
        model.load_state_dict(model.state_dict())


def test_the_arguments_of_save_pretrained_may_be_given_by_position(tmp_path, bases):
    """A TypeError; embeddings dropped in silence; a file signed that was not written."""
    model = lorashard.shard(build(bases["llama"], **LORAS["linear"]), placement="host", quantization="int8")
    model.add_adapter("other", model.peft_config["default"])
    model.save_pretrained(tmp_path, True, ["other"], "auto", True)
    assert [path.parent.name for path in tmp_path.rglob("*.safetensors")] == ["other"]
    with safe_open(tmp_path / "other" / "adapter_model.safetensors", "pt") as file:
        assert {EMBEDDING, HEAD} <= set(file.keys()) and any("quantization" in key for key in file.metadata())
    with pytest.raises(ConfigError, match="safe_serialization"):
        model.save_pretrained(tmp_path / "pickled", False)
    model.save_pretrained(tmp_path / "nowhere", True, None, "auto", False)
    assert list((tmp_path / "nowhere").rglob("*.*")) == []


def save_on_request(rank: int, folder: Path, out: Path) -> list[str]:
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    missing = []
    lora = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "embed_tokens"])
    for placement in ("shard", "file"):
        model = lorashard.load(str(folder), lora, placement, dtype=torch.float32)
        adapter = out / f"{placement}-{rank}"
        model.save_pretrained(adapter)
        if not all("lora" in name for name in load_file(adapter / "adapter_model.safetensors")):
            missing.append(f"{placement}: a weight of the base where none was asked for")
        model.save_pretrained(adapter, save_embedding_layers=True)
        saved = load_file(adapter / "adapter_model.safetensors")
        for name in ("model.embed_tokens.base_layer.weight", "lm_head.weight"):
            value = saved.get(f"base_model.model.{name}", torch.empty(0))
            if not torch.equal(value, expected[name.replace("base_layer.", "")]):
                missing.append(f"{placement}: {name}")
        lorashard.load_adapter(adapter, dtype=torch.float32, placement=placement)
    return missing


def test_embeddings_that_are_asked_for_are_gathered_and_written(tmp_path, bases):
    """`save_embedding_layers=True` that writes none; and the default that writes what is in the base's own files."""
    assert run_ranks(save_on_request, 2, bases["llama"], tmp_path) == [[], []]


def test_verify_knows_the_embeddings_of_an_adapter(tmp_path, bases):
    """A complete adapter that is called broken, since its base has fewer tokens."""
    build(bases["llama"], **LORAS["linear"]).save_pretrained(tmp_path)
    lora = LoraConfig.from_pretrained(tmp_path)
    restore(build_meta_model(str(bases["llama"]), lora, torch.float32, adapter=tmp_path), tmp_path)
    with pytest.raises(CheckpointError, match="embed_tokens"):
        restore(build_meta_model(str(bases["llama"]), lora, torch.float32), tmp_path)


def ask_on_one_rank(rank: int, folder: Path, out: Path) -> str:
    lora = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj"])
    model = lorashard.load(str(folder), lora, "shard", dtype=torch.float32)
    try:
        if rank == 0:
            model.save_pretrained(out, save_embedding_layers=True)
        else:
            logits(model)
    except ShardError as error:
        return str(error)
    return ""


def test_gathering_embeddings_on_one_rank_is_an_error_on_all(tmp_path, bases):
    """A gather on one rank that pairs up with another's of other weights."""
    for message in run_ranks(ask_on_one_rank, 2, bases["llama"], tmp_path):
        assert "base weights" in message


def test_a_resized_embedding_without_its_head_is_refused(tmp_path, bases):
    """A model whose inputs and outputs do not have the same tokens."""
    build(bases["llama"], **LORAS["linear"]).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if name != HEAD}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{VOCAB_SIZE} and {NEW_SIZE}"):
        lorashard.load_adapter(tmp_path, dtype=torch.float32)
