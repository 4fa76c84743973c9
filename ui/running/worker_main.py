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
from typing import TYPE_CHECKING, Any

from lorashard.errors import ConfigError, UserError
from lorashard.runtime.importing import quick_imports

if TYPE_CHECKING:
    from lorashard.config.run_config import RunConfig
    from lorashard.planning.hardware import HardwareOptions

_RANKS_OF_A_NODE = 8


def _warm_up() -> None:
    with quick_imports():
        import lorashard.planning.run_plan  # noqa: F401


def _choose_machine(words: list[str], gpu_type: str | None, num_gpus: int) -> tuple[RunConfig, HardwareOptions]:
    """Return a run and the machines to plan it for: GPUs of a type, or this machine, of which one CPU rank is taken
    where it has no GPU and no number is given."""
    from lorashard.config.run_config import RunConfig

    config = RunConfig.resolve(None, words, required=("model_name_or_path",))
    with quick_imports():
        from lorashard.planning.hardware import HardwareOptions
        from lorashard.runtime.devices import find_gpus

    if gpu_type is not None:
        if num_gpus < 1 or (num_gpus > _RANKS_OF_A_NODE and num_gpus % _RANKS_OF_A_NODE):
            expected = f"1 to {_RANKS_OF_A_NODE}, or a multiple of {_RANKS_OF_A_NODE}"
            raise ConfigError(option="num_gpus", expected=expected, found=num_gpus)
        wanted = HardwareOptions(gpu_type, nodes=max(1, num_gpus // _RANKS_OF_A_NODE))
        return config.model_copy(update={"cpu": None, "gpus": min(num_gpus, _RANKS_OF_A_NODE)}), wanted
    if config.cpu is None and config.gpus is None and not find_gpus().count:
        config = config.model_copy(update={"cpu": 1})
    return config, HardwareOptions()


def _answer_plan(words: list[str], gpu_type: str | None, num_gpus: int) -> dict[str, Any]:
    config, wanted = _choose_machine(words, gpu_type, num_gpus)
    with quick_imports():
        from lorashard.planning.choose import name_placement
        from lorashard.planning.run_plan import forecast

    plan, cluster = forecast(config, wanted)
    names = [name_placement(row.placement, cluster.num_ranks) for row in plan.rows]
    return plan.to_json() | {"names": names, "num_ranks": cluster.num_ranks}


def _answer_survey(words: list[str]) -> dict[str, Any]:
    from lorashard.config.run_config import RunConfig

    config = RunConfig.resolve(None, words, required=("model_name_or_path", "dataset"))
    with quick_imports():
        from lorashard.data.survey import survey_run

    return dataclasses.asdict(survey_run(config))


def _answer_estimate(
    words: list[str], plan: dict[str, Any], survey: dict[str, Any], gpu_type: str | None, num_gpus: int
) -> dict[str, Any]:
    config, wanted = _choose_machine(words, gpu_type, num_gpus)
    with quick_imports():
        from lorashard.data.survey import Survey
        from lorashard.planning.choose import Plan
        from lorashard.planning.estimate import estimate

    planned = Plan.from_json({field.name: plan[field.name] for field in dataclasses.fields(Plan)})
    return dataclasses.asdict(estimate(config, Survey(**survey), planned, wanted))


def _answer_preview(words: list[str], num_rows: int, max_tokens: int | None) -> list[dict[str, Any]]:
    from lorashard.config.run_config import RunConfig

    config = RunConfig.resolve(None, words, required=("model_name_or_path", "dataset"))
    with quick_imports():
        from lorashard.data.preview import preview_run

    return [dataclasses.asdict(row) for row in preview_run(config, num_rows, max_tokens)]


def _answer_model(name: str, revision: str | None) -> str:
    with quick_imports():
        from lorashard.diagnostics.model_facts import describe_model

    return describe_model(name, revision)


def _answer_validate(words: list[str]) -> Iterator[str]:
    from lorashard.config.run_config import RunConfig

    config = RunConfig.resolve(None, words)
    with quick_imports():
        from lorashard.diagnostics.validate import validate

    yield from validate(config)


def _serve(idle_s: float) -> None:
    """Answer until no question has come for `idle_s`, or the server is gone."""
    # PEFT imports it wherever it is installed, which imports inductor: 1.5 s for what no answer needs.
    sys.modules.setdefault("bitsandbytes", None)  # type: ignore[arg-type]
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
    "warm_up": _warm_up,
    "plan": _answer_plan,
    "estimate": _answer_estimate,
    "preview": _answer_preview,
    "survey": _answer_survey,
    "describe_model": _answer_model,
    "validate": _answer_validate,
}

if __name__ == "__main__":
    _serve(float(sys.argv[1]))
