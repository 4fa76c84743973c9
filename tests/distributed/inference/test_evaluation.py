"""Loss and exact matches of an adapter: the same for any number of ranks, batch size and placement."""

from __future__ import annotations

import math
from pathlib import Path

import datasets
import pytest
import torch
from helpers.cases import slow
from helpers.forked_ranks import run_ranks
from helpers.tiny import VOCAB_SIZE, add_lora, build_base
from helpers.words import make_tokenizer
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import lorashard
from lorashard.errors import CheckpointError
from lorashard.inference.evaluation import Question, count_exact, measure_loss

PAD_ID = 0
KINDS = {
    "lora": {},
    "dora": {"use_dora": True},
    "head": {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}

# Each kind of adapter meets each placement or each size of batches; one all of both.
PLACEMENTS: dict[str, dict[str, tuple[int, ...]]] = {
    "lora": {"shard": (1, 50), "file": (2,)},
    "dora": {"host": (5,)},
    "head": {"shard": (2,)},
    "modules_to_save": {"replicate": (50,)},
}


def _make_rows(lengths: list[int]) -> datasets.Dataset:
    """Return rows of which about half of the tokens are supervised, the first too, which nothing predicts."""
    generator = torch.Generator().manual_seed(4)
    ids = [torch.randint(1, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]
    labels = [[-100 if i % 3 == 1 else token for i, token in enumerate(row)] for row in ids]
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": labels})


def _save_adapter(folder: Path, dtype: torch.dtype = torch.float32, **options):
    """Save a base and an adapter on it, and return both as plain PEFT's model."""
    build_base(dtype=dtype, num_hidden_layers=3).save_pretrained(folder / "base")
    model = add_lora(AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype), **options)
    with torch.no_grad():
        for index, (_, parameter) in enumerate(sorted(model.named_parameters())):
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)) * 0.3)
    model.save_pretrained(folder / "adapter")
    return model.eval()


def _measure_plainly(model, rows: datasets.Dataset) -> tuple[float, int]:
    """Return the mean over all supervised tokens, a row at a time, with whole logits."""
    total, count = 0.0, 0
    for row in rows:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].double()
        labels = torch.tensor(row["labels"][1:])
        total += float(cross_entropy(logits, labels, reduction="sum", ignore_index=-100))
        count += int((labels != -100).sum())
    return total / count, count


def make_words() -> PreTrainedTokenizerFast:
    return make_tokenizer([*(f"w{i}" for i in range(VOCAB_SIZE - 1)), "</s>"], pad_token="w0")


@pytest.mark.parametrize("kind", ["lora", "head", *map(slow, ("dora", "modules_to_save"))])
def test_loss_is_the_mean_over_tokens_whatever_the_ranks_and_batches(tmp_path, kind):
    """A mean of batches' means, a tail counted twice or left out, or an adapter on the head that is ignored."""
    plain = _save_adapter(tmp_path, **KINDS[kind])
    rows = _make_rows([5, 30, 12, 7, 21, 3, 16])
    expected, num_tokens = _measure_plainly(plain, rows)
    with plain.disable_adapter():
        expected_base, _ = _measure_plainly(plain, rows)
    assert abs(expected - expected_base) > 1e-3

    def body(rank):
        found = []
        for placement, batch_sizes in PLACEMENTS[kind].items():
            model = lorashard.load_adapter(tmp_path / "adapter", placement=placement, dtype=torch.float32)
            for batch_size in batch_sizes:
                found.append(measure_loss(model, rows, PAD_ID, batch_size))
            with model.disable_adapter():
                base = measure_loss(model, rows, PAD_ID, 2)
            assert base.loss == pytest.approx(expected_base, rel=1e-6)
        return [(one.loss, one.perplexity, one.num_rows, one.num_tokens) for one in found]

    for results in run_ranks(body, 3):
        for loss, perplexity, num_rows, count in results:
            assert loss == pytest.approx(expected, rel=1e-6) and (num_rows, count) == (7, num_tokens)
            assert perplexity == math.exp(loss)


@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.bfloat16])
def test_loss_is_what_the_trainer_reports_where_batches_are_even(tmp_path, dtype, monkeypatch):
    """Another mask, shift or precision than in training would look like progress."""
    plain = _save_adapter(tmp_path, dtype=dtype)
    rows = _make_rows([12] * 8)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    arguments = SFTConfig(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        bf16=dtype == torch.bfloat16,
        per_device_eval_batch_size=2,
        report_to="none",
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = SFTTrainer(plain, arguments, train_dataset=rows, eval_dataset=rows, processing_class=make_words())
    expected = trainer.evaluate()["eval_loss"]

    def body(rank):
        model = lorashard.load_adapter(tmp_path / "adapter", placement="shard", dtype=dtype)
        return measure_loss(model, rows, PAD_ID, 2).loss

    for loss in run_ranks(body, 2):
        assert loss == pytest.approx(expected, rel=1e-6)


def test_exact_matches_do_not_depend_on_ranks_and_batches(tmp_path):
    """A question that two ranks count, one of the tail that none counts, or padding that changes the answer."""
    plain = _save_adapter(tmp_path)
    prompts = [[5 + i + j for j in range(2 + i % 4)] for i in range(7)]
    questions = []
    for i, prompt in enumerate(prompts):
        answer = plain.generate(input_ids=torch.tensor([prompt]), max_new_tokens=4, do_sample=False, eos_token_id=None)
        answer_ids = answer[0, len(prompt) :].tolist()
        questions.append(Question(prompt, answer_ids if i % 3 else [(answer_ids[0] + 1) % VOCAB_SIZE, *answer_ids[1:]]))

    def body(rank):
        tokenizer = make_words()
        counts = []
        for placement, batch_sizes in (("shard", (2,)), ("file", (50,))):
            model = lorashard.load_adapter(tmp_path / "adapter", placement=placement, dtype=torch.float32)
            counts += [count_exact(model, tokenizer, questions, batch_size, 4) for batch_size in batch_sizes]
        return counts

    assert [count for counts in run_ranks(body, 3) for count in counts] == [4] * 6


def test_a_batch_costs_the_gathers_of_one_pass(tmp_path):
    """A check that gathers, a second gather of the head, or one forward too many on some ranks."""
    _save_adapter(tmp_path)
    rows = _make_rows([8, 9, 10, 11, 12])

    def load():
        return lorashard.load_adapter(tmp_path / "adapter", placement="shard", dtype=torch.float32)

    def body(rank):
        measured, passed = load(), load()
        measure_loss(measured, rows, PAD_ID, 2)  # five rows, in batches of two on each of two ranks, are two forwards
        for _ in range(2):
            with torch.no_grad():
                passed(input_ids=torch.tensor([[1, 2, 3]]))
        return lorashard.stats(measured).num_gathers, lorashard.stats(passed).num_gathers

    for found, expected in run_ranks(body, 2):
        assert found == expected > 0


def test_a_loss_that_is_not_finite_is_an_error(tmp_path):
    """NaN in a table of results looks like a result."""
    _save_adapter(tmp_path)
    rows = _make_rows([8])

    def body(rank):
        model = lorashard.load_adapter(tmp_path / "adapter", placement="file", dtype=torch.float32)
        next(p for n, p in model.named_parameters() if "down_proj.lora_B" in n).data.fill_(math.nan)
        with pytest.raises(CheckpointError) as caught:
            measure_loss(model, rows, PAD_ID, 2)
        return math.isnan(caught.value.found)

    assert run_ranks(body, 1) == [True]
