"""Token files of other programs, written here after their published layout, are the same tokens as in train.bin."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from owt_data import (
    Batches,
    DataError,
    PrepareOptions,
    TokenSequence,
    inspect,
    is_prepared,
    open_documents,
    open_tokens,
    prepare,
    read_steps,
)
from owt_data._cli import main
from owt_data._tokenizer_names import VOCABULARIES

RNG = np.random.default_rng(5)
# Documents of many lengths, each after its end-of-text token as in llm.c's scripts.
TRAIN, VAL = (
    np.concatenate([np.append(50_256, RNG.integers(0, 50_256, RNG.integers(1, 90))) for _ in range(number)])
    for number in (60, 9)
)
INDICES = np.arange(0, 70, 3)


def write_shard(path: Path, tokens: np.ndarray, *, magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> None:
    """Write a file as `write_datafile` of llm.c and the scripts of modded-nanogpt do."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype(dtype).tobytes())


def llm_c(folder: Path) -> str:
    for number, part in enumerate(np.array_split(TRAIN, 9), 1):
        write_shard(folder / f"fineweb_train_{number:06d}.bin", part)
    write_shard(folder / "fineweb_val_000000.bin", VAL)
    return str(folder)


def llm_c_files(folder: Path) -> list[str]:
    llm_c(folder)
    return [f"train={folder}/fineweb_train_*.bin", f"val={folder}/fineweb_val_*.bin"]


def llm_c_without_numbers(folder: Path) -> str:
    write_shard(folder / "tiny_shakespeare_train.bin", TRAIN)
    write_shard(folder / "tiny_shakespeare_val.bin", VAL)
    return str(folder)


def llama_3(folder: Path) -> str:
    for split, tokens in (("train", TRAIN), ("val", VAL)):
        write_shard(folder / f"x_{split}_000000.bin", tokens, magic=20240801, version=7, dtype="<u4")
    return str(folder)


def raw_32_bits(folder: Path) -> str:
    TRAIN.astype("<u4").tofile(folder / "train.bin")
    VAL.astype("<u4").tofile(folder / "val.bin")
    return str(folder)


def one_of_32_bits(folder: Path) -> list[str]:
    TRAIN[:1001].astype("<u2").tofile(folder / "a.bin")
    TRAIN[1001:].astype("<u4").tofile(folder / "b.bin")
    VAL.astype("<u2").tofile(folder / "c.bin")
    return [f"train={folder}/a.bin", f"train={folder}/b.bin", f"val={folder}/c.bin"]


FOREIGN = (llm_c, llm_c_files, llm_c_without_numbers, llama_3, raw_32_bits, one_of_32_bits)


def whole(tokens) -> np.ndarray:
    assert isinstance(tokens, TokenSequence)
    return tokens.read()


