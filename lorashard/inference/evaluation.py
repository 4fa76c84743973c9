"""Evaluate an adapter: loss, perplexity, exact matches. The same for any number of ranks and any batch size."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import datasets
import torch
from peft import PeftModel
from peft.utils import ModulesToSaveWrapper
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import add_fused_lm_head

from ..config.use_options import EvalOptions
from ..data.encode import IGNORED_LABEL
from ..data.prepare import Prepared, prepare
from ..data.prompts import PromptWriter
from ..errors import CheckpointError, DataError
from ..planning.batches import plan_batches
from ..runtime import dist
from ..runtime.launch_env import read_launcher_env
from ..runtime.output import give, say
from ..runtime.progress import told_progress
from .generation import Generator, answer_shared, check_length, describe_placement
from .load import load_for_use, load_saved_tokenizer

_FILLER = {"input_ids": [0, 0], "labels": [0, 0]}
_READ_ROWS = 1000
_SPARE_TOKENS = 8  # the same words may take other tokens
_SCORED_TOKENS = 1024  # whose logits are converted to float32 at once
_LARGEST_LOSS = 700.0  # the perplexity of a larger one overflows float64


@dataclass(frozen=True)
class Loss:
    """A mean over supervised tokens, and how many there are in how many rows."""

    loss: float
    perplexity: float
    num_rows: int
    num_tokens: int


@dataclass(frozen=True)
class Question:
    """The tokens before a row's last completion, and those of the completion."""

    prompt_ids: list[int]
    answer_ids: list[int]


# These override the base's generation config: a penalty on repetition would change the result.
_MOST_PROBABLE = {
    "do_sample": False,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
}


def evaluate(options: EvalOptions) -> None:
    """Evaluate an adapter, or its base alone, on a dataset, and print the result.

    Raises:
        UserError: a mistake in options, data, adapter or base; all ranks raise alike.

    Ranks: run by every rank. The data is prepared before the ranks form a group, so that no collective waits for it.
    """
    env = read_launcher_env()
    rank = env.rank if env else 0
    tokenizer = load_saved_tokenizer(options.adapter, options)
    prepared = prepare(options.data_options(), tokenizer)
    say(rank, f"dataset: {prepared.report.summary()}")
    questions = prepare_questions(options, prepared, tokenizer)
    longest_prompt = max((len(question.prompt_ids) for question in questions), default=0)
    longest_answer = max((len(question.answer_ids) for question in questions), default=0)
    max_new_tokens = options.max_new_tokens or longest_answer + _SPARE_TOKENS
    # Without questions nothing is cached, but a forward of a batch takes memory too.
    longest = max(prepared.report.longest_tokens, longest_prompt + max_new_tokens)
    model = load_for_use(options.adapter, options, options.per_device_eval_batch_size * longest)
    say(rank, describe_placement(model))
    if questions:
        check_length(model, longest_prompt, max_new_tokens, "the longest prompt")
    result: dict[str, Any] = {"adapter": options.adapter, "base_only": options.base_only, "dataset": options.dataset}
    with model.disable_adapter() if options.base_only else contextlib.nullcontext():
        batch_size = options.per_device_eval_batch_size
        loss = measure_loss(model, prepared.train, tokenizer.pad_token_id, batch_size)
        result |= asdict(loss) | {"num_skipped": prepared.report.num_skipped, "num_cut": prepared.report.num_truncated}
        lines = [
            f"loss {loss.loss:.6g}, perplexity {loss.perplexity:.6g} over {loss.num_tokens:,} tokens of "
            f"{loss.num_rows:,} rows"
        ]
        if questions:
            num_exact = count_exact(model, tokenizer, questions, batch_size, max_new_tokens)
            share = num_exact / len(questions)
            result |= {"exact_match": share, "num_exact": num_exact, "num_questions": len(questions)}
            lines.append(f"exact matches: {num_exact:,} of {len(questions):,} ({share:.2%})")
    give(rank, result, "\n".join(lines), options.as_json)


def measure_loss(model: PeftModel, rows: datasets.Dataset, pad_token_id: int, batch_size: int) -> Loss:
    """Return the mean loss over all supervised tokens of `rows`.

    It equals the `eval_loss` of TRL's `SFTTrainer.evaluate` where all batches have the same number of tokens: that is
    the mean of the batches' means.

    Args:
        model: in eval mode, from `lorashard.load` or `load_adapter`.
        rows: `input_ids` and `labels`, as `prepare` returns them, not packed.
        batch_size: rows of a batch on each rank; the result does not depend on it.

    Raises:
        CheckpointError: the loss is not finite.

    Ranks: collective over all ranks. All run the same number of forwards, since they share the gathers of the base: a
        rank without rows for the last one computes a token that is not counted.
    Memory: the logits of a batch are never materialized, unless the adapter changes the LM head.
    """
    rank = dist.get_rank()
    lengths = [len(ids) for batch in rows.iter(batch_size=_READ_ROWS) for ids in batch["input_ids"]]
    batches = plan_batches(lengths, dist.get_world_size(), lambda _: batch_size)
    collate = DataCollatorForLanguageModeling(pad_token_id)
    sums: list[float] = []
    num_tokens = 0
    with _scoring(model) as score, told_progress("measuring the loss", rank == 0) as tell:
        for index, shares in enumerate(batches):
            tell(index, len(batches), "batches")
            batch = collate([rows[row] for row in shares[rank]] or [_FILLER])
            row_sums = score({name: tensor.to(model.device) for name, tensor in batch.items()})
            if shares[rank]:
                sums += row_sums.tolist()
                num_tokens += int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())
    gathered = dist.gather_objects((sums, num_tokens))
    num_tokens = sum(count for _, count in gathered)
    loss = -math.fsum(value for values, _ in gathered for value in values) / num_tokens
    if not loss < _LARGEST_LOSS:
        fix = "compare with --base_only and with another dtype to find whose logits are not finite"
        raise CheckpointError(expected="a finite loss", found=loss, fix=fix)
    return Loss(loss, math.exp(loss), len(rows), num_tokens)


