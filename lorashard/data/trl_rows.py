"""Rows in the formats that TRL's trainers take: checked one by one, and handed on as they are.

A column is a text, or a conversation: a list of messages with role and content. All columns of a dataset are of one
kind. `label` is true or false, log-probabilities and margins are numbers. TRL tokenizes and truncates the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa

from ..config.methods import Method, refuse_columns
from ..errors import DataError
from .formats import ROLES, check_chat_template, find_columns, get_field, get_text
from .sources import BadRow, RowReader, name_type, read_rows

_BATCH_ROWS = 256
_TEXTS = ("prompt", "chosen", "rejected", "completion")
_NUMBERS = ("margin", "ref_chosen_logps", "ref_rejected_logps", "ref_logps", "ref_KL_logps")


@dataclass(frozen=True)
class TrlFormat:
    """A set of columns that a trainer takes, and whether they hold conversations.

    With `has_implicit_prompt`, the trainer takes the common beginning of chosen and rejected as the prompt.
    """

    columns: tuple[str, ...]
    is_chat: bool
    optional_columns: tuple[str, ...] | None
    has_implicit_prompt: bool = False

    @property
    def name(self) -> str:
        """The format's name in a report."""
        return f"{', '.join(self.columns)} ({'conversations' if self.is_chat else 'texts'})"

    def check(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of a row that the trainer reads.

        Raises:
            BadRow: A column is missing, or is not what it should be.
        """
        for column in self.columns:
            self._check_column(row, column)
        if self.has_implicit_prompt and row["chosen"][0] != row["rejected"][0]:
            raise BadRow(
                "no prompt",
                "`chosen` and `rejected` have no common beginning, which would be the prompt: give `prompt`",
            )
        if self.optional_columns is None:
            return row
        kept = {column: row[column] for column in self.columns}
        for column in self.optional_columns:
            if row.get(column) is not None:
                kept[column] = row[column]
                if column in _NUMBERS and (isinstance(row[column], bool) or not isinstance(row[column], int | float)):
                    raise BadRow("wrong type", f"`{column}` must be a number, found {name_type(row[column])}")
        return kept

    def _check_column(self, row: dict[str, Any], column: str) -> None:
        if column == "label":
            value = get_field(row, column)
            if not isinstance(value, bool):
                raise BadRow("wrong type", f"`label` must be true or false, found {name_type(value)}")
        elif self.is_chat:
            _check_messages(get_field(row, column), column)
        else:
            get_text(row, column)


def open_rows(
    source: RowReader, method: Method, has_chat_template: bool, max_samples: int | None
) -> tuple[TrlFormat, Iterator[tuple[str, dict[str, Any] | BadRow]]]:
    """Recognize the columns by the first rows; return them, and every row with its place, checked.

    Raises:
        DataError: There are no rows, their columns are not those that the method takes, or they need a chat template.
    """
    first, rows = read_rows(source, max_samples)
    found = find_format(first, method, has_chat_template, source.name)

    def check() -> Iterator[tuple[str, dict[str, Any] | BadRow]]:
        for row in rows:
            try:
                yield row.place, row.value if isinstance(row.value, BadRow) else found.check(row.value)
            except BadRow as problem:
                yield row.place, problem

    return found, check()


def find_format(rows: Sequence[dict[str, Any]], method: Method, has_chat_template: bool, name: str) -> TrlFormat:
    """Return the first of the method's formats whose columns the rows of the dataset `name` have.

    Raises:
        DataError: There is none, or it needs a chat template and there is none.
    """
    columns = find_columns(rows, name)
    for expected in method.formats:
        if set(expected) <= set(columns):
            texts = [row.get(column) for row in rows for column in expected if column in _TEXTS]
            is_chat = 2 * sum(isinstance(value, list) for value in texts) > len(texts)  # the odd ones are the bad ones
            if is_chat:
                check_chat_template(has_chat_template, name)
            has_implicit_prompt = expected == ("chosen", "rejected") and not method.is_classifier
            return TrlFormat(expected, is_chat, method.optional_columns, has_implicit_prompt)
    raise refuse_columns(method, columns, name)


def find_schema(rows: Iterator[dict[str, Any]], name: str) -> pa.Schema:
    """Return the columns of all rows of the dataset `name`, with types that hold the values of all.

    Raises:
        DataError: A column has values of types that have no common one.
    """
    schema = pa.schema([])
    try:
        while batch := list(islice(rows, _BATCH_ROWS)):
            schema = pa.unify_schemas([schema, make_table(batch).schema], promote_options="permissive")
    except pa.ArrowException as error:
        problem = f"a column holds values of different types: {str(error).splitlines()[0]}"
        raise DataError(problem, where=f"dataset {name!r}") from error
    return schema


def tabulate(rows: Sequence[dict[str, Any]], name: str) -> pa.Table:
    """Return rows of the dataset `name`, which nobody has looked at, as a table.

    Raises:
        DataError: as for `find_schema`.
    """
    return make_table(rows, find_schema(iter(rows), name))


def make_table(rows: Sequence[dict[str, Any]], schema: pa.Schema | None = None) -> pa.Table:
    """Return rows as a table; a column that a row lacks is null there."""
    names = schema.names if schema else dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [row.get(name) for row in rows] for name in names}, schema=schema)


def _check_messages(value: Any, column: str) -> None:
    if not isinstance(value, list):
        raise BadRow("wrong type", f"`{column}` must be a list of messages, found {name_type(value)}")
    if not value:
        raise BadRow("empty field", f"`{column}` holds no message")
    for number, message in enumerate(value, 1):
        name = f"`{column}` message {number}"
        if not isinstance(message, dict):
            raise BadRow("wrong type", f"{name} must be an object with role and content, found {name_type(message)}")
        if message.get("role") not in ROLES:
            expected = ", ".join(ROLES)
            raise BadRow("unknown role", f"{name} has the role {message.get('role')!r}, expected one of {expected}")
        if message.get("content") is None and not message.get("tool_calls"):
            raise BadRow("missing field", f"{name} has no content")
