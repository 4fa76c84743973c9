"""Generation on any placement and number of ranks: plain PEFT's tokens, counted gathers, training left as it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import datasets
import pytest
import torch
from helpers.cases import slow
from helpers.finetune import read_lines
from helpers.forked_ranks import run_ranks
from helpers.tiny import (
    add_lora,
    build_base,
    build_model,
    find_differences,
    make_batch,
    take_gradients,
)
from helpers.words import make_tokenizer
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, TrainerState
from trl import SFTConfig, SFTTrainer

import lorashard
from lorashard.config.use_options import ChatOptions, GenerateOptions
from lorashard.errors import ConfigError, DataError
from lorashard.inference import chat
from lorashard.inference.chat_lines import Ask, Listener
from lorashard.inference.generation import Generator, SampleCallback, generate_file

LAYERS = 4
NEW_TOKENS = 6  # an even number: then the slots are left as they were found
MEASURED = ("loss", "grad_norm", "eval_loss")
# Ragged, and as many as leave the second of two ranks without a row in the last batch.
PROMPTS = ["w5 w6 w7", "w9", "w11 w12 w13 w14 w15 w16 w17", "w20 w21", "w3 w4 w5 w6 w30"]
# By themselves `shard` and `host` keep whole what fits, which here is all.
PLACEMENTS = {
    "auto": {},
    "replicate": {"placement": "replicate"},
    "file": {"placement": "file"},
    "resident": {"placement": "shard"},
    "shard": {"placement": "shard", "resident_layers": 0},
    "mixed": {"placement": "shard", "resident_layers": 2, "prefetch": 0},
    "host": {"placement": "host", "resident_layers": 0},
}
Answers = dict[str, dict[str, list[int]]]


def show(token_ids: list[int], stop_ids: Sequence[int] = (2,)) -> str:
    """Return the text of what plain PEFT answered."""
    return make_tokenizer().decode([i for i in token_ids if i not in stop_ids], skip_special_tokens=True)


def answer_plainly(model: PeftModel, prompt: str, **arguments) -> list[int]:
    ids = torch.tensor([[int(word[1:]) for word in prompt.split()]])
    output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, **arguments)
    return output[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """A folder with a base, an adapter, prompts, and what plain PEFT answers, in part ended by a stop token."""
    folder = tmp_path_factory.mktemp("task")
    base = build_base(num_hidden_layers=LAYERS, initializer_range=0.3, pad_token_id=0, eos_token_id=2)
    base.save_pretrained(folder / "base")
    model = add_lora(AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)).eval()
    model.save_pretrained(folder / "adapter")
    make_tokenizer().save_pretrained(folder / "adapter")
    free = [answer_plainly(model, prompt, max_new_tokens=NEW_TOKENS, eos_token_id=None) for prompt in PROMPTS]
    stop = free[0][3]  # ends the first answer early, and others never
    base.generation_config.eos_token_id = [2, stop]
    base.generation_config.save_pretrained(folder / "base")
    answers: Answers = {"completion": {}, "base_completion": {}}
    for prompt in PROMPTS:
        arguments = {"max_new_tokens": NEW_TOKENS, "eos_token_id": [2, stop]}
        answers["completion"][prompt] = answer_plainly(model, prompt, **arguments)
        with model.disable_adapter():
            answers["base_completion"][prompt] = answer_plainly(model, prompt, **arguments)
    lengths = [len(answer) for answer in answers["completion"].values()]
    assert len(set(lengths)) > 1 and max(lengths) == NEW_TOKENS
    assert answers["completion"] != answers["base_completion"]
    rows = [{"prompt": prompt, "id": number, "completion": "w1"} for number, prompt in enumerate(PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = {column: {p: show(ids, (2, stop)) for p, ids in found.items()} for column, found in answers.items()}
    (folder / "expected.json").write_text(json.dumps(texts))
    return folder


def make_options(task: Path, out: Path, **options) -> GenerateOptions:
    values = {"adapter": str(task / "adapter"), "prompts": str(task / "prompts.jsonl"), "out": str(out)}
    return GenerateOptions(**values | {"dtype": "float32", "max_new_tokens": NEW_TOKENS} | options)


# One rank has no other to keep in step with.
@pytest.mark.parametrize(
    "world_size, names",
    [(2, ("shard", "file")), slow(2, ("mixed", "host", "resident")), slow(1, ("auto", "host"))],
    ids=["two ranks", "more on two ranks", "one rank"],
)
def test_answers_are_plain_pefts_token_for_token(task, tmp_path, world_size, names):
    """Catches wrong padding, positions or cache, rows out of order, and a rank that stops or has no row left, for
    which the others wait forever."""
    expected = json.loads((task / "expected.json").read_text())

    def body(rank):
        for name in names:
            batch_size = {"auto": "auto", "file": "auto", "mixed": 1}.get(name, 2)
            out = tmp_path / f"{name}.jsonl"
            generate_file(make_options(task, out, batch_size=batch_size, **PLACEMENTS[name]))

    run_ranks(body, world_size)
    for name in names:
        rows = read_lines(tmp_path / f"{name}.jsonl")
        assert [row["prompt"] for row in rows] == PROMPTS and [row["id"] for row in rows] == list(range(5))
        assert {row["prompt"]: row["completion"] for row in rows} == expected["completion"], name
        assert {row["expected_completion"] for row in rows} == {"w1"}
    assert not list(tmp_path.glob(".*")), "a partial file is left"


@pytest.mark.slow
def test_base_and_adapter_side_by_side(task, tmp_path):
    """Catches an adapter that stays on, or off, after the other has answered."""
    expected = json.loads((task / "expected.json").read_text())

    def body(rank):
        generate_file(make_options(task, tmp_path / "both", compare=True, **PLACEMENTS["shard"]))
        generate_file(make_options(task, tmp_path / "base", base_only=True, **PLACEMENTS["file"]))

    run_ranks(body, 2)
    for column in ("completion", "base_completion"):
        assert {row["prompt"]: row[column] for row in read_lines(tmp_path / "both")} == expected[column]
    base = read_lines(tmp_path / "base")
    assert {row["prompt"]: row["completion"] for row in base} == expected["base_completion"]
    assert not any("base_completion" in row for row in base)


def test_sampling_follows_its_seed_and_ranks_may_diverge(task, tmp_path):
    """Catches ranks with answers of other lengths that join the wrong gathers, and a seed that is not used."""

    def body(rank):
        for out, seed in (("first", 1), ("again", 1), ("other", 2)):
            options = {"do_sample": True, "temperature": 2.0, "batch_size": 3, "seed": seed}
            generate_file(make_options(task, tmp_path / out, **options, **PLACEMENTS["shard"]))

    run_ranks(body, 2)
    first, again, other = (read_lines(tmp_path / out) for out in ("first", "again", "other"))
    assert first == again and first != other


@pytest.mark.parametrize("resident_layers, prefetch", [(0, 1), slow(1, 0)])
def test_a_token_costs_at_most_one_gather_a_unit_whatever_the_batch(task, resident_layers, prefetch):
    """Catches a gather for each row, or a prompt that is read again for each token."""

    def body(rank):
        options = {"placement": "shard", "resident_layers": resident_layers, "prefetch": prefetch}
        model = lorashard.load_adapter(task / "adapter", dtype=torch.float32, **options)
        model.generation_config.eos_token_id = None
        widths = []
        model.get_input_embeddings().register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
        generator = Generator(model, make_tokenizer(), NEW_TOKENS, set())
        counts = []
        for num_rows in (1, 1, 8):
            before = lorashard.stats(model).num_gathers
            assert all(len(row) == NEW_TOKENS for row in generator.generate([[5, 6, 7]] * num_rows))
            counts.append(lorashard.stats(model).num_gathers - before)
        assert widths == [3, *[1] * (NEW_TOKENS - 1)] * 3
        return counts

    num_units = LAYERS - resident_layers + 2  # with the embedding, and the norm with the head
    for first, one_row, eight_rows in run_ranks(body, 2):
        assert one_row == eight_rows  # the first finds nothing in the slots
        assert 2 * NEW_TOKENS < one_row <= first <= NEW_TOKENS * num_units


def test_mistakes_are_found_before_any_rank_waits(task, tmp_path):
    """Catches hours of generation for a file that cannot be written, and prompts that are overwritten."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "w5"}\n{"question": "w6"}\n')
    cases = [
        ({"prompts": str(bad)}, DataError, "bad.jsonl line 2"),
        ({"out": str(task / "prompts.jsonl")}, ConfigError, "out: .*prompts.jsonl"),
        ({"out": str(tmp_path / "nowhere" / "out")}, ConfigError, "out: .*nowhere"),
        ({"out": str(tmp_path)}, ConfigError, "out: .*folder"),
        ({"as_chat": True}, DataError, "chat template"),
        ({"max_new_tokens": 1000}, DataError, "prompts.jsonl line 3: .*128.*1000"),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message):
            generate_file(make_options(task, **{"out": tmp_path / "out"} | options))
    with pytest.raises(ConfigError, match="batch_size"):
        make_options(task, tmp_path / "out", batch_size=0)
    with pytest.raises(ConfigError, match="base_only"):
        make_options(task, tmp_path / "out", base_only=True, compare=True)
    assert not (tmp_path / "out").exists()


