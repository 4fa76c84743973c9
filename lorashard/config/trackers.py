"""The trackers that transformers' trainer reports to, by the names of `report_to`. Imports none of them."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Sequence

from ..errors import ConfigError

# By name the modules that it needs all of; of modules in a group one is enough.
TRACKERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "azure_ml": (("azureml",),),
    "clearml": (("clearml",),),
    "codecarbon": (("codecarbon",),),
    "comet_ml": (("comet_ml",),),
    "dagshub": (("dagshub",), ("mlflow",)),
    "dvclive": (("dvclive",),),
    "flyte": (("flytekit",),),
    "kubeflow": (),
    "mlflow": (("mlflow",),),
    "neptune": (("neptune",),),
    "swanlab": (("swanlab",),),
    "tensorboard": (("tensorboard", "tensorboardX"),),
    "trackio": (("trackio",),),
    "wandb": (("wandb",),),
}
_PACKAGES = {"azureml": "azureml-sdk"}  # where it has another name than what is imported
_WORDS = ("all", "none")


def name_trackers(report_to: str | Sequence[str] | None) -> list[str]:
    """Return the trackers that `report_to` names, without `all` and `none`.

    Raises:
        ConfigError: transformers has no such tracker.
    """
    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    for name in names:
        if name not in (*TRACKERS, *_WORDS):
            nearest = difflib.get_close_matches(name, TRACKERS, n=1)
            raise ConfigError(
                option="report_to",
                expected=f"of {', '.join((*TRACKERS, *_WORDS))}",
                found=repr(name),
                fix=f"did you mean '{nearest[0]}'?" if nearest else None,
            )
    return [name for name in names if name not in _WORDS]


def check_trackers(report_to: str | Sequence[str] | None) -> None:
    """Refuse a tracker whose package is not installed.

    Raises:
        ConfigError: with the package to install.
    """
    for name in name_trackers(report_to):
        for packages in TRACKERS[name]:
            if not any(importlib.util.find_spec(package) for package in packages):
                raise ConfigError(
                    f"{name} needs a package that is not installed",
                    option="report_to",
                    fix=f"pip install {_PACKAGES.get(packages[0], packages[0])}, or leave it out",
                )
