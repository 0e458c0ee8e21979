"""The comparison of runs A and B, or of several A and B by their seeds."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain._compare.paired import (
    MIN_STEPS,
    Interval,
    num_recent,
    of_models,
    of_options,
    of_recent_batches,
    over_seeds,
    unpaired_steps,
)
from pretrain._errors import UsageError, short, shown
from pretrain._run.description import RunDescription
from pretrain._run.differences import differing_options, option_values
from pretrain._run.step_losses import ValLosses

OF_WINDOWS = ("train.global_batch_size", "model.seq_len", "train.order")
"""Options that decide which windows a step reads, besides the tokens and the seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """The parts of a run that are compared."""

    name: str
    """The run's folder or URI."""

    description: RunDescription
    """Configuration and data."""

    losses: NDArray[np.float32]
    """The loss of each step, `float32[N]`; NaN where it is lost or the step made no update."""

    val_losses: ValLosses | None
    """The losses of the validation windows after the last step; None before."""

    is_training: bool | None
    """True if a command of this machine trains the run; None if its command may be on another machine."""

    @property
    def start_step(self) -> int:
        """The number of steps at the beginning that another run has trained, whose losses are in its folder."""
        origin = self.description.origin
        return 0 if origin is None else origin.start_step

    @property
    def val_step(self) -> int | None:
        """The step after which the validation losses were measured; None before."""
        return None if self.val_losses is None else len(self.losses)

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.description.config.seed


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The comparison of two runs. Differences are B - A, in nats per token."""

    seeds: tuple[int, int]
    """The seeds of A and B."""

    losses: tuple[float, float]
    """Mean losses of A and B over the compared steps."""

    same_losses: bool
    """True if the losses of all steps are equal."""

    options: Interval
    """The difference over the compared steps, with the noise of the training: see `of_options`."""

    batches: Interval
    """The same with the noise of the batches alone: see `of_recent_batches`."""

    unpaired_steps: float | None
    """Steps of runs on other windows that would have the noise of `batches`; None if the runs read other windows."""

    val_steps: tuple[int | None, int | None]
    """The last steps of A and B, after which they were validated on all validation tokens; None before."""

    val_losses: tuple[float, float] | None
    """Losses of A and B on all validation tokens after their last steps; None if these are not the compared step."""

    models: Interval | None
    """The difference of the two trained models on the validation text: see `of_models`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The comparison of runs. Differences are B - A, in nats per token."""

    first: list[str]
    """The runs A."""

    second: list[str]
    """The runs B."""

    step: int
    """The last compared step."""

    from_step: int
    """The first of the steps whose mean loss is compared."""

    differing_options: dict[str, list[Any]]
    """The options that differ, with the values of A and B."""

    pairs: list[Pair]
    """The pairs, one for each A."""

    seeds: Interval | None
    """The difference of the training losses over the pairs; None for a single pair."""

    val_seeds: Interval | None
    """The same of the validation losses."""

    @property
    def decisive(self) -> Interval:
        """The interval of the verdict: over the seeds, or that of the only pair."""
        return self.seeds or self.pairs[0].options

    @property
    def better(self) -> str | None:
        """The better one, A or B; None if they cannot be told apart."""
        if not self.decisive.is_different:
            return None
        return "A" if self.decisive.mean > 0 else "B"

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON."""
        return {"better": self.better, **dataclasses.asdict(self)}


