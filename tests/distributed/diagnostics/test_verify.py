"""`lorashard verify`: every fault that it looks for, made on purpose, on ranks that must all notice."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.bases import save_base
from helpers.cases import slow
from helpers.forked_ranks import run_ranks
from helpers.tiny import add_lora, build_base
from helpers.words import make_tokenizer
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    GPT2Config,
)
from transformers.models.llama.modeling_llama import LlamaMLP

from lorashard.api import engine_of
from lorashard.config.use_options import VerifyOptions
from lorashard.diagnostics.verify import adapter as of_adapter
from lorashard.diagnostics.verify import gradients, memory, verify
from lorashard.diagnostics.verify.rows import compute_logits
from lorashard.engine import DeviceHome
from lorashard.errors import CheckpointError, ConfigError, LorashardError, VerificationError
from lorashard.runtime.output import RESULT_FILE_VARIABLE
from lorashard.weights.fingerprint import ADAPTER_NAME, BaseIdentity, describe_base
from lorashard.weights.first_layers import cut_config, first_layers

CPU_BUDGET_S = 90  # gradients of whole models on two ranks, and the first layers of four models
GIB = 2**30
LAYERS = 3
NUM_GRADIENTS = LAYERS * 7 * 2
Outcome = tuple[LorashardError | None, dict[str, Any]]


def save_adapter(base: Path, folder: Path, seed: int = 0, std: float = 0.03) -> PeftModel:
    """Save an adapter that carries its base's hash, and return it on its base."""
    model = add_lora(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    torch.manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                parameter.normal_(std=std)
    model.save_pretrained(folder)
    file, identity = folder / ADAPTER_NAME, BaseIdentity.of(list(base.glob("*.safetensors")))
    save_file(load_file(file), file, describe_base(identity))
    return model


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """A base, an adapter, what it merges to, and what another one does."""
    folder = tmp_path_factory.mktemp("verify")
    build_base(num_hidden_layers=LAYERS).save_pretrained(folder / "base")
    save_adapter(folder / "base", folder / "adapter").merge_and_unload().save_pretrained(folder / "merged")
    save_adapter(folder / "base", folder / "another", 1).merge_and_unload().save_pretrained(folder / "merged-another")
    return folder


def verify_here(rank: int, result: Path, *words: object) -> Outcome:
    """Verify on this rank; return the error and, on rank 0, what was found."""
    os.environ[RESULT_FILE_VARIABLE] = str(result)
    dtype = [] if "--dtype" in words else ["--dtype", "float32"]
    error = None
    try:
        verify(VerifyOptions.read([*map(str, words), *dtype, "--json"]))
    except LorashardError as raised:
        error = raised
    finally:
        del os.environ[RESULT_FILE_VARIABLE]
    found = json.loads(result.read_text()) if rank == 0 and result.exists() else {}
    result.unlink(missing_ok=True)
    assert rank or bool(found) == (error is None or isinstance(error, VerificationError))
    assert not found or found["is_right"] == (error is None)
    return error, found


def verify_on_ranks(task: Path, *words: object) -> Outcome:
    """Verify on two ranks, which must not wait for each other forever, and must raise the same."""

    def body(rank):
        return verify_here(rank, task / f"result-{rank}", *words)

    outcomes = run_ranks(body, 2)
    assert len({repr(error) + str(error) for error, _ in outcomes}) == 1
    return outcomes[0]


def find_wrong(found: dict[str, Any]) -> dict[str, str]:
    """Return the verdicts of the checks that failed."""
    return {name: check["verdict"] for name, check in found["checks"].items() if not check["is_right"]}


@pytest.mark.parametrize("placement", ["shard", *map(slow, ("auto", "host", "file", "replicate"))])
def test_good_adapter_and_merged_model_pass(task, placement):
    """A check that reports faults where there are none; and a merged model under another placement than the base."""
    options = ["--merged", task / "merged", "--placement", placement]
    error, found = verify_on_ranks(task, task / "adapter", *options)
    assert error is None
    assert str(NUM_GRADIENTS) in found["checks"]["keys"]["verdict"]
    assert found["checks"]["base"]["is_same"]
    merged = found["checks"]["merged logits"]
    assert merged["num_same_tokens"] == 256 and merged["difference_from_adapter"] < 1e-5
    assert found["checks"]["logits"]["difference_from_base"] > 0.1 and merged["difference_from_base"] > 0.1


QUERY_A = "base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight"
CHANGES = {
    "zero": lambda tensors: {name: t * 0 if "lora_B" in name else t for name, t in tensors.items()},
    "nan": lambda tensors: tensors | {QUERY_A: tensors[QUERY_A] * torch.nan},
    "one less": lambda tensors: {name: tensor for name, tensor in tensors.items() if name != QUERY_A},
    "prefix": lambda tensors: {k.replace("model.layers", "model._orig_mod.layers"): t for k, t in tensors.items()},
    "one more": lambda tensors: tensors | {QUERY_A.replace("layers.2", "layers.9"): torch.ones(4, 32)},
    "none": lambda tensors: {},
}


@pytest.mark.parametrize(
    "change, check, words",
    [
        ("zero", "learned", "lora_B"),
        ("nan", "files", "layers.2.self_attn.q_proj.lora_A.weight"),
        ("one less", "keys", "layers.2.self_attn.q_proj"),
        ("prefix", "files", "_orig_mod"),
        ("one more", "keys", "layers.9.self_attn.q_proj"),
        ("none", "files", "no tensors"),
    ],
)
def test_broken_tensors_are_found(task, tmp_path, change, check, words):
    """Plain PEFT loads each of these with at most a warning, and answers."""
    save_adapter(task / "base", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(CHANGES[change](load_file(file)), file, metadata={"format": "pt"})
    error, found = verify_here(0, tmp_path / "result", tmp_path / "adapter")
    assert words in find_wrong(found)[check]
    assert error.where == check and "logits" not in found["checks"]


@pytest.mark.parametrize(
    "name, content",
    [
        ("adapter_model.safetensors", None),
        ("adapter_config.json", None),
        ("adapter_model.safetensors", b"\x08"),
        ("adapter_config.json", b"{"),
    ],
)
def test_incomplete_folder_is_found(task, tmp_path, name, content):
    """A copy that was cut short is a fault of the adapter, and no mistake in the command."""
    save_adapter(task / "base", tmp_path / "adapter")
    file = tmp_path / "adapter" / name
    file.unlink() if content is None else file.write_bytes(content)
    error, found = verify_here(0, tmp_path / "result", tmp_path / "adapter")
    assert error.where == "files" and list(find_wrong(found)) == ["files"]


def test_adapter_that_does_nothing_is_found(task, tmp_path):
    """Tensors that are not zero, and logits that are the base's: a scale of zero, a lora_A that underflowed."""
    save_adapter(task / "base", tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 0}))
    error, found = verify_on_ranks(tmp_path, tmp_path / "adapter", "--placement", "shard")
    assert list(find_wrong(found)) == ["logits"] and error.where == "logits"


