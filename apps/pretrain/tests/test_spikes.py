import numpy as np
import pytest

from pretrain._run.spikes import FEWEST, THRESHOLD, TRAILING, largest_spike, spike_scores


def normal_losses(num, seed=0):
    return np.random.default_rng(seed).normal(3.0, 0.1, num).astype(np.float32)


def test_the_score_is_the_distance_from_the_median_in_deviations_of_the_differences():
    losses = [*np.tile([1.0, 3.0, 2.0, 4.0], 13)[:50], 7.0, 2.5]
    scores = spike_scores(losses)
    assert np.isnan(scores[:50]).all()
    # Differences of 2, 1, 2 and 3 in turn.
    np.testing.assert_allclose(scores[50], (7 - 2.5) / (2 * 1.4826 / np.sqrt(2)), rtol=1e-12)


def test_the_scores_of_normal_noise_have_the_deviation_one():
    assert abs(np.nanstd(spike_scores(normal_losses(4000))) - 1) < 0.05


def test_the_fall_of_the_loss_does_not_hide_a_spike():
    losses = normal_losses(120) + np.linspace(3.0, 0.0, 120, dtype=np.float32)
    losses[119] += 4.0
    assert largest_spike(losses[:119]) is None
    spike = largest_spike(losses)
    assert spike is not None
    assert spike.step == 120


def test_only_the_losses_just_before_a_step_count():
    far, near = [100.0] * 500, normal_losses(TRAILING).tolist()
    expected = spike_scores([*near, 4.0])[-1]
    assert spike_scores([*far, *near, 4.0])[-1] == expected
    assert spike_scores([*far, *near[50:], 4.0])[-1] != expected


def test_steps_without_a_loss_have_no_score_and_do_not_count():
    losses = normal_losses(300)
    with_gaps = np.insert(losses, [20, 150, 150, 299], np.nan)
    scores = spike_scores(with_gaps)
    np.testing.assert_array_equal(scores[np.isfinite(with_gaps)], spike_scores(losses))
    assert np.isnan(scores[~np.isfinite(with_gaps)]).all()
    assert len(spike_scores([np.nan, np.inf])) == 2
    for first in (19, 20, 22, 152, 299, 300):
        np.testing.assert_array_equal(spike_scores(with_gaps, first=first), scores[first:])


@pytest.mark.parametrize("size", [1, 7, 64])
def test_scores_are_the_same_in_pieces(size):
    """A run computes them for the steps of a record, from the losses just before."""
    losses = np.insert(normal_losses(397), [3, 130], np.nan)
    found, trailing = [], []
    for start in range(0, len(losses), size):
        new = losses[start : start + size].tolist()
        found += spike_scores([*trailing, *new], first=len(trailing)).tolist()
        trailing = [loss for loss in [*trailing, *new] if np.isfinite(loss)][-TRAILING:]
    np.testing.assert_array_equal(found, spike_scores(losses))


def test_scores_of_a_long_run_are_those_of_its_parts():
    losses = normal_losses(9001)
    np.testing.assert_array_equal(spike_scores(losses)[8200:], spike_scores(losses[8100:])[100:])


def test_the_largest_spike_is_found_and_a_fall_is_none():
    losses = normal_losses(400)
    assert largest_spike(losses) is None
    assert largest_spike([]) is None
    losses[[110, 200, 250]] = (4.4, 4.8, 0.0)
    spike = largest_spike(losses)
    assert spike is not None
    assert (spike.step, spike.score) == (201, spike_scores(losses)[200])
    assert spike.score > THRESHOLD


def test_losses_that_do_not_change_have_no_spikes_by_rounding():
    losses = np.full(200, 2.0, np.float32)
    losses[150] += 1e-3
    assert largest_spike(losses) is None
    losses[150] += 0.1
    assert largest_spike(losses) is not None


def test_the_first_steps_have_no_spikes():
    losses = normal_losses(FEWEST + 1)
    losses[FEWEST - 1] = 100.0
    assert largest_spike(losses) is None
    losses[FEWEST] = 100.0
    assert largest_spike(losses) is not None