def compare_runs(first: Sequence[ComparedRun], second: Sequence[ComparedRun], at: int | None = None) -> Comparison:
    """Compare runs A with runs B, which read the same windows if they have the same seed.

    Args:
        first: the runs A; several differ in their seeds alone.
        second: the runs B, as many.
        at: the last step to compare; None takes the last one that all runs have.

    Raises:
        UsageError: the runs did not read the same windows, do not form pairs, or have too few losses.
    """
    runs = [*first, *second]
    for run in runs[1:]:
        _check_same_windows(runs[0], run)
    if len(runs) > 2:
        second = _by_seed(first, second)
        for group in (first, second):
            _check_same_options(group)
    step = _common_step(runs, at)
    lost = np.zeros(step, bool)
    for run in runs:
        lost |= ~np.isfinite(run.losses[:step])
    steps = np.flatnonzero(~lost)
    if len(steps) < MIN_STEPS:
        raise UsageError(
            f"runs must have at least {MIN_STEPS} steps of which every run has the loss, got {len(steps)}. "
            f"{_reason_of_few(runs, at)}"
        )
    val_step = step if at is None else None
    pairs = [_compare_pair(a, b, steps, val_step) for a, b in zip(first, second, strict=True)]
    val_differences = [pair.models.mean for pair in pairs if pair.models is not None]
    has_validations = len(pairs) > 1 and len(val_differences) == len(pairs)
    configs = (first[0].description.config, second[0].description.config)
    return Comparison(
        first=[run.name for run in first],
        second=[run.name for run in second],
        step=step,
        from_step=int(steps[-num_recent(len(steps))]) + 1,
        differing_options=differing_options(configs),
        pairs=pairs,
        seeds=over_seeds([pair.options.mean for pair in pairs]) if len(pairs) > 1 else None,
        val_seeds=over_seeds(val_differences) if has_validations else None,
    )


def _compare_pair(first: ComparedRun, second: ComparedRun, steps: NDArray[np.intp], val_step: int | None) -> Pair:
    """Return the comparison of two runs on some steps, and of their validations if both are of `val_step`."""
    losses_a, losses_b = (run.losses[steps].astype(np.float64) for run in (first, second))
    num = num_recent(len(steps))
    recent_a, recent_b = losses_a[-num:], losses_b[-num:]
    batches = of_recent_batches(losses_b - losses_a)
    is_paired = first.seed == second.seed
    is_noisy = is_paired and batches.half_width > 0
    val_steps = (first.val_step, second.val_step)
    val_losses, models = _compare_models(first, second) if val_steps == (val_step, val_step) else (None, None)
    return Pair(
        seeds=(first.seed, second.seed),
        losses=(float(recent_a.mean()), float(recent_b.mean())),
        same_losses=bool((losses_a == losses_b).all()),
        options=of_options(losses_b - losses_a),
        batches=batches,
        unpaired_steps=unpaired_steps(recent_a, recent_b, batches.half_width) if is_noisy else None,
        val_steps=val_steps,
        val_losses=val_losses,
        models=models,
    )


def _compare_models(first: ComparedRun, second: ComparedRun) -> tuple[tuple[float, float] | None, Interval | None]:
    """Return the validation losses, and the interval of their difference."""
    of_a, of_b = first.val_losses, second.val_losses
    if of_a is None or of_b is None:
        return None, None
    if (len(of_a.losses), of_a.last_count) != (len(of_b.losses), of_b.last_count):
        raise UsageError(
            f"val_losses.f32 must have the same windows in both runs, got {len(of_a.losses)} in {short(first.name)} "
            f"and {len(of_b.losses)} in {short(second.name)}. Restore the files from a copy, or compare with --at."
        )
    counts = np.full(len(of_a.losses), float(first.description.config.model.seq_len))
    counts[-1] = of_a.last_count
    losses_a, losses_b = (of.losses.astype(np.float64) for of in (of_a, of_b))
    means = (float(np.average(losses_a, weights=counts)), float(np.average(losses_b, weights=counts)))
    return means, of_models(losses_b - losses_a, counts)


