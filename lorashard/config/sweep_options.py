"""The options of a sweep as a run takes them; `sweep.py` makes jobs of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, PrivateAttr

from .options import GivenOption, read_yaml_options


class SweepOptions(BaseModel):
    """Several adapters, the jobs, that train on one base at the same time."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    sweep: dict[str, Any] | None = None
    """Train several adapters, the jobs, on each visit of the base: `{grid: {lora_r: [8, 16], learning_rate: [1e-4,
    2e-4]}}` for every combination, `{jobs: [{name: a, lora_r: 4}, ...]}` for those that are listed, or both. On the
    command line also a YAML file that holds this mapping. Each job is a run in output_dir/NAME. What may differ: the
    adapter's options, those of optimizer and schedule, the seed and the dataset."""
    sweep_stop: dict[str, Any] | None = None
    """Successive halving, such as `{metric: eval_loss, keep: 0.5, every: 100}`: at each multiple of 100 steps the
    better half of the jobs continues. Needs `eval_strategy: steps`."""
    yes: bool = False
    """Accept a sweep of more than 64 jobs."""

    _sweep_places: dict[tuple[str | int, ...], str] = PrivateAttr(default_factory=dict)

    def locate_in_sweep(self, *path: str | int) -> str:
        """Return the file and line of a part of `sweep`, or of what holds it; empty if no file is known.

        Args:
            path: Keys and indices that lead to it, such as `("jobs", 1, "lora_r")`.
        """
        ends = range(len(path), -1, -1)
        return next((self._sweep_places[path[:end]] for end in ends if path[:end] in self._sweep_places), "")


def read_sweep_file(option: GivenOption) -> GivenOption:
    """Return a `sweep` that names a file as the mapping in that file; any other option as it is.

    Raises:
        ConfigError: The file is missing, or is not YAML.
    """
    is_path = isinstance(option.value, str) and option.value.strip() not in ("", "null")
    if option.name != "sweep" or not is_path or option.value.lstrip().startswith("{"):
        return option
    parts = read_yaml_options(Path(option.value).expanduser(), option="sweep")
    places: dict[tuple[str | int, ...], str] = {
        (part.name, *path): place for part in parts for path, place in ({(): part.where} | part.places).items()
    }
    places[()] = option.value
    return replace(option, value={part.name: part.value for part in parts}, places=places)
