"""Several jobs on one base: each adapter ends with the bits that it has where its job trains alone."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.bases import save_base
from helpers.forked_ranks import run_ranks
from helpers.tiny import find_differences, make_batch, set_checkpointing
from peft import IA3Config, LoHaConfig, LoraConfig, PeftConfig, PeftModel
from torch import nn

import lorashard
from lorashard.engine.turns import Turns
from lorashard.errors import ShardError, TrainingError
from lorashard.model.sharding import engine_of

CPU_BUDGET_S = 140  # some 80 with the slow rows: several jobs, each compared with itself alone
NUM_LAYERS = 5  # two more than there are slots, with a layer of prefetch
SIZES: dict[str, Any] = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=NUM_LAYERS)
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "llama-tied": {}, "mixtral": dict(num_local_experts=3)}
SEED = 7
NAMES = ("lora", "dora", "other", "upper")
STEPS = 3


def make_configs(family: str) -> dict[str, PeftConfig]:
    """Return adapters of four kinds, some with dropout; `upper` is on two middle layers alone."""
    is_dense = family != "mixtral"
    down = "down_proj" if is_dense else "o_proj"
    common: dict[str, Any] = dict(task_type="CAUSAL_LM", lora_alpha=8)
    return {
        # PEFT has no dropout on experts, which all-linear means too.
        "lora": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1 * is_dense, **common),
        "dora": LoraConfig(r=8, target_modules=["q_proj", "v_proj"], use_dora=True, lora_dropout=0.2, **common),
        "other": LoHaConfig(r=2, target_modules=[down], task_type="CAUSAL_LM")
        if family == "llama"
        else IA3Config(
            target_modules=["k_proj", down], feedforward_modules=[down] if is_dense else [], task_type="CAUSAL_LM"
        ),
        "upper": LoraConfig(
            r=2,
            target_modules=["q_proj", "o_proj"],
            layers_to_transform=[2, 3],
            layers_pattern="layers",
            use_rslora=True,
            **common,
        ),
    }


@dataclass(frozen=True)
class Row:
    """What a row of the test trains with; `microbatches` over 1 accumulate, in DDP's no_sync."""

    placement: str
    world: int = 1
    family: str = "llama"
    checkpointing: str = "off"
    quantization: str | None = None
    microbatches: int = 0


