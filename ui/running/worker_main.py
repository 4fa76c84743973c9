"""The process of a `worker`: answers the questions that come through its stdin. Answers import torch."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from lorashard.errors import UserError
from lorashard.runtime.importing import quick_imports


def _answer_plan(words: list[str]) -> dict[str, Any]:
    from lorashard.config.run_config import RunConfig

    config = RunConfig.resolve(None, words, required=("model_name_or_path",))
    with quick_imports():
        from lorashard.planning.choose import name_placement
        from lorashard.planning.hardware import HardwareOptions
        from lorashard.planning.run_plan import forecast

    plan, cluster = forecast(config, HardwareOptions())
    names = [name_placement(row.placement, cluster.num_ranks) for row in plan.rows]
    return plan.to_json() | {"names": names, "num_ranks": cluster.num_ranks}


def _answer_preview(words: list[str], num_rows: int) -> list[dict[str, Any]]:
    from lorashard.config.run_config import RunConfig

    config = RunConfig.resolve(None, words, required=("model_name_or_path", "dataset"))
    with quick_imports():
        from lorashard.data.preview import preview
        from lorashard.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(**config.tokenizer_options())
    return [dataclasses.asdict(row) for row in preview(config.data_options(), tokenizer, num_rows)]


def _answer_model(name: str, revision: str | None) -> str:
    with quick_imports():
        from lorashard.diagnostics.validate import describe_model

    return describe_model(name, revision)


def _answer_validate(words: list[str]) -> Iterator[str]:
    from lorashard.config.run_config import RunConfig

    config = RunConfig.resolve(None, words)
    with quick_imports():
        from lorashard.diagnostics.validate import validate

    yield from validate(config)


def _serve(idle_s: float) -> None:
    """Answer until no question has come for `idle_s`, or the server is gone."""
    answers = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # libraries may print

    def send(message: dict[str, Any]) -> None:
        answers.send_bytes(json.dumps(message).encode())

    questions: queue.Queue[list[Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(questions,), daemon=True).start()
    while True:
        try:
            name, *arguments = questions.get(timeout=idle_s)
        except queue.Empty:
            os._exit(0)  # the listening thread cannot be ended otherwise
        try:
            answer = _ANSWERS[name](*arguments)
            if isinstance(answer, Iterator):
                for line in answer:
                    send({"line": line})
                answer = None
            send({"answer": answer})
        except UserError as error:
            send({"error": error.to_json()})
        except Exception as error:  # planning and tokenizing run the model's own code, which may raise anything
            logging.exception("no answer to %s", name)
            reason = (str(error).strip() or "no reason is given").splitlines()[0]
            send({"error": {"problem": f"an unexpected error ({type(error).__name__}: {reason})"}})


def _listen(questions: queue.Queue[list[Any]]) -> None:
    asked = Connection(os.dup(0), writable=False)
    while True:
        try:
            questions.put(json.loads(asked.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)  # the server is gone, so nobody waits for an answer


_ANSWERS: dict[str, Callable[..., Any]] = {
    "plan": _answer_plan,
    "preview": _answer_preview,
    "describe_model": _answer_model,
    "validate": _answer_validate,
}

if __name__ == "__main__":
    _serve(float(sys.argv[1]))
