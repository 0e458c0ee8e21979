"""Does `blame` find documents of random characters, and how often does a normal run mark a spike?

    uv run benchmarks/blame.py
    uv run benchmarks/blame.py --short

Trains tiny models by the command `train`, without Ray, on bytes of Python's standard library.

- Planted: a run on 10,000 documents and 20 documents of random characters. For each of the 20, `blame` ranks the
  documents of a step that reads it, and computes the steps from there on without it.
- False alarms: runs without planted documents, with several batch sizes, schedules and orders. The steps that they
  mark as spikes are counted.

Writes blame.md and blame.json. The text of blame.md below the tables is that of this file.
"""

import argparse
import json
import os
import random
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from environment import environment

from pretrain import PRESETS, train
from pretrain._audit.blamed_step import BlamedStep, blame_step
from pretrain._audit.document_reads import reads_of_document
from pretrain._audit.run_tokens import RunTokens, open_run_tokens
from pretrain._audit.step_windows import step_windows
from pretrain._run.find import find_run
from pretrain._run.spikes import THRESHOLD, spike_scores
from pretrain._run.step_losses import read_step_losses

RESULTS = Path(__file__).parent / "results"
DOCUMENT_BYTES = 400
# No blame before the model has learned anything.
FIRST_STEP = 100
COMPARED_STEPS = 20
KINDS = {
    "ASCII": [chr(code) for code in range(0x21, 0x7F)],
    "UTF-8": [chr(code) for code in range(0x80, 0x800)],
}
COMMON: dict[str, Any] = {
    "hardware": "local",
    "trackers": (),
    "train.log_every": 50,
    "train.eval_every": 100_000,
    "train.eval_tokens": 2_048,
    "train.sample_tokens": 0,
    "train.checkpoint_every": 100_000,
    "model.num_layers": 2,
    "model.embed_dim": 64,
}
FULL: dict[str, Any] = {
    "documents": 10_000,
    "planted": 20,
    "runs": [
        {"train.global_batch_size": 16, "train.order": "shuffle", "train.max_epochs": 1.0},
        {"train.global_batch_size": 8, "train.order": "sequential", "train.max_steps": 1750},
    ],
    "normal": [
        {"train.max_steps": 3000},
        {"train.max_steps": 6000, "train.global_batch_size": 2},
        {"train.max_steps": 4000, "train.global_batch_size": 4, "optimizer.schedule": "constant",
         "train.order": "random", "seed": 3},
        {"train.max_steps": 3000, "train.global_batch_size": 8, "optimizer.schedule": "wsd",
         "optimizer.learning_rate": 0.01},
        {"train.max_steps": 3000, "train.global_batch_size": 4, "model.seq_len": 256, "optimizer.clip_norm": 0.0},
        {"train.max_steps": 3000, "train.order": "sequential"},
    ],
}  # fmt: skip
SHORT = FULL | {
    "documents": 600,
    "planted": 2,
    "runs": [{"train.global_batch_size": 8, "train.order": "sequential", "train.max_epochs": 1.0}],
    "normal": [{"train.max_steps": 150, "train.global_batch_size": 2}],
}

NOTES = """
## What this shows

- The step of a planted document is known from the order of the windows: it is the one after step {first} that reads
  most of it, in `bytes`. Half of the documents are printable ASCII, half are characters of two bytes in UTF-8.
- `blame` orders documents by what they add to the mean loss of the step (`adds`): the share of their bytes times their
  loss above the mean. A document of a few bytes may have a higher mean loss by chance, and adds little. The share in
  the gradient (`gradient`) is a weaker sign of random characters: their gradients point in many directions.
- `z` is the score of the loss of the step, `z without` that of its loss without the document. `later` is the mean loss
  of the {compared} steps that follow less that without the document: what the model suffers from one update.
- With shuffled windows, one window of 16 raises the loss by little more than the noise of a batch: no threshold marks
  these steps without many false alarms. `blame` finds the document in any step that it is given.
- The threshold was chosen with the normal runs of this table in view.
- With the order `sequential`, a batch is one place of the text. A place of another kind, such as a table, is a spike.
"""


