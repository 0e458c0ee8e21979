"""Tasks in files of their own: multiple choice, the perplexity of texts, and generated texts, without a network."""

import json
import random
from pathlib import Path

_WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "in", "red", "blue", "old", "new", "tree", "quickly", "slowly"]

_DATA = """
dataset_path: json
dataset_kwargs:
  data_files:
    test: {path}
test_split: test
metadata:
  version: 1.0
"""
_TASKS = {
    "own_choice": """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "own_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
    aggregation: bits_per_byte
    higher_is_better: false
""",
    "own_writing": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{written}}"
generation_kwargs:
  until: ["e"]
  max_gen_toks: 12
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
""",
}


def documents(number: int) -> list[dict]:
    """Return documents with words of all lengths, some longer than a context of 32."""
    rng = random.Random(0)

    def words(most: int) -> str:
        return " ".join(rng.choice(_WORDS) for _ in range(rng.randint(1, most)))

    return [
        {
            "question": words(9),
            "choices": [words(3) for _ in range(4)],
            "answer": rng.randrange(4),
            "text": words(20),
            "written": "",
        }
        for _ in range(number)
    ]


def write_tasks(folder: Path, rows: list[dict]) -> None:
    """Write the files of the tasks, with their documents."""
    folder.mkdir(exist_ok=True)
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = _DATA.format(path=folder.absolute() / "documents.jsonl")
    for name, text in _TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}{data}{text}")
