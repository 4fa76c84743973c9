"""The process that a `worker` asks: lines of JSON come in, and lines of JSON answer them. Answers import torch."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
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
    """Answer until nobody asks any more, or the server is gone, which the end of the input tells."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print is no answer
    questions: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_listen, args=(questions,), daemon=True).start()

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message).encode() + b"\n")

    while True:
        try:
            question = json.loads(questions.get(timeout=idle_s))
        except queue.Empty:
            os._exit(0)  # the thread that listens cannot be ended otherwise
        try:
            answer = _ANSWERS[question[0]](*question[1:])
            if isinstance(answer, Iterator):
                for line in answer:
                    say({"line": line})
                answer = None
            say({"answer": answer})
        except UserError as error:
            say({"error": str(error)})
        except Exception as error:  # planning and tokenizing run the model's own code, which may raise anything
            logging.exception("no answer to %s", question)
            reason = (str(error).strip() or "no reason is given").splitlines()[0]
            say({"error": f"this cannot be told ({type(error).__name__}: {reason})"})


def _listen(questions: queue.Queue[bytes]) -> None:
    for line in sys.stdin.buffer:
        questions.put(line)
    os._exit(0)  # whatever is being computed: nobody hears it


_ANSWERS: dict[str, Callable[..., Any]] = {
    "plan": _answer_plan,
    "preview": _answer_preview,
    "describe_model": _answer_model,
    "validate": _answer_validate,
}

if __name__ == "__main__":
    _serve(float(sys.argv[1]))