def write_corpus(folder: Path, form: dict[str, Any]) -> dict[int, str]:
    """Write corpus.jsonl, and return the kind of the planted document in each row that has one."""
    text = "".join(
        path.read_text("utf-8", "replace") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    )
    rng = random.Random(0)
    documents = [text[start : start + DOCUMENT_BYTES] for start in range(0, len(text), DOCUMENT_BYTES)]
    documents = documents[: form["documents"]]
    # The last tenth is for the validation.
    rows = sorted(rng.sample(range(int(0.85 * len(documents))), form["planted"]))
    planted = dict(zip(rows, [*KINDS] * form["planted"], strict=False))
    for row, kind in planted.items():
        length = DOCUMENT_BYTES // len(KINDS[kind][0].encode())
        documents.insert(row, "".join(rng.choices(KINDS[kind], k=length)))
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))
    return planted


def train_run(folder: Path, name: str, options: dict[str, Any]) -> None:
    """Train a run in a folder."""
    config = PRESETS["quickstart"]().with_options(COMMON | options | {"storage_path": str(folder), "name": name})
    assert train(config).error is None


def step_of(tokens: RunTokens, document: int) -> int | None:
    """Return the step that reads most of a document, or None if no step after the first ones reads it."""
    counts: dict[int, int] = {}
    for step in {read.step for read in reads_of_document(tokens, document).reads if read.step > FIRST_STEP}:
        parts = [part for window in step_windows(tokens, step) for part in window.documents]
        counts[step] = sum(part.stop - part.start for part in parts if part.document.id == document)
    return max(counts, key=lambda step: (counts[step], -step), default=None)


def blame_planted(folder: Path, name: str, options: dict[str, Any], planted: dict[int, str]) -> list[dict[str, Any]]:
    """Train a run on the corpus with planted documents, and blame a step of each that it reads."""
    of_corpus = {
        "data": str(folder / "corpus.jsonl"),
        "prepare.split": "position",
        "model.seq_len": 128,
        "train.checkpoint_every": 50,
        "train.checkpoints_to_keep": None,
    }
    train_run(folder, name, of_corpus | options)
    run, description = find_run(str(folder / name))
    tokens, losses = open_run_tokens(run, description), read_step_losses(run.step_losses)
    ids = {place.row: place.id for place in tokens.documents.describe(np.arange(len(tokens.documents)))}
    rows = []
    for row, kind in planted.items():
        step = step_of(tokens, ids[row])
        if step is None:
            continue
        document = f"d{ids[row]}"
        found = blame_step(tokens, step, losses, by="loss", without=[document], num_steps=COMPARED_STEPS + 1)
        rows.append({"document": document, "kind": kind, "step": step, **facts(found, document)})
        print(rows[-1], flush=True)
    return rows


def facts(found: BlamedStep, document: str) -> dict[str, Any]:
    """Return what blame says of a planted document."""
    orders = {
        "rank": found.documents,
        "rank_by_gradient": sorted(found.documents, key=lambda suspect: -suspect.share),
        "rank_by_mean_loss": sorted(found.documents, key=lambda suspect: -suspect.loss),
    }
    suspect = next(one for one in found.documents if one.id == document)
    comparison = found.comparison
    assert comparison is not None
    return {
        "tokens": suspect.num_tokens,
        "documents": len(found.documents),
        **{name: order.index(suspect) + 1 for name, order in orders.items()},
        "excess": suspect.excess,
        "share": suspect.share,
        "loss": suspect.loss,
        "step_loss": comparison.losses[0],
        "score": found.score,
        "score_without": comparison.score_without,
        "later": float(np.mean(np.subtract(comparison.losses[1:], comparison.losses_without[1:]))),
        "largest_difference": found.largest_difference,
        "text": suspect.text[:40],
    }


def count_alarms(folder: Path, form: dict[str, Any]) -> list[dict[str, Any]]:
    """Train normal runs, and return the scores of their steps."""
    rows = []
    for number, options in enumerate(form["normal"]):
        train_run(folder, f"normal-{number}", options)
        run, _ = find_run(str(folder / f"normal-{number}"))
        scores = spike_scores(read_step_losses(run.step_losses))
        scores = scores[np.isfinite(scores)]
        largest = np.sort(scores)[::-1][:3].tolist()
        row = {"options": options, "steps": len(scores), "spikes": int((scores >= THRESHOLD).sum()), "largest": largest}
        rows.append(row)
        print(row, flush=True)
    return rows


