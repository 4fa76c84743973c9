"""What every page and every endpoint uses: the folder of runs, and the objects that read, start and query them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lorashard.runtime.gpus import list_gpus

from .form.paths import Allowed
from .reading.runs import Runs
from .running import control
from .running.chats import Chats
from .running.jobs import Jobs
from .running.worker import Worker


@dataclass(frozen=True)
class AppContext:
    """The server's shared state, one for all browsers; each member is safe to use from several threads."""

    root: Path
    allowed: Allowed
    runs: Runs
    jobs: Jobs
    worker: Worker
    chats: Chats
    has_login: bool = False  # whether who sees a page has logged in, and so can log out

    @classmethod
    def open(
        cls,
        root: Path,
        allowed_folders: Sequence[Path] = (),
        trusts_code: bool = False,
        start: Path | None = None,
        has_login: bool = False,
    ) -> AppContext:
        """Open a folder of runs; create it if it does not exist.

        Args:
            allowed_folders: where files named in a browser may lie, beside `root`.
            trusts_code: whether a browser may have models' own code run (`trust_remote_code`, `reward_funcs`).
            start: the folder whose models and datasets may be read besides, if they are not hidden.
            has_login: whether the server lets in only who has logged in.
        """
        root.mkdir(parents=True, exist_ok=True)
        root = root.resolve()
        allowed = Allowed(root, allowed_folders, trusts_code, start)
        return cls(root, allowed, Runs(root), Jobs(root), Worker(), Chats(root), has_login)

    def start_run(self, name: str, config_yaml: str, is_suggested: bool = False) -> str:
        """Start a new run; return its name, which is another than a suggested one where that was just taken.

        Raises:
            ConfigError: as `control.start_run`.
        """
        self._free_gpus()
        return control.start_run(self.root, name, config_yaml, is_suggested)

    def resume_run(self, name: str) -> None:
        """Resume a run.

        Raises:
            UserError: as `control.resume_run`.
        """
        self._free_gpus()
        control.resume_run(self.root, name)

    def delete_run(self, name: str) -> None:
        """Delete a run's folder, and unload its model, which would answer for a later run of that name.

        Raises:
            ConfigError: as `control.delete_run`.
        """
        control.delete_run(self.root, name)
        for chat in self.chats.list():
            if control.is_of(chat.name, name):
                chat.unload("its run was deleted")

    def _free_gpus(self) -> None:
        """End what plans, whose process keeps some of the memory of the GPUs that it has planned for."""
        if list_gpus():
            self.worker.close()

    def close(self) -> None:
        """Stop the chats and the worker. Runs and jobs continue."""
        self.chats.close()
        self.worker.close()
