"""The command `profile`: the costliest operations of a run's newest trace."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pretrain._errors import UsageError
from pretrain._run.find import find_run
from pretrain._run.remote_copy import pull_profiles


def show_profile(run: str, *, console: Console, num_ops: int = 10) -> None:
    """Print the costliest operations of a run's newest trace.

    Args:
        run: the run's folder, URI or name.
        console: gets the table.
        num_ops: number of operations.

    Raises:
        UsageError: the run does not exist, has no trace, or has a damaged one.
    """
    if num_ops < 1:
        raise UsageError(f"--num-ops must be at least 1, got {num_ops}. Change it.")
    folder, _ = find_run(run)
    pull_profiles(folder)
    from pretrain._training.trace import newest_trace, read_trace  # imports jax, which other commands do not need

    path = newest_trace(folder.profiles)
    if path is None:
        raise UsageError(f"{folder} must have a profile, got none. Train with --profile 100:105.")
    try:
        trace = read_trace(path)
    except ValueError as error:
        raise UsageError(f"{path} must be a trace as JAX writes it, got {error}. Profile the run again.") from error
    if not trace.operations:
        raise UsageError(f"{path} must contain operations, got none. Profile the run again.")
    total_s = sum(operation.total_s for operation in trace.operations)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("", "share", "ms", "calls"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("operation", "source"):
        table.add_column(name, overflow="fold")
    for rank, operation in enumerate(trace.operations[:num_ops], 1):
        table.add_row(
            str(rank),
            f"{operation.total_s / total_s:.1%}",
            f"{operation.total_s * 1e3:,.3f}",
            f"{operation.calls:,}",
            Text(operation.name),
            Text(operation.source),
        )
    console.print(table)
    idle = "" if trace.idle is None else f", idle {trace.idle:.1%} of the time"
    console.print(
        f"{len(trace.operations):,} operations on {trace.device}: {total_s * 1e3:,.3f} ms{idle}\n"
        f"trace: {path}\n"
        f"timeline: tensorboard --logdir {folder.profiles}, with the package xprof",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
