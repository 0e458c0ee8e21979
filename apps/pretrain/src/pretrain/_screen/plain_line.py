"""The line of a record where the output is no terminal."""

from pretrain._formats import clock_time, count, loss
from pretrain._run.metrics import Record
from pretrain._screen.run_view import RunView


def plain_line(view: RunView) -> str:
    """Return the newest record as a line. Its fields align with the line before."""
    last, total = view.last, str(view.max_steps)
    fields = [f"step {last['step']:>{len(total)}}/{total}"]
    if "epoch" in last:
        fields.append(f"epoch {last['epoch']:.2f}")
    fields += [_loss(last, "loss", "loss"), _loss(last, "val_loss", "val loss")]
    if "tokens_per_s" in last:
        fields.append(f"{count(last['tokens_per_s']):>7} tokens/s")
    if "mfu" in last:
        fields.append(f"MFU {last['mfu']:5.1%}")
    if view.tokenizing is not None and (tokenized := view.tokenizing.summary()):
        fields.append(tokenized)
    if "step_s" in last and (left_s := view.left_s()) is not None:
        fields.append(f"left {clock_time(left_s)}")
    return "  ".join(fields).rstrip()


def _loss(last: Record, key: str, name: str) -> str:
    return f"{name} {loss(last[key])}" if key in last else " " * (len(name) + 7)
