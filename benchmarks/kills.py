"""Bytes of one `owt-data prepare` after SIGKILL at random moments, against an undisturbed one.

    uv run benchmarks/kills.py --kills 20

The first run is undisturbed and timed. The second run is killed and started again until it has been killed --kills
times. The time from the start of work to a kill is uniform, up to 2 * (undisturbed time / kills + --startup-s). The
kills thus spread over most of the run. Writes benchmarks/results/kills.md and kills.json.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from environment import environment
from options import count

ROOT = Path(__file__).parent.parent
COMMAND = "import sys; from owt_data._cli import main; sys.exit(main(sys.argv[1:]))"
FILES = ("train.bin", "val.bin", "manifest.json")


def write_corpus(path: Path, max_mb: int) -> tuple[int, int]:
    """Write the Python files of this environment as JSON lines; return the number of documents and of bytes."""
    num_documents = num_bytes = 0
    with path.open("w", encoding="utf-8") as file:
        for source in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
            if num_bytes < max_mb * 1e6:
                text = source.read_text(encoding="utf-8", errors="replace")
                file.write(json.dumps({"text": text}) + "\n")
                num_documents, num_bytes = num_documents + 1, num_bytes + len(text.encode())
    return num_documents, num_bytes


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def start(corpus: Path, out: Path) -> subprocess.Popen[bytes]:
    """Start or continue the preparation."""
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, "prepare", str(corpus), str(out)], stderr=subprocess.DEVNULL
    )


def wait_for_work(process: subprocess.Popen[bytes], out: Path) -> None:
    """Wait until the process has opened its working folder, after the imports, or has ended."""
    staging = str(out.with_name(f".{out.name}.partial"))
    while process.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            if staging in map(os.readlink, Path(f"/proc/{process.pid}/fd").iterdir()):
                return
        time.sleep(0.01)


def stage(out: Path) -> str:
    """Return the progress of the preparation, in words."""
    staging = out.with_name(f".{out.name}.partial")
    if out.exists():
        return "finished"
    if (staging / "result").exists():
        return "assembling" + "".join(f", {name} started" for name in FILES if (staging / "result" / name).exists())
    journal = staging / "parts-all" / "parts.jsonl"
    return f"tokenizing, {len(journal.read_bytes().splitlines()) if journal.exists() else 0} shards recorded"


def main() -> None:
    """Kill the preparation, compare its files, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=count, default=20, help="number of kills (default: %(default)s)")
    parser.add_argument("--corpus-mb", type=count, default=300, help="MB of text (default: %(default)s)")
    parser.add_argument("--startup-s", type=float, default=0.6, help="seconds between start and tokenization")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random moments")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as temp:
        corpus, plain, out = Path(temp, "corpus.jsonl"), Path(temp, "plain"), Path(temp, "out")
        num_documents, num_bytes = write_corpus(corpus, options.corpus_mb)
        began = time.monotonic()
        if start(corpus, plain).wait() != 0:
            sys.exit("the undisturbed run failed")
        undisturbed_s = time.monotonic() - began
        kills = []
        while len(kills) < options.kills:
            began = time.monotonic()
            process = start(corpus, out)
            wait_for_work(process, out)
            time.sleep(rng.uniform(0, 2 * (undisturbed_s / options.kills + options.startup_s)))
            if process.poll() is not None:
                sys.exit(
                    f"the preparation must last for {options.kills} kills, got {len(kills)}. Give a larger --corpus-mb."
                )
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills.append({"after_s": round(time.monotonic() - began, 2), "at": stage(out)})
            print(f"kill {len(kills)}: {kills[-1]}", flush=True)
        if start(corpus, out).wait() != 0:
            sys.exit("the last start failed")
        same = {name: sha256(plain / name) == sha256(out / name) for name in FILES}
        left = sorted(path.name for path in Path(temp).iterdir() if path not in (corpus, plain, out))
    result = {
        "kills": kills,
        "same_as_undisturbed": same,
        "left_behind": left,
        "undisturbed_s": undisturbed_s,
        "config": f"{num_documents} documents, {num_bytes / 1e6:.1f} MB of text, gpt2, {os.cpu_count()} processes",
        **environment("owt-data"),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "kills.json").write_text(json.dumps(result, indent=2) + "\n")
    rows = "".join(f"| {number} | {kill['after_s']} | {kill['at']} |\n" for number, kill in enumerate(kills, start=1))
    (options.out / "kills.md").write_text(
        "# SIGKILL at random moments of one prepare\n\n"
        f"{result['config']}; {result['hardware']}; {result['date']}; {result['versions']}\n\n"
        f"Undisturbed run: {undisturbed_s:.1f} s. Same bytes after {len(kills)} kills: "
        f"{', '.join(f'{name} {yes}' for name, yes in same.items())}. Files left behind: {left or 'none'}.\n\n"
        f"| kill | seconds after the start | progress |\n|---|---|---|\n{rows}"
    )
    print((options.out / "kills.md").read_text())
    if not all(same.values()) or left:
        sys.exit("the files differ")


if __name__ == "__main__":
    main()