def test_another_base_is_found_and_can_be_allowed(task, tmp_path):
    """The same shapes with other values give fluent nonsense."""
    save_adapter(task / "base", tmp_path / "adapter")
    build_base(rms_norm_eps=1e-3, num_hidden_layers=LAYERS).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    words = [tmp_path / "adapter", "--base", tmp_path / "base"]
    error, found = verify_here(0, tmp_path / "result", *words)
    assert list(find_wrong(found)) == ["base"] and error.where == "base"
    error, found = verify_here(0, tmp_path / "result", *words, "--allow_base_mismatch")
    assert error is None and found["checks"]["base"]["is_same"] is False


def test_base_of_another_shape_is_found(task, tmp_path):
    """PEFT's own error is a page of shapes; modules that the base has not are another one."""
    save_adapter(task / "base", tmp_path / "adapter")
    build_base(num_hidden_layers=2).save_pretrained(tmp_path / "shallow")
    wrong = find_wrong(verify_here(0, tmp_path / "result", tmp_path / "adapter", "--base", tmp_path / "shallow")[1])
    assert "layers.2" in wrong["keys"] and "base" in wrong


@pytest.mark.parametrize("merged", ["base", "merged-another"])
def test_wrong_merged_model_is_found(task, merged):
    """A merge that wrote the base, or the adapter before last, is complete and fluent."""
    error, found = verify_here(0, task / "result", task / "adapter", "--merged", task / merged)
    check = found["checks"]["merged logits"]
    assert error.where == "merged logits" and not check["is_right"]
    assert check["difference_from_adapter"] > check["tolerance"]
    assert (check["difference_from_base"] == 0) == (merged == "base")


