"""Batches of a worker, read by a thread of its own."""

import pytest

from owt_data import DataError, read_steps

ARGUMENTS = {
    "seq_len": 16, "global_batch_size": 8, "rank": 0, "world_size": 1, "start_step": 0, "stop_step": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seq_len": 0}, "seq_len must be an integer of at least 1, got 0"),
        ({"global_batch_size": 0}, "global_batch_size must be an integer of at least 1, got 0"),
        ({"rank": 1}, "rank must be an integer from 0 to 0, got 1"),
        ({"world_size": 3}, "global_batch_size must be a multiple of the 3 workers, got 8"),
        ({"start_step": -1}, "start_step must be an integer of at least 0, got -1"),
        ({"stop_step": 0}, "stop_step must be an integer of at least 1, got 0"),
        ({"stop_step": 1 << 61}, "stop_step must be an integer from 0 to"),
        ({"start_step": 10**400, "stop_step": 10**400 + 1}, "start_step must be an integer from 0 to"),
        ({"prefetch_steps": 0}, "prefetch_steps must be an integer of at least 1, got 0"),
    ],
)
def test_read_steps_checks_its_arguments_at_the_call(changed, message, tokens):
    with pytest.raises(DataError) as caught:
        read_steps(tokens, **{**ARGUMENTS, **changed})
    assert str(caught.value).startswith(message)
    assert len(str(caught.value)) < 300
