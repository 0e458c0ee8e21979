"""Intervals on series whose noise is known: they miss no difference that is there, and see none that is not."""

import math

import numpy as np
import pytest

from pretrain._compare.paired import (
    MIN_STEPS,
    num_recent,
    of_models,
    of_options,
    of_recent_batches,
    over_seeds,
    t_quantile,
    unpaired_steps,
)

STEPS = 400
PAIRS = 1000
# Three standard errors of a share of 5 % of the pairs.
LIMITS = 0.05 - 3 * math.sqrt(0.05 * 0.95 / PAIRS), 0.05 + 3 * math.sqrt(0.05 * 0.95 / PAIRS)
SIZES = {
    "steady": np.ones(STEPS),
    "growing": np.linspace(0, 1, STEPS),
    "slower and slower": 1 / np.sqrt(np.arange(10, STEPS + 10)),
    "frozen after a quarter": np.where(np.arange(STEPS) < STEPS // 4, 1, 0.01),
    "late": np.where(np.arange(STEPS) < 300, 0.01, 1),
}


def noise(seed=0, shape=(PAIRS, STEPS)):
    return np.random.default_rng(seed).normal(size=shape)


def autoregressive(coefficient):
    series, values = noise(), np.zeros((PAIRS, STEPS))
    for step in range(STEPS):
        values[:, step] = coefficient * values[:, step - 1] * (step > 0) + series[:, step]
    return values


def share_different(function, pairs):
    return np.mean([function(pair).is_different for pair in pairs])


@pytest.mark.parametrize(
    ("df", "expected"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (7, 2.36462), (11, 2.20099), (31, 2.03951)]
)
def test_quantiles_are_those_of_tables(df, expected):
    assert t_quantile(df) == pytest.approx(expected, abs=1e-5)


def test_a_quantile_of_another_level():
    assert t_quantile(5, 0.99) == pytest.approx(4.03214, abs=1e-5)


@pytest.mark.parametrize("white", [0.0, 5.0])
@pytest.mark.parametrize("size", SIZES)
def test_a_level_that_wanders_is_no_difference_of_the_options(size, white):
    wandering = np.cumsum(noise() * SIZES[size], axis=1)
    assert share_different(of_options, wandering + white * noise(1)) <= 0.05


@pytest.mark.parametrize("coefficient", [0.0, 0.5, 0.9, 0.99, 0.999])
def test_noise_that_returns_to_its_mean_is_no_difference_of_the_options(coefficient):
    assert share_different(of_options, autoregressive(coefficient)) <= 0.05


@pytest.mark.parametrize("num_steps", [MIN_STEPS, 41, 61, 97])
def test_few_steps_are_no_reason_for_false_alarms(num_steps):
    assert share_different(of_options, np.cumsum(noise(shape=(PAIRS, num_steps)), axis=1)) <= 0.05


COURSES = {
    "growing": np.arange(STEPS) / STEPS,
    "faster and faster": (np.arange(STEPS) / STEPS) ** 2,
    "early": 1 - np.exp(-np.arange(STEPS) / 40),
    "as a logarithm": np.log1p(np.arange(STEPS) / 5) / math.log(81),
}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("course", COURSES)
def test_a_large_effect_is_found_however_it_comes(course, sign):
    """The effect is twenty times the spread of the level at the end, which is 1."""
    wandering = np.cumsum(noise(shape=(200, STEPS)), axis=1) / math.sqrt(STEPS)
    found = [of_options(pair + sign * 20 * COURSES[course]) for pair in wandering]
    assert np.mean([one.is_different for one in found]) > 0.95
    assert all(one.mean * sign > 0 for one in found if one.is_different)


def test_batch_means_do_not_know_a_level_that_stays():
    """The reason for `of_options`: each pair has a level of its own, and white noise around it."""
    levels = noise(2, (PAIRS, 1))
    assert share_different(of_recent_batches, levels + noise()) > 0.8
    assert share_different(of_options, levels + noise()) <= 0.05


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_batch_means_cover_the_noise_of_batches(correlation):
    series = noise()
    series[:, 1:] += correlation * series[:, :-1]
    assert LIMITS[0] < share_different(of_recent_batches, series) < LIMITS[1] + 0.02 * (correlation > 0)


@pytest.mark.parametrize("share_of_document", [0.0, 1.0])
def test_the_interval_of_two_models_covers_other_texts(share_of_document):
    """Documents of four windows, whose differences are alike."""
    counts = np.full(STEPS, 64.0)
    windows = noise() + share_of_document * np.repeat(noise(3, (PAIRS, STEPS // 4)), 4, axis=1)
    share = share_different(lambda window: of_models(window, counts), windows)
    assert LIMITS[0] < share < LIMITS[1] + 0.02 * share_of_document


def test_a_window_weighs_its_tokens():
    found = of_models(np.array([1.0, 1.0, 4.0]), np.array([64.0, 64.0, 16.0]))
    assert found is not None
    assert found.mean == pytest.approx((64 + 64 + 4 * 16) / 144)
    # The residuals of the three blocks are 64 - 64 m, twice, and 64 - 16 m, with the mean m = 4 / 3.
    error = math.sqrt(3 / 2 * (2 * (64 / 3) ** 2 + (64 - 64 / 3) ** 2)) / 144
    assert found.half_width == pytest.approx(4.302653 * error, rel=1e-5)
    assert found.df == 2


def test_a_single_window_has_no_interval():
    assert of_models(np.ones(1), np.ones(1)) is None


def test_pairs_of_three_seeds_have_two_degrees_of_freedom():
    found = over_seeds([0.1, 0.2, 0.3])
    assert (found.mean, found.df) == (pytest.approx(0.2), 2)
    assert found.half_width == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-5)


@pytest.mark.parametrize("num_seeds", [2, 3, 8])
def test_the_interval_over_seeds_covers_other_seeds(num_seeds):
    share = np.mean([over_seeds(levels).is_different for levels in noise(4, (PAIRS, num_seeds)).tolist()])
    assert LIMITS[0] < share < LIMITS[1]


def test_the_trend_of_a_curve_is_no_noise_of_its_batches():
    """Each run has a variance of 1: 2 / n is the variance of the difference of their means."""
    trend, series = np.linspace(9, 0, STEPS), noise(5, (2, STEPS))
    assert unpaired_steps(trend + series[0], trend + series[1], 0.1) == pytest.approx(2 * (1.96 / 0.1) ** 2, rel=0.1)


@pytest.mark.parametrize(("num_steps", "expected"), [(40, 10), (41, 11), (43, 11), (400, 100)])
def test_the_last_quarter_is_compared(num_steps, expected):
    assert num_recent(num_steps) == expected
    values = np.where(np.arange(num_steps) >= num_steps - expected, 1.0, 0.0)
    assert of_options(values).mean == of_recent_batches(values).mean == 1.0
