"""Arguments of a wrong type or value, in a process without beartype, which would be the first to reject them."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

CODE = """
import json, os, sys
from dataclasses import replace
from pathlib import Path as P
import numpy as np
from owt_data import *
P("book.txt").write_text("It was a bright cold day in April. " * 20)
T = PrepareOptions(tokenizer="bytes")
prepare("book.txt", "book", T, num_processes=1)
os.mkdir("poem")
for name in ("train", "val"):
    np.zeros(400, "<u2").tofile(f"poem/{name}.bin")
wide = {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "</s>": 65536}, "merges": []}}
P("wide.json").write_text(json.dumps(wide))
data = open_tokens("book", tokenizer="bytes")
tr, I, ARRAY = data.train, np.arange(3), np.array([1, 2])
text = {"block_size": 8, "tokenizer": "bytes"}

class BadText:
    def __repr__(self):
        raise RuntimeError("no text")

class BadPath:
    def __fspath__(self):
        return 5
    def __repr__(self):
        return "BadPath()"

growing = GrowingTokens(P("book"), "train", is_one_source=True)

def starts(indices=I, order="shuffle", seed=1, num_tokens=100, seq_len=8):
    return window_starts(indices, order=order, seed=seed, num_tokens=num_tokens, seq_len=seq_len)

def windows(indices, tokens=tr, seq_len=8, seed=1, order="shuffle"):
    return tokens.windows(indices, seq_len=seq_len, order=order, seed=seed)

def record(sha256="0" * 64, num_tokens=1):
    return FileRecord(num_tokens=num_tokens, num_documents=1, sha256=sha256)

def steps(read=read_steps, tokens=tr, start_step=0, stop_step=2, **changed):
    batches = Batches(**{"seq_len": 8, "global_batch_size": 4, **changed})
    return read(tokens, batches, start_step=start_step, stop_step=stop_step)

def enter(context):
    with context:
        pass

def manifest(**changed):
    record = json.loads(P("book/manifest.json").read_text())
    record["files"]["val.bin"].update(changed)
    P("poem/manifest.json").write_text(json.dumps(record))
    try:
        open_tokens("poem", tokenizer="bytes")
    finally:
        os.unlink("poem/manifest.json")

before = sorted(os.listdir())
messages = {}
for code in json.loads(input()):
    try:
        messages[code] = str(eval(code))
    except Exception as error:
        messages[code] = f"{type(error).__name__}: {error}"
