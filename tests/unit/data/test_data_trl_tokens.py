"""What is shown and counted of DPO, KTO, reward and GRPO is what TRL's own trainers hold: the independent reference."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from helpers.data import CHATML, LLAMA3, make_tokenizer, write_jsonl
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from lorashard.config.data_options import DataOptions
from lorashard.config.methods import METHODS
from lorashard.config.run_config import RunConfig
from lorashard.data.preview import PreviewRow, preview, render_preview
from lorashard.data.trl_tokens import fill_trainer_options

TEXTS = [
    {"prompt": "What is the capital of France? ", "chosen": "Paris.", "rejected": "It is naïve 🦙 to ask.</s>"},
    {"prompt": "Write a short story", "chosen": " about a cat. " * 9, "rejected": ": the end"},
    {"prompt": "How many clips did she sell? " * 9, "chosen": "72", "rejected": "24"},
]


def to_chat(row: dict[str, str]) -> dict[str, Any]:
    return {name: [{"role": "user" if name == "prompt" else "assistant", "content": row[name]}] for name in row}


def hide_prompt(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row["prompt"] + row[name] for name in ("chosen", "rejected")}


CHATS = [to_chat(row) for row in TEXTS]
UNPAIRED = [
    {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
    for row, name in zip(CHATS, ("chosen", "rejected", "chosen"), strict=True)
]
# Of each: the method, rows, chat template, TRL's options, and the mistake that it shows.
CASES = {
    "dpo texts": ("dpo", TEXTS, None, {}),  # an end-of-sequence token missing or doubled
    "dpo cut": ("dpo", TEXTS, None, {"max_length": 24}),  # a prompt that fills max_length, which TRL drops
    "dpo cut at the start": ("dpo", CHATS, CHATML, {"max_length": 24, "truncation_mode": "keep_end"}),
    "dpo chats": ("dpo", CHATS, CHATML, {}),  # a generation prompt that counts as completion
    "dpo without a prompt": ("dpo", [hide_prompt(row) for row in CHATS], LLAMA3, {}),
    "kto": ("kto", UNPAIRED, CHATML, {}),
    "kto of pairs": ("kto", TEXTS, None, {"max_length": 40}),
    "reward": ("reward", CHATS, CHATML, {}),
    "reward texts": ("reward", TEXTS, None, {"max_length": 40}),  # rows that are longer, which TRL drops
}


def build_trainer(method: str, rows: list, tokenizer, folder: Path, **options: Any):
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}
    config = LlamaConfig(vocab_size=1000, **size)
    config.pad_token_id = tokenizer.pad_token_id
    if method == "reward":
        config.num_labels = 1
    model = (LlamaForSequenceClassification if method == "reward" else LlamaForCausalLM)(config)
    task = METHODS[method].task_type
    others: dict[str, Any] = {}
    if method == "grpo":
        others["reward_funcs"] = [lambda completions, **_: [0.0] * len(completions)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        arguments = getattr(trl, METHODS[method].config_class)(
            output_dir=str(folder / "trl"), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, **options
        )
        return getattr(trl, METHODS[method].trainer_class)(
            model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
            peft_config=LoraConfig(task_type=task), **others,
        )  # fmt: skip


def show(method: str, rows: list, tokenizer, folder: Path, **options: Any) -> list[PreviewRow]:
    given = {"reward_funcs": "think_format_reward"} if method == "grpo" else {}
    config = RunConfig(method=method, model="m", dataset="d", output_dir="o", **given, trainer=options)
    data = DataOptions(dataset=write_jsonl(folder / "rows.jsonl", rows))
    return preview(data, tokenizer, 9, METHODS[method], fill_trainer_options(config))


def read_trainer(trainer, tokenizer) -> list[list[tuple[str, str, int, int]]]:
    """Return the sequences of each example in the batches that the trainer trains on: context, supervised text, and
    the numbers of all and of the supervised tokens."""
    found = []
    for example in trainer.train_dataset:
        batch = trainer.data_collator([example])
        is_loss = batch.get("completion_mask", torch.zeros_like(batch["input_ids"])).bool()
        columns = zip(batch["input_ids"], is_loss, batch["attention_mask"].bool(), strict=True)
        parts = [(ids[real & ~loss], ids[real & loss]) for ids, loss, real in columns]
        found.append([(*map(tokenizer.decode, (a, b)), len(a) + len(b), len(b)) for a, b in parts])
    return found


def read_preview(rows: list[PreviewRow]) -> list[list[tuple[str, str, int, int]]]:
    def join(tokens: list[tuple[str, bool]], wanted: bool) -> str:
        return "".join(text for text, is_supervised in tokens if is_supervised == wanted)

    return [
        [(join(s.tokens, False), join(s.tokens, True), s.num_tokens, s.num_supervised_tokens) for s in row.sequences]
        for row in rows
        if row.problem is None
    ]


@pytest.mark.parametrize("name", CASES)
def test_examples_are_shown_as_trl_holds_them(tmp_path: Path, name: str) -> None:
    """Catches the mistakes that stand beside the cases, and a preview that shows what TRL drops."""
    method, rows, template, options = CASES[name]
    tokenizer = make_tokenizer(template)
    trainer = build_trainer(method, rows, tokenizer, tmp_path, **options)
    shown = show(method, rows, tokenizer, tmp_path, **options)
    held, found = read_trainer(trainer, tokenizer), read_preview(shown)
    if "pairs" in name:  # each row is two examples; TRL has all chosen before all rejected
        half = len(held) // 2
        held = [first + second for first, second in zip(held[:half], held[half:], strict=True)]
    assert found == held and len(found) + sum(row.problem is not None for row in shown) == len(rows)
    assert any(row.problem for row in shown) == (name in ("dpo cut", "kto of pairs", "reward texts"))


def test_prompts_are_shown_as_grpo_generates_from_them(tmp_path: Path) -> None:
    """Catches a prompt without the generation prompt, or cut."""
    rows = [{"prompt": row["prompt"]} for row in CHATS]
    tokenizer = make_tokenizer(CHATML)
    batch = {"per_device_train_batch_size": 6, "num_generations": 2, "max_completion_length": 2, "max_steps": 1}
    trainer = build_trainer("grpo", rows, tokenizer, tmp_path, **batch)
    seen: list[list[int]] = []
    generate = trainer.model.base_model.model.generate

    def record(input_ids: torch.Tensor, attention_mask: torch.Tensor, **others: Any) -> Any:
        seen.extend(ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True))
        return generate(input_ids=input_ids, attention_mask=attention_mask, **others)

    trainer.model.base_model.model.generate = record
    trainer.train()
    shown = show("grpo", rows, tokenizer, tmp_path)
    texts = ["".join(text for text, _ in sequence.tokens) for row in shown for sequence in row.sequences]
    assert sorted({tokenizer.decode(ids) for ids in seen}) == sorted(texts) and len(texts) == 3
    assert "What is the capital of France? <|im_end|>\n<|im_start|>assistant" in render_preview(shown)
