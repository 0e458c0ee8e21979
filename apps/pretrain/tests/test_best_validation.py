"""The best validation of a run: the checkpoint that stays for it, and the end of a run that does not improve."""

import json
import math

from pretrain import TrainConfig
from pretrain._training.best_validation import BestValidation, without_checkpoints


def test_a_loss_that_is_not_finite_is_never_the_best():
    best = BestValidation(TrainConfig(early_stop_evals=3))
    for step, loss in enumerate((math.nan, 5.0, math.inf, 4.0)):
        best.add(10 * step, loss, is_saved=True)
    assert (best.best_loss, best.best_saved_step, best.num_since_best) == (4.0, 30, 0)
    best.add(40, math.nan, is_saved=True)
    best.add(50, 4.0, is_saved=True)  # no lower
    assert (best.num_since_best, best.has_stalled, best.keep(30), best.keep(50)) == (2, False, True, False)
    best.add(60, 4.5, is_saved=True)
    assert best.has_stalled


def test_the_best_without_a_checkpoint_is_not_kept():
    best = BestValidation(TrainConfig(keep_every=7))
    best.add(5, 2.0, is_saved=False)
    best.add(10, 3.0, is_saved=True)
    assert [step for step in (5, 7, 10, 14, 15) if best.keep(step)] == [7, 10, 14]
    assert not BestValidation(TrainConfig(keep_best=False), best_saved_step=10).keep(10)


def test_a_continued_run_goes_on_and_a_fork_forgets_the_checkpoints_of_its_parent():
    best, continued, fork = (BestValidation(TrainConfig(early_stop_evals=2)) for _ in range(3))
    best.add(10, 2.0, is_saved=True)
    best.add(20, 2.5, is_saved=True)
    stored = json.loads(json.dumps(best.to_json(), allow_nan=False))
    continued.restore(stored)
    fork.restore(without_checkpoints(stored))
    assert continued == best
    for one in (continued, fork):
        one.add(30, 2.25, is_saved=True)
        assert one.has_stalled
    assert (continued.best_saved_step, fork.best_saved_step) == (10, 30)