ROWS = {
    "streamed": Row("host"),
    "file nf4": Row("file", checkpointing="non-reentrant", quantization="nf4"),
    "sharded ddp": Row("shard", 2, checkpointing="non-reentrant", microbatches=2),
    "experts": Row("shard", 2, "mixtral", microbatches=1),
    "tied nf4": Row("host", 2, "llama-tied", checkpointing="non-reentrant", quantization="nf4"),
    "reentrant": Row("shard", 1, "llama-tied", checkpointing="reentrant"),
    "four ranks": Row("shard", 4, checkpointing="off", microbatches=2),
    "four ranks, experts": Row("file", 4, "mixtral", checkpointing="non-reentrant", quantization="nf4"),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for family, sizes in FAMILIES.items():
        save_base(folder / family, family, torch.float32, max_shard_size="50KB", **SIZES | sizes)
    return folder


def load(folder: Path, row: Row, name: str | None = None) -> dict[str, PeftModel]:
    """Return the models of all jobs on one base, or the one of a job alone."""
    options: dict[str, Any] = dict(dtype="float32", placement=row.placement, quantization=row.quantization)
    configs = make_configs(row.family)
    torch.manual_seed(SEED)
    if name is not None:
        return {name: lorashard.load(str(folder / row.family), configs[name], **options)}
    return lorashard.load(str(folder / row.family), adapters=configs, **options)


def backward_alone(loss: torch.Tensor) -> None:
    loss.backward()


def train(
    name: str,
    model: PeftModel,
    row: Row,
    backward: Callable[[torch.Tensor], None],
    rank: int = 0,
    steps: int = STEPS,
    between: Callable[[int, PeftModel], None] = lambda step, model: None,
) -> None:
    """Train one job, whose data has a length of its own.

    Args:
        between: called after each step.
    """
    number = NAMES.index(name)
    torch.manual_seed(number)
    set_checkpointing(model, row.checkpointing)
    model.train()
    called: nn.Module = nn.parallel.DistributedDataParallel(model) if row.microbatches else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    count = max(row.microbatches, 1)
    for step in range(steps):
        for microbatch in range(count):
            is_last = microbatch == count - 1
            seed = 1000 * rank * bool(row.microbatches) + 100 * number + 10 * step + microbatch
            batch = make_batch(seed=seed, tokens=12 - number)
            with nullcontext() if is_last else called.no_sync():
                backward(called(**batch).loss / count)
        optimizer.step()
        optimizer.zero_grad()
        between(step, model)


def take_adapter(model: PeftModel) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def turns_of(models: dict[str, PeftModel]) -> Turns:
    turns = engine_of(models["lora"]).turns
    assert turns is not None
    return turns


def count_traffic(models: dict[str, PeftModel]) -> list[int]:
    stats = lorashard.stats(next(iter(models.values())))
    return [stats.num_gathers, stats.gathered_bytes, stats.num_copies, stats.copied_bytes]


def run_alone(rank: int, folder: Path, row: Row, name: str, **options: Any) -> tuple[dict[str, Any], list[int]]:
    """Return the adapter of a job that trains alone, and its traffic."""
    models = load(folder, row, name)
    before = count_traffic(models)
    train(name, models[name], row, backward_alone, rank, **options)
    return take_adapter(models[name]), [a - b for a, b in zip(count_traffic(models), before, strict=True)]


def run_together(rank: int, folder: Path, row: Row, options: dict[str, dict[str, Any]]) -> tuple[Any, list, list[int]]:
    """Return the adapters of jobs that train together, the errors that ended them, and the traffic."""
    models = load(folder, row)
    turns, before = turns_of(models), count_traffic(models)

    def work(name: str) -> Callable[[], None]:
        return lambda: train(name, models[name], row, turns.backward, rank, **options.get(name, {}))

    errors = turns.run([work(name) for name in NAMES], (TrainingError,))
    traffic = [a - b for a, b in zip(count_traffic(models), before, strict=True)]
    return {name: take_adapter(model) for name, model in models.items()}, errors, traffic


def compare(rank: int, folder: Path, row: Row) -> tuple[dict[str, list[str]], list[int], list[int]]:
    """Return what differs by job, and the traffic together and of the job with all layers alone."""
    found, errors, traffic = run_together(rank, folder, row, {})
    assert errors == [None] * len(NAMES)
    wrong, expected_traffic = {}, []
    for name in NAMES:
        expected, own = run_alone(rank, folder, row, name)
        assert expected and found[name].keys() == expected.keys()
        wrong[name] = find_differences(found[name], expected)
        expected_traffic = own if name == "lora" else expected_traffic
    return {name: names for name, names in wrong.items() if names}, traffic, expected_traffic


QUICK = ("streamed", "file nf4", "sharded ddp")
MARKED = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ROWS]


@pytest.mark.parametrize("name", MARKED)
def test_each_job_has_the_bits_of_its_own_run(bases, name):
    """Catches dropout drawn from another job's random numbers, a unit released under a job, gradients that meet.

    And the promise of a sweep: the units are gathered or copied as often as for one job.
    """
    row = ROWS[name]
    for wrong, traffic, expected in run_ranks(compare, row.world, bases, row):
        assert wrong == {}
        if row.checkpointing != "reentrant":  # whose recomputation each job asks for by itself
            assert traffic == expected and (sum(traffic) > 0 or row.placement == "file")


# -- jobs that do something else ---------------------------------------------------------------------------------------


def evaluate(step: int, model: PeftModel) -> None:
    model.eval()
    with torch.no_grad():
        for seed in range(step + 1):
            model(**make_batch(seed=seed))
    model.train()


def answer(step: int, model: PeftModel) -> None:
    if step == 1:
        model.eval()
        model.generate(input_ids=make_batch()["input_ids"][:1], max_new_tokens=4, do_sample=True)
        model.train()


def give_up(step: int, model: PeftModel) -> None:
    if step == 1:
        raise TrainingError("enough")


def save(step: int, model: PeftModel) -> None:
    """Evaluate, and save with the embeddings, while the others are still in the joint pass."""
    evaluate(0, model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, save_embedding_layers=True)


UNLIKE: dict[str, dict[str, Any]] = {
    "lora": {"steps": 5, "between": answer},
    "dora": {"steps": 2},
    "other": {"steps": 4, "between": evaluate},
    "upper": {"steps": 4, "between": give_up},
}


def compare_unlike(rank: int, folder: Path, row: Row) -> dict[str, list[str]]:
    found, errors, _ = run_together(rank, folder, row, UNLIKE)
    assert errors[:3] == [None] * 3 and isinstance(errors[3], TrainingError)
    wrong = {}
    for name, options in (UNLIKE | {"upper": {"steps": 2}}).items():
        expected, _ = run_alone(rank, folder, row, name, **options)
        wrong[name] = find_differences(found[name], expected)
    return {name: names for name, names in wrong.items() if names}


