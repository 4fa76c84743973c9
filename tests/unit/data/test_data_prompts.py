"""Prompts to answer: what their tokens are, and which rows are refused, by place."""

from __future__ import annotations

import json

import pytest
from helpers.data import CHATML, chat, make_tokenizer, write_jsonl

from lorashard.data.prompts import PromptWriter, read_prompts
from lorashard.data.sources import BadRow
from lorashard.errors import DataError


def read_texts(path: str, tokenizer, as_chat: bool = False) -> list[str]:
    prompts = read_prompts(path, PromptWriter(tokenizer, as_chat))
    return [tokenizer.decode(prompt.token_ids) for prompt in prompts]


def test_a_text_goes_on_and_a_conversation_is_answered(tmp_path):
    """Catches prompts written otherwise than training rows: no <s>, two of them, or no header of the assistant."""
    rows = [
        {"prompt": "What is"},
        {"prompt": chat("What is the capital?")},
        {"messages": chat("a", "b", "c", system="s"), "id": 7},
    ]
    path = write_jsonl(tmp_path / "prompts.jsonl", rows)
    header = "<|im_start|>assistant\n"
    assert read_texts(path, make_tokenizer(CHATML)) == [
        "<s>What is",
        f"<|im_start|>user\nWhat is the capital?<|im_end|>\n{header}",
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        f"<|im_start|>user\nc<|im_end|>\n{header}",
    ]
    as_chat = read_texts(path, make_tokenizer(CHATML), as_chat=True)
    assert as_chat[0] == f"<|im_start|>user\nWhat is<|im_end|>\n{header}"
    prompts = read_prompts(path, PromptWriter(make_tokenizer(CHATML)))
    assert prompts[2].row == rows[2] and prompts[1].place == f"{path} line 2"


def test_a_conversation_goes_on_after_an_empty_answer():
    """Catches a chat that refuses every message once the model has answered with no token at all."""
    tokenizer = make_tokenizer(CHATML)
    written = tokenizer.decode(PromptWriter(tokenizer).write(chat("a", "", "b")))
    assert "<|im_start|>assistant\n<|im_end|>" in written and written.endswith("<|im_start|>assistant\n")
    with pytest.raises(BadRow, match="no content"):  # templates would write "None"
        PromptWriter(tokenizer).write([{"role": "user", "content": "a"}, {"role": "assistant"}, *chat("b")])


def test_answers_end_where_the_template_ends_a_turn():
    """Catches a model that was taught to end with <|im_end|> and talks on to itself."""
    tokenizer = make_tokenizer(CHATML)
    expected = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert PromptWriter(tokenizer).find_stop_ids() == expected
    assert PromptWriter(make_tokenizer()).find_stop_ids() == {tokenizer.eos_token_id}
    assert PromptWriter(make_tokenizer(eos_token=None)).find_stop_ids() == set()


def test_a_text_is_not_ended_before_it_is_answered():
    """Catches tokenizers that end every text with </s>: the model would go on with another text."""
    from tokenizers import processors

    tokenizer = make_tokenizer()
    special = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=special
    )
    assert tokenizer.decode(PromptWriter(tokenizer).write("What is")) == "<s>What is"
    assert tokenizer.decode(PromptWriter(tokenizer).write("What is</s>")).endswith("</s>")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a"}, "expected `prompt`.*found neither"),
        ({"prompt": "a", "messages": chat("a")}, "found both"),
        ({"prompt": 3}, "`prompt` .*found a number"),
        ({"messages": "a"}, "`messages`"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": []}, "`prompt` holds no message"),
        ({"messages": chat("a", "b")}, "the assistant's"),
        ({"prompt": [{"role": "user"}]}, "`prompt` message 1 has no content"),
        ("{broken", "broken|column"),
        ("[1]", "an object"),
    ],
)
def test_a_row_that_cannot_be_answered_is_named(tmp_path, row, message):
    """Catches a row that is left out in silence, or a traceback instead of its line."""
    good = json.dumps({"prompt": "a"})
    path = write_jsonl(tmp_path / "rows.jsonl", [good, "", row])
    with pytest.raises(DataError, match=f"^{path} line 3: .*({message})"):
        read_prompts(path, PromptWriter(make_tokenizer(CHATML)))


def test_files_and_templates_that_are_not_there_are_named(tmp_path):
    """Catches a conversation written without a template, and a file's name taken for a dataset on the hub."""
    conversation = write_jsonl(tmp_path / "chat.jsonl", [{"prompt": chat("a")}])
    with pytest.raises(DataError, match="line 1.*no chat template"):
        read_prompts(conversation, PromptWriter(make_tokenizer()))
    with pytest.raises(DataError, match="as_chat"):
        PromptWriter(make_tokenizer(), as_chat=True)
    for name in ("absent.jsonl", "org/data", str(tmp_path)):
        with pytest.raises(DataError, match="expected a file"):
            read_prompts(name, PromptWriter(make_tokenizer()))
    with pytest.raises(DataError, match="holds no row"):
        read_prompts(write_jsonl(tmp_path / "empty.jsonl", []), PromptWriter(make_tokenizer()))
