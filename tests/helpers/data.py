"""Tokenizers, chat templates and files for the tests of lorashard.data."""

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

# The two templates below write the same text; only the first says which part of it is the assistant's.
CHATML_MARKED = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}{% generation %}{{- message.content + '<|im_end|>\\n' }}{% endgeneration %}"
    "{%- else %}{{- message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
CHATML = CHATML_MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# The end of the assistant's turn stands outside of the markers.
CHATML_MARKED_SHORT = CHATML_MARKED.replace(
    "message.content + '<|im_end|>\\n' }}{% endgeneration %}",
    "message.content }}{% endgeneration %}{{- '<|im_end|>\\n' }}",
)
LLAMA3 = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
# No generation prompt, and a space before what the assistant says.
MISTRAL = (
    "{{- bos_token }}{%- for message in messages %}{%- if message.role == 'user' %}{{- '[INST] ' + message.content + "
    "' [/INST]' }}{%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}"
    "{%- else %}{{- raise_exception('only user and assistant roles are supported') }}{%- endif %}{%- endfor %}"
)
# Closes a conversation that waits for no answer, as Phi-3's template does.
CLOSING = CHATML + "{%- if not add_generation_prompt %}{{- '</s>' }}{%- endif %}"
# Writes a thought into the last turn only, as Qwen3's template does.
FORGETFUL = CHATML.replace(
    "'<|im_start|>' + message.role + '\\n' }}",
    "'<|im_start|>' + message.role + '\\n' }}"
    "{%- if loop.last and message.role == 'assistant' %}{{- 'a thought' }}{%- endif %}",
)

SPECIAL_TOKENS = (
    ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<think>", "</think>"]
    + ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    + ["<start_of_turn>", "<end_of_turn>", "<|endoftext|>"]
)
CORPUS = [
    "What is the capital of France? The capital of France is Paris. user assistant system",
    "How many clips did Natalia sell altogether in April and May? She sold 48 + 24 = 72 clips. The answer is 72.",
    "Write a short story about a cat. Once upon a time there was a cat, and it slept all day long.\n\nThe end.",
]


@cache
def _train_tokenizer(kind: str) -> str:
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind == "metaspace", unk_token=None))
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
        alphabet = sorted({character for text in CORPUS for character in text})
        special = SPECIAL_TOKENS + [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        special = SPECIAL_TOKENS
    trainer = trainers.BpeTrainer(
        vocab_size=len(special) + 400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    start = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[start])
    return tokenizer.to_str()


def make_tokenizer(chat_template: str | None = None, kind: str = "bytes", eos_token: str | None = "</s>"):
    """Return a small fast tokenizer that puts <s> first: byte-level BPE as of Llama 3, or "metaspace" as of Llama 2."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_train_tokenizer(kind)),
        bos_token="<s>",
        eos_token=eos_token,
        pad_token="<pad>",
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def write_jsonl(path: Path, rows: list) -> str:
    """Write one JSON value a line; a string is written as it is, so that broken lines can be made."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def chat(*contents: str, system: str | None = None) -> list[dict]:
    """Return a conversation whose messages are the user's and the assistant's in turn."""
    start = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return start + [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]


def find_supervised(row: dict, tokenizer) -> list[str]:
    """Return the runs of supervised tokens of a prepared row, decoded."""
    runs: list[list[int]] = []
    for position, label in enumerate(row["labels"]):
        if label == -100:
            continue
        assert label == row["input_ids"][position]
        if position == 0 or row["labels"][position - 1] == -100:
            runs.append([])
        runs[-1].append(label)
    return [tokenizer.decode(run) for run in runs]
