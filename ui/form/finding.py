"""What a panel of the form has found out, and errors in the words of the form."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from lorashard.config.methods import METHODS, Method
from lorashard.config.options import COMMAND_LINE
from lorashard.config.run_config import read_known_options
from lorashard.errors import ConfigError

from ..running.worker import Canceled
from .form import describe_option

_FLAG = re.compile(r"--([a-z_]+)")


class Finding(NamedTuple):
    """What is wrong by the newest answer of a panel.

    Attributes:
        question: what the panel was asked; while the form asks something else, this tells nothing. None: nothing was.
        problem: the sentence; empty if nothing is wrong.
        option: the field that the sentence belongs to, where there is one.
        warnings: sentences on what works, but not as one would wish.
    """

    question: Any = None
    problem: str = ""
    option: str = ""
    warnings: tuple[str, ...] = ()

    @classmethod
    def of_error(cls, question: Any, error: ConfigError) -> Finding:
        """Return the finding of a panel whose question was answered with an error."""
        if isinstance(error, Canceled):
            return cls(question, warnings=(tell(error),))
        return cls(question, tell(error), error.option or "")


def read_findings(asked: Iterable[tuple[Any, Finding]]) -> tuple[list[Finding], bool]:
    """Return the findings that answer what is asked now, and whether an answer is still to come.

    Args:
        asked: of each panel the question of the form, None if it has none, and its newest finding.
    """
    asked = [(question, finding) for question, finding in asked if question is not None]
    told = [finding for question, finding in asked if finding.question == question]
    return told, len(told) < len(asked)


def tell(error: ConfigError, method: Method = METHODS["sft"]) -> str:
    """Return an error in the words of the form, whose fields have no dashes, and are empty where YAML says null."""
    known = read_known_options(method)
    text = str(error).removeprefix(f"{COMMAND_LINE}: ")
    text = _FLAG.sub(lambda found: found[1] if found[1] in known else found[0], text)
    option = known.get(error.option or "")
    is_off_when_empty = option is not None and not describe_option(option, method)[0] and not error.where
    return text.replace(" or null", "") if is_off_when_empty else text
