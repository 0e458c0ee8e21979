"""Scores on tasks, against lm-eval's own model for transformers.

    uv run --extra eval benchmarks/judge.py --torch-python PATH --tiny FOLDER

The same tasks of 200 questions are judged by both: a multiple choice, the perplexity of texts (rolling), and generated
texts. The models are a tiny one, in FOLDER, with a token for each byte, and a `gpt2` with random weights, which
transformers writes. The two take turns. The seconds are those of an evaluation of lm-eval without reading the task.
Those of the first evaluation, which compiles, are apart. PATH is an interpreter with torch, transformers and lm-eval.
Writes benchmarks/results/judge.md and judge.json.
"""

# lm-eval is an extra.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false

import argparse
import contextlib
import io
import itertools
import json
import logging
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from environment import environment
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager
from options import count, python_with
from rich.console import Console

from owt_data import load_tokenizer
from pretrain import load_trained
from pretrain._judge.language_model import LanguageModel

ROOT = Path(__file__).parent.parent
NUM_QUESTIONS, BATCH_SIZE = 200, 32
TASKS = ("choice", "text", "writing")
TOKENIZERS = {"tiny": "bytes", "gpt2": "gpt2"}
WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "in", "red", "blue", "old", "new", "tree", "house", "quickly"]
WORDS += ["slowly", "under", "over", "green", "river"]
DATA = """
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
metadata:
  version: 1.0
"""
YAML = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: bits_per_byte
""",
    "writing": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{text}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 16
metric_list:
  - metric: exact_match
""",
}


def write_tasks(folder: Path) -> None:
    """Write the tasks and their questions."""
    rng = random.Random(0)

    def words(least: int, most: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(least, most)))

    rows = [
        {"question": words(4, 30), "choices": [words(1, 3) for _ in range(4)], "answer": rng.randrange(4),
         "text": words(10, 60)}
        for _ in range(NUM_QUESTIONS)
    ]  # fmt: skip
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in YAML.items():
        data = DATA.format(path=folder / "rows.jsonl")
        (folder / f"{name}.yaml").write_text(f"task: {name}{data}{text}")


def letters() -> list[str]:
    """Return the letter of each byte in the vocabularies of transformers: itself if it can be printed."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return [chr(byte) if byte in printed else chr(256 + others.index(byte)) for byte in range(256)]


def write_vocabulary(name: str, path: Path) -> None:
    """Write a tokenizer of tiktoken as a vocabulary and merges: the two parts that were last joined into each token."""
    encoding, of_byte = load_tokenizer(name), letters()
    tokens = {encoding.decode_single_token_bytes(i): i for i in range(encoding.n_vocab) if i != encoding.eot_token}

    def spelled(token: bytes) -> str:
        return "".join(of_byte[byte] for byte in token)

    merges = []
    for token, rank in tokens.items():
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [tokens.get(a + b, rank) for a, b in itertools.pairwise(parts)]
            at = min(range(len(pairs)), key=pairs.__getitem__)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append([spelled(part) for part in parts])
    vocabulary = {spelled(token): rank for token, rank in tokens.items()} | {"<|endoftext|>": encoding.eot_token}
    path.write_text(json.dumps({"vocab": vocabulary, "merges": merges}))


def copy_tiny(source: Path, target: Path) -> None:
    """Copy a tiny model, with the end of text of the tokenizer of bytes."""
    target.mkdir()
    (target / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"eos_token_id": 256, "bos_token_id": 256}))


def scored(language_model: LanguageModel, task: str, tasks: TaskManager) -> dict[str, Any]:
    """Return the answer for a task, as `torch_judge.py` does."""
    loaded = tasks.load([task])
    for one in loaded["tasks"].values():
        one.set_config(key="num_fewshot", value=0)
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        results: Any = evaluate(language_model, loaded, bootstrap_iters=0)
    seconds = time.perf_counter() - began
    texts = [sample["filtered_resps"][0] for sample in results["samples"][task]]
    return {"seconds": seconds, "scores": results["results"][task], "texts": texts if task == "writing" else []}


def ask(process: "subprocess.Popen[str]", **request: str) -> dict[str, Any]:
    """Return the answer of transformers."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return the largest relative difference of two scores."""
    names = [name for name, value in ours.items() if isinstance(value, float) and "stderr" not in name]
    return max(abs(ours[name] - theirs[name]) / max(abs(theirs[name]), 1e-9) for name in names)


