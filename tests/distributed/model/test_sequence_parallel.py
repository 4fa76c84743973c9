"""Rows that several ranks share, against plain PEFT on whole rows: losses, every gradient, and what trainers read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.forked_ranks import run_ranks
from helpers.tiny import VOCAB_SIZE, fill_adapter, set_checkpointing, take_gradients
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from trl.trainer.utils import add_fused_lm_head

import lorashard
from lorashard.errors import ConfigError, ShardError

CPU_BUDGET_S = 120  # four families and their options, on two and four ranks, and compiled layers; mostly slow ones

SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    pad_token_id=0,
)
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": lambda **more: LlamaForCausalLM(LlamaConfig(**SIZES, **more)),
    "qwen3": lambda **more: Qwen3ForCausalLM(Qwen3Config(**SIZES, **more)),
    "gemma3": lambda **more: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SIZES, sliding_window=4, layer_types=["sliding_attention", "full_attention", "sliding_attention"], **more
        )
    ),
    "mixtral": lambda **more: MixtralForCausalLM(
        MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=5, **more)
    ),
    "gpt-oss": lambda **more: GptOssForCausalLM(
        GptOssConfig(
            **SIZES,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            **more,
        )
    ),
    "phi3": lambda **more: Phi3ForCausalLM(  # whose rows of more than 8 tokens have other frequencies
        Phi3Config(**SIZES, rope_parameters=LONGROPE, original_max_position_embeddings=8, **more)
    ),
}
ATTENTIONS = {"gpt-oss": "eager"}  # whose sinks no other takes on a CPU
ROWS = ("whole", "padded", "packed")
KINDS = {"gpt-oss": ("whole", "padded")}  # in transformers' own mask for it, packed sequences see each other
RELATIVE = 1e-6  # of a gradient's norm, and of a loss, which transformers always takes in float32
RELATIVE_DOUBLE = 1e-12  # of a gradient's norm in float64, where other CPUs' order of sums does not show


def build(family: str, attention: str = "sdpa", dtype: torch.dtype = torch.float64) -> PeftModel:
    torch.manual_seed(0)
    base = FAMILIES[family](attn_implementation=attention, experts_implementation="eager")  # others take no float64
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return fill_adapter(get_peft_model(base, lora)).to(dtype)


def make_rows(kind: str, seed: int) -> dict[str, torch.Tensor]:
    """Return a batch of 13 tokens, which no number of ranks divides, and whose first tokens are not supervised."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(1, VOCAB_SIZE, (1 if kind == "packed" else 2, 13), generator=generator)
    labels = input_ids.clone()
    labels[:, :2] = -100
    rows = {"input_ids": input_ids, "labels": labels}
    if kind == "padded":
        mask = torch.ones_like(input_ids)
        mask[0, 9:], mask[1, :2] = 0, 0
        has_seen = torch.cat([mask[:, :1], mask[:, :-1]], 1)  # what follows padding is predicted from nothing
        rows |= {"attention_mask": mask, "labels": labels.masked_fill(mask * has_seen == 0, -100)}
    if kind == "packed":
        rows["position_ids"] = torch.cat([torch.arange(5), torch.arange(8)])[None]
    return rows


