"""Answer prompts, on any placement and any number of ranks: a file of them, or a few at each evaluation of a run."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedTokenizerBase, StoppingCriteriaList, TrainerCallback
from transformers.generation import BaseStreamer

from ..config.use_options import ChatOptions, GenerateOptions
from ..data.formats import Message
from ..data.prompts import Prompt, PromptWriter, read_prompts
from ..data.sources import BadRow
from ..engine import DeviceHome, FileHome, HostHome
from ..errors import ConfigError, DataError
from ..model.generating import needs_all_ranks
from ..model.sharding import engine_of
from ..model.units import LAYER
from ..planning.batches import count_row_bytes, plan_batches
from ..planning.probe import measure_free_bytes
from ..runs.events import describe_event
from ..runtime import dist
from ..runtime.disk import PatientFiles, cut_lines, describe_fault, replace_text
from ..runtime.launch_env import read_launcher_env
from ..runtime.output import give, say
from .load import load_for_use, load_saved_tokenizer

# Rows of each rank that `auto` placement reserves memory for, so that the base does not take what a batch needs.
_RESERVED_ROWS = 32
_MEMORY_SHARE = 0.8
# Ranks that are independent still exchange answers once in so many batches: no collective may wait for hours.
_BATCHES_BETWEEN_GATHERS = 16
_SHOWN_CHARACTERS = 200


class Generator:
    """Answers prompts with a model.

    Ranks: where base units are gathered, every rank must call `generate` equally often.
    """

    def __init__(
        self,
        model: PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        stop_ids: set[int],
        sampling: dict[str, Any] | None = None,
    ) -> None:
        """Make one.

        Args:
            model: in eval mode.
            stop_ids: tokens that end an answer, in addition to those of the base's generation config.
            sampling: arguments of transformers' `generate` from `read_sampling`; without it the most probable token
                is taken each time.
        """
        own = model.generation_config.eos_token_id
        own_ids = set(own) if isinstance(own, list) else {own} - {None}
        self.stop_ids = sorted(own_ids | stop_ids)
        self.is_collective = needs_all_ranks(engine_of(model))
        self._model = model
        self._pad_id = tokenizer.pad_token_id
        self._arguments = {
            "use_cache": True,
            "num_beams": 1,
            "pad_token_id": self._pad_id,
            "eos_token_id": self.stop_ids or None,
            "max_new_tokens": max_new_tokens,
            **(sampling or {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}),
        }

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        streamer: BaseStreamer | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
    ) -> list[list[int]]:
        """Return the new tokens of each prompt, without the one that ended it.

        Args:
            prompts: the tokens of each; empty where this rank only takes part in the others' gathers.
            stopping_criteria: in addition to the tokens that end an answer.

        Ranks: collective where base units are gathered.
        """
        if not prompts and not self.is_collective:
            return []
        rows = prompts or [[self._pad_id]]
        width = max(map(len, rows))
        input_ids = torch.tensor([[self._pad_id] * (width - len(row)) + list(row) for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        arguments = self._arguments | ({} if prompts else {"max_new_tokens": 1})
        device = self._model.device
        output = self._model.generate(  # [rows, width + new tokens]
            input_ids=input_ids.to(device),
            attention_mask=mask.to(device),
            streamer=streamer,
            stopping_criteria=stopping_criteria,
            **arguments,
        )
        return [self._cut(row) for row in output[: len(prompts), width:].tolist()]

    def _cut(self, token_ids: list[int]) -> list[int]:
        end = next((i for i, token_id in enumerate(token_ids) if token_id in self.stop_ids), len(token_ids))
        return token_ids[:end]


def read_sampling(options: GenerateOptions | ChatOptions) -> dict[str, Any] | None:
    """Return the sampling arguments of transformers' `generate`, None without sampling."""
    if not options.do_sample:
        return None
    return {"do_sample": True} | {name: getattr(options, name) for name in ("temperature", "top_p", "top_k")}


def describe_placement(model: PeftModel) -> str:
    """Return on one line the placement of a loaded model's base, and how many of its layers are resident."""
    engine = engine_of(model)
    stats = engine.stats()
    moved = [unit for unit in engine.units if not unit.is_resident]
    layers = [unit for unit in engine.units if unit.size_class == LAYER]
    num_resident = sum(unit.is_resident for unit in layers)
    held = f"{(stats.bytes_at_rest + stats.slot_bytes) / 2**30:.3f} GiB on the device"
    if not moved:
        is_mapped = any(isinstance(unit.home, FileHome) for unit in engine.units)
        kind = "file, read where it is mapped" if is_mapped else "the whole base on each device"
        return f"placement: {kind}; {held}"
    home = moved[0].home
    names: dict[type, str] = {DeviceHome: "shard", HostHome: "host", FileHome: "file"}
    over = f" over {home.layout.num_shards} ranks" if home.layout.num_shards > 1 else ""
    return f"placement: {names[type(home)]}{over}; {num_resident} of {len(layers)} layers resident; {held}"


