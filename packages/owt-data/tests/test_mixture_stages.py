"""Mixtures whose weights change: every property against a count of the windows, at odd places and shares."""

import pickle
from itertools import pairwise

import numpy as np
import pytest

from owt_data import Batches, DataError, TokenMixture, find_windows, open_tokens, read_steps, window_positions

ROUND = 1 << 16
SEQ_LEN = 8
STAGES = {
    "none": ((6, 3, 1), ()),
    "one": ((6, 3, 1), ((70_001, (1, 1, 8)),)),
    "a short one": ((1, 2.5, 7), ((17, (1, 1, 1)), (18, (5, 2, 1e-4)), (ROUND + 18, (1, 1, 1)))),
    "at the ends of rounds": ((1, 1, 1), ((ROUND, (3, 1, 2)), (3 * ROUND, (1, 3, 2)))),
    "off and on": ((0, 3, 1), ((60_000, (1, 0, 0)), (61_111, (0, 1, 0)), (130_000, (2, 7, 1)))),
    "much is skipped": ((1, 1, 1), ((33_333, (30_000, 1, 1)), (33_400, (30_000, 1, 1)), (190_000, (9, 9, 1)))),
}
SEEDS = (0, 2**64 - 1)


@pytest.fixture(scope="module")
def sequences(tmp_path_factory, positions):
    """Three sequences of which no token is equal to another one of another sequence."""
    folder = tmp_path_factory.mktemp("sequences")
    bounds = [0, 20_011, 60_000, 65_001]
    return tuple(positions(folder / f"{low}.bin", low, high) for low, high in pairwise(bounds))


@pytest.fixture(params=STAGES)
def mixture(request, sequences):
    weights, stages = STAGES[request.param]
    return TokenMixture(sequences, weights, stages)