def take_plain(model: PeftModel, groups: Sequence[dict[str, torch.Tensor]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the mean loss of the groups' rows, and its gradients."""
    loss = torch.stack([model(**rows, use_cache=False).loss for rows in groups]).mean()
    loss.backward()
    return loss.item(), take_gradients(model)


def average(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what DistributedDataParallel makes of gradients."""
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return {name: gradient / dist.get_world_size() for name, gradient in gradients.items()}


def measure(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, relative to its gradient's norm."""
    assert found.keys() == expected.keys()
    return max(((found[name] - expected[name]).norm() / expected[name].norm()).item() for name in expected)


def compare(rank: int, size: int, family: str, attention: str, **options: Any) -> dict[str, tuple[float, float]]:
    """Return how far loss and gradients are from plain PEFT's, by kind of rows."""
    checkpointing, kinds = options.pop("checkpointing", "off"), options.pop("kinds", KINDS.get(family, ROWS))
    group, num_groups = rank // size, dist.get_world_size() // size
    plain, shared = build(family, attention), build(family, attention)
    set_checkpointing(shared, checkpointing)
    shared = lorashard.shard(shared, sequence_parallel_size=size, **options)
    far = {}
    for kind in kinds:
        groups = [make_rows(kind, seed) for seed in range(num_groups)]
        loss, expected = take_plain(plain, groups)
        output = shared(**groups[group])
        output.loss.backward()
        mean = output.loss.detach().clone()
        dist.all_reduce(mean)
        found = average(take_gradients(shared))
        far[kind] = abs(mean.item() / dist.get_world_size() - loss) / loss, measure(found, expected)
    return far


def compare_all(rank: int, size: int, cases: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    found = {}
    for case in cases:
        for kind, far in compare(rank, size, **case).items():
            found[f"{' '.join(map(str, case.values()))}: {kind}"] = far
    return found


def find_far(found: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    return {name: far for name, far in found.items() if not (far[0] <= RELATIVE and far[1] <= RELATIVE_DOUBLE)}


@pytest.mark.parametrize(
    ("world_size", "size", "families"),
    [
        pytest.param(2, 2, ["llama", "gemma3"], id="2"),
        pytest.param(2, 2, ["qwen3", "mixtral", "gpt-oss", "phi3"], id="2, other families", marks=pytest.mark.slow),
        pytest.param(4, 4, ["llama", "gemma3"], id="4", marks=pytest.mark.slow),
        pytest.param(4, 2, ["mixtral"], id="2 x 2", marks=pytest.mark.slow),
    ],
)
def test_every_gradient_is_that_of_whole_rows(world_size, size, families):
    """Catches wrong positions, labels, masks, windows or weights of slices, and heads or sinks of the wrong rank."""
    cases = [{"family": family, "attention": ATTENTIONS.get(family, "sdpa")} for family in families]
    for found in run_ranks(compare_all, world_size, size, cases):
        assert find_far(found) == {}


@pytest.mark.slow
def test_other_options_change_no_gradient():
    """Catches rows that a recomputation or a piece of a batch does not find, and masks of another implementation."""
    options: list[dict[str, Any]] = [
        {"attention": "eager", "kinds": ("whole", "packed")},  # its softmax takes a wholly masked row in float32 alone
        {"attention": "sdpa", "checkpointing": "non-reentrant", "placement": "host"},
        {"attention": "sdpa", "checkpointing": "reentrant", "shard_group_size": 1},
        {"attention": "sdpa", "checkpointing": "non-reentrant", "layer_microbatch_size": 1},
    ]
    for found in run_ranks(compare_all, 2, 2, [{"family": "gemma3", **more} for more in options]):
        assert find_far(found) == {}


def compare_shared(rank: int, options: dict[str, Any]) -> dict[str, float]:
    """Return how far gradients of shared rows are from those of whole rows on the same sharded base."""
    whole = lorashard.shard(build("llama"), **options)
    shared = lorashard.shard(build("llama"), **options, sequence_parallel_size=2)
    far = {}
    for kind in ROWS:
        rows = make_rows(kind, 0)
        _, expected = take_plain(whole, [rows])
        shared(**rows, use_cache=False).loss.backward()
        far[kind] = measure(average(take_gradients(shared)), expected)
    return far


@pytest.mark.slow
def test_a_quantized_base_is_shared_too():
    """Catches weights that are unpacked for one of the passes alone."""
    for far in run_ranks(compare_shared, 2, {"quantization": "nf4"}):
        assert max(far.values()) <= RELATIVE_DOUBLE


def compare_loaded(rank: int, folder: Path) -> tuple[float, float]:
    """Return how far the gradients of a saved adapter, and its loss in evaluation, are from plain PEFT's."""
    rows = make_rows("padded", 0)
    loss, expected = take_plain(build("llama", dtype=torch.float32), [rows])
    trained, used = (
        lorashard.load_adapter(
            folder / "adapter",
            str(folder / "base"),
            dtype="float32",
            is_trainable=is_trainable,
            sequence_parallel_size=2,
        )
        for is_trainable in (True, False)
    )
    trained(**rows).loss.backward()
    output = used(**rows)
    assert output.logits is None, "the rows are not shared"
    return measure(average(take_gradients(trained)), expected), abs(output.loss.item() - loss) / loss


@pytest.mark.slow
def test_a_saved_adapter_is_loaded_to_share_rows(tmp_path):
    """Catches an option that `load_adapter` drops, and gradients of an adapter that is trained further."""
    torch.manual_seed(0)
    FAMILIES["llama"]().save_pretrained(tmp_path / "base")
    build("llama", dtype=torch.float32).save_pretrained(tmp_path / "adapter")
    for far in run_ranks(compare_loaded, 2, tmp_path):
        assert max(far) <= RELATIVE


def compare_compiled(rank: int) -> float:
    shared = lorashard.shard(build("llama"), sequence_parallel_size=2, torch_compile={"backend": "eager"})
    rows = make_rows("packed", 0)
    _, expected = take_plain(build("llama"), [rows])
    shared(**rows, use_cache=False).loss.backward()
    return measure(average(take_gradients(shared)), expected)


@pytest.mark.slow
def test_compiled_layers_exchange_heads():
    """Catches a collective inside of a compiled graph."""
    assert max(run_ranks(compare_compiled, 2)) <= RELATIVE_DOUBLE


def read_values(rank: int) -> list[str]:
    """Return the values of tokens that differ from those of whole rows, with TRL's fused head and without labels."""
    outputs = ("log_probs", "entropy", "is_top1", "mean_logits")
    plain, shared = build("llama", dtype=torch.float32), build("llama", dtype=torch.float32)
    for model in (plain, shared):
        add_fused_lm_head(model.get_base_model(), outputs=outputs)
    shared = lorashard.shard(shared, sequence_parallel_size=2)
    rows = make_rows("padded", 0)
    wrong = []
    for model_rows in (rows, rows | {"labels": None, "shift_labels": rows["labels"].roll(-1, 1)}):
        expected, found = (model(**model_rows, fused_lm_head=True) for model in (plain, shared))
        wrong += [
            name for name in (*outputs, "label_mask") if not torch.allclose(found[name], expected[name], atol=1e-5)
        ]
    whole = {name: rows[name] for name in ("input_ids", "attention_mask")}
    wrong += [] if torch.allclose(shared(**whole).logits, plain(**whole).logits, atol=1e-5) else ["logits"]
    with torch.no_grad():  # each rank for itself, as in generation
        alone = {name: value[rank : rank + 1] for name, value in whole.items()}
        wrong += [] if torch.allclose(shared(**alone).logits, plain(**alone).logits, atol=1e-5) else ["alone"]
    prompt = {name: value[rank : rank + 1, 2:] for name, value in whole.items()}
    same = torch.equal(
        *(model.eval().generate(**prompt, max_new_tokens=4, do_sample=False) for model in (plain, shared))
    )
    return wrong + ([] if same else ["generate"])


def test_what_trainers_read_is_of_whole_rows():
    """Catches values of tokens at the wrong places, and passes that are no training and would be shared."""
    assert run_ranks(read_values, 2) == [[], []]


def refuse(rank: int, make: Callable[[], PeftModel], size: int, seeds: Sequence[int]) -> str:
    try:
        model = lorashard.shard(make(), sequence_parallel_size=size)
        model(**make_rows("whole", seeds[rank]))
    except (ConfigError, ShardError) as error:
        return str(error)
    return "nothing"


def build_falcon() -> PeftModel:
    config = FalconConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True, pad_token_id=0
    )
    lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(FalconForCausalLM(config), lora)


def build_other_layer() -> PeftModel:
    """Return a model one of whose layers has no attention that goes through transformers' interface."""
    model = build("llama")
    model.get_base_model().model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    return model


def build_prefix() -> PeftModel:
    return get_peft_model(FAMILIES["llama"](), PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))


@pytest.mark.parametrize(
    ("make", "seeds", "words"),
    [
        (lambda: build("llama"), [0, 1], ["different rows", "hash"]),
        (lambda: build("llama"), [0, 0, 0], ["4 attention heads", "found 3"]),
        (build_prefix, [0, 0], ["virtual tokens"]),
        (build_falcon, [0, 0], ["FalconForCausalLM", "AttentionInterface"]),
        (build_other_layer, [0, 0], ["decoder layers [1]", "attention"]),
    ],
    ids=["rows", "heads", "prompt", "attention", "layer"],
)
def test_what_cannot_be_shared_is_refused(make, seeds, words):
    """Catches silent nonsense: tokens of other rows, heads that do not divide, attention that sees slices."""
    for said in run_ranks(refuse, len(seeds), make, len(seeds), seeds):
        assert all(word in said for word in words), said