def report(results: dict[str, Any], form: dict[str, Any]) -> str:
    """Return the results as Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines = [
        "# blame",
        "",
        f"{results['hardware']}, {results['date']}, {versions}. Models of 2 layers of "
        "width 64 on bytes; otherwise the preset `quickstart`.",
        "",
        f"The corpus has {form['documents']:,} documents of {DOCUMENT_BYTES} bytes, and {form['planted']} planted ones "
        "of the same length.",
        "",
        *(line for run in results["planted"] for line in (*_planted_lines(run["options"], run["rows"]), "")),
        *_alarm_lines(results["alarms"]),
    ]
    return "\n".join(lines) + "\n" + NOTES.format(first=FIRST_STEP, compared=COMPARED_STEPS)


def _planted_lines(options: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    num, sizes = len(rows), f"batches of {options['train.global_batch_size']} windows of 128 bytes"
    found = {name: sum(row[name] <= 3 for row in rows) for name in ("rank", "rank_by_gradient", "rank_by_mean_loss")}
    exact = sum(row["largest_difference"] in (0.0, None) for row in rows)
    spikes = [row for row in rows if row["score"] >= THRESHOLD]
    gone = sum(row["score_without"] < THRESHOLD for row in spikes)
    return [
        f"## Documents of random characters: order `{options['train.order']}`, {sizes}",
        "",
        f"The run reads {num} of the planted documents after step {FIRST_STEP}.",
        "",
        f"- Among the first three documents of `blame`: {found['rank']} of {num}; with `--by gradient` "
        f"{found['rank_by_gradient']}, by the mean loss of a document {found['rank_by_mean_loss']}.",
        f"- `train` marks {len(spikes)} of the {num} steps as spikes. Without the document, {gone} of these are none.",
        f"- The steps since the checkpoint have the losses of the run to the bit: {exact} of {num}.",
        "",
        "| step | kind | bytes | rank | `--by gradient` | by mean loss | of | its loss | adds | gradient | loss of the "
        "step | z | z without | later |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {row['step']} | {row['kind']} | {row['tokens']} | {row['rank']} | {row['rank_by_gradient']} | "
            f"{row['rank_by_mean_loss']} | {row['documents']} | {row['loss']:.2f} | {row['excess']:.3f} | "
            f"{row['share']:.0%} | {row['step_loss']:.3f} | {row['score']:.1f} | {row['score_without']:.1f} | "
            f"{row['later']:+.4f} |"
            for row in rows
        ),
    ]


def _alarm_lines(rows: list[dict[str, Any]]) -> list[str]:
    sequential = [row for row in rows if row["options"].get("train.order") == "sequential"]
    others = [row for row in rows if row not in sequential]
    counts = [
        f"{sum(row['spikes'] for row in of):,} of {sum(row['steps'] for row in of):,}" for of in (others, sequential)
    ]
    return [
        f"## Spikes of normal runs: a score of {THRESHOLD:.0f} or more",
        "",
        f"{counts[0]} steps with shuffled or random windows, {counts[1]} with sequential ones.",
        "",
        "| options | steps with a score | spikes | largest scores |",
        "|---|---|---|---|",
        *(
            f"| {', '.join(f'{name} {value}' for name, value in row['options'].items())} | {row['steps']:,} | "
            f"{row['spikes']} | {', '.join(f'{score:.1f}' for score in row['largest'])} |"
            for row in rows
        ),
    ]


def main() -> None:
    """Run the study and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a small corpus, few steps: shows that the script works")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args()
    form = SHORT if options.short else FULL
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = f"{name}/cache"
        folder = Path(name)
        planted = write_corpus(folder, form)
        runs = [
            {"options": options, "rows": blame_planted(folder, f"planted-{number}", options, planted)}
            for number, options in enumerate(form["runs"])
        ]
        found = {"planted": runs, "alarms": count_alarms(folder, form)}
    results = environment("pretrain", "nnx-gpt2", "jax", "numpy") | found
    options.out.mkdir(parents=True, exist_ok=True)
    text = report(results, form)
    (options.out / "blame.md").write_text(text)
    (options.out / "blame.json").write_text(json.dumps(results | {"form": form}, indent=2) + "\n")
    print(text)


if __name__ == "__main__":
    main()