messages["files"] = sorted(os.listdir()) == before
messages["ray"] = "ray" in sys.modules and sys.modules["ray"].is_initialized()
print(json.dumps(messages))
"""

NAME = "A name must be a text without null characters, or a path, got"
TOKENIZER = (
    "The tokenizer must be bytes, gpt2, r50k_base, p50k_base, cl100k_base, o200k_base, or the path of a "
    "tokenizer.json, got"
)
LARGEST = 2**62 - 1
SEED = "seed must be an integer from 0 to 18446744073709551615, got"
INDEX = "Each index must be an integer in an array int64[N], got"
START = "Each start must be an integer in an array int64[N], got"
# The form of values in errors, where it is not their code.
VALUES = {"ARRAY": "array([1, 2])"}
ORDERS = "shuffle, random, sequential, sequential-first"
OPTIONS = "options must be PrepareOptions, got"
TOKENS = "tokens must be train or val of open_tokens, got None. Open the token files first."
DATA = "data must be the result of open_tokens, got"
CONSOLE = "console must be a rich.console.Console, got None. Make one with Console()."
DATASET = "dataset must be the result of step_windows, or its iterator, got"
# The error of each call, from its first word on.
CASES = {
    # Options.
    **{
        f"PrepareOptions(tokenizer={value})": f"{TOKENIZER} {VALUES.get(value, value)}." for value in ("ARRAY", "['x']")
    },
    "PrepareOptions(tokenizer=None)": f"{TOKENIZER} None.",
    "PrepareOptions(tokenizer='x' * 9000)": f"{TOKENIZER} 'xxx",
    "PrepareOptions(split=5)": "split must be one of auto, documents, position, start, got 5.",
    "PrepareOptions(val_fraction='0.1')": "val_fraction must be between 0 and 1, got '0.1'.",
    "PrepareOptions(split_seed='1')": "split_seed must be an integer of at least 0, got '1'.",
    "PrepareOptions(split_seed=BadText())": "split_seed must be an integer of at least 0, got one BadText, which has",
    "PrepareOptions(split_seed=True)": "split_seed must be an integer of at least 0, got True.",
    "PrepareOptions(limit_rows=1.5)": "limit_rows must be an integer of at least 1, got 1.5.",
    "PrepareOptions(text_column=5)": "text_column must be UTF-8 text of at least 1 character, got 5.",
    "PrepareOptions(text_column='')": "text_column must be UTF-8 text of at least 1 character, got ''.",
    "PrepareOptions(row_end=5)": "row_end must be UTF-8 text, got 5.",
    "PrepareOptions(documents=[])": "documents must be one of rows, wikitext-titles, got [].",
    # Names.
    **{
        f"{call}": f"{NAME} {value}."
        for value in ("None", "5", "b'x'", r"'\x00'", "{'a': 1}", "BadPath()")
        for call in (
            f"prepare({value}, 'o', T)",
            f"find_source({value})",
            f"inspect({value}, tokenizer='bytes')",
            f"is_prepared({value})",
            f"read_manifest({value})",
            f"verify({value})",
            f"prepare('book.txt', {value}, T)",
            f"stream_text({value}, **text)",
            f"GrowingTokens({value}, 'train', is_one_source=True)",
            f"enter(prepare_in_background({value}, 'o', PrepareOptions(tokenizer='bytes', split='start')))",
            *([] if value.startswith("{") else [f"open_tokens({value}, tokenizer='bytes')"]),
        )
    },
    "prepare(['book.txt', 5], 'o', T)": f"{NAME} 5.",
    "open_tokens(['book', None], tokenizer='bytes')": f"{NAME} None.",
    "open_tokens({5: 1}, tokenizer='bytes')": f"{NAME} 5.",
    "open_tokens({'book': '1'}, tokenizer='bytes')": "A weight must be a number, or pairs of a window",
    "open_tokens({'book': None}, tokenizer='bytes')": "A weight must be a number, or pairs of a window",
    "open_tokens({'book': [0, 1]}, tokenizer='bytes')": "A weight must be a number, or pairs of a window",
    "open_tokens({'book': [(0, '1')]}, tokenizer='bytes')": "A weight must be a number, or pairs of a window",
    "open_tokens({'book': [(0, 1), (9.5, 2)]}, tokenizer='bytes')": "The window of a weight must be an integer",
    "load_tokenizer([])": f"{TOKENIZER} [].",
    # Other arguments of a preparation.
    "prepare('book.txt', 'o', None)": f"{OPTIONS} None. Make them with PrepareOptions(...).",
    "prepare('book.txt', 'o', 'bytes')": f"{OPTIONS} 'bytes'.",
    "enter(prepare_in_background('book.txt', 'o', {}))": f"{OPTIONS} {{}}.",
    "prepare('book.txt', 'o', T, num_processes=1.5)": "num_processes must be an integer from 1 to 65536, got 1.5.",
    "prepare('book.txt', 'o', T, num_processes='2')": "num_processes must be an integer from 1 to 65536, got '2'.",
    "prepare('book.txt', 'o', T, use_ray='no')": "use_ray must be True or False, got 'no'.",
    **{
        call.replace("?", value): f"{name} must be a function or None, got {VALUES.get(value, value)}. Give a function"
        for value in ("5", "0", "''", "False", "ARRAY")
        for name, call in (
            ("progress", "prepare('book.txt', 'o', T, progress=?)"),
            ("progress", "enter(prepare_in_background('book.txt', 'o', T, progress=?))"),
            ("report", "verify('book', report=?)"),
            ("report", "check_digests(data, report=?)"),
            ("report", "find_source('book.txt').digest(?)"),
            ("starts_document", "stream_text('book.txt', **text, starts_document=?)"),
        )
    },
    "GrowingTokens(P('book'), 'x', is_one_source=True)": "split must be one of train, val, got 'x'.",
    "enter(progress_bar(None))": CONSOLE,
    "enter(share_bar(None, 'x'))": CONSOLE,
    # Indices, starts and numbers of an order.
    "num_windows(1.5, 5)": "num_tokens must be an integer of at least 0, got 1.5.",
    "num_windows(-1, 5)": "num_tokens must be an integer of at least 0, got -1.",
    "num_windows(5, None)": "seq_len must be an integer of at least 1, got None.",
    "starts([0, 1])": f"{INDEX} [0, 1]. Convert a list with np.array(values, np.int64).",
    "starts(np.array([1.5]))": f"{INDEX} array([1.5]).",
    "starts(np.array(5))": f"{INDEX} array(5).",
    "starts(np.array([2**64 - 1], np.uint64))": f"The largest index must be an integer from 0 to {2**63 - 1}, got ",
    **{
        call.replace("?", value): f"{name} must be one of {choices}, got {VALUES.get(value, value)}."
        for value in ("ARRAY", "['x']")
        for name, choices, call in (
            ("order", ORDERS, "starts(order=?)"),
            ("order", ORDERS, "windows(I, TokenMixture((tr,), (1.0,)), order=?)"),
            ("order", ORDERS, "windows(I, growing, order=?)"),
            ("documents", "rows, wikitext-titles", "PrepareOptions(documents=?)"),
        )
    },
    "starts(seed=-1)": f"{SEED} -1.",
    "starts(seed=10**400)": f"{SEED} 1000",
    "starts(seed='a')": f"{SEED} 'a'.",
    "starts(num_tokens=10**400)": f"num_tokens must be an integer from 0 to {LARGEST}, got 1000",
    "starts(num_tokens='a')": "num_tokens must be an integer of at least 0, got 'a'.",
    "starts(np.ma.masked_array([5, 6], [0, 1]))": f"{INDEX} masked_array(data=[5, --],",
    "windows([0])": f"{INDEX} [0].",
    "windows(None, growing)": "The order of tokens that are being",
    "windows([0], TokenMixture((tr,), (1.0,)))": f"{INDEX} [0].",
    "windows(I, TokenMixture((tr,), (1.0,)), seq_len=10**18)": "The tokens must be at least 1000000000000000001, one",
    "windows(I, TokenMixture((tr,), (1.0,)), seed=-1)": f"{SEED} -1.",
    # Ranges of tokens.
    "tr.read_windows(np.array([0]), 0)": "seq_len must be an integer of at least 1, got 0.",
    "tr.read_windows(np.array([0]), 10**18)": "The tokens must be at least 1000000000000000001, one window of",
    "tr.read_windows([0], 8)": f"{START} [0].",
    "tr.read_windows(np.array([0.5]), 8)": f"{START} array([0.5]).",
    "tr.read(5, 2)": "stop must be an integer from 5 to 631, got 2.",
    "tr.read(0, 10**30)": "stop must be an integer from 0 to 631, got 1000",
    "tr.read(-5)": "start must be an integer from 0 to 631, got -5.",
    "tr.read('a')": "start must be an integer from 0 to 631, got 'a'.",
    "tr.between(-1, 5)": "start must be an integer from 0 to 631, got -1.",
    "tr.between(0, 10**30)": "stop must be an integer from 0 to 631, got 1000",
    "TokenSpan(path=None, start=0, stop=1)": "path must be a text, got None.",
    "TokenSpan(path='x', start=5, stop=1)": "stop must be an integer of at least 5, got 1.",
    "TokenSequence(None)": "spans must be a tuple, got None.",
    "TokenSequence((5,))": "Each of spans must be a TokenSpan, got 5.",
    "TokenSequence(tr.spans, vocab_size='a')": "vocab_size must be an integer from 1 to 2147483648, got 'a'.",
    "TokenMixture((tr,), ('1',))": "The weights must be 1 finite numbers",
    "TokenMixture((tr,), None)": "weights must be a tuple, got None.",
    "TokenMixture((tr,), (1.0,), [])": "stages must be a tuple, got [].",
    "TokenMixture((tr,), (1.0,), (5,))": "Each of stages must be a pair of a window and weights, got (5,).",
    "TokenMixture((tr,), (1.0,), ((9.0, (1.0,)),))": "The window of a stage must be an integer of at least 1, got 9.0.",
    "TokenMixture((tr,), (1.0,), ((9, [1.0]),))": "weights must be a tuple, got [1.0].",
    "TokenMixture((tr,), (1.0,)).counts(-1, 1)": "stop_index must be an integer of at least 0, got -1.",
    "TokenMixture((tr,), (1.0,)).counts(1, -1)": f"{SEED} -1.",
    "TokenMixture((5,), (1.0,))": "Each of sequences must be a TokenSequence, got 5.",
    # Verification.
    "check_digests(None)": f"{DATA} None. Open the folder first.",
    "verify_in_background('book')": f"{DATA} 'book'.",
    "BackgroundVerification({5: '0' * 64})": "Each path and digest must be UTF-8 text of at least 1 character, got 5.",
    "BackgroundVerification({'x': ARRAY})": "Each path and digest must be UTF-8 text of at least 1 character, got arr",
    "BackgroundVerification(None)": "digests must be the digests of opened tokens, got None.",
    **{
        f"record({value})": f"sha256 must be a SHA-256 of 64 hexadecimal digits, got {VALUES.get(value, value)}."
        for value in ("5", "None", "ARRAY", "'x'")
    },
    "record(num_tokens='x')": "num_tokens must be an integer of at least 0, got 'x'.",
    "replace(read_manifest('book'), files=5)": "files must be a dict, got 5.",
    "replace(read_manifest('book'), options=None)": "options must be a dict, got None.",
    "replace(read_manifest('book'), vocab_size='x')": "vocab_size must be an integer from 1 to 2147483648, got 'x'.",
    "is_wikitext_title(None)": "row must be a text, got None. Give the row as text.",
    **{
        f"manifest(sha256={value})": "/poem/manifest.json must be a manifest of owt-data, got another or a damaged one"
        for value in ("'x' * 9000", "'0' * 63", "''", "'A' * 64")
    },
    # Streams.
    "steps(start_step=1.5)": "start_step must be an integer of at least 0, got 1.5.",
    "steps(tokens=None)": TOKENS,
    "steps(seed='1')": f"{SEED} '1'.",
    "steps(step_windows, tokens=None)": TOKENS,
    "steps(step_windows, seq_len=0)": "seq_len must be an integer of at least 1, got 0.",
    "steps(read_steps_by_tasks, tokens=None)": TOKENS,
    "steps(step_windows, seq_len=10**6)": "tokens must hold one window of 1000000 inputs and a target, got",
    "read_steps(tr, None, start_step=0, stop_step=2)": "batches must be owt_data.Batches, got None. Make one first.",
    "steps(step_windows, order='x')": "order must be one of shuffle, random, sequential, sequential-first, got 'x'.",
    "token_windows(None, seq_len=8, num_rows=5)": TOKENS,
    "token_windows(tr, seq_len=8, num_rows='5')": "num_rows must be an integer of at least 1, got '5'.",
    "iter_steps(5)": f"{DATASET} 5. Call step_windows first.",
    "iter_steps([])": f"{DATASET} []. Call step_windows first.",
    "stream_text('book.txt', block_size=8, tokenizer='wide.json')": "dtype must hold the 65537 ids of '",
    "stream_text('book.txt', **text, row_end=5)": "row_end must be UTF-8 text, got 5.",
    "stream_text('book.txt', **text, column='')": "column must be UTF-8 text of at least 1 character, got ''.",
    "stream_text('book.txt', **text, column=5)": "column must be UTF-8 text of at least 1 character, got 5.",
    "stream_text('book.txt', **text, segment_ids='a')": "segment_ids must be True or False, got 'a'.",
    "stream_text('book.txt', **text, num_tasks=10**9)": "num_tasks must be an integer from 1 to 65536, got 1000000000.",
}
# Arguments of other types that mean the same.
SAME = (
    "open_tokens(P('book'), tokenizer='bytes') == data",
    "inspect(P('book')) == inspect('book')",
    "find_source(P('book.txt')) == find_source('book.txt')",
    "is_prepared(P('book'))",
    "prepare(P('book.txt'), P('book'), T) == read_manifest('book')",
    "(starts(np.arange(3, dtype=np.uint8), 'sequential', seq_len=99, num_tokens=400) == [0, 99, 198]).all()",
    "(starts(np.array([200], np.uint8), 'sequential', num_tokens=9000) == 1600).all()",
    "(windows(np.arange(3, dtype=np.uint8)) == windows(I)).all()",
    "(windows(np.array([200], np.uint8), TokenMixture((tr,), (1.0,))) == "
    "windows(np.array([200]), TokenMixture((tr,), (1.0,)))).all()",
    "num_windows(np.uint8(0), np.uint8(1)) == 0",
    "tr.num_windows(np.uint8(1)) == tr.num_windows(1)",
    "(windows(np.arange(3, dtype=np.int8), seq_len=np.uint8(200), seed=np.int8(1)) == windows(I, seq_len=200)).all()",
    "(windows(I, TokenMixture((tr, tr), (np.uint8(200), np.uint8(200))), np.uint8(200), np.uint8(255)) == "
    "windows(I, TokenMixture((tr, tr), (200, 200)), 200, 255)).all()",
    "(starts(np.arange(200, dtype=np.uint8), 'random', np.uint8(1), np.uint16(65000), np.uint8(200)) == "
    "starts(np.arange(200), 'random', 1, 65000, 200)).all()",
    "all((a[1] == b[1]).all() for a, b in zip(steps(seq_len=np.int8(64), global_batch_size=np.int8(100), "
    "stop_step=np.int8(2)), steps(seq_len=64, global_batch_size=100), strict=True))",
    "inspect('book', window_tokens=np.int8(5)) == inspect('book', window_tokens=5)",
    "(tr.read(np.uint8(250), np.int16(300)) == tr.read(250, 300)).all()",
    "(tr.read_windows(np.array([250], np.uint8), np.uint8(255)) == tr.read_windows(np.array([250]), 255)).all()",
    "prepare('book.txt', 'book', T, num_processes=np.uint8(200)) == read_manifest('book')",
    "PrepareOptions(split_seed=np.int64(5), val_fraction=np.float32(0.5)).record() == "
    "PrepareOptions(split_seed=5, val_fraction=0.5).record() and "
    "type(PrepareOptions(split_seed=np.int64(5)).split_seed) is int",
)


@pytest.fixture(scope="module")
def messages(tmp_path_factory) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=tmp_path_factory.mktemp("arguments"),
        env=os.environ | {"TIKTOKEN_CACHE_DIR": ""},
        input=json.dumps([*CASES, *SAME]), capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.parametrize("code", CASES)
def test_an_argument_of_a_wrong_type_or_value_is_rejected_at_the_call(messages, code):
    kind, _, message = messages[code].partition(": ")
    assert kind == "DataError"
    assert message.startswith(CASES[code]) or CASES[code] in message[:300]
    assert len(message) < 700


@pytest.mark.parametrize("code", SAME)
def test_an_argument_of_another_type_means_the_same(messages, code):
    assert messages[code] == "True"


def test_rejected_arguments_leave_no_file_and_start_no_cluster(messages):
    assert (messages["files"], messages["ray"]) == (True, False)