def _check_same_windows(first: ComparedRun, second: ComparedRun) -> None:
    """Check that runs of one seed read the same windows, and that their losses are of the same tokens.

    Raises:
        UsageError: the tokenizer, the tokens, or an option of the windows differs.
    """
    data_a, data_b = first.description.data, second.description.data
    if data_a.tokenizer_kind != data_b.tokenizer_kind:
        raise UsageError(
            f"runs must have one tokenizer to compare nats per token, got {data_a.tokenizer} in {short(first.name)} "
            f"and {data_b.tokenizer} in {short(second.name)}. Compare the bits per byte that eval prints."
        )
    values_a, values_b = (option_values(run.description.config) for run in (first, second))
    found = [(name, values_a[name], values_b[name]) for name in OF_WINDOWS]
    found.append(("the window order's version", data_a.window_order_version, data_b.window_order_version))
    for name, of_a, of_b in found:
        if of_a != of_b:
            raise _other_windows(f"{name} {of_a} in {short(first.name)} and {of_b} in {short(second.name)}")
    if data_a.fingerprint != data_b.fingerprint:
        names = (shown(data_a.tokens), shown(data_b.tokens))
        raise _other_windows(
            f"other tokens in {short(first.name)}, {names[0]}, than in {short(second.name)}, {names[1]}"
        )


def _other_windows(found: str) -> UsageError:
    return UsageError(f"runs must have read the same windows, got {found}. Train one of them again.")


def _by_seed(first: Sequence[ComparedRun], second: Sequence[ComparedRun]) -> list[ComparedRun]:
    """Return the second runs in the order of the seeds of the first ones.

    Raises:
        UsageError: a seed occurs twice in a group, or in one group alone.
    """
    seeds, others = ([run.seed for run in group] for group in (first, second))
    if len({*seeds}) < len(seeds) or sorted(seeds) != sorted(others):
        raise UsageError(
            f"runs must form pairs of one seed, each seed once, got the seeds {shown(seeds)} --against "
            f"{shown(others)}. Leave out the others."
        )
    by_seed = {run.seed: run for run in second}
    return [by_seed[seed] for seed in seeds]


def _check_same_options(group: Sequence[ComparedRun]) -> None:
    """Check that runs differ in their seeds alone.

    Raises:
        UsageError: another option differs.
    """
    differing = differing_options([run.description.config for run in group])
    for name, values in differing.items():
        if name != "seed":
            raise UsageError(
                f"the runs of one side must differ in their seeds alone, got {name} "
                f"{' and '.join(map(shown, values))}. Leave out the others."
            )


def _common_step(runs: Sequence[ComparedRun], at: int | None) -> int:
    """Return the last step to compare.

    Raises:
        UsageError: a run has too few steps, or `at` is not one of the common steps.
    """
    shortest = min(runs, key=lambda run: len(run.losses))
    most = len(shortest.losses)
    if most < MIN_STEPS:
        raise UsageError(
            f"runs must have the losses of at least {MIN_STEPS} steps (step_losses.f32), got {most} in "
            f"{short(shortest.name)}. {_remedy_of_few(shortest)}"
        )
    if at is not None and not MIN_STEPS <= at <= most:
        raise UsageError(
            f"--at must be a step from {MIN_STEPS} to {most}, the last one that {short(shortest.name)} has, got {at}."
        )
    return most if at is None else at


def _remedy_of_few(run: ComparedRun) -> str:
    """Return what to do about a run that has too few losses."""
    if run.is_training:
        return "A command trains it: wait until it has more steps."
    wait = "Wait if a command on another machine trains it, or continue" if run.is_training is None else "Continue"
    again = "" if len(run.losses) else ", or train it again with this version"
    return f"{wait} its training{again}."


def _reason_of_few(runs: Sequence[ComparedRun], at: int | None) -> str:
    """Return why runs with enough steps have too few losses in common, and what to do."""
    fork = max(runs, key=lambda run: run.start_step)
    if fork.description.origin is None or fork.start_step == 0:
        return "The other losses are lost, or their steps were skipped."
    remedy = _remedy_of_few(fork) if at is None else "Give a later --at, or none."
    return (
        f"The first {fork.start_step} steps of {short(fork.name)} are those of {short(fork.description.origin.place)}, "
        f"which it starts from. {remedy}"
    )