@pytest.mark.parametrize("write", FOREIGN)
def test_foreign_files_give_the_windows_of_the_same_tokens(write, tmp_path):
    TRAIN.astype("<u2").tofile(tmp_path / "train.bin")
    VAL.astype("<u2").tofile(tmp_path / "val.bin")
    ours = open_tokens(str(tmp_path), tokenizer="gpt2")
    (tmp_path / "other").mkdir()
    names = write(tmp_path / "other")
    if isinstance(names, str):
        assert is_prepared(names)
    theirs = open_tokens(names, tokenizer="gpt2")
    np.testing.assert_array_equal(whole(theirs.train), TRAIN)
    np.testing.assert_array_equal(whole(theirs.val), VAL)
    for order in ("shuffle", "random", "sequential"):
        for seq_len in (1, 16, 37):
            wanted = {"seq_len": seq_len, "order": order, "seed": 3}
            np.testing.assert_array_equal(
                theirs.train.windows(INDICES, **wanted), ours.train.windows(INDICES, **wanted)
            )
    batches = Batches(seq_len=8, global_batch_size=4)
    for (_, a), (_, b) in zip(
        *(read_steps(data.train, batches, start_step=5, stop_step=9) for data in (ours, theirs)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    again = open_tokens(theirs.names, tokenizer="gpt2")
    assert (again.fingerprint, again.train) == (theirs.fingerprint, theirs.train)


def test_one_shard_of_each_split_has_the_fingerprint_of_the_raw_files(tmp_path):
    TRAIN.astype("<u2").tofile(tmp_path / "train.bin")
    VAL.astype("<u2").tofile(tmp_path / "val.bin")
    (tmp_path / "other").mkdir()
    theirs = open_tokens(llm_c_without_numbers(tmp_path / "other"), tokenizer="gpt2")
    assert theirs.fingerprint == open_tokens(str(tmp_path), tokenizer="gpt2").fingerprint


def test_documents_of_llm_c_begin_with_their_end_of_text(tmp_path):
    data = open_tokens(llm_c_without_numbers(tmp_path), tokenizer="gpt2")
    documents = open_documents(data)
    starts = np.flatnonzero(TRAIN == 50_256)
    np.testing.assert_array_equal(documents.ranges(np.arange(len(documents)))[0], starts)
    np.testing.assert_array_equal(documents.read(7), TRAIN[starts[7] : starts[8]])


@pytest.mark.parametrize(("magic", "dtype"), [(20240520, "<u2"), (20240801, "<u4")])
def test_one_file_of_llm_c_is_split_by_position(magic, dtype, tmp_path):
    path = tmp_path / "all.bin"
    write_shard(path, TRAIN, magic=magic, dtype=dtype)
    data = open_tokens(path, tokenizer="gpt2")
    boundary = round(0.9 * len(TRAIN))
    np.testing.assert_array_equal(whole(data.train), TRAIN[:boundary])
    np.testing.assert_array_equal(whole(data.val), TRAIN[boundary:])
    starts = np.flatnonzero(TRAIN == 50_256)
    for _ in range(2):  # the second time by the index
        documents, val = open_documents(data), open_documents(data, "val")
        np.testing.assert_array_equal(documents.ranges(np.arange(len(documents)))[0], starts[starts < boundary])
        np.testing.assert_array_equal(
            val.ranges(np.arange(len(val)))[0], [0, *(starts[starts > boundary] - boundary).tolist()]
        )
        np.testing.assert_array_equal(val.read(1), TRAIN[starts[-len(val) + 1] :][: len(val.read(1))])


def test_shards_of_an_object_storage_are_read(s3, tmp_path):
    from pyarrow.fs import FileSystem

    llm_c(tmp_path)
    filesystem, bucket = FileSystem.from_uri(s3)
    for path in tmp_path.iterdir():
        with filesystem.open_output_stream(f"{bucket}/shards/{path.name}") as file:
            file.write(path.read_bytes())
    theirs, local = (open_tokens(name, tokenizer="gpt2") for name in (f"{s3}/shards", str(tmp_path)))
    assert theirs.fingerprint == local.fingerprint
    wanted = {"seq_len": 16, "order": "shuffle", "seed": 3}
    np.testing.assert_array_equal(theirs.train.windows(INDICES, **wanted), local.train.windows(INDICES, **wanted))


def test_ids_above_16_bits_are_read_and_those_outside_the_vocabulary_rejected(tmp_path):
    tokens = RNG.integers(0, 200_019, 3000)
    tokens[1500] = 200_018
    tokens.astype("<u4").tofile(tmp_path / "x.bin")
    data = open_tokens(str(tmp_path / "x.bin"), tokenizer="o200k_base")
    assert (data.vocab_size, data.end_of_text) == VOCABULARIES["o200k_base"]
    windows = data.train.windows(np.arange(300), seq_len=8, order="sequential", seed=0)
    assert windows.dtype == np.uint32
    np.testing.assert_array_equal(windows[:, :8].ravel(), tokens[:2400])
    with pytest.raises(DataError, match=r"The ids in .*x.bin must be below 100277, .* got \d+ at token"):
        open_tokens(str(tmp_path / "x.bin"), tokenizer="cl100k_base")
    tokens[:3] = 5
    (tokens % 50_257).astype("<u2").tofile(tmp_path / "x.bin")
    with pytest.raises(DataError, match=r"The ids in .*x.bin must be below 200019"):
        open_tokens(str(tmp_path / "x.bin"), tokenizer="o200k_base")


def test_few_bytes_are_tokens_of_16_bits_unless_the_vocabulary_is_larger(tmp_path):
    """Every second value may be 0 by chance. 128 bytes tell."""
    path = str(tmp_path / "x.bin")
    for num_tokens, tokenizer, read in ((62, "gpt2", 62), (64, "gpt2", 32), (62, "o200k_base", 31)):
        np.resize(np.array([7, 0], "<u2"), num_tokens).tofile(path)
        data = open_tokens(path, tokenizer=tokenizer)
        assert len(data.train) + len(data.val) == read
        assert whole(data.train)[:3].tolist() == ([7, 0, 7] if read == 62 else [7, 7, 7])


@pytest.mark.parametrize("version", [1, 7])
def test_files_by_split_have_the_vocabulary_of_the_tokenizer(version, tmp_path):
    for split, tokens in (("train", TRAIN), ("val", VAL)):
        write_shard(tmp_path / f"x_{split}_000000.bin", tokens, magic=20240801, version=version, dtype="<u4")
    named = [f"{split}={tmp_path}/x_{split}_000000.bin" for split in ("train", "val")]
    raw_32_bits(tmp_path)
    (tmp_path / "raw").mkdir()
    raw = raw_32_bits(tmp_path / "raw")
    for names in (named, raw, [raw, raw], {raw: 1.0, f"{tmp_path}/train.bin": 2.0}):
        data = open_tokens(names, tokenizer="cl100k_base")
        assert (data.vocab_size, data.end_of_text) == VOCABULARIES["cl100k_base"]
        assert int(data.train.windows(np.arange(9), seq_len=16, order="shuffle", seed=0).max()) > 0


def damaged_header(folder: Path) -> None:
    write_shard(folder / "x_train_000001.bin", TRAIN, version=2)


def wrong_count(folder: Path) -> None:
    path = folder / "x_train_000001.bin"
    write_shard(path, TRAIN)
    path.write_bytes(path.read_bytes() + b"\0\0")


def truncated(folder: Path) -> None:
    path = folder / "x_train_000001.bin"
    write_shard(path, TRAIN)
    path.write_bytes(path.read_bytes()[:2001])


def truncated_header(folder: Path) -> None:
    path = folder / "x_train_000001.bin"
    write_shard(path, TRAIN)
    path.write_bytes(path.read_bytes()[:12])


def negative_count(folder: Path) -> None:
    path = folder / "x_train_000001.bin"
    write_shard(path, TRAIN)
    path.write_bytes(path.read_bytes()[:8] + b"\xff" * 4 + path.read_bytes()[12:])


def questions(folder: Path) -> None:
    write_shard(folder / "x_train_000001.bin", TRAIN, magic=20240522)


def other_magic(folder: Path) -> None:
    write_shard(folder / "x_train_000001.bin", TRAIN, magic=20240521)


def empty_shard(folder: Path) -> None:
    (folder / "x_train_000001.bin").touch()


def header_alone(folder: Path) -> None:
    write_shard(folder / "x_train_000001.bin", TRAIN[:0])


def other_width(folder: Path) -> None:
    write_shard(folder / "x_train_000001.bin", TRAIN, magic=20240801, dtype="<u4")


def empty_train(folder: Path) -> None:
    (folder / "x_val_000000.bin").rename(folder / "val.bin")
    (folder / "train.bin").touch()


def raw_shard(folder: Path) -> None:
    TRAIN.astype("<u2").tofile(folder / "x_train_000001.bin")


def other_dataset(folder: Path) -> None:
    write_shard(folder / "x_train_000001.bin", TRAIN)
    write_shard(folder / "y_train_000001.bin", TRAIN)


def beside_train_bin(folder: Path) -> None:
    write_shard(folder / "x_train_000001.bin", TRAIN)
    TRAIN.astype("<u2").tofile(folder / "train.bin")


def no_train(_: Path) -> None:
    """Leave the validation alone."""


ODD_SIZE = f"must have {1024 + 2 * len(TRAIN)} bytes for the {len(TRAIN)} tokens of its header, got"
BEGIN = "must begin with the number 20240520 of llm.c's header, as {}/x_val_000000.bin does"


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (
            damaged_header,
            "must have a header of version 1, as llm.c and modded-nanogpt write it, got version 2.",
        ),
        (wrong_count, f"{ODD_SIZE} {1026 + 2 * len(TRAIN)}. Copy or make the file again."),
        (truncated, f"{ODD_SIZE} 2001."),
        (truncated_header, f"{ODD_SIZE} 12."),
        (negative_count, "must have 1024 bytes for the -1 tokens of its header, got"),
        (questions, "must hold tokens of text, got llm.c's questions of an evaluation. Name its token files."),
        (
            raw_shard,
            f"x_train_000001.bin {BEGIN}, got {TRAIN[1] << 16 | TRAIN[0]}. Copy it again, or name the files as",
        ),
        (other_magic, f"x_train_000001.bin {BEGIN}, got 20240521. Copy it again, or name the files as"),
        (empty_shard, "x_train_000001.bin must hold tokens, got an empty file. Copy it again."),
        (header_alone, "x_train_000001.bin must hold tokens, got a header without any. Copy or make the file again."),
        (other_width, "x_val_000000.bin must be a file of 32-bit tokens with llm.c's header as {}/x_train_000001.bin"),
        (empty_train, "{} must have training tokens, got 0. Copy it again, or prepare more text."),
        (other_dataset, "must have the shards of one dataset, got those of x, y. Name the files as train=... and"),
        (beside_train_bin, "must have the shards of one dataset, got those of x and train.bin. Name the files as"),
        (no_train, "must have shards of both splits, got none named ..._train_....bin. Copy them too, or name"),
    ],
)
def test_damaged_and_mixed_shards_are_one_sentence(write, sentence, tmp_path, capsys):
    write_shard(tmp_path / "x_val_000000.bin", VAL)
    write(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert main(["inspect", str(tmp_path), "--tokenizer", "gpt2"]) == 2
    error = capsys.readouterr().err
    assert sentence.format(tmp_path) in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "names",
    [
        "{}/*.bin",
        ["{}/x_val_000000.bin", "{}/other.bin", "{}/x_train_000001.bin"],
        ["{}/train.bin", "{}/x_val_000000.bin"],
        ["train={}/*.bin", "val={}/x_val_000000.bin"],
        {"{}/*.bin": 1, "{}/other.bin": 2},
    ],
    ids=str,
)
def test_a_pattern_or_a_list_with_the_files_of_both_splits_is_rejected(names, tmp_path):
    for name in ("x_train_000001", "x_train_000002", "x_val_000000"):
        write_shard(tmp_path / f"{name}.bin", VAL)
    for name in ("train", "other"):
        VAL.astype("<u2").tofile(tmp_path / f"{name}.bin")
    given = [name.format(tmp_path) for name in ([names] if isinstance(names, str) else names)]
    with pytest.raises(
        DataError, match=r"must be of one split, got .*train.*\.bin and .*/x_val_000000\.bin\. Name their"
    ):
        open_tokens(dict.fromkeys(given, 1.0) if isinstance(names, dict) else given, tokenizer="gpt2")
    assert len(open_tokens(f"{tmp_path}/x_train_*.bin", tokenizer="gpt2").names) == 2