def test_a_batch_that_does_not_fit_is_explained(task, tmp_path, monkeypatch):
    """Catches a traceback from inside a layer where a smaller batch is enough."""

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Generator, "generate", fail)
    with pytest.raises(ConfigError) as caught:
        generate_file(make_options(task, tmp_path / "out"))
    assert caught.value.option == "batch_size" and caught.value.fix.endswith(" 2")  # of 5 rows


class Script(Listener):
    """Asks these lines, after a pause longer than ranks wait before each; `/reset` is a request of its own."""

    def __init__(self, options: ChatOptions, lines: Sequence[str]) -> None:
        self._asks = []
        for line in lines:
            ask = Ask("reset", options) if line == "/reset" else Ask("answer", options, ("adapter",), line)
            self._asks += [Ask("nothing", options), ask]
        self.answers: list[str] = []
        self.refused: list[str] = []

    def read(self, patience_s: float) -> Ask | None:
        return self._asks.pop(0) if self._asks else None

    def begin(self, source: str) -> None:
        self.answers.append("")

    def add(self, source: str, text: str) -> None:
        self.answers[-1] += text

    def refuse(self, reason: str) -> None:
        self.refused.append(reason)


@pytest.mark.parametrize("do_sample", [slow(False), True])
def test_all_ranks_hold_one_conversation(task, tmp_path, monkeypatch, do_sample):
    """Catches ranks that sample apart, wait for a line until their collective gives up, or forget the system."""
    shutil.copytree(task / "adapter", tmp_path / "adapter")
    template = (
        "{% for m in messages %}{{ {'system': 'w90', 'user': 'w91', 'assistant': 'w92'}[m.role] }} {{ m.content }} "
        "{% endfor %}{% if add_generation_prompt %}w92{% endif %}"
    )
    make_tokenizer(template=template).save_pretrained(tmp_path / "adapter")

    def body(rank, where, system):
        values = {"adapter": str(tmp_path / "adapter"), "dtype": "float32", "max_new_tokens": NEW_TOKENS}
        sampling = {"do_sample": do_sample, "temperature": 2.0, "top_p": 1.0}
        options = ChatOptions(**values, **sampling, system=system, **PLACEMENTS[where])
        script = Script(options, ["w5 w6", "w7", "w8 " * 200, "/reset", "w7"])
        monkeypatch.setattr(chat, "open_listener", lambda options: nullcontext(script))
        chat.chat(options)
        assert len(script.refused) == (rank == 0)
        return script.answers

    (alone,) = run_ranks(body, 1, "file", "w44 w45")
    assert len(alone) == 3 and alone[1] != alone[2]
    assert run_ranks(body, 2, "shard", "w44 w45") == [alone, []]
    assert run_ranks(body, 1, "file", None)[0][2] != alone[2]