def test_merge_of_another_faint_adapter_is_found(task, tmp_path):
    """Within the tolerance of bfloat16 a faint adapter's merge, another one's and the base itself are all alike."""
    save_adapter(task / "base", tmp_path / "faint", std=0.004)
    other = save_adapter(task / "base", tmp_path / "other", seed=1, std=0.004)
    other.merge_and_unload().save_pretrained(tmp_path / "merged")
    words = [tmp_path / "faint", "--merged", tmp_path / "merged", "--tolerance", 0.0625]
    error, found = verify_here(0, tmp_path / "result", *words)
    check = found["checks"]["merged logits"]
    assert check["difference_from_base"] < check["difference_from_adapter"] < 0.0625
    assert error.where == "merged logits"


def test_incomplete_merged_model_is_found(task, tmp_path):
    """Plain transformers initializes what is missing, and says so in a warning."""
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(task / "base"), task / "adapter")
    merged.merge_and_unload().save_pretrained(tmp_path / "merged")
    file = tmp_path / "merged" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.2.mlp.down_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    _, found = verify_on_ranks(task, task / "adapter", "--merged", tmp_path / "merged")
    assert "model.layers.2.mlp.down_proj.weight" in find_wrong(found)["merged files"]


def test_a_fault_on_one_rank_ends_all_of_them(task):
    """A rank that stops alone leaves the others in their next gather until a timeout."""

    def body(rank):
        if rank == 1:
            original = of_adapter.compute_logits
            of_adapter.compute_logits = lambda *args: [logits * torch.nan for logits in original(*args)]
        words = [task / "adapter", "--merged", task / "merged", "--placement", "shard"]
        return verify_here(rank, task / f"result-{rank}", *words)[0]

    for error in run_ranks(body, 2):
        assert error.where == "logits" and "rank 1" in error.problem


@pytest.mark.slow
def test_rounding_of_a_deep_merge_is_within_the_tolerance(tmp_path):
    """A tolerance that is too tight for the dtype calls every good merge wrong; in bfloat16 it is eight steps."""
    build_base(num_hidden_layers=16).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    model = save_adapter(tmp_path / "base", tmp_path / "adapter")
    model.to(torch.bfloat16).merge_and_unload().save_pretrained(tmp_path / "merged")
    words = [tmp_path / "adapter", "--merged", tmp_path / "merged", "--dtype", "bfloat16"]
    error, found = verify_here(0, tmp_path / "result", *words)
    merged = found["checks"]["merged logits"]
    assert error is None and merged["tolerance"] == 0.0625 and 1e-3 < merged["difference_from_adapter"] < 0.0625 / 2


def test_rows_of_other_lengths_do_not_change_a_row():
    """Padding that a token could see would compare padding."""
    model = build_base().eval()
    rows = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]
    together = compute_logits(model, rows, torch.device("cpu"))
    for row, logits in zip(rows, together, strict=True):
        torch.testing.assert_close(logits, compute_logits(model, [row], torch.device("cpu"))[0])


def test_first_model_is_gone_when_the_second_comes(task, tmp_path, monkeypatch):
    """Two models in memory at once, where one barely fits, end the check in the middle."""
    first: list[weakref.ref] = []
    is_left: list[bool] = []

    def compute(model, *args):
        if not first or first[0]() is model:
            first[:] = weakref.ref(model), weakref.ref(engine_of(model))
        else:
            is_left.extend(one() is not None for one in first)
        return compute_logits(model, *args)

    monkeypatch.setattr(of_adapter, "compute_logits", compute)
    assert verify_here(0, tmp_path / "result", task / "adapter", "--merged", task / "merged")[0] is None
    assert is_left == [False, False]


