"""Prepared data equals what TRL's SFTTrainer makes of the same rows: the independent reference."""

import warnings
from pathlib import Path

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
PAIRS = [{"prompt": q, "completion": a} for q, a in zip(QUESTIONS, TEXTS, strict=True)]
CHAT_PAIRS = [{"prompt": messages[:-1], "completion": messages[-1:]} for messages in CHATS]
TURN_PAIRS = [{"prompt": chat(q), "completion": chat("", a)[1:]} for q, a in zip(QUESTIONS, TEXTS, strict=True)]
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


def prepare_with_trl(rows: list[dict], tokenizer, folder: Path, **options) -> Dataset:
    return build_trainer(Dataset.from_list(rows), tokenizer, folder, **options).train_dataset


def assert_same(rows: list[dict], trl_rows: list[dict], tokenizer, folder: Path, trl_options=None, **options) -> None:
    expected = prepare_with_trl(trl_rows, tokenizer, folder, **(options | (trl_options or {})))
    path = write_jsonl(folder / "rows.jsonl", rows)
    prepared = prepare(DataOptions(dataset=path, **options), tokenizer, folder / "cache")
    assert len(prepared.train) == len(expected)
    for column in {"input_ids", "labels", "seq_lengths"} & set(expected.column_names):
        assert prepared.train[:][column] == expected[:][column], column
    assert ("seq_lengths" in prepared.train.column_names) == ("seq_lengths" in expected.column_names)


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
def test_text_equals_trl(tmp_path: Path, kind: str) -> None:
    """Catches a missing or doubled end-of-sequence token, and special tokens added otherwise than TRL adds them."""
    assert_same([{"text": t} for t in TEXTS], [{"text": t} for t in TEXTS], make_tokenizer(kind=kind), tmp_path)


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
def test_truncation_equals_trl(tmp_path: Path, mode: str) -> None:
    """Catches a row cut at the wrong end or one token off, and labels cut apart from their tokens."""
    assert_same(PAIRS, PAIRS, make_tokenizer(), tmp_path, max_length=40, truncation_mode=mode)


@pytest.mark.parametrize("completion_only_loss", [None, True, False])
@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
def test_prompt_completion_equals_trl(tmp_path: Path, kind: str, completion_only_loss: bool | None) -> None:
    """Catches a mask that starts a token early or late, in particular where prompt and completion merge."""
    options = {"completion_only_loss": completion_only_loss}
    assert_same(PAIRS, PAIRS, make_tokenizer(kind=kind), tmp_path, **options)


@pytest.mark.parametrize("template", [CHATML, LLAMA3])
def test_prompt_completion_messages_equal_trl(tmp_path: Path, template: str) -> None:
    """Catches the generation prompt being learnt, or special tokens written twice."""
    assert_same(CHAT_PAIRS, CHAT_PAIRS, make_tokenizer(template), tmp_path)


def test_assistant_turns_of_completions_equal_trl(tmp_path: Path) -> None:
    """Catches the prompt's assistant turns, or what the user says in a completion, being learnt."""
    pairs = [{"prompt": CHATS[0][:split], "completion": CHATS[0][split:]} for split in (2, 4)]
    assert_same(pairs, pairs, make_tokenizer(CHATML_MARKED), tmp_path, assistant_only_loss=True)


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
def test_messages_equal_trl(tmp_path: Path, kind: str) -> None:
    """Catches assistant turns found a token off with markers; not given, the loss is on the assistant's turns."""
    rows = [{"messages": messages} for messages in CHATS]
    trl_options = {"assistant_only_loss": True}
    assert_same(rows, rows, make_tokenizer(CHATML_MARKED, kind), tmp_path, trl_options)


def test_whole_conversations_equal_trl(tmp_path: Path) -> None:
    """Catches `assistant_only_loss: false` that still masks."""
    rows = [{"messages": messages} for messages in CHATS]
    assert_same(rows, rows, make_tokenizer(CHATML), tmp_path, assistant_only_loss=False)
    rows = [{"messages": messages} for messages in CHATS[1:]]
    assert_same(rows, rows, make_tokenizer(MISTRAL, "metaspace"), tmp_path, assistant_only_loss=False)