def _train(task: Path, folder: Path, placement: str, has_samples: bool) -> list[float]:
    """Train a few steps, with an evaluation after each, and return the losses."""
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
    model = lorashard.load(str(task / "base"), lora, placement, dtype=torch.float32)
    rows = [{"input_ids": [3 + (i + j) % 90 for j in range(8)]} for i in range(24)]
    dataset = datasets.Dataset.from_list([row | {"labels": row["input_ids"]} for row in rows])
    arguments = SFTConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        eval_strategy="steps",
        eval_steps=1,
        logging_steps=1,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataset_kwargs={"skip_prepare_dataset": True},
        ddp_find_unused_parameters=False,
    )
    tokenizer = make_tokenizer()
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=dataset,
        eval_dataset=dataset.select(range(4)),
        processing_class=tokenizer,
    )
    folder.mkdir(exist_ok=True)
    if has_samples:
        trainer.add_callback(SampleCallback(model, tokenizer, PROMPTS[:3], folder, max_new_tokens=NEW_TOKENS))
    trainer.train()
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(str(folder / "adapter"))
    return [value for line in trainer.state.log_history for name, value in line.items() if name in MEASURED]


@pytest.mark.parametrize("placement", ["shard", slow("file")])
def test_samples_leave_the_run_as_it_would_have_been(task, tmp_path, placement):
    """Catches dropout's random numbers used up, a mode or a cache left on, a gather too many on one rank."""

    def body(rank):
        return [_train(task, tmp_path / name, placement, name == "with") for name in ("without", "with")]

    results = run_ranks(body, 2)
    assert results[0] == results[1] and results[0][0] == results[0][1]
    assert len(set(results[0][0])) == 6
    lines = read_lines(tmp_path / "with" / "samples.jsonl")
    assert [(line["step"], line["prompt"]) for line in lines] == [(s, p) for s in (1, 2) for p in PROMPTS[:3]]
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(task / "base", dtype=torch.float32), tmp_path / "with" / "adapter"
    ).eval()
    stops = plain.generation_config.eos_token_id
    for line in lines[-3:]:
        found = answer_plainly(plain, line["prompt"], max_new_tokens=NEW_TOKENS, pad_token_id=0)
        assert line["completion"] == show(found, stops)


