"""Scores by lm-eval's own model for transformers, for `judge.py`.

The arguments are the folder of the tasks and that of the models. Each line of standard input is a JSON object with the
`model`, a folder in it, and a `task`; or with `make`, the name of a new model with random weights. Each answer is a
line of JSON: the `seconds` of the evaluation, the `scores`, and the `texts` that the model wrote.
"""

# torch and lm-eval are not dependencies of this workspace.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false

import contextlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BATCH_SIZE = 32


def read_tokenizer(path: Path) -> Any:
    """Return a tokenizer of transformers from a vocabulary and merges, with bytes as letters."""
    stored = json.loads(path.read_text())
    merges = [tuple(merge) for merge in stored["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=stored["vocab"], merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, bos_token=end, clean_up_tokenization_spaces=False
    )


def scored(language_model: Any, task: str, tasks: TaskManager) -> dict[str, Any]:
    """Return the answer for a task."""
    loaded = tasks.load([task])
    for one in loaded["tasks"].values():
        one.set_config(key="num_fewshot", value=0)
    began = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        results: Any = evaluate(language_model, loaded, bootstrap_iters=0)
    seconds = time.perf_counter() - began
    texts = [sample["filtered_resps"][0] for sample in results["samples"][task]]
    return {"seconds": seconds, "scores": results["results"][task], "texts": texts if "writing" in task else []}


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    torch.set_grad_enabled(False)
    manager = TaskManager(include_path=sys.argv[1], include_defaults=False)
    folder, loaded_models = Path(sys.argv[2]), dict[str, Any]()
    for line in sys.stdin:
        request = json.loads(line)
        if "make" in request:
            torch.manual_seed(0)
            transformers.GPT2LMHeadModel(transformers.GPT2Config()).save_pretrained(folder / request["make"])
            versions = {"torch": torch.__version__, "transformers": transformers.__version__}
            print(json.dumps(versions | {"num_threads": torch.get_num_threads()}), flush=True)
            continue
        name = request["model"]
        if name not in loaded_models:
            model = transformers.GPT2LMHeadModel.from_pretrained(folder / name).eval()
            tokenizer = read_tokenizer(folder / name / "vocabulary.json")
            make: Any = HFLM  # a decorator hides its arguments
            loaded_models[name] = make(pretrained=model, tokenizer=tokenizer, batch_size=BATCH_SIZE)
        print(json.dumps(scored(loaded_models[name], request["task"], manager), default=str), flush=True)