def write_rows(path: Path, row: dict[str, str]) -> Path:
    path.write_text((json.dumps(row) + "\n") * 9)
    return path


def test_rows_are_the_datasets_the_runs_or_random(task, tmp_path):
    """Random tokens in place of a dataset that was given would be a silent fallback."""
    run = tmp_path / "run"
    save_adapter(task / "base", run)
    make_tokenizer(["<pad>", "</s>", *["what", "is", "it", "the", "capital", "of", "France"]]).save_pretrained(run)
    mine = write_rows(tmp_path / "mine.jsonl", {"text": "the capital of France"})
    of_run = write_rows(tmp_path / "of_run.jsonl", {"prompt": "what is", "completion": " it is" * 99})
    (run / "config.yaml").write_text(f"dataset: {of_run}\nmax_length: 7\nlearning_rate: 1\n")

    def find_rows(*words):
        error, found = verify_here(0, tmp_path / "result", run, *words)
        return str(error) if error else found["checks"]["rows"]["verdict"]

    assert find_rows("--dataset", mine, "--num_rows", 3).endswith(f"of {mine}")
    of_the_run = find_rows("--max_length", 10)
    assert of_the_run.startswith("4 of 40 tokens") and of_the_run.endswith(str(of_run))
    of_run.unlink()
    assert "random" in find_rows() and str(of_run) in find_rows()
    assert "nowhere.jsonl" in find_rows("--dataset", tmp_path / "nowhere.jsonl")
    (run / "config.yaml").unlink()
    assert find_rows().endswith("random tokens")


@pytest.mark.parametrize(
    "words", [["adapter-nowhere"], ["adapter", "--merged", "nowhere"], ["adapter", "--base", "nowhere"]]
)
def test_a_missing_folder_is_a_mistake_in_the_command(task, words):
    """Exit code 2, not 1: nothing was found to be wrong."""
    words = [word if word.startswith("--") else task / word for word in words]
    error, _ = verify_here(0, task / "result", *words)
    assert isinstance(error, CheckpointError) and "nowhere" in str(error)


PIECES = ["--placement", "host", "--prefetch", "2"]
PIECES += ["--layer_microbatch_size", "1", "--activation_checkpointing_layers", "2"]
OTHERS = [
    ["--placement", "shard"],
    ["--placement", "shard", "--dtype", "bfloat16"],
    ["--placement", "file"],
    ["--placement", "replicate"],
]


@pytest.mark.parametrize("cases, num_split", [([PIECES], 2), slow(OTHERS, 0)], ids=["sharded", "others"])
def test_gradients_of_a_model_are_equal(task, cases, num_split):
    """A reference that is not set up like the sharded model: the engine would be blamed for every difference."""

    def body(rank):
        split, original = [], gradients.split_layers
        gradients.split_layers = lambda layers, rows: (split.append(rows), original(layers, rows))
        return [verify_model_here(rank, task, task / "base", *words) for words in cases], split

    (outcomes, split), (others, _) = run_ranks(body, 2)
    assert split == [1] * num_split, "layer-major on one side only, or on none"
    assert [error for error, _ in (*outcomes, *others)] == [None] * 2 * len(cases)
    for words, (_, found) in zip(cases, outcomes, strict=True):
        check = found["checks"]["gradients"]
        assert (check["num_gradients"], check["num_differing"]) == (NUM_GRADIENTS, 0)
        assert found["checks"]["model"]["num_layers"] == LAYERS
        num_gathers = found["checks"]["sharded"]["num_gathers"]
        assert num_gathers > LAYERS if words[1] in ("shard", "host") else num_gathers == 0


def verify_model_here(rank: int, task: Path, model: Path, *words: object) -> Outcome:
    size = ["--num_rows", 2, "--max_length", 12]
    return verify_here(rank, task / f"result-{rank}", "--model", model, *size, *words)