def check_length(model: PeftModel, num_tokens: int, max_new_tokens: int, place: str) -> None:
    """Check that a prompt and its answer have no more tokens than the model has positions.

    Raises:
        DataError: they have more.
    """
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and num_tokens + max_new_tokens > most:
        raise DataError(
            where=place,
            expected=f"at most {most} tokens, the positions of the model",
            found=f"{num_tokens} and max_new_tokens {max_new_tokens}",
            fix="shorten the prompt, or lower max_new_tokens",
        )


def generate_file(options: GenerateOptions) -> None:
    """Answer every prompt of a file, and write each row with its `completion`.

    Raises:
        UserError: a mistake in the options, the prompts or the adapter; all ranks raise alike.

    Ranks: run by every rank; the prompts are divided among the ranks, and rank 0 writes.
    """
    out = _check_out(options)
    tokenizer = load_saved_tokenizer(options.adapter, options)
    writer = PromptWriter(tokenizer, options.as_chat)
    prompts = read_prompts(options.prompts, writer)
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    model = load_for_use(options.adapter, options, _count_cached_tokens(options, prompts))
    rank = dist.get_rank()
    say(rank, describe_placement(model))
    check_length(model, len(longest.token_ids), options.max_new_tokens, longest.place)
    generator = Generator(model, tokenizer, options.max_new_tokens, writer.find_stop_ids(), read_sampling(options))
    lengths = [len(prompt.token_ids) for prompt in prompts]
    batches = plan_batches(lengths, dist.get_world_size(), _plan_rows(options, model))
    say(rank, f"{len(prompts)} prompts in {len(batches)} batches of at most {max(len(b[0]) for b in batches)} a rank")
    answers = {}
    begin_s = time.perf_counter()
    columns = {"completion": options.base_only} | ({"base_completion": True} if options.compare else {})
    for column, is_base in columns.items():
        with model.disable_adapter() if is_base else nullcontext(), _explained_shortage(batches):
            answers[column] = answer_shared(
                generator,
                [prompt.token_ids for prompt in prompts],
                batches,
                options.seed,
                lambda num_done: say(rank, f"{column}: {num_done} of {len(prompts)} prompts answered"),  # noqa: B023
            )
    seconds = time.perf_counter() - begin_s
    if rank != 0:
        return
    num_tokens = sum(len(row) for rows in answers.values() for row in rows)
    texts = {column: [_decode(tokenizer, row) for row in rows] for column, rows in answers.items()}
    _write_rows(out, [_build_row(p.row, {c: texts[c][i] for c in texts}) for i, p in enumerate(prompts)])
    result = {"out": str(out), "num_prompts": len(prompts), "num_tokens": num_tokens, "seconds": round(seconds, 3)}
    give(rank, result, f"{len(prompts)} prompts answered in {seconds:.1f} s ({num_tokens} tokens): {out}", False)


def answer_shared(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    batches: Sequence[Sequence[Sequence[int]]],
    seed: int,
    report: Callable[[int], None] = lambda num_done: None,
) -> list[list[int]]:
    """Return the new tokens of every prompt, in order, on every rank.

    Args:
        batches: from `plan_batches`: for each, for each rank, which prompts.
        seed: of the sampling; every rank and every batch has its own.
        report: called now and then with how many are answered.

    Ranks: collective over all ranks.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    answers: dict[int, list[int]] = {}
    own: dict[int, list[int]] = {}
    for number, shares in enumerate(batches, 1):
        torch.manual_seed(seed + number * world_size + rank)
        new = generator.generate([prompts[index] for index in shares[rank]])
        own |= dict(zip(shares[rank], new, strict=True))
        if number % _BATCHES_BETWEEN_GATHERS == 0 or number == len(batches):
            for found in dist.gather_objects(own):
                answers |= found
            own = {}
            report(len(answers))
    return [answers[index] for index in range(len(prompts))]


class SampleCallback(TrainerCallback):
    """Answers a few prompts at each evaluation of a run, into `samples.jsonl` of its folder.

    Training is not affected: the modules' modes and the random state are restored.

    Ranks: each evaluation is collective over all ranks.
    """

    def __init__(
        self,
        model: PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Sequence[str | Sequence[Message]],
        folder: Path,
        max_new_tokens: int = 128,
        as_chat: bool = False,
    ) -> None:
        """Make one.

        Args:
            model: the sharded model itself, not the trainer's wrapper.
            prompts: texts or conversations.
            folder: the run's.
            as_chat: take a text as a user's message.

        Raises:
            DataError: a prompt cannot be written.
        """
        writer = PromptWriter(tokenizer, as_chat)
        self._model = model
        self._tokenizer = tokenizer
        self._prompts = list(prompts)
        self._path = folder / "samples.jsonl"
        self._files = PatientFiles(lambda kind, **fields: say(0, describe_event(kind, fields)))
        self._token_ids = []
        for number, prompt in enumerate(prompts, 1):
            place = f"sample_prompts: prompt {number}"
            try:
                self._token_ids.append(writer.write(prompt))
            except BadRow as error:
                raise DataError(error.detail, where=place) from error
            check_length(model, len(self._token_ids[-1]), max_new_tokens, place)
        self._generator = Generator(model, tokenizer, max_new_tokens, writer.find_stop_ids())
        self._batches = plan_batches(
            [len(row) for row in self._token_ids], dist.get_world_size(), lambda _: len(prompts)
        )

    def on_train_begin(self, args, state, control, **kwargs):
        if dist.get_rank() == 0:  # lines of another run, or of steps that run again
            cut_lines(self._path, state.global_step or None)

    def on_evaluate(self, args, state, control, **kwargs):
        with _in_eval_mode(self._model):
            answers = answer_shared(self._generator, self._token_ids, self._batches, seed=0)
        if dist.get_rank() != 0 or not answers:
            return
        lines = [
            {"step": state.global_step, "prompt": prompt, "completion": _decode(self._tokenizer, answer)}
            for prompt, answer in zip(self._prompts, answers, strict=True)
        ]
        for line in lines:
            self._files.append(self._path, json.dumps(line, ensure_ascii=False))
        first = lines[0]
        shown = first["prompt"] if isinstance(first["prompt"], str) else first["prompt"][-1].get("content")
        say(0, f"sample at step {state.global_step}: {_shorten(shown)} -> {_shorten(first['completion'])}")


@contextmanager
def _in_eval_mode(model: PeftModel) -> Iterator[None]:
    """Put `model` in eval mode for the body, then restore each module's mode and the random state."""
    modes = [(module, module.training) for module in model.modules()]
    devices = [model.device] if model.device.type == "cuda" else []
    model.eval()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for module, is_training in modes:
            module.training = is_training


