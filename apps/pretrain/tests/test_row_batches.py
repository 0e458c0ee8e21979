"""Rows of any lengths in batches of few shapes."""

import random

import pytest

from pretrain._judge.row_batches import Batch, Row, _joined, _shared, batches


def test_rows_share_few_shapes_and_each_is_in_one_batch():
    rng = random.Random(1)
    rows = [Row([rng.randrange(300) for _ in range(rng.randint(2, 1025))], 1) for _ in range(2_000)]
    rows = [Row(row.tokens, rng.randint(1, len(row.inputs))) for row in rows]
    planned = [*batches(rows, most_tokens=8 * 1024, context=1024, multiple=3, length_multiple=8, program_tokens=4096)]
    assert sorted(number for batch in planned for shared in batch.rows for number in shared) == [*range(2_000)]
    assert len({(batch.size, batch.length, batch.num_scored) for batch in planned}) <= 25
    for batch in planned:
        assert (batch.size % 3, batch.num_scored % 4) == (0, 0)
        assert 0 < len(batch.rows) <= batch.size
        for shared in batch.rows:
            assert len(rows[shared[0]].inputs) <= batch.length
            assert sum(rows[number].num_scored for number in shared) <= batch.num_scored
        assert batch.size * batch.length <= 8 * 1024 + 3 * batch.length
    used = sum(batch.size * batch.length for batch in planned)
    assert used < 1.15 * sum(len(row.inputs) for row in rows)
    (slow_to_compile,) = {
        (batch.size, batch.length)
        for batch in batches(
            rows[:10], most_tokens=2048, context=1024, multiple=1, length_multiple=128, program_tokens=1 << 23
        )
    }
    longest = max(len(row.inputs) for row in rows[:10])
    assert slow_to_compile == (2, -(-longest // 128) * 128)
    few_rows = [Row([0, 1, place], 2) for place in range(3)]
    (few,) = batches(few_rows, most_tokens=64, context=4, multiple=2, length_multiple=8, program_tokens=9)
    assert few == Batch([[0, 1, 2]], 2, length=4, num_scored=8)


@pytest.mark.parametrize("program_tokens", [0, 100, 1000, 10**6])
def test_joined_lengths_take_the_least_time_of_all_ways_to_join_them(program_tokens):
    rng = random.Random(program_tokens)
    counts = {8 * length: rng.randint(1, 60) for length in rng.sample(range(1, 40), 9)}
    lengths = sorted(counts, reverse=True)

    def tokens(parts):
        return sum(part[0] * sum(counts[length] for length in part) + program_tokens for part in parts)

    def ways(rest):
        if not rest:
            yield []
        for stop in range(1, len(rest) + 1):
            yield from ([rest[:stop], *others] for others in ways(rest[stop:]))

    found = _joined(counts, program_tokens)
    assert [length for part in found for length in part] == lengths
    assert tokens(found) == min(map(tokens, ways(lengths)))


def test_short_answers_share_the_row_of_a_longer_one():
    def rows(*texts, num_scored=1):
        return [Row([*text.encode()], num_scored) for text in texts]

    answers = rows("Is it A", "Is it B", "Is it C and", "Was it C", "Is it C", "Is it D", "I")
    assert _shared(answers) == [[3], [2, 0, 1, 4, 5, 6]]
    assert _shared([]) == []
    assert _shared([Row([5], 0), Row([5], 0)]) == [[0, 1]]
    # As many as the longest row has inputs.
    assert [len(shared) for shared in _shared(rows(*(f"A question: {letter}" for letter in "ABCDEFGHIJKLMNOPQ")))] == [
        12,
        5,
    ]