def of_stages(mixture, stop):
    """The first and last index, and the weights of each stage before an index."""
    starts = [0, *(start for start, _ in mixture.stages), stop]
    return zip(pairwise(starts), (mixture.weights, *(weights for _, weights in mixture.stages)), strict=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_window_of_a_sequence_is_read_once_and_none_is_left_out(seed, mixture):
    """The windows that the end of a stage skips are the first ones of the next stages."""
    last = mixture.stages[-1][0] if mixture.stages else 0
    stop = last + 7 * ROUND  # all weights are above 0 in the last stage: what was skipped is read by then
    which, own = mixture.deal(np.arange(stop), seed)
    for number in range(3):
        assert np.sort(own[which == number]).tolist() == list(range(np.count_nonzero(which == number)))


STAGES_STARTS = sorted({start for _, stages in STAGES.values() for start, _ in stages})


@pytest.mark.parametrize("seed", SEEDS)
def test_counts_are_exact_at_every_index(seed, mixture):
    stop = 4 * ROUND
    which, own = mixture.deal(np.arange(stop), seed)
    seen = np.cumsum(which[:, None] == np.arange(3), axis=0)
    edges = [start + offset for start in (*STAGES_STARTS, 1, ROUND, 3 * ROUND) for offset in (-1, 0, 1)]
    for index in sorted({edge for edge in edges if 0 < edge < stop} | {*range(1, stop, 17_393)}):
        assert mixture.counts(index, seed) == seen[index - 1].tolist()
        for number in range(3):
            of_sequence = own[:index][which[:index] == number]
            assert int(of_sequence.max(initial=-1)) < max(1, mixture.own_stop(number, index, seed))
    assert mixture.counts(0, seed) == [0, 0, 0]


@pytest.mark.parametrize("seed", SEEDS)
def test_each_round_of_a_stage_has_its_proportions(seed, mixture):
    for (start, stop), weights in of_stages(mixture, 5 * ROUND):
        for begin in range(start, stop - ROUND + 1, ROUND):
            which, _ = mixture.deal(np.arange(begin, begin + ROUND), seed)
            shares = np.bincount(which, minlength=3) / ROUND
            np.testing.assert_allclose(shares, np.array(weights) / sum(weights), atol=1 / ROUND)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_later_stage_changes_no_window_before_it(seed, mixture, sequences):
    for number, (start, _) in enumerate(mixture.stages):
        if number == 0 and not all(mixture.weights):
            continue  # a mixture of one stage has no weight of 0
        before = TokenMixture(sequences, mixture.weights, mixture.stages[:number])
        indices = np.arange(max(0, start - 3000), start)
        for found, expected in zip(mixture.deal(indices, seed), before.deal(indices, seed), strict=True):
            assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_undeal_is_the_inverse_of_deal(seed, mixture):
    indices = np.arange(0, 5 * ROUND, 7)
    which, own = mixture.deal(indices, seed)
    for number in range(3):
        here = which == number
        assert mixture.undeal(number, own[here], seed).tolist() == indices[here].tolist()
    assert mixture.undeal(0, np.empty(0, np.int64), seed).tolist() == []


def test_a_window_that_no_stage_reads_has_no_index(sequences):
    mixture = TokenMixture(sequences, (1, 1, 1), ((100, (1, 0, 1)),))
    count = mixture.counts(10**9, 5)[1]
    found = mixture.undeal(1, np.arange(ROUND), 5)
    assert np.count_nonzero(found < 100) == np.count_nonzero(found < 2**63 - 1) == count
    assert mixture.counts(100, 5)[1] == count


def test_any_window_is_independent(mixture):
    indices = np.array([5, 4_123_456_789, 70_000, 70_001, 6, 17, 18, 61_111, 5, 2**62])
    which, own = mixture.deal(indices, 5)
    for index, number, of_sequence in zip(indices, which, own, strict=True):
        alone = mixture.deal(np.array([index]), 5)
        assert (alone[0].tolist(), alone[1].tolist()) == ([number], [of_sequence])
    with_start = mixture.windows(indices[:-1], seq_len=SEQ_LEN, order="shuffle", seed=5)
    again = pickle.loads(pickle.dumps(mixture))
    assert again == mixture
    assert again.windows(indices[:-1], seq_len=SEQ_LEN, order="shuffle", seed=5).tolist() == with_start.tolist()


# Computed once; a run that was started anywhere must go on with these anywhere.
DEALT = [[0, 1, 0, 1, 0, 2], [5593, 6117, 26_741, 18_238, 34_019, 6128]]


def test_the_windows_of_a_mixture_with_stages_never_change(sequences):
    weights, stages = STAGES["a short one"]
    indices = np.array([0, 3, 18, 400, ROUND + 17, 123_456])
    assert [part.tolist() for part in TokenMixture(sequences, weights, stages).deal(indices, 5)] == DEALT


@pytest.mark.parametrize("order", ["shuffle", "random"])
def test_the_windows_that_read_a_range_are_found(order, mixture):
    stop_index = 2 * ROUND + 4999
    begins = window_positions(mixture, np.arange(stop_index), seq_len=100, order=order, seed=4)
    bounds = np.cumsum([len(sequence) for sequence in mixture.sequences])
    for start in (0, 20_010, 20_011, 59_999, 60_000, 65_000):
        same = np.searchsorted(bounds, begins, side="right") == np.searchsorted(bounds, start, side="right")
        expected = np.flatnonzero((begins <= start) & (start <= begins + 100) & same).tolist()
        found = find_windows(
            mixture,
            np.array([start]),
            np.array([start + 1]),
            seq_len=100,
            order=order,
            seed=4,
            stop_index=stop_index,
        )
        assert found[1].tolist() == expected


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_workers_have_the_batches_of_one_also_after_a_start_in_any_stage(world_size, sequences):
    mixture = TokenMixture(sequences, (1, 2, 0), ((25, (3, 0, 1)), (61, (1, 1, 1))))
    whole = dict(read_steps(mixture, Batches(seq_len=SEQ_LEN, global_batch_size=6), start_step=0, stop_step=15))
    for start in (0, 4, 5, 11):
        parts = [
            read_steps(
                mixture,
                Batches(seq_len=SEQ_LEN, global_batch_size=6, rank=rank, world_size=world_size),
                start_step=start,
                stop_step=15,
            )
            for rank in range(world_size)
        ]
        for steps in zip(*parts, strict=True):
            assert np.concatenate([rows for _, rows in steps]).tolist() == whole[steps[0][0]].tolist()


def test_a_weight_of_pairs_opens_a_mixture_with_stages(tmp_path, positions):
    names = [str(tmp_path / name) for name in ("a.bin", "b.bin", "c.bin")]
    for number, name in enumerate(names):
        positions(tmp_path / name, 0, 256 - number)
    weights = [[(0, 0.7), (600, 0.2)], 3, [(0, 0), (90, 1.5), (1000, 2)]]
    data = open_tokens(dict(zip(names, weights, strict=True)), tokenizer="bytes")
    assert isinstance(data.train, TokenMixture)
    assert data.train.weights == (0.7, 3, 0)
    assert data.train.stages == ((90, (0.7, 3, 1.5)), (600, (0.2, 3, 1.5)), (1000, (0.2, 3, 2)))
    assert data.fingerprint["weights"] == [[[0, 0.7], [600, 0.2]], 3, [[0, 0], [90, 1.5], [1000, 2]]]
    assert data.val_lengths == (26, 25, 25)
    assert sum(data.val_lengths) == len(data.val)
    assert open_tokens(data.names, tokenizer="bytes") == data
    other = open_tokens({**data.names, names[1]: 4}, tokenizer="bytes")  # pyright: ignore[reportGeneralTypeIssues]
    assert other.fingerprint != data.fingerprint


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ([], r"A weight must be a number, or pairs of a window and a number such as \[\(0, 0.7\), \(5000, 0.3\)\]"),
        ([(1, 0.5)], r"The windows of a weight must ascend from 0, got \[1\]"),
        ([(0, 1), (9, 2), (9, 3)], r"The windows of a weight must ascend from 0, got \[0, 9, 9\]"),
        ([(0, 1), (9, -2)], r"The weights must be 2 finite numbers, .* in 65536, in one of the stages, got \[-2, 1\]"),
        ([(0, 0), (9, 0)], r"The weights must be 2 finite numbers, .* in one of the stages"),
        ([(0, 1e-9), (9, 1)], r"The weights must be 2 finite numbers, .* got \[1e-09, 1\]"),
        (0, r"The weights must be 2 finite numbers, and give each sequence at least one window in 65536, got \[0, 1\]"),
    ],
)
def test_other_weights_are_rejected(weight, message, tmp_path, positions):
    for name in ("a.bin", "b.bin"):
        positions(tmp_path / name, 0, 200)
    with pytest.raises(DataError, match=message):
        open_tokens({str(tmp_path / "a.bin"): weight, str(tmp_path / "b.bin"): 1}, tokenizer="bytes")


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (((0, (1, 1, 1)),), "The window of a stage must be an integer of at least 1, got 0"),
        (((9, (1, 1, 1)), (5, (1, 1, 1))), r"The windows of the stages must ascend, got \[9, 5\]"),
        (((9, (1, 1)),), r"The weights must be 3 finite numbers, .* got \[1, 1\]"),
    ],
)
def test_other_stages_are_rejected(stages, message, sequences):
    with pytest.raises(DataError, match=message):
        TokenMixture(sequences, (1, 1, 1), stages)
