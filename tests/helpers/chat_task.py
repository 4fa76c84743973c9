"""A task for tests of `lorashard chat`, and what plain PEFT answers."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from helpers.tiny import VOCAB_SIZE, add_lora, build_base
from helpers.words import make_tokenizer

SPECIAL = ("<pad>", "<unk>", "</s>", "<system>", "<user>", "<assistant>")
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} "
    "{% if message.role == 'assistant' %}</s> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NEW_TOKENS = 8
GREEDY = ["--dtype", "float32", "--max_new_tokens", str(NEW_TOKENS), "--do_sample", "false"]


def build_task(folder: Path, num_positions: int = 128) -> Path:
    """Fill a folder with runs' adapters, their base, which knows so many positions, and prompts."""
    words = [*SPECIAL, *(f"w{i}" for i in range(len(SPECIAL), VOCAB_SIZE))]
    tokenizer = make_tokenizer(words, additional_special_tokens=list(SPECIAL[3:]))
    build_base(
        num_hidden_layers=2,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=2,
        max_position_embeddings=num_positions,
    ).save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    model = add_lora(base)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(10)  # so that the adapter says other things than its base
    model.save_pretrained(folder / "runs" / "plain")
    shutil.copytree(folder / "runs" / "plain", folder / "runs" / "answers")
    tokenizer.save_pretrained(folder / "runs" / "plain")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "runs" / "answers")
    rows = [{"prompt": "w7 w8"}, {"messages": [{"role": "user", "content": "w9"}]}, {"prompt": "w10 w11 w12 w13"}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def load_plain(task: Path) -> PeftModel:
    """Return the task's adapter on its base, with PEFT alone."""
    base = AutoModelForCausalLM.from_pretrained(task / "base", dtype=torch.float32)
    return PeftModel.from_pretrained(base, task / "runs" / "plain").eval()


def load_tokenizer(task: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(task / "runs" / "answers")


def answer(task: Path, model: PeftModel, text: str) -> str:
    """Return what plain PEFT answers."""
    tokenizer = load_tokenizer(task)
    ids = tokenizer(text, return_tensors="pt").input_ids
    output = model.generate(input_ids=ids, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0)
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def talk(task: Path, model: PeftModel, lines: list[str]) -> list[str]:
    """Return plain PEFT's answers to a conversation."""
    text, answers = "", []
    for line in lines:
        text += f"<user> {line} "
        answers.append(answer(task, model, text + "<assistant>"))
        text += f"<assistant> {answers[-1]} </s> "
    return answers


def make_environment(task: Path) -> dict[str, str]:
    folder = task / "tmp"
    folder.mkdir(exist_ok=True)
    return os.environ | {"HF_HOME": str(task / "hf"), "TMPDIR": str(folder)}
