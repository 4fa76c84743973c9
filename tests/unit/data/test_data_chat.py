"""The assistant's turns are found in what chat templates write, with and without generation markers."""

from pathlib import Path

import pytest
import trl
import trl.chat_template_utils
from helpers.data import (
    CHATML,
    CHATML_MARKED,
    CHATML_MARKED_SHORT,
    CLOSING,
    FORGETFUL,
    LLAMA3,
    MISTRAL,
    chat,
    find_supervised,
    make_tokenizer,
    write_jsonl,
)

from lorashard.config.data_options import DataOptions
from lorashard.config.methods import METHODS
from lorashard.data.chat import mask_turns
from lorashard.data.prepare import Prepared, prepare
from lorashard.errors import DataError

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
CONVERSATION = chat("How many?", "72.", "And in May?", "24 clips 🦙")


def prepare_messages(conversations: list[list[dict]], tokenizer, folder: Path, **options) -> Prepared:
    path = write_jsonl(folder / "rows.jsonl", [{"messages": messages} for messages in conversations])
    return prepare(DataOptions(dataset=path, **options), tokenizer, folder / "cache")


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
@pytest.mark.parametrize(
    ("template", "eos_token", "supervised"),
    [
        (CHATML_MARKED, "</s>", ["72.<|im_end|>\n", "24 clips 🦙<|im_end|>\n"]),
        (CHATML, "</s>", ["72.<|im_end|>\n", "24 clips 🦙<|im_end|>\n"]),
        (LLAMA3, "</s>", ["72.<|eot_id|>", "24 clips 🦙<|eot_id|>"]),
        (MISTRAL, "</s>", ["72.</s>", "24 clips 🦙</s>"]),
        (CLOSING, "<|im_end|>", ["72.<|im_end|>\n", "24 clips 🦙<|im_end|>\n</s>"]),
    ],
)
def test_only_what_the_assistant_says_is_supervised(
    tmp_path: Path, kind: str, template: str, eos_token: str, supervised: list[str]
) -> None:
    """Catches a header or a user's words in the loss, and an end-of-turn token left out of it."""
    tokenizer = make_tokenizer(template, kind, eos_token)
    prepared = prepare_messages([CONVERSATION], tokenizer, tmp_path)
    assert [text.lstrip(" ") for text in find_supervised(prepared.train[0], tokenizer)] == supervised
    assert prepared.report.num_unended_turns == 0


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
@pytest.mark.parametrize("name", ["llama3", "gemma", "phi3", "cohere", None])
def test_incremental_rendering_equals_generation_markers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str | None
) -> None:
    """Catches a turn found a token off without markers: TRL's own versions with markers are the reference."""
    template = (TEMPLATES / f"{name}.jinja").read_text() if name else CHATML
    conversations = [
        CONVERSATION,
        chat("Write a story", "Once upon a time\n\nThe end. "),
        chat("a", "\n b\n", "c", "d", "e", "f"),
    ]
    expected = prepare_messages(conversations, make_tokenizer(template if name else CHATML_MARKED, kind), tmp_path)

    def know_nothing(tokenizer: object) -> None:
        raise ValueError("patching is not supported for this template")

    monkeypatch.setattr(trl.chat_template_utils, "get_training_chat_template", know_nothing)
    # Another option, which changes nothing here, has the rows encoded anew.
    found = prepare_messages(conversations, make_tokenizer(template, kind), tmp_path, on_bad_row="skip")
    assert "incremental rendering" in found.report.mask_method
    assert "incremental rendering" not in expected.report.mask_method
    assert found.train[:] == expected.train[:]


def test_system_and_tool_messages_are_not_supervised(tmp_path: Path) -> None:
    """Catches a mask of everything that is not the user's."""
    tokenizer = make_tokenizer(CHATML)
    call = {"role": "assistant", "content": "weather?"}
    messages = [*chat("Hi", system="Be short."), call, {"role": "tool", "content": "sunny"}, *chat("", "Good.")[1:]]
    supervised = find_supervised(prepare_messages([messages], tokenizer, tmp_path).train[0], tokenizer)
    assert supervised == ["weather?<|im_end|>\n", "Good.<|im_end|>\n"]


