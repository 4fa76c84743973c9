"""The recognized sets of columns, and how a row becomes a text, a prompt with its completion, or a conversation.

| columns                                       | becomes                                                        |
|-----------------------------------------------|----------------------------------------------------------------|
| `messages` (`system`, `tools`)                | a conversation                                                 |
| `conversations` (`system`, `tools`)           | a conversation; ShareGPT's `from`/`value` and role names       |
| `prompt`, `completion` (`tools`)              | a prompt and its completion, both texts or both conversations  |
| `instruction`, `output` (`input`, `system`)   | a prompt and its completion: Alpaca                            |
| `question`, `answer`                          | a prompt and its completion                                    |
| `text`, or what `dataset_text_field` names    | a text                                                         |

The first line that fits decides, so `text` beside `instruction` is ignored; a `dataset_text_field` other than `text`
goes before all. Alpaca and question/answer rows are chats (user, assistant) if the tokenizer has a chat template. If
not, the prompt is the parts with an empty line between them, and one line break is before the completion.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..config.methods import METHODS, refuse_columns
from ..errors import DataError
from .sources import BadRow, name_type

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SHAREGPT_ROLES = {"human": "user"} | dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant")


@dataclass(frozen=True, slots=True)
class Example:
    """A row in one of the three shapes that TRL trains on: text, prompt with completion, conversation.

    `body` is TRL's `text`, `messages` or `completion`; only the last has a `prompt`.
    """

    body: str | list[Message]
    prompt: str | list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class DataFormat:
    """A recognized set of columns: its name, its shape, and the function that makes an `Example` of a row."""

    name: str
    is_chat: bool
    has_prompt: bool
    convert: Callable[[dict[str, Any]], Example]


def detect_format(
    rows: Sequence[dict[str, Any]], has_chat_template: bool, text_field: str = "text", name: str = ""
) -> DataFormat:
    """Recognize the format by the columns of the first rows.

    Args:
        rows: The first rows, of which one may lack a column.
        has_chat_template: Whether the tokenizer has one.
        text_field: The column of a plain text dataset.
        name: Of the dataset, for errors.

    Raises:
        DataError: No recognized format has these columns, or they need a chat template and there is none.
    """
    columns = find_columns(rows, name)
    found = _match_format(rows, columns, has_chat_template, text_field)
    if found is None:
        raise refuse_columns(METHODS["sft"], columns, name, text_field)
    if found.is_chat:
        check_chat_template(has_chat_template, name)
    return found


def find_columns(rows: Sequence[dict[str, Any]], name: str) -> list[str]:
    """Return the columns of rows of the dataset `name`.

    Raises:
        DataError: One of them holds images.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    images = sorted({"image", "images"} & set(columns))
    if images:
        raise DataError(where=f"dataset {name!r}", expected="text alone", found=f"the column {images[0]!r}")
    return columns


def check_chat_template(has_chat_template: bool, name: str) -> None:
    """Refuse the conversations of the dataset `name` if the tokenizer cannot write them.

    Raises:
        DataError: It has no chat template.
    """
    if not has_chat_template:
        raise DataError(
            "holds conversations, and the tokenizer has no chat template",
            where=f"dataset {name!r}",
            fix="set chat_template_path to a .jinja file, or to a model whose template suits this one",
        )


def _match_format(
    rows: Sequence[dict[str, Any]], columns: list[str], has_chat_template: bool, text_field: str
) -> DataFormat | None:
    def has(*required: str) -> bool:
        return all(column in columns for column in required)

    def convert_text(row: dict[str, Any]) -> Example:
        return Example(get_text(row, text_field))

    text = DataFormat(text_field, False, False, convert_text)
    if text_field != "text" and has(text_field):
        return text
    if has("messages"):
        return DataFormat("messages", True, False, lambda row: convert_conversation(row, "messages"))
    if has("conversations"):
        return DataFormat("conversations", True, False, lambda row: convert_conversation(row, "conversations"))
    if has("prompt", "completion"):
        if any(isinstance(row.get("prompt"), list) for row in rows):
            return DataFormat("prompt/completion messages", True, True, _convert_prompt_messages)
        return DataFormat("prompt/completion", False, True, _convert_prompt_text)
    join = _join_chat if has_chat_template else _join_text
    if has("instruction", "output"):
        return DataFormat("instruction/output", has_chat_template, True, lambda row: join(*_split_alpaca(row)))
    if has("question", "answer"):
        return DataFormat("question/answer", has_chat_template, True, lambda row: join(*_split_question(row)))
    return text if has(text_field) else None


def convert_conversation(row: dict[str, Any], column: str, is_prompt: bool = False) -> Example:
    """Return the conversation of a row.

    Args:
        is_prompt: whether it is to be answered, and not trained on. The assistant may then have said nothing.

    Raises:
        BadRow: it is not a conversation, or has nothing to train on in one of the assistant's messages.
    """
    messages = _get_messages(row, column, is_prompt)
    system = _get_optional_text(row, "system")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return Example(messages, None, _get_tools(row), _get_template_kwargs(row))