def prepare_questions(options: EvalOptions, prepared: Prepared, tokenizer: PreTrainedTokenizerBase) -> list[Question]:
    """Return the questions of `options`: none where exact matches are not wanted, or no row has a completion.

    Args:
        prepared: the rows whose loss is measured; they are prepared again where they are cut, or fully supervised.

    Raises:
        DataError: exact matches are required, and no row has a completion.
    """
    if options.exact_match is False:
        return []
    if prepared.report.num_truncated or options.completion_only_loss is not None:
        uncut = {"max_length": None, "completion_only_loss": None}
        prepared = prepare(options.data_options().model_copy(update=uncut), tokenizer)
    questions = find_questions(prepared.train, tokenizer)
    if options.exact_match and not questions:
        raise DataError(
            where=options.dataset,
            option="exact_match",
            expected="prompts with completions, or conversations that the assistant ends",
            found=f"{prepared.report.format} rows of which {prepared.report.mask_method} is supervised",
        )
    return questions


def find_questions(rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> list[Question]:
    """Return the last completion of each row that ends with one, with everything before it.

    Args:
        rows: as `prepare` returns them, neither packed nor cut, with only completions supervised.
    """
    questions = []
    for row in rows:
        ids, labels = row["input_ids"], row["labels"]
        end = next((i for i in range(len(labels), 0, -1) if labels[i - 1] != IGNORED_LABEL), 0)
        start = next((i for i in range(end, 0, -1) if labels[i - 1] == IGNORED_LABEL), 0)
        if start and not _decode(tokenizer, ids[end:]):  # a template's closing tokens may follow
            questions.append(Question(ids[:start], ids[start:end]))
    return questions


def count_exact(
    model: PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    batch_size: int,
    max_new_tokens: int,
) -> int:
    """Return how many questions the model answers word for word, taking the most probable token each time.

    White space at both ends does not count, nor does the token that ends the answer.

    Args:
        batch_size: questions of a batch on each rank; the result does not depend on it.

    Ranks: collective over all ranks; all get the same count.
    """
    prompts = [question.prompt_ids for question in questions]
    stop_ids = PromptWriter(tokenizer).find_stop_ids()
    generator = Generator(model, tokenizer, max_new_tokens, stop_ids, _MOST_PROBABLE)
    batches = plan_batches([len(prompt) for prompt in prompts], dist.get_world_size(), lambda _: batch_size)
    answers = answer_shared(
        generator, prompts, batches, 0, lambda done: say(dist.get_rank(), f"{done} of {len(prompts)} rows answered")
    )
    stops = {*stop_ids, *generator.stop_ids}
    return sum(
        _decode(tokenizer, answer) == _decode(tokenizer, _strip_stop(question.answer_ids, tokenizer, stops))
        for answer, question in zip(answers, questions, strict=True)
    )


def _strip_stop(ids: list[int], tokenizer: PreTrainedTokenizerBase, stop_ids: set[int]) -> list[int]:
    """Remove the token that ends an answer, which is not a special token in every vocabulary, and blanks around it."""
    end = len(ids)
    while end and (ids[end - 1] in stop_ids or not _decode(tokenizer, ids[end - 1 : end])):
        end -= 1
    return ids[:end]


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()


@contextlib.contextmanager
def _scoring(model: PeftModel) -> Iterator[Callable[[dict[str, torch.Tensor]], torch.Tensor]]:
    """Yield a function that returns the summed log-probabilities of a batch's labels, [rows] in float64.

    A row's sum does not depend on the rest of its batch.
    """
    base = model.get_base_model()
    # As in training, TRL multiplies by the head's weight in tiles. It would skip an adapter on the head.
    is_fused = isinstance(base.get_output_embeddings(), (torch.nn.Linear, ModulesToSaveWrapper))
    autocast = torch.autocast(model.device.type, base.dtype, enabled=base.dtype != torch.float32)

    def score(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad(), autocast:
            if is_fused:
                return model(**batch, fused_lm_head=True).log_probs.double().sum(1)
            labels = batch.pop("labels")
            logits = model(**batch, use_cache=False).logits  # [rows, tokens, vocabulary]
            return torch.stack([_sum_log_probs(*row) for row in zip(logits[:, :-1], labels[:, 1:], strict=True)])

    own_forward = base.__dict__.get("forward")
    if is_fused:
        add_fused_lm_head(base)
    try:
        yield score
    finally:
        if is_fused:
            del base.forward
        if own_forward is not None:
            base.forward = own_forward


def _sum_log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the log-probabilities of one row's labels, some tokens at a time.

    Args:
        logits: [tokens, vocabulary].
        labels: [tokens].
    """
    parts = zip(logits.split(_SCORED_TOKENS), labels.split(_SCORED_TOKENS), strict=True)
    losses = [cross_entropy(some.float(), own, ignore_index=IGNORED_LABEL, reduction="none") for some, own in parts]
    return -torch.cat(losses).double().sum()
