"""What became of a dataset's rows: counted while they are encoded, so that none goes missing unseen."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest

from .encode import IGNORED_LABEL, Encoding
from .sources import BadRow

_SHOWN_PLACES = 5


@dataclass
class SkippedRows:
    """Rows left out for one reason; `first` holds the first few, each with its place and what is wrong."""

    count: int = 0
    first: list[str] = field(default_factory=list)


@dataclass
class DataReport:
    """What was found in one dataset; `rows_read` is `rows_kept` plus all that `rows_skipped` counts.

    Tokens are counted as they are trained on: after rows were cut to `max_length`, without padding. Where TRL's trainer
    tokenizes the rows there are none to count, but for the longest prompt of a method that answers prompts.
    """

    dataset: str
    format: str
    mask_method: str
    is_chat: bool = False
    """The rows are conversations, or were made to be."""
    rows_read: int = 0
    rows_kept: int = 0
    rows_skipped: dict[str, SkippedRows] = field(default_factory=dict)
    num_tokens: int = 0
    num_supervised_tokens: int = 0
    longest_tokens: int = 0
    num_cut_off: int = 0
    """Rows left out because `max_length` cuts off all that is to be supervised of them."""
    longest_cut_off_tokens: int = 0
    """The longest of these, before it is cut."""
    num_truncated: int = 0
    num_packed: int | None = None
    """Sequences that the rows were packed into."""
    num_prompt_drifts: int = 0
    """Rows whose prompt, written alone, is not how prompt and completion together start: the model is trained on
    another context than it sees when it is used."""
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
        """Count one row that is left out."""
        self.rows_read += 1
        if problem.tokens_before_cut is not None:
            self.num_cut_off += 1
            self.longest_cut_off_tokens = max(self.longest_cut_off_tokens, problem.tokens_before_cut)
        skipped = self.rows_skipped.setdefault(problem.reason, SkippedRows())
        skipped.count += 1
        if len(skipped.first) < _SHOWN_PLACES:
            skipped.first.append(f"{place}: {problem.detail}")

    def explain_skipped(self) -> str:
        """Return one line: how many rows cannot be trained on, why, and where the first ones are."""
        reasons = ", ".join(f"{skipped.count} {reason}" for reason, skipped in self.rows_skipped.items())
        rounds = zip_longest(*(skipped.first for skipped in self.rows_skipped.values()))  # one of each reason first
        shown = [place for places in rounds for place in places if place][:_SHOWN_PLACES]
        more = "; ..." if self.num_skipped > len(shown) else ""
        return f"{self.num_skipped} of {self.rows_read} rows cannot be trained on ({reasons}): {'; '.join(shown)}{more}"

    def explain_cut_off(self, max_length: int | None) -> str:
        """Return a sentence on the rows of which `max_length` leaves nothing to learn; empty where there are none."""
        if not self.num_cut_off:
            return ""
        return (
            f" max_length {max_length} leaves nothing to learn of {self.num_cut_off} of the {self.rows_read} rows: "
            f"--max_length {self.longest_cut_off_tokens} keeps all of them whole."
        )

    def summary(self) -> str:
        """Return one line: how many rows and tokens, the format found, and what is supervised."""
        skipped = f", {self.num_skipped} skipped" if self.num_skipped else ""
        if not self.num_tokens:
            return f"{self.rows_kept} rows{skipped}; {self.format}; {self.mask_method}"
        cut = f", {self.num_truncated} cut" if self.num_truncated else ""
        packed = f" packed into {self.num_packed} sequences" if self.num_packed is not None else ""
        return (
            f"{self.rows_kept} rows{packed}{skipped}{cut}; {self.num_tokens} tokens, {self.num_supervised_tokens} "
            f"supervised, the longest row {self.longest_tokens}; {self.format}, learning: {self.mask_method}"
        )
