"""A report on a dataset's rows, counted while they are encoded, so that none is lost in silence."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest

from .encode import IGNORED_LABEL, Encoding
from .sources import BadRow

_SHOWN_PLACES = 5


@dataclass
class SkippedRows:
    """Rows skipped for one reason; `first` holds the first few, each with its place and the problem."""

    count: int = 0
    first: list[str] = field(default_factory=list)


@dataclass
class DataReport:
    """The rows of one dataset, counted; `rows_read` is `rows_kept` plus all that `rows_skipped` counts.

    Tokens are counted as they are trained on: truncated to `max_length`, without padding. If TRL's trainer tokenizes
    the rows, only the longest prompt of a method that generates is counted.
    """

    dataset: str
    format: str
    mask_method: str
    is_chat: bool = False
    """The rows are conversations, or are made into them."""
    rows_read: int = 0
    rows_kept: int = 0
    rows_skipped: dict[str, SkippedRows] = field(default_factory=dict)
    num_tokens: int = 0
    num_supervised_tokens: int = 0
    longest_tokens: int = 0
    num_cut_off: int = 0
    """Rows skipped because `max_length` cuts off all their supervised tokens."""
    longest_cut_off_tokens: int = 0
    """The longest of these, before truncation."""
    num_truncated: int = 0
    num_packed: int | None = None
    """Sequences that the rows were packed into."""
    num_prompt_drifts: int = 0
    """Rows in which the tokens of the prompt alone are not the first tokens of prompt and completion together: the
    model is trained on another context than it sees when it is used."""
    num_unended_turns: int = 0
    """Rows in which an assistant's turn has no token that ends it: the model may not learn to stop."""
    ignored_files: list[str] = field(default_factory=list)
    """Files of a folder that belong to no split, or are of another kind."""

    @property
    def num_skipped(self) -> int:
        return sum(skipped.count for skipped in self.rows_skipped.values())

    def add(self, place: str, result: Encoding | BadRow) -> None:
        """Count one row."""
        if isinstance(result, BadRow):
            self.skip(place, result)
            return
        self.keep()
        self.num_tokens += len(result.input_ids)
        self.num_supervised_tokens += sum(label != IGNORED_LABEL for label in result.labels)
        self.longest_tokens = max(self.longest_tokens, len(result.input_ids))
        self.num_truncated += len(result.input_ids) < result.num_tokens_before_cut
        self.num_prompt_drifts += result.has_prompt_drift
        self.num_unended_turns += result.has_unended_turn

    def keep(self) -> None:
        """Count one row that is trained on."""
        self.rows_read += 1
        self.rows_kept += 1

    def skip(self, place: str, problem: BadRow) -> None:
        """Count one row that is skipped."""
        self.rows_read += 1
        if problem.tokens_before_cut is not None:
            self.num_cut_off += 1
            self.longest_cut_off_tokens = max(self.longest_cut_off_tokens, problem.tokens_before_cut)
        skipped = self.rows_skipped.setdefault(problem.reason, SkippedRows())
        skipped.count += 1
        if len(skipped.first) < _SHOWN_PLACES:
            skipped.first.append(f"{place}: {problem.detail}")

    def explain_skipped(self) -> str:
        """Return one line: the number of rows that cannot be trained on, the reasons, and the first places."""
        reasons = ", ".join(f"{skipped.count} {reason}" for reason, skipped in self.rows_skipped.items())
        rounds = zip_longest(*(skipped.first for skipped in self.rows_skipped.values()))  # one of each reason first
        shown = [place for places in rounds for place in places if place][:_SHOWN_PLACES]
        more = "; ..." if self.num_skipped > len(shown) else ""
        return f"{self.num_skipped} of {self.rows_read} rows cannot be trained on ({reasons}): {'; '.join(shown)}{more}"

    def suggest_length(self, max_length: int | None) -> str | None:
        """Return the max_length that keeps the supervised tokens of all rows; None if no row lost all of them."""
        if not self.num_cut_off:
            return None
        return (
            f"--max_length {self.longest_cut_off_tokens} keeps the {self.num_cut_off} of the {self.rows_read} rows of "
            f"which max_length {max_length} cuts off all supervised tokens"
        )

    def summary(self) -> str:
        """Return one line: the numbers of rows and tokens, the format, and what the loss is computed on."""
        skipped = f", {self.num_skipped} skipped" if self.num_skipped else ""
        if not self.num_tokens:
            return f"{self.rows_kept} rows{skipped}; {self.format}; {self.mask_method}"
        cut = f", {self.num_truncated} truncated" if self.num_truncated else ""
        packed = f" packed into {self.num_packed} sequences" if self.num_packed is not None else ""
        return (
            f"{self.rows_kept} rows{packed}{skipped}{cut}; {self.num_tokens} tokens, {self.num_supervised_tokens} "
            f"supervised, the longest row {self.longest_tokens}; {self.format}, loss on {self.mask_method}"
        )