@pytest.mark.parametrize("name", ["llama3", "qwen2_5", "qwen3", "phi3"])
def test_templates_known_to_trl_equal_trl(tmp_path: Path, name: str) -> None:
    """Catches another template than TRL's training version of a known one, which may write other text."""
    tokenizer = make_tokenizer((TEMPLATES / f"{name}.jinja").read_text())
    rows = [{"messages": messages} for messages in CHATS]
    assert_same(rows, rows, tokenizer, tmp_path, {"assistant_only_loss": True})


@pytest.mark.parametrize("tools", [[WEATHER_TOOL], '[{"type": "function", "function": {"name": "weather"}}]'])
def test_tools_equal_trl(tmp_path: Path, tools: object) -> None:
    """Catches tools that never reach the template, as a list or as the JSON string that TRL takes too."""
    tokenizer = make_tokenizer((TEMPLATES / "qwen2_5.jinja").read_text())
    rows = [{"messages": TOOL_CHAT, "tools": tools}]
    assert_same(rows, rows, tokenizer, tmp_path, {"assistant_only_loss": True})
    assert "weather" in tokenizer.decode(prepare_with_trl(rows, tokenizer, tmp_path)[0]["input_ids"])


def test_template_kwargs_equal_trl(tmp_path: Path) -> None:
    """Catches a `chat_template_kwargs` column that never reaches the template."""
    template = "{{ style }}" + CHATML
    rows = [{"messages": CHATS[0], "chat_template_kwargs": {"style": "Once upon a time"}}]
    assert_same(rows, rows, make_tokenizer(template), tmp_path, assistant_only_loss=False)


def test_question_answer_equals_trl(tmp_path: Path) -> None:
    """Catches question/answer rows that become another chat, or another text, than documented."""
    rows = [{"question": q, "answer": a} for q, a in zip(QUESTIONS, TEXTS, strict=True)]
    assert_same(rows, TURN_PAIRS, make_tokenizer(CHATML), tmp_path)
    texts = [{"prompt": f"{q}\n", "completion": a} for q, a in zip(QUESTIONS, TEXTS, strict=True)]
    assert_same(rows, texts, make_tokenizer(), tmp_path)


def test_alpaca_equals_trl(tmp_path: Path) -> None:
    """Catches a lost `input` or `system`, with and without a chat template."""
    rows = [
        {"instruction": "Add", "input": "48 + 24", "output": "72", "system": "Be short."},
        {"instruction": "Write a story", "input": "", "output": TEXTS[1]},
        {"instruction": "Write", "output": "The end."},
    ]
    chats = [
        chat("Add\n\n48 + 24", "72", system="Be short."),
        chat("Write a story", TEXTS[1]),
        chat("Write", "The end."),
    ]
    pairs = [{"prompt": messages[:-1], "completion": messages[-1:]} for messages in chats]
    assert_same(rows, pairs, make_tokenizer(CHATML), tmp_path)
    prompts = ["Be short.\n\nAdd\n\n48 + 24\n", "Write a story\n", "Write\n"]
    texts = [{"prompt": p, "completion": row["output"]} for p, row in zip(prompts, rows, strict=True)]
    assert_same(rows, texts, make_tokenizer(), tmp_path)


def test_sharegpt_equals_trl(tmp_path: Path) -> None:
    """Catches ShareGPT's role names reaching the template as they are."""
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    rows = [
        {"conversations": [{"from": names[message["role"]], "value": message["content"]} for message in messages]}
        for messages in CHATS
    ]
    trl_rows = [{"messages": messages} for messages in CHATS]
    assert_same(rows, trl_rows, make_tokenizer(CHATML_MARKED), tmp_path, {"assistant_only_loss": True})


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
@pytest.mark.parametrize("shuffle_dataset", [False, True])
def test_packing_equals_trl(tmp_path: Path, strategy: str, shuffle_dataset: bool) -> None:
    """Catches rows cut before a strategy that goes on with them, packing of another order, and lost seq_lengths."""
    rows = [{"text": text[: 7 * length]} for length in range(1, 12) for text in TEXTS]
    options = {"packing": True, "packing_strategy": strategy, "shuffle_dataset": shuffle_dataset, "seed": 3}
    assert_same(rows, rows, make_tokenizer(), tmp_path, max_length=32, **options)


def test_shuffle_equals_trl(tmp_path: Path) -> None:
    """Catches a shuffle that depends on anything but the seed."""
    rows = [{"text": f"{number} clips"} for number in range(50)]
    assert_same(rows, rows, make_tokenizer(), tmp_path, shuffle_dataset=True, seed=7)


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
