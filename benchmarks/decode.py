"""Time per generated token with the cache, early and late in the context.

    uv run benchmarks/decode.py --rounds 3 --torch-python PATH

Prompts of 100 and of 1000 tokens take turns, with batch size 1, greedy decoding and random weights. The time per token
is a slope: the time to generate n tokens minus the time to generate one token, divided by n - 1. The time to process
the prompt thus cancels out. The baseline is the same call with `use_cache=False`, which computes the full context again
for every token. Writes benchmarks/results/decode.md and decode.json.

PATH is an interpreter with torch and transformers. With it, 96 tokens after prompts of 64 tokens take turns with
`GPT2LMHeadModel.generate` and its cache, for batches of 1 and 8, with the same weights. The time is that of the whole
call. Writes decode_transformers.md and decode_transformers.json too. `--only-transformers` leaves out the rest.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from environment import environment
from flax import nnx
from options import count, python_with

from nnx_gpt2 import GPT2, generate, gpt2

ROOT = Path(__file__).parent.parent
POSITIONS = (100, 1000)
# Tokens of the longer call, by `use_cache`. Without the cache, the slope over one slow token is exact enough.
NUM_NEW_TOKENS = {True: 25, False: 2}
# The comparison with transformers.
BATCH_SIZES = (1, 8)
PROMPT_TOKENS, DRAWN_TOKENS = 64, 96


def timed(model: GPT2, prompt: list[int], num_tokens: int, use_cache: bool) -> tuple[float, list[int]]:
    """Return the seconds of one call, and the generated tokens."""
    began = time.perf_counter()
    (text,) = generate(model, [prompt], num_tokens, temperature=0, use_cache=use_cache)
    return time.perf_counter() - began, text[len(prompt) :]


def token_s(model: GPT2, prompt: list[int], use_cache: bool) -> tuple[float, list[int]]:
    """Return the seconds per token after this prompt, and the generated tokens."""
    num_tokens = NUM_NEW_TOKENS[use_cache]
    one_s, _ = timed(model, prompt, 1, use_cache)
    all_s, tokens = timed(model, prompt, num_tokens, use_cache)
    return (all_s - one_s) / (num_tokens - 1), tokens


def ask(process: "subprocess.Popen[str]", prompts: list[list[int]]) -> dict[str, Any]:
    """Return the seconds and the tokens of transformers."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps({"prompts": prompts, "num_tokens": DRAWN_TOKENS}) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def compare(model: GPT2, torch_python: str, rounds: int, out: Path) -> None:
    """Measure both in turns, and write the results."""
    rng = np.random.default_rng(1)
    prompts = {size: rng.integers(0, model.config.vocab_size, (size, PROMPT_TOKENS)).tolist() for size in BATCH_SIZES}
    times: dict[int, dict[str, list[float]]] = {size: {"nnx-gpt2": [], "transformers": []} for size in BATCH_SIZES}
    is_same = True
    with tempfile.TemporaryDirectory(prefix="decode-") as folder:
        model.save_pretrained(folder)
        command = [torch_python, str(ROOT / "benchmarks" / "torch_decode.py"), folder]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            torch = json.loads(process.stdout.readline())
            for number in range(rounds + 1):  # the first one compiles
                for size in BATCH_SIZES:
                    began = time.perf_counter()
                    texts = generate(model, prompts[size], DRAWN_TOKENS, temperature=0)
                    seconds = time.perf_counter() - began
                    theirs = ask(process, prompts[size])
                    is_same = is_same and [text[PROMPT_TOKENS:] for text in texts] == theirs["tokens"]
                    if number:
                        times[size]["nnx-gpt2"].append(seconds)
                        times[size]["transformers"].append(theirs["seconds"])
                        print(f"round {number}, batch {size}: {seconds:.2f} s, {theirs['seconds']:.2f} s", flush=True)
            process.stdin.close()
    medians = {size: {name: statistics.median(all_s) for name, all_s in times[size].items()} for size in BATCH_SIZES}
    ratios = {str(size): medians[size]["transformers"] / medians[size]["nnx-gpt2"] for size in BATCH_SIZES}
    about = environment("jax", "flax")
    about["versions"] |= {name: torch[name] for name in ("torch", "transformers")}
    result = {
        "ratio": ratios,
        "median_s": {str(size): medians[size] for size in BATCH_SIZES},
        "seconds_by_round": {str(size): times[size] for size in BATCH_SIZES},
        "same_tokens": is_same,
        "config": (
            f"preset gpt2, float32, greedy, random weights, {PROMPT_TOKENS} tokens of prompt and {DRAWN_TOKENS} new "
            f"tokens; {torch['num_threads']} threads of torch; {rounds} rounds"
        ),
        **about,
    }
    rows = "".join(
        f"| {size} | {medians[size]['nnx-gpt2']:.2f} s | {medians[size]['transformers']:.2f} s "
        f"| {ratios[str(size)]:.2f} |\n"
        for size in BATCH_SIZES
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "decode_transformers.json").write_text(json.dumps(result, indent=2) + "\n")
    (out / "decode_transformers.md").write_text(
        "# Greedy decoding, against transformers\n\n"
        f"{result['config']}; {result['hardware']}; {result['date']}; {result['versions']}\n\n"
        "| batch | nnx-gpt2 | transformers | ratio |\n|---|---|---|---|\n"
        f"{rows}\nThe tokens are {'the same' if is_same else 'different'}. Goal: a ratio of at least 1.5.\n"
    )
    print((out / "decode_transformers.md").read_text())


