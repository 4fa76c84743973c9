"""What can be told of a run before any rank starts and torch is imported. `finetune`, `validate` and the UI ask it."""

from __future__ import annotations

from collections.abc import Sequence

from ..config.device_checks import check_cpu_options
from ..config.run_config import RunConfig
from ..config.sweep import read_jobs
from ..config.trackers import check_trackers
from ..data.peek import check_columns, check_exists
from ..runtime.devices import RankChoice, VisibleGpus, check_device, choose_ranks


def check_options(config: RunConfig, gpus: VisibleGpus) -> RankChoice:
    """Refuse what options alone decide on this machine; return the ranks to start.

    Raises:
        ConfigError: devices that are not here, what they cannot do, a batch that they cannot divide, a tracker that is
            not installed, a job of a sweep that cannot run beside the others.
    """
    read_jobs(config)
    choice = choose_ranks(config, gpus)
    check_device(config, choice.device_type)
    if choice.device_type == "cpu":
        check_cpu_options(config)
    config.count_accumulation(choice.num_ranks)
    check_trackers(config.trainer.get("report_to"))
    return choice


def check_data(runs: Sequence[RunConfig]) -> None:
    """Refuse datasets that are not there, or whose columns are another method's, as far as a look tells.

    Args:
        runs: of one method: the jobs of a sweep, or a run alone.

    Raises:
        DataError: at the option of the dataset or the method.
    """
    looks = [(name, one.dataset_text_field) for one in runs for name in (one.dataset, one.eval_dataset) if name]
    for name, text_field in dict.fromkeys(looks):
        check_exists(name)
        check_columns(name, runs[0].trl_method, text_field)