def _check_out(options: GenerateOptions) -> Path:
    out = Path(options.out).expanduser()
    problem = None
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        problem = "a name in a folder that cannot be written to"
    elif out.is_dir():
        problem = "a folder"
    prompts = Path(options.prompts).expanduser()
    if out.exists() and prompts.exists() and out.samefile(prompts):
        problem = "the file of the prompts itself"
    if problem is not None:
        raise ConfigError(option="out", expected="a file to write", found=f"{options.out}, {problem}")
    return out


def _count_cached_tokens(options: GenerateOptions, prompts: Sequence[Prompt]) -> int:
    env = read_launcher_env()
    num_ranks = env.world_size if env else 1
    num_rows = _RESERVED_ROWS if options.batch_size == "auto" else options.batch_size
    longest = max(len(prompt.token_ids) for prompt in prompts)
    return min(num_rows, -(-len(prompts) // num_ranks)) * (longest + options.max_new_tokens)


def _plan_rows(options: GenerateOptions, model: PeftModel) -> Callable[[int], int]:
    """Return how many rows of a length a rank takes at once: `batch_size`, or what the rank with least memory holds.

    Ranks: collective over all ranks.
    """
    if options.batch_size != "auto":
        num_rows = options.batch_size
        return lambda length: num_rows
    ranks_per_node = dist.find_node_size() or dist.get_world_size()
    free_bytes = min(dist.gather_objects(measure_free_bytes(model.device, ranks_per_node)))
    dtype = model.get_base_model().dtype

    def count_rows(length: int) -> int:
        row_bytes = count_row_bytes(model.config, dtype, length, options.max_new_tokens)
        return max(1, int(free_bytes * _MEMORY_SHARE) // row_bytes)

    return count_rows


@contextmanager
def _explained_shortage(batches: Sequence[Sequence[Sequence[int]]]) -> Iterator[None]:
    most = max(len(shares[0]) for shares in batches)
    try:
        yield
    except torch.OutOfMemoryError as error:
        fix = f"give --batch_size {most // 2}" if most > 1 else "lower max_new_tokens, or choose another --placement"
        problem = f"a batch of up to {most} rows on a rank does not fit in memory"
        raise ConfigError(problem, option="batch_size", fix=fix) from error


def _build_row(row: dict[str, Any], answers: dict[str, str]) -> dict[str, Any]:
    """Return a row with its answers; a completion that it had is kept as `expected_completion`."""
    kept = {f"expected_{name}" if name in answers else name: value for name, value in row.items()}
    return kept | answers


def _write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows to a file, all or nothing; if its disk refuses them, write the work of hours elsewhere."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    try:
        replace_text(path, text)
    except OSError as error:
        descriptor, spare = tempfile.mkstemp(prefix="lorashard-answers-", suffix=".jsonl")
        os.close(descriptor)
        Path(spare).write_text(text, encoding="utf-8")
        reason = describe_fault(error, path.parent)
        fix = f"the answers are in {spare}"
        raise ConfigError(f"cannot be written: {reason}", option="out", where=path, fix=fix) from error


def _decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=True))


def _shorten(text: str | None) -> str:
    text = text or ""
    return json.dumps(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "...", ensure_ascii=False)