def _convert_prompt_messages(row: dict[str, Any]) -> Example:
    prompt, completion = _get_messages(row, "prompt"), _get_messages(row, "completion")
    if not any(message["role"] == "assistant" for message in completion):
        raise BadRow("empty completion", "`completion` holds no assistant message")
    return Example(completion, prompt, _get_tools(row), _get_template_kwargs(row))


def _convert_prompt_text(row: dict[str, Any]) -> Example:
    prompt = get_field(row, "prompt")
    if not isinstance(prompt, str):
        raise BadRow("wrong type", f"`prompt` must be a string, found {name_type(prompt)}")
    return Example(_get_completion(row, "completion"), prompt)


def _split_alpaca(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return a row's system message, question and answer."""
    if row.get("history"):
        raise BadRow("unsupported field", "`history` holds earlier turns: write the whole conversation as `messages`")
    question = [get_text(row, "instruction"), _get_optional_text(row, "input")]
    return _get_optional_text(row, "system"), "\n\n".join(filter(None, question)), _get_completion(row, "output")


def _split_question(row: dict[str, Any]) -> tuple[str, str, str]:
    return "", get_text(row, "question"), _get_completion(row, "answer")


def _join_chat(system: str, question: str, answer: str) -> Example:
    prompt = [{"role": "system", "content": system}] if system else []
    return Example([{"role": "assistant", "content": answer}], [*prompt, {"role": "user", "content": question}])


def _join_text(system: str, question: str, answer: str) -> Example:
    return Example(answer, "\n\n".join(filter(None, (system, question))) + "\n")


def get_field(row: dict[str, Any], field: str) -> Any:
    """Return a column of a row, which must be there and not null."""
    if field not in row:
        raise BadRow("missing field", f"`{field}` is missing")
    if row[field] is None:
        raise BadRow("null field", f"`{field}` is null")
    return row[field]


def get_text(row: dict[str, Any], field: str, reason: str = "empty field") -> str:
    """Return a column of a row that must hold a text."""
    text = get_field(row, field)
    if not isinstance(text, str):
        raise BadRow("wrong type", f"`{field}` must be a string, found {name_type(text)}")
    if not text.strip():
        raise BadRow(reason, f"`{field}` is empty")
    return text


def _get_completion(row: dict[str, Any], field: str) -> str:
    return get_text(row, field, "empty completion")


def _get_optional_text(row: dict[str, Any], field: str) -> str:
    text = row.get(field) or ""
    if not isinstance(text, str):
        raise BadRow("wrong type", f"`{field}` must be a string, found {name_type(text)}")
    return text


def _get_tools(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = row.get("tools")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise BadRow("wrong type", f"`tools` is a string but not JSON ({error})") from error
    if not tools:
        return None  # some templates announce tools even for an empty list
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("wrong type", "`tools` must be a list of objects, or a string of JSON with such a list")
    return tools


def _get_template_kwargs(row: dict[str, Any]) -> dict[str, Any] | None:
    template_kwargs = row.get("chat_template_kwargs")
    if template_kwargs is not None and not isinstance(template_kwargs, dict):
        raise BadRow("wrong type", f"`chat_template_kwargs` must be an object, found {name_type(template_kwargs)}")
    return template_kwargs


def _get_messages(row: dict[str, Any], field: str, may_be_silent: bool = False) -> list[Message]:
    items = get_field(row, field)
    if not isinstance(items, list):
        raise BadRow("wrong type", f"`{field}` must be a list of messages, found {name_type(items)}")
    if not items:
        raise BadRow("empty completion" if field == "completion" else "empty field", f"`{field}` holds no message")
    return [
        _convert_message(item, f"`{field}` message {number}", may_be_silent) for number, item in enumerate(items, 1)
    ]


def _convert_message(item: Any, name: str, may_be_silent: bool) -> Message:
    if not isinstance(item, dict):
        raise BadRow("wrong type", f"{name} must be an object with role and content, found {name_type(item)}")
    # Arrow gives each message the keys of all, and templates take null for a value: a null is a key that is not there.
    message = {key: value for key, value in item.items() if value is not None}
    if "role" not in message and "from" in message:
        sender = message.pop("from")
        message["role"] = SHAREGPT_ROLES.get(sender, sender) if isinstance(sender, str) else sender
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")

    role = message.get("role")
    if role is None:
        raise BadRow("missing field", f"{name} has no role")
    if role not in ROLES:
        raise BadRow("unknown role", f"{name} has the role {role!r}, expected one of {', '.join(ROLES)}")
    if message.get("weight", 1) != 1:
        raise BadRow("unsupported field", f"{name} has weight {message['weight']!r}: every turn is supervised alike")
    if "content" in message:
        message["content"] = _convert_content(message["content"], name)
    is_call = role == "assistant" and bool(message.get("tool_calls"))
    if role == "assistant" and not may_be_silent and not (message.get("content", "").strip() or is_call):
        raise BadRow("empty completion", f"{name}, the assistant's, is empty")
    if "content" not in message and not is_call:
        raise BadRow("missing field", f"{name} has no content")
    return message


def _convert_content(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRow("wrong type", f"the content of {name} must be a string, found {name_type(content)}")
    # A template for plain strings would print this list as Python writes it, so text parts become one string.
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise BadRow(
                "wrong type", f"the content of {name} has a part that is not text; only text can be trained on"
            )
    return "".join(part["text"] for part in content)
