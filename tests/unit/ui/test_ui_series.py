"""Thinned and smoothed numbers: what stands out stays, and memory does not grow."""

import math

import numpy as np
import pytest

from lorashard_ui.reading.series import Series, choose_points, read_column, smooth


def make_series(ys, **options):
    series = Series(**options)
    series.extend(np.arange(len(ys), dtype=float), np.array(ys, dtype=float))
    return series


def test_a_spike_of_one_step_and_both_ends_survive_thinning():
    """Every hundredth point, or the mean of a hundred, hides the one step in which a run went wrong."""
    ys = [1.0] * 100_000
    ys[0], ys[33_333], ys[66_666], ys[-1] = 7.0, 50.0, -50.0, 8.0
    xs, kept, _ = make_series(ys).points(500)
    assert len(xs) <= 500
    assert {(0, 7.0), (33_333, 50.0), (66_666, -50.0), (99_999, 8.0)} <= set(zip(xs, kept, strict=True))
    assert xs == sorted(set(xs))


def test_a_closer_look_shows_every_step_and_keeps_what_stands_out_elsewhere():
    """A spike of one step is a triangle of 200 steps however far one zooms in; or zooming out has lost the others."""
    ys = np.ones(100_000)
    ys[33_333], ys[50_010] = 50.0, 9.0
    series = make_series(ys)
    xs, found, _ = series.points(500, 0.0, (50_000, 50_200))
    assert len(xs) <= 1000 and xs == sorted(set(xs)) and set(range(50_000, 50_201)) <= set(xs)
    assert {(33_333, 50.0), (50_009, 1.0), (50_010, 9.0), (50_011, 1.0)} <= set(zip(xs, found, strict=True))
    assert (xs[0], xs[-1]) == (0, 99_999)
    for nowhere in ((-9.0, -1.0), (1e9, 2e9)):
        assert series.points(500, 0.0, nowhere)[0] == series.points(500)[0]


@pytest.mark.parametrize("num_points", [0, 1, 2, 3, 9, 10, 11, 500, 501, 1003])
def test_no_more_points_come_than_were_asked_for(num_points):
    """One too many, or an empty stretch, breaks at lengths that nobody tries by hand."""
    kept = choose_points(np.arange(num_points, dtype=float), 10)
    assert len(kept) <= 10 and len(kept) == min(num_points, len(kept))
    assert num_points == 0 or (kept[0], kept[-1]) == (0, num_points - 1)


def test_infinities_do_not_push_out_the_finite_extremes():
    """A stretch whose extreme is NaN or infinite draws nothing, and a spike beside it is not seen."""
    ys = np.ones(1000)
    ys[100], ys[101], ys[102], ys[103] = math.inf, math.nan, -math.inf, 9.0
    assert 103 in choose_points(ys, 20)


def test_memory_is_bounded_and_a_spike_is_not_forgotten():
    """A run of millions of steps fills the server's memory; or what saves it forgets the oldest spike."""
    series = Series(most_points=1000)
    for begin in range(0, 100_000, 100):
        xs = np.arange(begin, begin + 100, dtype=float)
        series.extend(xs, np.where(xs == 777, 99.0, 1.0))
    assert len(series) <= 1000
    xs, ys, _ = series.points(100)
    assert (777, 99.0) in zip(xs, ys, strict=True) and xs[0] == 0 and xs[-1] == 99_999


def test_smoothing_is_the_mean_of_all_points_so_far_without_a_pull_to_zero():
    """Without the correction the first points hang near 0; over the thinned points it would depend on their number."""
    ys = np.random.default_rng(0).normal(3, 1, 5000)
    expected, mean = [], 0.0
    for number, y in enumerate(ys, 1):
        mean = 0.9 * mean + 0.1 * y
        expected.append(mean / (1 - 0.9**number))
    series = make_series(ys)
    xs, _, smoothed = series.points(50, 0.9)
    assert smoothed == pytest.approx([expected[int(x)] for x in xs])
    assert smoothed[0] == ys[0]
    _, raw, same = series.points(50, 0.0)
    assert raw == same


def test_numbers_that_are_not_finite_leave_the_mean_as_it_was():
    """One NaN makes all of the smoothed curve after it NaN."""
    ys = np.array([1.0, 2.0, math.nan, math.inf, 2.0])
    smoothed = smooth(ys, 0.5)
    assert smoothed[2] == smoothed[3] == smoothed[1] and np.isfinite(smoothed).all()


def test_a_step_that_is_run_again_replaces_what_was_there():
    """The curve of a run that was resumed without cutting its lines goes back in time."""
    series = Series()
    series.extend(np.array([1.0, 2, 3, 4, 3, 4, 5]), np.array([1.0, 2, 3, 4, 30, 40, 50]))
    series.extend(np.array([5.0, 6]), np.array([500.0, 600]))
    assert series.points(100)[:2] == ([1, 2, 3, 4, 5, 6], [1, 2, 30, 40, 500, 600])


def test_new_points_are_seen_by_one_who_has_looked_before():
    """What was thinned for one browser is shown to it for ever."""
    series = make_series([1.0, 2.0])
    assert series.points(100)[0] == [0, 1]
    series.extend(np.array([2.0]), np.array([3.0]))
    assert series.points(100)[0] == [0, 1, 2]


def test_words_for_what_json_has_not_are_numbers():
    """The run writes NaN as a word: the one value that matters is left out of the curve."""
    rows = [{"step": 1, "loss": "nan"}, {"step": 2, "loss": 2}, {"step": 3, "loss": "high"}, {"step": 4, "loss": None}]
    rows += [{"step": 5}, {"step": 6, "loss": True}, {"step": 7, "loss": "-inf"}]
    xs, ys = read_column(rows, "loss")
    assert xs.tolist() == [1, 2, 7] and math.isnan(ys[0]) and ys[1:].tolist() == [2, -math.inf]
