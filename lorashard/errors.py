"""The errors that lorashard raises on purpose: fields that code reads, and one sentence made of them for people."""

from __future__ import annotations

from typing import Any, Self


class LorashardError(Exception):
    """Base of lorashard's own errors. `str()` makes the sentence: `where: option: problem: expected, found; fix`.

    Attributes:
        problem: what is wrong, where "expected, found" alone does not say it; empty otherwise.
        option: the option, argument, field or environment variable that is wrong.
        expected: what would have worked.
        found: what was there.
        where: the file, line, row or folder.
        fix: what to do.
    """

    def __init__(
        self,
        problem: str = "",
        *,
        option: str | None = None,
        expected: Any = None,
        found: Any = None,
        where: Any = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.option = option
        self.expected = expected
        self.found = found
        self.where = where
        self.fix = fix
        self.args = (str(self),)  # what torch quotes of an error; pickle restores the fields from the attributes

    def __str__(self) -> str:
        sides = (("expected", self.expected), ("found", self.found))
        clause = ", ".join(f"{name} {value}" for name, value in sides if value is not None)
        parts = (self.where, self.option, self.problem, clause)
        sentence = ": ".join(str(part) for part in parts if part not in (None, ""))
        return f"{sentence}; {self.fix}" if self.fix else sentence

    def __reduce__(self) -> tuple[Any, ...]:
        """Make what ranks exchange: what an option held may be anything, and is text there."""
        plain = {name: getattr(self, name) for name in ("expected", "found", "where")}
        fields = {name: value if value is None else str(value) for name, value in plain.items()}
        return type(self), (self.problem,), self.__dict__ | fields

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are set, as strings, and `type`, the name of the class."""
        names = ("problem", "option", "expected", "found", "where", "fix")
        values = {name: getattr(self, name) for name in names}
        return {"type": type(self).__name__} | {
            name: str(value) for name, value in values.items() if value not in (None, "")
        }

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> Self:
        """Return an error of this class with the fields that `to_json` of another has returned."""
        return cls(**{name: value for name, value in fields.items() if name != "type"})


class UserError(LorashardError):
    """Something the user can fix: the command line reports it in one line and exits with code 2."""


class ConfigError(UserError):
    """An option, a configuration file or an environment that cannot work."""


class DataError(UserError):
    """A dataset, or an example of it, that cannot be trained on."""


class CheckpointError(UserError):
    """A model folder, weight file or adapter that is missing, damaged or does not match."""


class VerificationError(LorashardError):
    """What was to be equal is not: the command line reports it in one line and exits with code 1."""


class TrainingError(LorashardError):
    """Values that no training recovers from: the command line reports it in one line and exits with code 1.

    Attributes:
        rank: the first whose loss is not finite; None where all ranks have the value, as of a gradient's norm.
    """

    def __init__(self, problem: str = "", *, rank: int | None = None, fix: str | None = None) -> None:
        super().__init__(problem, fix=fix)
        self.rank = rank

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | ({} if self.rank is None else {"rank": self.rank})


class RunStopped(LorashardError):
    """A run that was asked to stop, and has: the command line says what was saved and exits with code 75.

    Attributes:
        signal: the name of the signal that asked.
        step: the optimizer step that was saved.
        checkpoint: the folder that it was saved in; None: nothing was, as `problem` says.
    """

    def __init__(
        self,
        problem: str = "",
        *,
        signal: str | None = None,
        step: int | None = None,
        checkpoint: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.signal = signal  # before the base's __init__, which composes the sentence
        self.step = step
        self.checkpoint = checkpoint
        super().__init__(problem, fix=fix)

    def __str__(self) -> str:
        if self.checkpoint is not None:
            where = f"saved at step {self.step} in {self.checkpoint}"
            return f"stopped by {self.signal}, {where}; resume it with --resume auto"
        sentence = super().__str__()
        return f"stopped by {self.signal}: {sentence}" if self.signal else sentence

    def to_json(self) -> dict[str, Any]:
        fields = {"signal": self.signal, "step": self.step, "checkpoint": self.checkpoint}
        return super().to_json() | {name: value for name, value in fields.items() if value is not None}


class ShardError(LorashardError):
    """A use of the engine that would give wrong values: a sharded weight read, ranks that diverged, no slot left."""