@pytest.mark.parametrize("name", ["streamed", pytest.param("sharded ddp", marks=pytest.mark.slow)])
def test_jobs_that_end_evaluate_or_generate_leave_the_others_alone(bases, name):
    """Catches a job that waits for one that has ended, that samples from its random numbers, or fails with another."""
    for wrong in run_ranks(compare_unlike, ROWS[name].world, bases, ROWS[name]):
        assert wrong == {}


def compare_saving(rank: int, folder: Path, row: Row) -> dict[str, list[str]]:
    options: dict[str, dict[str, Any]] = {name: {"between": save} for name in NAMES}
    found, errors, _ = run_together(rank, folder, row, options)
    assert errors == [None] * 4
    wrong = {name: find_differences(found[name], run_alone(rank, folder, row, name)[0]) for name in NAMES}
    return {name: names for name, names in wrong.items() if names}


@pytest.mark.parametrize("row", [Row("host"), Row("shard", 2)], ids=["streamed", "sharded"])
def test_a_job_that_saves_base_weights_waits_for_the_pass_of_the_others(bases, row):
    """Catches weights that are read into the slot of a unit that other jobs are about to enter."""
    for wrong in run_ranks(compare_saving, row.world, bases, row):
        assert wrong == {}


# -- errors ------------------------------------------------------------------------------------------------------------


def fail(*args: Any) -> None:
    raise TrainingError("inside")


def fail_strangely(*args: Any) -> None:
    raise ValueError("strange")


def fail_and_go_on(rank: int, folder: Path, row: Row) -> dict[str, list[str]]:
    """Break a sweep in a forward, in a backward and between; then train on the same engine."""
    models = load(folder, row)
    turns = turns_of(models)
    layer = models["dora"].get_base_model().model.layers[3]

    def work(name: str, backward: Callable[[torch.Tensor], None] = turns.backward) -> Callable[[], None]:
        return lambda: train(name, models[name], row, backward, rank)

    def break_backward(loss: torch.Tensor) -> None:
        loss.register_hook(fail)
        turns.backward(loss)

    def run(error: type[Exception], broken: Callable[[], None]) -> None:
        # Before any job has taken a step: the adapters are as they were made.
        with pytest.raises(error):
            turns.run([work("lora"), broken, work("other"), work("upper")], (TrainingError,))
        assert turns.job is None

    in_layer = layer.mlp.register_forward_hook(fail)
    run(TrainingError, work("dora"))
    in_layer.remove()
    run(TrainingError, work("dora", break_backward))
    run(ValueError, work("dora", fail_strangely))
    for model in models.values():
        model.zero_grad()
    assert turns.run([work(name) for name in NAMES]) == [None] * 4
    wrong = {}
    for name in NAMES:
        wrong[name] = find_differences(take_adapter(models[name]), run_alone(rank, folder, row, name)[0])
    return {name: names for name, names in wrong.items() if names}


@pytest.mark.parametrize("row", [Row("host"), Row("shard", 2)], ids=["streamed", "sharded"])
def test_an_error_inside_of_a_pass_ends_all_and_the_engine_goes_on(bases, row):
    """Catches threads that hang, units that stay in their slots, and a job that trains on after half of a pass."""
    for wrong in run_ranks(fail_and_go_on, row.world, bases, row):
        assert wrong == {}


def lose_other_jobs(rank: int, folder: Path, row: Row) -> str:
    """Lose one job on each rank, another on each."""
    models = load(folder, row)
    turns, lost = turns_of(models), NAMES[rank]

    def work(name: str) -> Callable[[], None]:
        options = {"between": give_up} if name == lost else {}
        return lambda: train(name, models[name], row, turns.backward, rank, **options)

    with pytest.raises(ShardError) as caught:
        turns.run([work(name) for name in NAMES], (TrainingError,))
    return str(caught.value)


def test_ranks_that_have_lost_other_jobs_stop_before_they_mix_gradients(bases):
    """Catches a job whose gradients are added to another's, where a rank alone has lost it: the units that are
    gathered for those that are left are the same."""
    for said in run_ranks(lose_other_jobs, 2, bases, Row("shard", 2, microbatches=1)):
        assert said.count("begins a forward with gradients of 3 jobs") == 2
