"""Prepared data equals what TRL's SFTTrainer makes of the same rows: the independent reference."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trl
from datasets import Dataset
from helpers.data import CHATML, CHATML_MARKED, LLAMA3, MISTRAL, chat, make_tokenizer, write_jsonl
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from lorashard.config.data_options import DataOptions
from lorashard.data.prepare import prepare

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TEXTS = [
    "The capital of France is Paris.",
    "Once upon a time there was a cat, and it slept all day long. " * 4,
    "She sold 48 + 24 = 72 clips.</s>",
    "naïve 🦙 façade — 你好\n\nThe end. ",
]
QUESTIONS = ["What is the capital of France?", "How many clips?\n", "Write a short story.", "a"]
CHATS = [
    chat("How many?", "72.", "And in May?", "24 clips 🦙", system="Be short."),
    chat("What is the capital of France?", "  Paris. "),
    chat("Write a story", TEXTS[1], "Go on", "The end.\n\n"),
]
WEATHER_TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {"city": {}}}},
}
TOOL_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
TOOL_CHAT = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]},
    {"role": "tool", "content": "sunny"},
    {"role": "assistant", "content": "It is sunny."},
]


def build_trainer(rows: Dataset, tokenizer, folder: Path, **options) -> SFTTrainer:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1000, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8
        )
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # truncation_mode="keep_end" is deprecated, and still TRL's
        config = SFTConfig(output_dir=str(folder / "trl"), use_cpu=True, bf16=False, report_to=[], **options)
        return SFTTrainer(model=model, args=config, train_dataset=rows, processing_class=tokenizer)


def case(rows: list, template=None, kind="bytes", like=None, trl=None, **options) -> SimpleNamespace:
    """Describe rows that become what TRL makes of the rows `like`, by default the same, with the options `trl` too."""
    return SimpleNamespace(
        rows=rows, template=template, kind=kind, like=like or rows, trl=options | (trl or {}), options=options
    )


def texts_of(prompts: Sequence[str], completions: Sequence[str]) -> list[dict]:
    return [{"prompt": p, "completion": c} for p, c in zip(prompts, completions, strict=True)]


def messages_of(conversations: list) -> list[dict]:
    return [{"messages": messages} for messages in conversations]


def chat_pairs_of(conversations: list) -> list[dict]:
    return [{"prompt": messages[:-1], "completion": messages[-1:]} for messages in conversations]


def to_sharegpt(messages: list[dict]) -> dict:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return {"conversations": [{"from": names[message["role"]], "value": message["content"]} for message in messages]}


ASSISTANT = {"assistant_only_loss": True}  # what conversations learn where nothing is said
WHOLE = {"assistant_only_loss": False}
PAIRS = texts_of(QUESTIONS, TEXTS)
ANSWERS = [{"question": q, "answer": a} for q, a in zip(QUESTIONS, TEXTS, strict=True)]
SPLITS = [{"prompt": CHATS[0][:split], "completion": CHATS[0][split:]} for split in (2, 4)]
TURNS = [{"prompt": chat(q), "completion": chat("", a)[1:]} for q, a in zip(QUESTIONS, TEXTS, strict=True)]
MANY = [{"text": text[: 7 * length]} for length in range(1, 12) for text in TEXTS]
TOOL_TEMPLATE = (TEMPLATES / "qwen2_5.jinja").read_text()
TOOL_ROWS = [
    {"messages": TOOL_CHAT, "tools": tools}
    for tools in ([WEATHER_TOOL], '[{"type": "function", "function": {"name": "weather"}}]')
]
ALPACA = [
    {"instruction": "Add", "input": "48 + 24", "output": "72", "system": "Be short."},
    {"instruction": "Write a story", "input": "", "output": TEXTS[1]},
    {"instruction": "Write", "output": "The end."},
]
ALPACA_CHATS = [
    chat("Add\n\n48 + 24", "72", system="Be short."),
    chat("Write a story", TEXTS[1]),
    chat("Write", "The end."),
]
ALPACA_PROMPTS = ["Be short.\n\nAdd\n\n48 + 24\n", "Write a story\n", "Write\n"]
CASES = {
    # A missing or doubled end-of-sequence token; special tokens added otherwise than TRL adds them.
    **{f"text {kind}": case([{"text": t} for t in TEXTS], kind=kind) for kind in ("bytes", "metaspace")},
    # A row cut at the wrong end or one token off, and labels cut apart from their tokens.
    **{f"cut {mode}": case(PAIRS, max_length=40, truncation_mode=mode) for mode in ("keep_start", "keep_end")},
    # A mask that starts a token early or late, in particular where prompt and completion merge.
    **{
        f"pairs {kind} {only}": case(PAIRS, kind=kind, completion_only_loss=only)
        for kind in ("bytes", "metaspace")
        for only in (None, True, False)
    },
    # The generation prompt being supervised, or special tokens written twice.
    "chat pairs of chatml": case(chat_pairs_of(CHATS), CHATML),
    "chat pairs of llama": case(chat_pairs_of(CHATS), LLAMA3),
    # The prompt's assistant turns, or what the user says in a completion, being supervised.
    "turns of completions": case(SPLITS, CHATML_MARKED, assistant_only_loss=True),
    # Assistant turns found a token off with markers.
    "messages bytes": case(messages_of(CHATS), CHATML_MARKED, trl=ASSISTANT),
    "messages metaspace": case(messages_of(CHATS), CHATML_MARKED, "metaspace", trl=ASSISTANT),
    # `assistant_only_loss: false` that still masks.
    "whole messages": case(messages_of(CHATS), CHATML, **WHOLE),
    "whole messages of mistral": case(messages_of(CHATS[1:]), MISTRAL, "metaspace", **WHOLE),
    # Another template than TRL's training version of a known one, which may write other text.
    **{
        name: case(messages_of(CHATS), (TEMPLATES / f"{name}.jinja").read_text(), trl=ASSISTANT)
        for name in ("llama3", "qwen2_5", "qwen3", "phi3")
    },
    # Tools that never reach the template, as a list or as the JSON string that TRL takes too; and its variables.
    "tools": case(TOOL_ROWS[:1], TOOL_TEMPLATE, trl=ASSISTANT),
    "tools as text": case(TOOL_ROWS[1:], TOOL_TEMPLATE, trl=ASSISTANT),
    "variables": case(
        [{"messages": CHATS[0], "chat_template_kwargs": {"style": "Once upon a time"}}], "{{ style }}" + CHATML, **WHOLE
    ),
    # Rows that become another chat, or another text, than documented; a lost `input` or `system`.
    "answers as chats": case(ANSWERS, CHATML, like=TURNS),
    "answers": case(ANSWERS, like=texts_of([f"{q}\n" for q in QUESTIONS], TEXTS)),
    "alpaca as chats": case(ALPACA, CHATML, like=chat_pairs_of(ALPACA_CHATS)),
    "alpaca": case(ALPACA, like=texts_of(ALPACA_PROMPTS, [row["output"] for row in ALPACA])),
    "sharegpt": case([to_sharegpt(m) for m in CHATS], CHATML_MARKED, like=messages_of(CHATS), trl=ASSISTANT),
    # Rows cut before a strategy that goes on with them, packing of another order, and lost seq_lengths.
    **{
        f"packed {strategy} {is_shuffled}": case(
            MANY, packing=True, packing_strategy=strategy, shuffle_dataset=is_shuffled, seed=3, max_length=32
        )
        for strategy in ("bfd", "bfd_split", "wrapped")
        for is_shuffled in (False, True)
    },
    # A shuffle that depends on anything but the seed.
    "shuffled": case([{"text": f"{number} clips"} for number in range(50)], shuffle_dataset=True, seed=7),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_become_what_trl_makes_of_them(tmp_path: Path, name: str) -> None:
    """Catches the mistakes that stand above each case."""
    case = CASES[name]
    tokenizer = make_tokenizer(case.template, case.kind)
    expected = build_trainer(Dataset.from_list(case.like), tokenizer, tmp_path, **case.trl).train_dataset
    path = write_jsonl(tmp_path / "rows.jsonl", case.rows)
    prepared = prepare(DataOptions(dataset=path, **case.options), tokenizer, tmp_path / "cache")
    assert len(prepared.train) == len(expected)
    for column in {"input_ids", "labels", "seq_lengths"} & set(expected.column_names):
        assert prepared.train[:][column] == expected[:][column], column
    assert ("seq_lengths" in prepared.train.column_names) == ("seq_lengths" in expected.column_names)
    said = {"tools": "weather", "tools as text": "weather", "variables": "Once upon a time"}
    assert said.get(name, "") in tokenizer.decode(expected[0]["input_ids"])


@pytest.mark.parametrize("options", [{"max_length": 40}, {"packing": True, "max_length": 64}])
def test_batches_equal_trl(tmp_path: Path, options: dict) -> None:
    """Catches columns or types that SFTTrainer drops or trips over when it is told to skip its own preparation."""
    tokenizer = make_tokenizer()
    trainer = build_trainer(Dataset.from_list(PAIRS), tokenizer, tmp_path, **options)
    path = write_jsonl(tmp_path / "rows.jsonl", PAIRS)
    prepared = prepare(DataOptions(dataset=path, **options), tokenizer, tmp_path / "cache")
    skip = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    our_trainer = build_trainer(prepared.train, tokenizer, tmp_path, **options, **skip)
    pairs = list(zip(trainer.get_train_dataloader(), our_trainer.get_train_dataloader(), strict=True))
    assert pairs
    for expected, batch in pairs:
        assert expected.keys() == batch.keys()
        assert all(torch.equal(torch.as_tensor(expected[key]), torch.as_tensor(batch[key])) for key in expected)