def test_a_folder_of_shards_is_no_text(tmp_path):
    llm_c(tmp_path)
    with pytest.raises(DataError, match=r"must hold text to prepare, got a folder of token files. Use it as it is."):
        prepare(str(tmp_path), tmp_path / "out", PrepareOptions(tokenizer="bytes"))


def test_inspect_counts_the_bytes_of_the_tokens(gpt2, tmp_path):
    assert inspect(llama_3(tmp_path), tokenizer="r50k_base").num_bytes == {"train": 4 * len(TRAIN), "val": 4 * len(VAL)}


def test_shards_of_nanochat_give_the_tokens_of_their_texts(tmp_path):
    texts = [f"Text {number} of a shard. " * (number % 7 + 1) for number in range(50)]
    for number, part in enumerate((texts[:20], texts[20:45], texts[45:])):
        table = pa.table({"text": part})
        pq.write_table(table, tmp_path / f"shard_{number:05d}.parquet", row_group_size=8)
    names = [f"train={tmp_path}/shard_0000[01].parquet", f"val={tmp_path}/shard_00002.parquet"]
    prepare(names, tmp_path / "out", PrepareOptions(tokenizer="bytes"))
    data = open_tokens(tmp_path / "out", tokenizer="bytes")
    for tokens, part in ((data.train, texts[:45]), (data.val, texts[45:])):
        expected = np.concatenate([[*text.encode(), 256] for text in part])
        np.testing.assert_array_equal(whole(tokens), expected)
