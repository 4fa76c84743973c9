"""From a checkpoint to shards: the same model as with transformers and PEFT, read once over all ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from helpers import warm
from helpers.bases import save_base
from helpers.cases import slow
from helpers.forked_ranks import read_status_bytes, run_ranks
from helpers.tiny import NUM_LAYERS, build_base, find_differences, make_batch, take_gradients
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification

import lorashard
from lorashard.errors import CheckpointError, ConfigError
from lorashard.weights.safetensors_files import Checkpoint


def check_commits(rank: int, folder: str) -> str:
    lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    try:
        lorashard.load(str(Path(folder) / "snapshots" / f"commit{rank}"), lora, "shard")
    except CheckpointError as error:
        return str(error)
    return ""


def test_ranks_with_two_commits_are_refused(tmp_path):
    """Catches a branch that moves while the ranks start: each would shard another model."""
    for rank in range(2):
        save_base(tmp_path / "snapshots" / f"commit{rank}", "llama")
    assert all("commit0" in message and "commit1" in message for message in run_ranks(check_commits, 2, str(tmp_path)))


def check_reward(rank: int, folder: str) -> list[str]:
    config = lambda: LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS")  # noqa: E731
    results = []
    for make in (
        lambda: get_peft_model(
            AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32), config()
        ),
        lambda: lorashard.load(folder, config(), dtype=torch.float32),
    ):
        model = make()
        torch.manual_seed(8)
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.05)
        model(input_ids=make_batch()["input_ids"], labels=torch.tensor([0, 1])).loss.backward()
        results.append(take_gradients(model))
    return find_differences(*results)


def test_a_sequence_classifier_loads_from_a_causal_lm(tmp_path):
    """The new head is not in the checkpoint and trains with the adapter; the LM head is in it and is not needed."""
    assert run_ranks(check_reward, 2, save_base(tmp_path, "llama")) == [[], []]


def check_one_label(rank: int, folder: str, adapter: str) -> tuple[list[str], int, bool]:
    config = lambda: LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS")  # noqa: E731
    with pytest.raises(ConfigError, match="CAUSAL_LM") as caught:
        lorashard.load(folder, LoraConfig(task_type="CAUSAL_LM"), num_labels=1)
    assert caught.value.option == "num_labels"
    torch.manual_seed(8)
    plain = get_peft_model(
        AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32), config()
    )
    torch.manual_seed(8)
    model = lorashard.load(folder, config(), "shard", dtype=torch.float32, resident_layers=0, num_labels=1)
    trained = [{n: p for n, p in m.named_parameters() if p.requires_grad} for m in (model, plain)]
    differences = find_differences(*trained)
    with torch.no_grad():
        model.get_parameter("base_model.model.score.modules_to_save.default.weight").add_(1)
    if rank == 0:
        model.save_pretrained(adapter)
    torch.distributed.barrier()
    loaded = lorashard.load_adapter(adapter, placement="shard", dtype=torch.float32, resident_layers=0)
    ids = make_batch()["input_ids"]
    is_same = torch.equal(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    return differences, loaded.config.num_labels, is_same


def test_a_reward_model_has_one_output(tmp_path):
    """Catches a head of two labels, one made from other random numbers, and a saved one that finds no place."""
    folder = save_base(tmp_path, "llama")
    assert run_ranks(check_one_label, 2, folder, str(tmp_path / "adapter")) == [([], 1, True)] * 2


def check_bytes(rank: int, folder: str) -> tuple[int, int, int]:
    opened = []
    plain_open = Checkpoint.open
    Checkpoint.open = lambda path: opened.append(plain_open(path)) or opened[-1]
    try:
        model = lorashard.load(folder, LoraConfig(r=2, target_modules=["q_proj"]))
    finally:
        Checkpoint.open = plain_open
    weights = sum(tensor.num_bytes for tensor in opened[0].tensors.values())
    return opened[0].bytes_read, opened[0].header_bytes, weights, lorashard.stats(model).bytes_at_rest


@pytest.mark.parametrize("world_size", (2, slow(4)))
def test_each_rank_reads_its_share_of_the_files(tmp_path, world_size):
    """A rank that reads the whole checkpoint makes loading as slow as the number of ranks."""
    folder = tmp_path / "model"
    build_base("llama").to(torch.bfloat16).save_pretrained(folder)
    results = run_ranks(check_bytes, world_size, str(folder))
    headers, weights = results[0][1], results[0][2]
    assert sum(read for read, *_ in results) == weights
    assert all(read <= bytes_at_rest for read, _, _, bytes_at_rest in results)
    assert headers < weights / 10


def check_peak(rank: int, folder: str) -> tuple[int, int, int]:
    lorashard.load(
        str(Path(folder).parent / "small"), LoraConfig(r=2, target_modules=["q_proj"]), dtype=torch.bfloat16
    )  # imports, caches
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = read_status_bytes("VmRSS")
    model = lorashard.load(folder, LoraConfig(r=2, target_modules=["q_proj"]), dtype=torch.bfloat16)
    stats, engine = lorashard.stats(model), lorashard.api.engine_of(model)
    unit = max(unit.layout.total_bytes for unit in engine.units)
    return read_status_bytes("VmHWM") - before, stats.bytes_at_rest + stats.slot_bytes, unit


@pytest.mark.parametrize("dtype", (slow(torch.bfloat16), torch.float32))
def test_loading_holds_at_most_one_unit_beyond_the_shards(tmp_path, dtype):
    """A rank that holds the whole model for a moment cannot load a model that does not fit."""
    build_base("llama").save_pretrained(tmp_path / "small")
    sizes = dict(hidden_size=512, intermediate_size=2048, vocab_size=4096, num_hidden_layers=10)
    base = build_base("llama", dtype, **sizes)
    base.save_pretrained(tmp_path / "large")
    whole_bytes = sum(p.numel() * 2 for p in base.parameters())
    del base
    for grown, held, unit in run_ranks(check_peak, 2, str(tmp_path / "large")):
        assert grown < held + unit + 20 * 2**20
        assert held + unit < whole_bytes


def break_folder(folder: Path, how: str) -> str:
    if how == "truncated":
        file = min(folder.glob("*.safetensors"))
        os.truncate(file, file.stat().st_size - 8)
    if how in ("other layers", "fewer layers"):
        config = json.loads((folder / "config.json").read_text())
        num_layers = NUM_LAYERS + (1 if how == "other layers" else -1)
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    return str(folder / "nowhere") if how == "missing folder" else str(folder)


def check_errors(rank: int, folders: dict[str, str]) -> dict[str, str]:
    messages = {}
    for how, folder in folders.items():
        with pytest.raises(CheckpointError) as caught:
            lorashard.load(folder, LoraConfig(r=2, target_modules="all-linear"))
        messages[how] = str(caught.value)
    with pytest.raises(ConfigError, match="init_lora_weights"):
        lorashard.load(folder, LoraConfig(r=2, init_lora_weights="corda"))
    with pytest.raises(ConfigError, match="placement"):
        lorashard.load(folder, LoraConfig(r=2), placement="everywhere")
    return messages


def test_errors_come_before_the_first_collective(tmp_path):
    """A rank that finds a fault after others began to gather leaves them hanging until a timeout."""
    parts = {
        "missing folder": "nowhere",
        "truncated": "model-00001",
        "other layers": "missing",
        "fewer layers": "unexpected",
    }
    folders = {how: break_folder(Path(save_base(tmp_path / how, "llama")), how) for how in parts}
    for messages in run_ranks(check_errors, 2, folders):
        for how, part in parts.items():
            assert part in messages[how] and "\n" not in messages[how]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="accelerate sees the ranks of a machine with GPUs by itself")
def test_ranks_that_accelerate_does_not_see_are_refused(tmp_path):
    """Two independent trainings that look healthy."""
    script = tmp_path / "script.py"
    script.write_text("import lorashard, peft, sys\nlorashard.load(sys.argv[1], peft.LoraConfig())\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    result = warm.run(
        [*torchrun, str(script), save_base(tmp_path / "base", "llama")],
        env=os.environ | {"ACCELERATE_USE_CPU": "false"},
        capture_output=True,
        text=True,
    )
    assert "ConfigError" in result.stderr and "ACCELERATE_USE_CPU=true" in result.stderr
