"""Train on a text of your own, from Python: documents, token files, a run, and its result.

    python examples/own_text.py FOLDER --pattern "*.md"

Each file of the folder is a document. Start it again to continue an interrupted run.
"""

import argparse
import dataclasses
import json
from pathlib import Path

from owt_data import PrepareOptions, prepare
from pretrain import PRESETS, train


def main() -> None:
    """Write documents, prepare their tokens, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder with files of text")
    parser.add_argument("--pattern", default="*.txt", help="names of the files")
    parser.add_argument("--max-steps", type=int, default=2000)
    parser.add_argument("--hardware", default="local", help="local (this process), cpu:2, gpu:8, ...")
    arguments = parser.parse_args()

    # One JSON object per document. The texts can come from anywhere: a database, a crawl, a list in Python.
    documents = Path("documents.jsonl")
    with documents.open("w") as file:
        for path in sorted(arguments.folder.rglob(arguments.pattern)):
            file.write(json.dumps({"text": path.read_text(errors="replace")}) + "\n")

    # Token files for any training loop. With the same documents and options, the second call does nothing.
    manifest = prepare(str(documents), "tokens", PrepareOptions(tokenizer="bytes", val_fraction=0.1))
    print({name: f"{record.num_tokens:,} tokens" for name, record in manifest.files.items()})

    preset = PRESETS["baby"]()
    config = dataclasses.replace(
        preset,
        data="tokens",
        name="own-text",
        hardware=arguments.hardware,
        train=dataclasses.replace(preset.train, max_steps=arguments.max_steps, eval_tokens=20_480),
    )
    result = train(config)
    if result.error is not None:
        raise SystemExit(str(result.error))
    print(f"loss {result.metrics['loss']:.3f}, validation loss {result.metrics['val_loss']:.3f}, in {result.folder}")
    print(result.sample)


if __name__ == "__main__":
    main()