def flip_a_byte(home_class: type, call: int) -> None:
    """Change one byte of what arrives in the given gather."""
    original = home_class.unshard_into
    calls = iter(range(10**6))

    def unshard_into(self, buffer):
        work = original(self, buffer)
        if next(calls) != call:
            return work
        work.wait()
        buffer[self.layout.total_bytes // 2] ^= 0x40
        return work

    home_class.unshard_into = unshard_into


def test_one_flipped_byte_of_a_gather_is_found(task):
    """The loss stays healthy; and the first gradient that differs says where to look."""

    def body(rank):
        if rank == 1:
            flip_a_byte(DeviceHome, LAYERS + 2)  # the first in backward
        return verify_model_here(rank, task, task / "base", "--placement", "shard", "--prefetch", 0)

    (error, found), (other, _) = run_ranks(body, 2)
    assert str(error) == str(other) and error.where == "gradients" and "rank 1" in error.problem
    check = found["checks"]["gradients"]
    assert 0 < check["num_differing"] <= NUM_GRADIENTS // 2 and check["largest_difference"] > 0
    assert check["first"] in check["verdict"] and "layers.0.self_attn.q_proj.lora_A" in check["first"]


def test_kernels_that_do_not_repeat_themselves_are_named(task, monkeypatch):
    """Two unsharded runs that differ say nothing about sharding."""
    forward = LlamaMLP.forward
    factors = itertools.count(1)
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, hidden: forward(self, hidden) * next(factors))
    error, _ = verify_model_here(0, task, task / "base")
    assert error.where == "reference"


def leave_no_room_for_the_last_layer() -> None:
    """Leave one byte too few for all layers."""
    original = gradients.fit_layers

    def fit_layers(*args):
        memory.measure_free_bytes = lambda *_: 2**60
        needed_bytes = original(*args).needed_bytes
        memory.measure_free_bytes = lambda *_: needed_bytes + GIB - 1
        return original(*args)

    gradients.fit_layers = fit_layers


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, placement",
    [("qwen3", "shard"), ("llama-tied", "file"), ("mixtral", "shard"), ("mixtral", "file")],
)
def test_first_layers_are_compared_where_all_do_not_fit(tmp_path, kind, placement):
    """A large model is refused, or cut without the lists in its config that have an item for each layer."""
    model = Path(save_base(tmp_path / "model", kind, torch.float32, num_hidden_layers=LAYERS))

    def body(rank):
        tempfile.tempdir = str(tmp_path)
        leave_no_room_for_the_last_layer()
        outcome = verify_model_here(rank, tmp_path, model, "--placement", placement)
        return outcome, [path.name for path in tmp_path.glob("lorashard-first-layers-*")]

    (first, left_over), (other, _) = run_ranks(body, 2)
    assert (first[0], other[0], left_over) == (None, None, [])
    model = first[1]["checks"]["model"]
    assert (model["num_layers"], model["num_whole_layers"]) == (LAYERS - 1, LAYERS)


def test_model_of_which_nothing_fits_is_refused(task, monkeypatch):
    """Zero layers are equal, too: a comparison of nothing would pass."""
    monkeypatch.setattr("lorashard.diagnostics.verify.memory.measure_free_bytes", lambda *args: GIB)
    error, _ = verify_model_here(0, task, task / "base")
    assert isinstance(error, ConfigError) and "1.0 GiB" in error.found and "--num_rows" in error.fix


def test_config_is_cut_wherever_it_counts_layers():
    """GPT-2 counts under another name, models of text and images in a part; token ids are no layers."""
    values = {"n_layer": 3, "eos_token_id": [1, 2, 3], "architectures": ["A", "B", "C"]}
    assert cut_config(values, GPT2Config(**values), 2) == values | {"n_layer": 2}
    text = {"num_hidden_layers": 3, "layer_types": ["full_attention", "full_attention", "sliding_attention"]}
    values = {"text_config": text, "model_type": "gemma3"}
    expected = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    assert cut_config(values, Gemma3Config(**values), 2) == values | {"text_config": expected}


def test_first_layers_copy_no_weights(task):
    """A temporary copy of 140 GB would fill the disk."""
    with first_layers(task / "base", 2) as folder:
        assert (folder / "model.safetensors").is_symlink()
        assert AutoModelForCausalLM.from_pretrained(folder).config.num_hidden_layers == 2
    assert not folder.exists() and (task / "base" / "model.safetensors").is_file()