def main() -> None:
    """Run the rounds and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=5, help="turns of each case (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder for the results")
    torch = python_with("torch", "transformers")
    parser.add_argument("--torch-python", type=torch, help="interpreter with torch and transformers")
    parser.add_argument("--only-transformers", action="store_true", help="only the comparison with transformers")
    options = parser.parse_args()
    if options.only_transformers and options.torch_python is None:
        parser.error("--only-transformers needs --torch-python")
    config = gpt2()
    model = GPT2(config, rngs=nnx.Rngs(0))
    if options.torch_python is not None:
        compare(model, options.torch_python, options.rounds, options.out)
    if options.only_transformers:
        return
    rng = np.random.default_rng(0)
    prompts = {position: rng.integers(0, config.vocab_size, position).tolist() for position in POSITIONS}
    cases = [(position, use_cache) for use_cache in (True, False) for position in POSITIONS]
    drawn = {case: timed(model, prompts[case[0]], NUM_NEW_TOKENS[case[1]], case[1])[1] for case in cases}  # compiles
    times: dict[tuple[int, bool], list[float]] = {case: [] for case in cases}
    for number in range(options.rounds):
        for position, use_cache in cases:
            seconds, tokens = token_s(model, prompts[position], use_cache)
            assert tokens == drawn[position, use_cache], "greedy decoding generated other tokens than before"
            times[position, use_cache].append(seconds)
        latest = ", ".join(f"{case}: {seconds[-1] * 1e3:.1f} ms" for case, seconds in times.items())
        print(f"round {number + 1}: {latest}", flush=True)
    early, late = POSITIONS
    medians = {case: statistics.median(seconds) for case, seconds in times.items()}
    device = jax.devices()[0]
    result = {
        "token_s": {str(position): medians[position, True] for position in POSITIONS},
        "token_s_without_cache": {str(position): medians[position, False] for position in POSITIONS},
        "ratio_late_to_early": medians[late, True] / medians[early, True],
        "ratio_late_to_early_by_round": [b / a for a, b in zip(times[early, True], times[late, True], strict=True)],
        "ratio_without_cache": {str(p): medians[p, False] / medians[p, True] for p in POSITIONS},
        "token_s_by_round": {
            f"{position}{'' if use_cache else ' without cache'}": seconds
            for (position, use_cache), seconds in times.items()
        },
        "same_tokens_without_cache": all(drawn[p, True][: len(drawn[p, False])] == drawn[p, False] for p in POSITIONS),
        "config": (
            f"preset gpt2: {config.num_layers} layers, width {config.embed_dim}, {config.dtype}, context "
            f"{config.seq_len}; batch 1, greedy, random weights; slope over {NUM_NEW_TOKENS[True] - 1} tokens, "
            f"{NUM_NEW_TOKENS[False] - 1} without the cache; {options.rounds} rounds"
        ),
        **environment("jax", "flax", device=device.device_kind),
    }
    rows = "".join(
        f"| {p} | {medians[p, True] * 1e3:.1f} ms | {medians[p, False] * 1e3:.0f} ms "
        f"| {medians[p, False] / medians[p, True]:.1f} |\n"
        for p in POSITIONS
    )
    by_round = ", ".join(f"{ratio:.3f}" for ratio in result["ratio_late_to_early_by_round"])
    same = "the same" if result["same_tokens_without_cache"] else "different"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "decode.json").write_text(json.dumps(result, indent=2) + "\n")
    (options.out / "decode.md").write_text(
        "# Time per generated token\n\n"
        f"{result['config']}; {result['hardware']}; {result['date']}; {result['versions']}\n\n"
        "| position | with the cache | without the cache | ratio |\n|---|---|---|---|\n"
        f"{rows}\n"
        f"Position {late} divided by position {early}, with the cache: {result['ratio_late_to_early']:.3f} "
        f"(by round {by_round}; goal: at most 1.2). With and without the cache the tokens are {same}.\n"
    )
    print((options.out / "decode.md").read_text())


if __name__ == "__main__":
    main()
