"""Compare learning rates, in the cells of a notebook: two runs with names of their own, a table, and the best one.

    python examples/sweep.py book.txt

Start it again: finished runs are not trained again. The command `pretrain sweep` does the same in a shell.
"""

# %% A small model. Without an argument, the text is Python's standard library.
import sys

from pretrain import PRESETS, load_trained, train

base = PRESETS["quickstart"]().with_options(
    {
        "data": sys.argv[1] if len(sys.argv) > 1 else "builtin",
        "hardware": "local",
        "storage_path": "rates",
        "trackers": (),
        "model.num_layers": 2,
        "model.num_heads": 2,
        "model.embed_dim": 32,
        "train.max_steps": 40,
        "train.log_every": 10,
    }
)

# %% One run for each rate. `train` without a console prints nothing.
rates = (1e-3, 1e-2)
results = {rate: train(base.with_options({"optimizer.learning_rate": rate})) for rate in rates}
failed = [str(result.error) for result in results.values() if result.error is not None]
if failed:
    raise SystemExit("\n".join(failed))

# %% A table: the training loss of each record. `pandas.DataFrame(result.history)` has all columns.
print("step", *(f"rate {rate:g}" for rate in rates), sep="\t")
losses = [[record["loss"] for record in results[rate].history if "loss" in record] for rate in rates]
for number, row in enumerate(zip(*losses, strict=True), 1):
    print(number * base.train.log_every, *(f"{loss:.4f}" for loss in row), sep="\t")

# %% The run with the lowest validation loss, and its model.
best = min(rates, key=lambda rate: results[rate].metrics["val_loss"])
trained = load_trained(results[best].folder)
print(f"best: rate {best:g}, validation loss {results[best].metrics['val_loss']:.4f}, in {trained.folder.name}")
