"""Growth of the costs of the packages with the number of workers, steps, records, documents and bytes.

    uv run benchmarks/growth.py
    uv run benchmarks/growth.py --short --only commit-requests
    uv run benchmarks/growth.py --before OLD/growth.json

Each measurement runs the code of the packages at increasing sizes: with simulated ranks, against an S3 server on
loopback with latency, on files of that many records. The result is the exponent k of `cost ~ size**k`, between the
largest two sizes. It depends little on the machine. `--before` adds the costs of earlier results, to compare versions.
Writes results/growth.md and growth.json after each measurement. With `--only`, the other rows of an earlier growth.json
stay.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from costs import checkpoints, control, data, logs
from costs.measurement import Measurement, exponent
from environment import environment

MEASUREMENTS: list[Measurement] = [
    *checkpoints.MEASUREMENTS,
    *control.MEASUREMENTS,
    *data.MEASUREMENTS,
    *logs.MEASUREMENTS,
]
ROOT = Path(__file__).parent.parent


def measured(measurement: Measurement, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Measure the cost at each size, in a folder of its own."""
    costs = {}
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            costs[size] = measurement.cost(size, Path(folder))
        print(f"{measurement.name}: {size:,} {measurement.size}: {costs[size]:,.6g} {measurement.unit}", flush=True)
    return {
        "name": measurement.name, "what": measurement.what, "unit": measurement.unit, "size": measurement.size,
        "costs": [[size, cost] for size, cost in costs.items()], "exponent": exponent(costs), "goal": measurement.goal,
    }  # fmt: skip


def write(rows: list[dict[str, Any]], before: dict[str, Any], folder: Path) -> None:
    """Write the table and the values."""
    results = environment() | {"rows": rows}
    earlier = {row["name"]: row for row in before.get("rows", [])}
    table = [["cost", "of", *(["before", "exponent before"] if earlier else []), "measured", "exponent", "goal", "met"]]
    table.append(["---"] * len(table[0]))
    for row in rows:
        old = earlier.get(row["name"])
        cells = [f"{row['what']}, {row['unit']}", row["size"]]
        if earlier:
            cells += [_costs(old["costs"]), f"{old['exponent']:.2f}"] if old else ["", ""]
        is_met = "yes" if row["exponent"] <= row["goal"] else "no"
        cells += [_costs(row["costs"]), f"{row['exponent']:.2f}", f"at most {row['goal']:g}", is_met]
        table.append(cells)
    text = "\n".join(f"| {' | '.join(row)} |" for row in table)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "growth.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "growth.md").write_text(
        f"# Growth of costs\n\n{results['date']}, {results['hardware']}. The exponent is that between the largest two "
        f"sizes.\n\n{text}\n"
    )


def _costs(costs: list[list[float]]) -> str:
    return "; ".join(f"{size:,}: {f'{cost:,.0f}' if cost >= 100 else f'{cost:.3g}'}" for size, cost in costs)


def main() -> int:
    """Measure, and write the results."""
    names = [measurement.name for measurement in MEASUREMENTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help="the measurements: " + ", ".join(names)
    )
    parser.add_argument("--short", action="store_true", help="small sizes")
    parser.add_argument("--before", type=Path, help="results of an earlier version")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    args = parser.parse_args()
    before = {} if args.before is None else json.loads(args.before.read_text())
    kept = args.out / "growth.json"
    rows = {row["name"]: row for row in json.loads(kept.read_text())["rows"]} if kept.exists() else {}
    for measurement in MEASUREMENTS:
        if measurement.name in args.only:
            rows[measurement.name] = measured(measurement, measurement.short if args.short else measurement.sizes)
            write([rows[name] for name in names if name in rows], before, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