def test_end_of_turn_outside_of_markers_is_supervised(tmp_path: Path) -> None:
    """Catches a model that never learns to stop, because its template's markers leave out the token for it."""
    tokenizer = make_tokenizer(CHATML_MARKED_SHORT)
    prepared = prepare_messages([CONVERSATION, chat("a", "b ")], tokenizer, tmp_path)
    assert find_supervised(prepared.train[0], tokenizer) == ["72.<|im_end|>", "24 clips 🦙<|im_end|>"]
    assert find_supervised(prepared.train[1], tokenizer) == ["b <|im_end|>"]
    assert prepared.report.num_unended_turns == 0


def test_turns_without_an_end_are_reported(tmp_path: Path) -> None:
    """Catches silence about a template that never ends the assistant's turns."""
    tokenizer = make_tokenizer("{% for message in messages %}{{ message.role + ': ' + message.content }}{% endfor %}")
    prepared = prepare_messages([CONVERSATION], tokenizer, tmp_path)
    assert prepared.report.num_unended_turns == 1
    pairs = write_jsonl(tmp_path / "pairs.jsonl", [{"question": "a", "answer": "b"}])
    assert prepare(DataOptions(dataset=pairs), tokenizer, tmp_path / "cache").report.num_unended_turns == 1


def test_opened_thought_does_not_move_the_turn(tmp_path: Path) -> None:
    """Catches a turn that starts too late where the generation prompt opens a thought that the turn does not have."""
    tokenizer = make_tokenizer(CHATML.replace("assistant\\n' }}{%- endif %}", "assistant\\n<think>\\n' }}{%- endif %}"))
    prepared = prepare_messages([CONVERSATION], tokenizer, tmp_path)
    assert find_supervised(prepared.train[0], tokenizer) == ["72.<|im_end|>\n", "24 clips 🦙<|im_end|>\n"]


@pytest.mark.parametrize(
    "template",
    [
        FORGETFUL,
        # Likewise, with something at the end.
        CHATML.replace(
            "message.content +", "message.content + ('!' if loop.last and message.role != 'user' else '') +"
        ),
        # The generation prompt is not what the assistant's turn is written with.
        CHATML.replace("'<|im_start|>assistant\\n' }}{%- endif %}", "'<|assistant|>' }}{%- endif %}"),
    ],
)
def test_unstable_template_is_refused(tmp_path: Path, template: str) -> None:
    """Catches a guessed mask where a template does not write earlier turns alike whatever follows; also with skip."""
    with pytest.raises(DataError, match="chat_template_path") as caught:
        prepare_messages([CONVERSATION], make_tokenizer(template), tmp_path, on_bad_row="skip")
    assert caught.value.where == "rows.jsonl line 1, message 2"


def test_row_that_the_template_refuses_is_a_bad_row(tmp_path: Path) -> None:
    """Catches a Jinja traceback, without a row number, for a role that a template does not take."""
    tokenizer = make_tokenizer(MISTRAL)
    conversations = [CONVERSATION, chat("a", "b", system="c"), chat("a", "b", "c")[1:]]
    prepared = prepare_messages(conversations, tokenizer, tmp_path, on_bad_row="skip")
    assert prepared.report.rows_kept == 1
    [refused] = prepared.report.rows_skipped["refused by the chat template"].first
    assert refused.startswith("rows.jsonl line 2: ") and "user and assistant" in refused
    assert prepared.report.rows_skipped["assistant speaks first"].count == 1


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_conversations_without_a_template_are_refused(tmp_path: Path, method: str) -> None:
    """Catches a chat trained on without its roles, or an error of each rank that names no option."""
    row = {"messages": CONVERSATION, "chosen": CONVERSATION, "rejected": CONVERSATION}
    options = DataOptions(dataset=write_jsonl(tmp_path / "rows.jsonl", [row]))
    with pytest.raises(DataError, match="chat_template_path"):
        prepare(options, make_tokenizer(), tmp_path / "cache", METHODS[method])


def test_token_across_a_turns_edge_is_marked() -> None:
    """Catches an off-by-one at either edge of a turn, and tokens without characters marked beside it."""
    offsets = [(0, 2), (2, 4), (4, 4), (4, 7), (7, 9), (9, 9)]
    assert mask_turns(offsets, [(3, 7)]) == [False, True, True, True, False, False]
    assert mask_turns(offsets, [(2, 4), (7, 9)]) == [False, True, False, False, True, False]
    assert mask_turns(offsets, []) == [False] * 6
