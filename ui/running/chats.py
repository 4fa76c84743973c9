"""The models that are loaded for the chat: one for each run, and few at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from lorashard.config.use_options import ChatOptions
from lorashard.errors import ConfigError

from .chatting import Chat
from .packing import find_adapter_run

_IDLE_S = 900.0
_MAX_LOADED = 2


class Chats:
    """The loaded models, each of one run. Safe to use from several threads."""

    def __init__(self, root: Path, idle_s: float = _IDLE_S, max_loaded: int = _MAX_LOADED) -> None:
        """Start with nothing loaded.

        Args:
            root: the folder of the runs.
            idle_s: a model is unloaded after so long without a question.
            max_loaded: how many may be loaded at a time.
        """
        self._root = root
        self._idle_s = idle_s
        self._max_loaded = max_loaded
        self._lock = threading.Lock()
        self._chats: dict[str, Chat] = {}

    def load(self, name: str, device_words: Sequence[str] = (), checkpoint: str = "") -> Chat:
        """Return the run's model; start loading it if it is not loaded.

        Args:
            device_words: of `lorashard chat`: `--gpus 0,2` or `--cpu 2`; none: all GPUs.
            checkpoint: whose adapter answers; empty: the run's last.

        Raises:
            ConfigError: there is no such run, adapter or checkpoint, it is loaded elsewhere or with another checkpoint,
                or too many are loaded.
        """
        folder = find_adapter_run(self._root, name, checkpoint)
        ChatOptions.read([str(folder), *device_words])
        left = self.find(name)
        if left is not None and not left.is_alive:
            left.wait()  # until its memory is free
        with self._lock:
            there = self._chats.get(name)
            if there is not None and there.is_alive:
                if (list(there.device_words), there.checkpoint) == (list(device_words), checkpoint):
                    return there
                there_words = ", ".join(filter(None, (there.checkpoint, " ".join(there.device_words) or "all GPUs")))
                raise ConfigError(f"{name} is loaded with {there_words}", fix="unload it first")
            alive = [chat.name for chat in self._chats.values() if chat.is_alive]
            if len(alive) >= self._max_loaded:
                raise ConfigError(
                    "too many models are loaded",
                    expected=f"at most {self._max_loaded}",
                    found=", ".join(alive),
                    fix="unload one of them first",
                )
            self._chats[name] = Chat(name, folder, device_words, self._idle_s, checkpoint)
            return self._chats[name]

    def find(self, name: str) -> Chat | None:
        """Return the run's model if it was loaded: its state may be `ended` by now."""
        with self._lock:
            return self._chats.get(name)

    def list(self) -> list[Chat]:
        """Return the models that are loaded or loading."""
        with self._lock:
            return [chat for chat in self._chats.values() if chat.is_alive]

    def close(self) -> None:
        """Unload all, and wait until their processes have ended."""
        chats = self.list()
        for chat in chats:
            chat.unload("the server has ended")
        for chat in chats:
            chat.wait()
