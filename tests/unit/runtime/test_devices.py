"""How many ranks, on what, with which environment."""

from __future__ import annotations

import pytest

from lorashard.config.run_config import RunConfig
from lorashard.errors import ConfigError
from lorashard.runtime.devices import (
    Launcher,
    RankChoice,
    VisibleGpus,
    build_environment,
    check_device,
    check_launcher,
    choose_ranks,
    count_cores,
    find_launcher,
)

FOUR = VisibleGpus(4)


def make_config(**options: object) -> RunConfig:
    return RunConfig(model="org/model", dataset="rows.jsonl", **options)


@pytest.mark.parametrize(
    ("options", "gpus", "num_ranks", "device_type", "gpu_ids"),
    [
        ({}, FOUR, 4, "cuda", None),
        ({"gpus": 2}, FOUR, 2, "cuda", None),
        ({"gpus": [0, 2]}, FOUR, 2, "cuda", (0, 2)),
        ({"cpu": 3}, FOUR, 3, "cpu", None),
        ({}, VisibleGpus(0), 1, "cpu", None),
    ],
)
def test_ranks_are_those_asked_for_or_all_gpus(
    options: dict, gpus: VisibleGpus, num_ranks: int, device_type: str, gpu_ids: tuple[int, ...] | None
) -> None:
    """Catches a run on other devices than the user thinks."""
    choice = choose_ranks(make_config(**options), gpus)

    assert (choice.num_ranks, choice.device_type, choice.gpu_ids) == (num_ranks, device_type, gpu_ids)
    assert (choice.note is not None) == (not options and not gpus.count)


@pytest.mark.parametrize(
    ("asked", "gpus", "expected", "found"),
    [
        (1, VisibleGpus(0), "GPUs", "no GPU"),
        (1, VisibleGpus(0, "driver too old"), "GPUs", "driver too old"),
        (5, FOUR, "at most 4", "5"),
        ([0, 4], FOUR, "the 4 visible GPUs", "0,4"),
    ],
)
def test_gpus_that_are_not_there_are_refused(
    asked: int | list[int], gpus: VisibleGpus, expected: str, found: str
) -> None:
    """Catches ranks that start only to find no device."""
    with pytest.raises(ConfigError) as error:
        choose_ranks(make_config(gpus=asked), gpus)
    assert error.value.option == "gpus" and expected in error.value.expected and found in str(error.value.found)


def test_float16_is_refused_where_no_gpu_was_found() -> None:
    """Catches fp16 on a CPU that was not asked for but fallen back to."""
    check_device(make_config(fp16=True), "cuda")
    with pytest.raises(ConfigError) as error:
        check_device(make_config(fp16=True), "cpu")
    assert (error.value.option, error.value.found) == ("dtype", "float16")


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (TORCHRUN, Launcher(3, 4, 2, False)),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "lorashard-1"}, Launcher(3, 4, 2, True)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "true"}, Launcher(0, 1, 1, False)),
        ({"ACCELERATE_USE_CPU": "true"}, None),
    ],
)
def test_launchers_are_recognized(environ: dict[str, str], expected: Launcher | None) -> None:
    """Catches ranks that start ranks of their own, and one process of accelerate's that becomes many."""
    assert find_launcher(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK"),
        (TORCHRUN | {"RANK": "first"}, "whole numbers"),
    ],
)
def test_half_a_launcher_is_an_error(environ: dict[str, str], message: str) -> None:
    """Catches several processes that each believe to be alone, and train apart."""
    with pytest.raises(ConfigError, match=message):
        find_launcher(environ)


def test_a_number_of_ranks_must_be_the_launchers() -> None:
    """Catches `--cpu 4` inside a launch of two, which would be two ranks with nobody told."""
    torchrun = Launcher(0, 4, 2, is_lorashard=False)
    check_launcher(make_config(), torchrun)
    check_launcher(make_config(cpu=2), torchrun)
    check_launcher(make_config(gpus=2), torchrun)
    for options in ({"cpu": 4}, {"gpus": 1}, {"gpus": [0, 1]}):
        with pytest.raises(ConfigError, match="torchrun"):
            check_launcher(make_config(**options), torchrun)
    check_launcher(make_config(gpus=[0, 2]), Launcher(0, 2, 2, is_lorashard=True))


def test_cpu_ranks_are_told_so() -> None:
    """Catches the two independent trainings that look healthy: accelerate must know that it is several processes."""
    environment = build_environment(RankChoice(2, "cpu"), {})

    assert environment["ACCELERATE_USE_CPU"] == "true"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["OMP_NUM_THREADS"] == str(max(1, count_cores() // 2))
    assert "OMP_NUM_THREADS" not in build_environment(RankChoice(2, "cpu"), {"OMP_NUM_THREADS": "5"})


def test_gpu_ranks_order_two_communicators_and_keep_memory_in_one_piece() -> None:
    """Catches gathers and all-reduces that overtake one another on a GPU, a cache in pieces, and a user overruled."""
    environment = build_environment(RankChoice(2, "cuda"), {})
    own = {"NCCL_LAUNCH_ORDER_IMPLICIT": "0", "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    chosen = build_environment(RankChoice(2, "cuda"), own)

    assert environment["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert not {"NCCL_LAUNCH_ORDER_IMPLICIT", "PYTORCH_ALLOC_CONF"} & chosen.keys()
    assert "PYTORCH_ALLOC_CONF" not in build_environment(RankChoice(2, "cuda"), {"PYTORCH_ALLOC_CONF": ""})


@pytest.mark.parametrize(("visible", "expected"), [(None, "0,2"), ("4,5,GPU-6", "4,GPU-6")])
def test_gpu_ids_count_among_the_visible(visible: str | None, expected: str) -> None:
    """Catches `--gpus 0,2` that reaches out of what the scheduler gave this job."""
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    environment = build_environment(RankChoice(2, "cuda", (0, 2)), environ)

    assert environment["CUDA_VISIBLE_DEVICES"] == expected
    assert "ACCELERATE_USE_CPU" not in environment
    assert "CUDA_VISIBLE_DEVICES" not in build_environment(RankChoice(2, "cuda"), environ)