def write_results(cases: dict[str, dict[str, Any]], about: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the results of the cases up to now."""
    found = environment("jax", "flax", "lm_eval")
    found["versions"] |= {name: about[name] for name in ("torch", "transformers")}
    result = {
        "cases": cases,
        "config": (
            f"{NUM_QUESTIONS} questions of each task, float32, batch {BATCH_SIZE}; {about['num_threads']} threads of "
            f"torch; {options.rounds} rounds"
        ),
        **found,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "judge.json").write_text(json.dumps(result, indent=2, default=str) + "\n")
    rows = ""
    for name, case in cases.items():
        same = "" if case["same_texts"] is None else f", {case['same_texts']} texts the same"
        speeds = case["questions_per_s"]
        rows += (
            f"| {name} | {speeds['pretrain']:.1f} | {speeds['transformers']:.1f} | {case['ratio']:.2f} "
            f"| {NUM_QUESTIONS / case['seconds_with_compilation']:.1f} "
            f"| {case['largest_relative_difference']:.0e}{same} |\n"
        )
    (options.out / "judge.md").write_text(
        "# Scores on tasks, against lm-eval's model for transformers\n\n"
        f"{result['config']}; {result['hardware']}; {result['date']}; {result['versions']}\n\n"
        "Questions per second; `first` is the first evaluation, which compiles. The last column is the largest "
        "relative difference of two scores.\n\n"
        "| model, task | pretrain | transformers | ratio | first | difference |\n|---|---|---|---|---|---|\n"
        f"{rows}\nGoal: the same scores, and a ratio of at least 1.\n"
    )


def main() -> None:
    """Judge both models by both, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=3, help="turns of each case (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    torch = python_with("torch", "transformers", "lm_eval")
    parser.add_argument("--torch-python", type=torch, required=True, help="interpreter with torch and lm-eval")
    parser.add_argument("--tiny", type=Path, required=True, help="folder of a tiny GPT-2 with at least 257 ids")
    parser.add_argument("--models", nargs="+", choices=TOKENIZERS, default=[*TOKENIZERS], help="default: both")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    cases: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="judge-") as place:
        tasks, models = Path(place) / "tasks", Path(place) / "models"
        write_tasks(tasks)
        models.mkdir()
        copy_tiny(options.tiny, models / "tiny")
        manager = TaskManager(include_path=str(tasks), include_defaults=False)
        command = [options.torch_python, str(ROOT / "benchmarks" / "torch_judge.py"), str(tasks), str(models)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            about = ask(process, make="gpt2")
            for name in options.models:
                write_vocabulary(TOKENIZERS[name], models / name / "vocabulary.json")
                trained = load_trained(models / name)
                language_model = LanguageModel(
                    trained.model, trained.tokenizer, batch_size=BATCH_SIZE, console=Console(quiet=True)
                )
                for task in TASKS:
                    first = scored(language_model, task, manager)
                    answers: dict[str, list[dict[str, Any]]] = {"pretrain": [], "transformers": []}
                    for _ in range(options.rounds):
                        answers["transformers"].append(ask(process, model=name, task=task))
                        answers["pretrain"].append(scored(language_model, task, manager))
                    ours, theirs = (of_one[-1] for of_one in answers.values())
                    seconds = {who: [answer["seconds"] for answer in of_one] for who, of_one in answers.items()}
                    speeds = {who: NUM_QUESTIONS / statistics.median(all_s) for who, all_s in seconds.items()}
                    same = [a == b for a, b in zip(ours["texts"], theirs["texts"], strict=True)]
                    cases[f"{name}, {task}"] = {
                        "questions_per_s": speeds,
                        "ratio": speeds["pretrain"] / speeds["transformers"],
                        "seconds_by_round": seconds,
                        "seconds_with_compilation": first["seconds"],
                        "scores": {"pretrain": ours["scores"], "transformers": theirs["scores"]},
                        "largest_relative_difference": difference(ours["scores"], theirs["scores"]),
                        "same_texts": f"{sum(same)} of {len(same)}" if same else None,
                    }
                    write_results(cases, about, options)
                    print(f"{name}, {task}: {speeds}, {cases[f'{name}, {task}']['same_texts']}", flush=True)
            assert process.stdin is not None
            process.stdin.close()
    print((options.out / "judge.md").read_text())


if __name__ == "__main__":
    main()