@pytest.mark.parametrize("checkpointing", map(slow, ["off", "non-reentrant", "reentrant"]))
def test_samples_between_two_microbatches_change_no_gradient(tmp_path, checkpointing):
    """Catches modes or random numbers changed, activation checkpointing lost, a slot left taken, dropout in answers."""

    def body(rank):
        gradients = []
        for has_samples in (False, True):
            model = build_model(dropout=0.1, checkpointing=checkpointing)
            model = lorashard.shard(model, "shard", resident_layers=1)
            frozen = model.get_base_model().model.layers[2].eval()  # a mode of its own
            callback = SampleCallback(model, make_tokenizer(), PROMPTS, tmp_path, max_new_tokens=NEW_TOKENS)
            torch.manual_seed(rank)
            for seed in (3, 4):
                model(**make_batch(seed)).loss.backward()
                if has_samples:
                    callback.on_evaluate(None, TrainerState(global_step=seed), None)
            assert model.training and not frozen.training and not frozen.mlp.training
            gradients.append(take_gradients(model))
        generator = Generator(model.eval(), make_tokenizer(), NEW_TOKENS, set())
        answers = generator.generate([make_tokenizer()(prompt).input_ids for prompt in PROMPTS])
        return find_differences(*gradients), [show(answer) for answer in answers]

    (differences, answers), other = run_ranks(body, 2)
    assert differences == [] and other == ([], answers)
    lines = read_lines(tmp_path / "samples.jsonl")
    assert [line["completion"] for line in lines] == answers * 2  # without dropout
