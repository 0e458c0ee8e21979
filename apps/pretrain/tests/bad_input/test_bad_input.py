"""Bad input of every kind: one sentence and exit code 2, or the right result, and nothing left behind."""

import json
import shlex
import shutil

import jax
import pytest

from pretrain import main
from pretrain._errors import rejection
from pretrain._export.new_folder import new_folder
from pretrain._run.files import write_json
from ray_jax_launch import UnsavedCheckpointError

SMALL = "--data book.txt --model.num-layers 1 --model.num-heads 2 --model.embed-dim 16 --train.max-steps 10"
TRAIN = f"--name run {SMALL}"
SAMPLE = "sample run --max-new-tokens 3"
EVAL = "eval run"
EXPORT = "export run out"
COMMANDS = (TRAIN, SAMPLE, EVAL, EXPORT)
END = 2**53
LONG = "n" * 300


def unsaved(place):
    """Delete the checkpoints, so that the description is that of `config.json`."""
    shutil.rmtree(place / "runs/run/checkpoints")


def config_of(contents):
    """Damage the `config.json` of a run without checkpoints, or delete it."""

    def damage(place):
        unsaved(place)
        path = place / "runs/run/config.json"
        path.unlink() if contents is None else path.write_bytes(contents)

    return damage


def field(*names, value):
    """Change a field in the `config.json` of a run without checkpoints."""

    def damage(place):
        unsaved(place)
        write_json(place / "runs/run/config.json", with_field(place, names, value))

    return damage


def field_of_checkpoint(*names, value):
    """Return a description with another field, for the checkpoint of the run."""

    def damage(place):
        unsaved(place)
        return with_field(place, names, value)

    return damage


def with_field(place, names, value):
    description = inner = json.loads((place / "runs/run/config.json").read_text())
    for name in names[:-1]:
        inner = inner[name]
    inner[names[-1]] = value
    return description


def folder_for(name):
    """Put a folder in the place of a file of the run."""

    def damage(place):
        path = place / "runs/run" / name
        path.unlink()
        path.mkdir()

    return damage


def file_for(name):
    """Put a file in the place of a folder of the run."""

    def damage(place):
        path = place / "runs/run" / name
        shutil.rmtree(path, ignore_errors=True)
        path.write_text("a file")

    return damage


def without(name):
    """Delete a file of the run."""

    def damage(place):
        (place / "runs/run" / name).unlink()

    return damage


def nothing(place):
    pass


# A command line without a damaged file, and what its sentence has.
LINES = [
    ("--data nowhere.txt", "nowhere.txt"),
    ("--data nowhere.bin", "nowhere.bin"),
    ("--data book.txt --model.seq-len 1024", "book.txt must have at least 1025 validation tokens"),
    (f"--data book.txt --train.max-tokens {10**15}", "train.max_tokens must give at most 2147483647 steps, got None"),
    ("--data train=book.txt,val=nowhere.txt", "nowhere.txt"),
    ("--data train=book.txt,val=ids.bin", "data must be text or token files for both splits, got train=book.txt,val="),
    ("--data book.txt --prepare.num-processes 0", "prepare.num_processes must be at least 1, got 0."),
    ("--data book.txt --prepare.cache-path odd.bin/x", "odd.bin"),
    ("--data book.txt --prepare.cache-path s3://bucket/x", "prepare.cache_path must be a folder that all nodes"),
    (
        "--data book.txt --data-mode stream --train.max-epochs 2",
        "train.max_epochs must be absent with data_mode stream, which does not know the number of tokens",
    ),
    *(
        (f"--hardware local --data {data} --data-mode stream", "data must be text, as NAME or train=NAME,val=NAME,")
        for data in ("ids.bin", "a=1:book.txt,b=1:book.jsonl")
    ),
    (
        "--hardware local --data book.txt --data-mode stream --prepare.split position",
        "split must be start for one source that is read while it is prepared, got 'position'.",
    ),
    ("--hardware local --data nowhere.txt --data-mode stream", "nowhere.txt"),
    ("--data book.txt --tokenizer gpt2", "The files of tokenizer 'gpt2' could not be downloaded: "),
    ("--data someone/something", "must be a file or a dataset of the Hugging Face hub, got neither"),
    ("--data odd.bin", "odd.bin"),
    ("--data ids.bin", "must be below 257, the vocabulary of the tokenizer, got 300 at token 0."),
    (
        "--data book.txt --hardware cpu:3",
        "must be divisible by 3 (3 data-parallel devices x 1 accumulation steps), got 16.",
    ),
    (
        "--data book.txt --hardware cpu:2 --train.grad-accum-steps 16",
        "must be divisible by 32 (2 data-parallel devices x 16 accumulation steps), got 16. Change it, train.grad",
    ),
    (
        "--data book.txt --hardware tpu:v7x:2x2x2 --train.global-batch-size 24",
        "must be divisible by 16 (16 data-parallel devices x 1 accumulation steps), got 24. Change it, train.grad",
    ),
    (
        "--data book.txt --hardware tpu:v6e:4x4 --mesh.tensor 8 --model.num-heads 8",
        "tpu:v6e:4x4: mesh axis tensor must divide the 4 devices of one process, got 8. Choose a smaller size, or",
    ),
    (
        "--data book.txt --hardware gpu:3x2 --mesh.fsdp 4 --train.global-batch-size 24",
        "gpu:3x2: mesh axes fsdp and tensor must be at least 1 and their product must divide the 6 devices, got 4",
    ),
    (
        "--data book.txt --hardware tpu:v4:2x2x2:2 --mesh.fsdp 16",
        "a product that divides the 8 devices of one TPU slice, got 16 and 1. Choose smaller sizes: only the data",
    ),
    ("--data book.txt --hardware tpu", "hardware"),
    (
        "--data book.txt --tokenizer cl100k",
        "error: --tokenizer must be bytes, gpt2, r50k_base, p50k_base, cl100k_base, o200k_base, or the path of a "
        "tokenizer.json, got cl100k. Did you mean cl100k_base?\n",
    ),
    ("--data book.txt --tokenizer gpt4", "or the path of a tokenizer.json, got gpt4.\n"),
    ("--data book.txt --tokenizer gpt-2", "got gpt-2. Did you mean gpt2?\n"),
    ("--data book.txt --tokenizer ''", "or the path of a tokenizer.json, got ''.\n"),
    ("--data book.txt --tokenizer ~nosuch/x.json", "error: ~nosuch/x.json must begin with ~ or the ~name of a us"),
    (
        "--data book.txt --tokenizer weights::",
        "error: --tokenizer must name the end-of-text token after ::, got weights",
    ),
    ("--data book.txt --hardware gpu:2", "This machine must have 2 GPUs for gpu:2, got 0. Ask for other hardware"),
    ("--data book.txt --storage-path book.txt", "must be accessible, got Not a directory."),
    ("--data book.txt --storage-path new/deep --model.vocab-size 100", "--model.vocab-size must be at least 257"),
    ("--data book.txt --name 'a b?c'", "name must be a printable text that begins with no dot or space and has no /"),
    ("--data book.txt --storage-path loop", "got Too many levels of symbolic links"),
    ("--data book.txt --storage-path file:book.txt", "a storage path must be"),
    ("--data book.txt --storage-path nowhere://x", "nowhere://x"),
    (
        "--data book.txt --model.vocab-size 100",
        "--model.vocab-size must be at least 257, the vocabulary of the tokenizer bytes",
    ),
    (f"--data book.txt --seed {END}", f"--seed must be an integer of at most {END - 1}, got {END}"),
    (f"--data book.txt --name {LONG}", "name must have at most 255 bytes, got"),
    (f"{SMALL} --hardware local --train.global-batch-size 100000000", "the model and its batch must fit the"),
    (
        "sample nowhere",
        "run must be the folder or URI of a run, its name in runs, a folder of `export`, or published weights such as "
        "gpt2, got nowhere. runs has run.",
    ),
    ("sample nowhere --top-k 0", "--top-k must be at least 1, got 0."),
    ("sample nowhere --top-p 1.5", "--top-p must be above 0 and at most 1, got 1.5."),
    ("sample nowhere --temperature nan", "--temperature must be from 0 to 1e+30, got nan."),
    ("sample nowhere --temperature 3.5e38", "--temperature must be from 0 to 1e+30, got 3.5e+38."),
    ("--train.sample-tokens 1000001", "train.sample_tokens must be at least 0 and at most 1000000, got 1000001."),
    ("--peak-tflops 1e-300", "peak_tflops must be at least 1e-06 and below 1000000000.0, got 1e-300."),
    ("--train.micro-batch-size outo", "--train.micro-batch-size must be an integer, auto or none, got outo."),
    ("--train.log-every 9007199254740993", "--train.log-every must be an integer of at most 9007199254740991, got 9"),
    ("--train.max-epochs 1e300", "train.max_epochs must be above 0 and at most 1e+39, got 1e+300."),
    (f"{SMALL} --model.dtype float64", "model.dtype and model.param_dtype must be bfloat16 or float32, got float64."),
    (f"{SMALL} --model.attention splash", "attention backend splash must have a multiple of 128 positions, got "),
    (f"{SMALL} --model.attention cudnn", "attention backend cudnn must have the type bfloat16, got float32. Choose"),
    (
        "--data book.txt --hardware cpu:2 --model.attention cudnn --model.dtype bfloat16",
        "model.attention must not be cudnn without a GPU, got cpu:2 on cpu. Choose auto.",
    ),
    (
        f"{SMALL} --optimizer.schedule wsd --train.max-steps 20 --optimizer.warmup-steps 18",
        "optimizer.warmup_steps and decay_steps must fit into the 20 steps of the run, got 18 and 4.",
    ),
    ("runs hf://a/b", "got hf://a/b: hf is no object storage. Check the address"),
    ("sample hf://a/b", "got hf://a/b: hf is no object storage. Check the address"),
    ("--config ''", "--config must be a file, got an empty name. Give a file, or leave the option out."),
    ("--config /proc/self/mem", "--config must be readable, got /proc/self/mem (Input/output error). Give another fi"),
    ("report run --out runs/run/metrics.jsonl", "--out must be a new file or a page that it can replace, got runs/run"),
    ("report run --out ''", "--out must be the name of a file, got ''. Write a name such as report.html."),
    ("report run --out page.html/", "--out must be the name of a file, got page.html/. Write a name such as"),
    ("runs nowhere", "the storage path must be a folder of runs, got nowhere, which does not exist. Train a run"),
    ("runs book.txt", "the storage path must be a folder of runs, got book.txt, a file. Give a folder."),
    ("runs runs/run", "the storage path must be a folder of runs, got runs/run, a run itself. Give the folder that"),
    ("sample ''", "or published weights such as gpt2, got ''. runs has run."),
    ("sample nowhere --max-new-tokens -5", "--max-new-tokens must be from 0 to 1000000, got -5."),
    (
        f"sample nowhere --max-new-tokens {10**15}",
        "--max-new-tokens must be from 0 to 1000000, got 1000000000000000.",
    ),
    (
        f"sample nowhere --max-new-tokens {10**20}",
        "--max-new-tokens must be an integer of at most 9007199254740991, got 1000000",
    ),
    ("sample nowhere --num-samples 0", "--num-samples must be from 1 to 2147483647, got 0."),
    (f"sample nowhere --num-samples {2**31}", "--num-samples must be from 1 to 2147483647, got 2147483648."),
    (f"{EVAL} --batch-size {2**31}", "--batch-size must be from 1 to 2147483647, got 2147483648."),
    (f"{SAMPLE} --seed {END}", f"--seed must be an integer of at most {END - 1}, got {END}"),
    (f"{SAMPLE} --seed -1", f"--seed must be at least 0 and at most {END - 1}, got -1"),
    (f"sample {LONG}", "File name too long"),
    ("sample loop", "Too many levels of symbolic links"),
    ("sample book.txt", "or published weights such as gpt2, got book.txt. runs has run."),
    ("eval nowhere", "or published weights such as gpt2, got nowhere."),
    ("eval .", "or published weights such as gpt2, got .."),
    ("eval gpt3", "or published weights such as gpt2, got gpt3."),
    (
        "eval gpt2@best",
        "gpt2@best must be a checkpoint of a run, got a published name, which has one set of weights. L",
    ),
    (
        "eval user/näme",
        "error: path or name must be a folder, or NAME or OWNER/NAME on the hub, of the letters a to z, ",
    ),
    ("eval weights@best", "weights@best must be a checkpoint of a run, got a folder of `export`, which has one set of"),
    ("sample weights@1", "weights@1 must be a checkpoint of a run, got a folder of `export`, which has one set of wei"),
    ("eval run@1@1", "the name of a checkpoint must have at most one @, as RUN@STEP and RUN@best have, got run@1@1."),
    ("diff run weights", "weights must be a run, got a folder of weights alone, as `export` writes it. Name a run."),
    (f"{EVAL} --batch-size 0", "--batch-size must be from 1 to 2147483647, got 0."),
    (f"{EVAL} --data loop", "loop"),
    (f"{EVAL} --data train=letters.bin", "got 'train=letters.bin': val has no name."),
    (f"{EVAL} --data leters.bin", "leters.bin must be a token file, got a name that does not exist. Did you mean"),
    ("export run s3://bucket/x", "out must be a folder, got s3://bucket/x. Export to a folder, and copy the files"),
    ("export run ''", "out must be a new or empty folder, got an empty text. Give a name."),
    ("export run book.txt/x", "must be accessible, got Not a directory"),
    ("export run book.txt", "out must be a new or empty folder, got book.txt."),
    ("export run loop", "out must be a new or empty folder, got loop."),
    ("export run .", "out must be a new or empty folder, got ."),
    ("export run out --dtype float8", "--dtype must be bfloat16, float16 or float32 or none, got float8."),
    ("export run out --weights average", "error: --weights must be last for"),
    ("export run out --push-to out", "--push-to must be OWNER/NAME of a repository on the hub, got out."),
]
# Contents of the `config.json` of a run without checkpoints, and what the sentence has.
CONFIGS = [
    (config_of(b""), "Invalid JSON: EOF while parsing a value"),
    (config_of(b'{"config": {"pre'), "Invalid JSON: EOF while parsing a string"),
    (config_of(b"[1]"), "Input should be an object"),
    (config_of(b'{"config": {}, "data": 3, "format": 1}'), "config.prepare: Field required"),
    (config_of(b"\xff\xfe{"), "Invalid JSON: expected value"),
    (field("config", "model", "num_layers", value="1"), "config.model.num_layers: Input should be"),
    (field("config", "model", "num_layers", value=0), "config.model: model.num_layers must be"),
    (field("data", value=7), "data: Input should be an object"),
    (field("data", "tokens", value=7), "data.tokens.str: Input should be a valid string"),
    (field("versions", value=[]), "versions: Input should be an object"),
]
DEEPER = field_of_checkpoint("config", "model", "num_layers", value=2)
# A command line, what is damaged before, and what the sentence has.
DAMAGED = [
    *(
        (line, damage, f"config.json must be JSON as a run writes it, got an error in it ({message}")
        for damage, message in CONFIGS
        for line in COMMANDS
    ),
    (TRAIN, folder_for("config.json"), "config.json must be a file, got something else. Move it away, or choose"),
    (
        f"{TRAIN} --optimizer.learning-rate 0.01",
        without("config.json"),
        "optimizer.learning_rate must be 0.002, its value at the start of the run in",
    ),
    *(
        (line, damage("format", value=7), "have format 1, which pretrain ")
        for damage in (field, field_of_checkpoint)
        for line in (*COMMANDS, "report run")
    ),
    *(
        (line, field_of_checkpoint("config", "train", "unknown", value=7), "got a difference, config.train.unknown,")
        for line in COMMANDS
    ),
    (SAMPLE, field_of_checkpoint("config", "model", "num_layers", value=2), "error: the checkpoint must hold the arr"),
    (EVAL, field_of_checkpoint("config", "model", "embed_dim", value=32), "error: the checkpoint must hold the arrays"),
    (EXPORT, field_of_checkpoint("config", "model", "scan_layers", value=True), "error: the checkpoint must hold the"),
    pytest.param(
        f"{TRAIN} --model.num-layers 2",
        lambda place: (without("result.json")(place), DEEPER(place))[1],
        "error: the checkpoint must hold the arrays",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "--data book.txt --model.vocab-size 999999999",
        nothing,
        "the model and its batch must fit the",
        marks=pytest.mark.slow,
    ),
    (TRAIN, folder_for("metrics.jsonl"), "metrics.jsonl must be a file, got something else."),
    (TRAIN, folder_for("starts.jsonl"), "starts.jsonl must be a file, got something else."),
    (TRAIN, folder_for("result.json"), "result.json must be a file, got something else."),
    (TRAIN, file_for("checkpoints"), "checkpoints must be a folder, got a file."),
]


@pytest.mark.parametrize(
    ("line", "damage", "message"), [*((line, nothing, message) for line, message in LINES), *DAMAGED]
)
def test_rejected(line, damage, message, place, save, rejected):
    if (description := damage(place)) is not None:
        save(description)
    assert message in rejected(shlex.split(line))


def test_what_is_damaged_has_a_copy(place, capsys):
    """Each checkpoint holds a copy of `config.json`, and a damaged `result.json` is no result."""
    path = place / "runs/run/config.json"
    expected = path.read_text()
    for number, contents in enumerate((b"", b"[1]", b"\xff", None)):
        path.unlink() if contents is None else path.write_bytes(contents)
        assert main(["export", "run", f"out{number}"]) == 0
    assert main(shlex.split(TRAIN)) == 0
    assert "is finished; choose another --name for a new one\nsteps" in capsys.readouterr().out
    assert path.read_text() == expected


def test_a_folder_has_one_export_at_a_time(place, rejected):
    with new_folder(place / "out"):
        assert f"Another command exports to {place / 'out'}. Wait" in rejected(shlex.split(EXPORT))
    assert main(shlex.split(EXPORT)) == 0


@pytest.mark.parametrize(
    ("line", "out"),
    [
        (f"{EVAL} --batch-size 100000000", '"step": 1'),
        *(
            (f"{EVAL} --data {data}", '"num_tokens": ')
            for data in ("letters.bin", "train=letters.bin,val=letters.bin", "a=1:letters.bin,b=2:again.bin")
        ),
        (f"{SAMPLE} --seed {END - 1}", "\n"),
        ("sample file:$PLACE/runs/run --max-new-tokens 3 --num-samples 40", "\n"),
        ("export run file://$PLACE/out", "wrote the model of step 1 to file://"),
    ],
)
def test_right(line, out, place, capsys):
    assert main(shlex.split(line.replace("$PLACE", str(place)))) == 0
    captured = capsys.readouterr()
    assert out in captured.out
    assert captured.err == ""
    assert ("out" in line) == (place / "out" / "model.safetensors").exists()


def test_a_failed_allocation_is_rejected_in_one_sentence():
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.numpy.zeros(10**13).block_until_ready()
    expected = "the model and its batch must fit the memory, got RESOURCE_EXHAUSTED: Out of memory allocating"
    assert (rejection(caught.value) or "").startswith(expected)
    assert rejection(KeyError("step")) is None


def test_a_failed_save_is_no_lack_of_memory():
    text = "checkpoint 2 must be written, got RESOURCE_EXHAUSTED: too many open files. Check the storage."
    assert rejection(UnsavedCheckpointError(text)) == text


def test_a_null_character_in_the_name_of_a_configuration_is_rejected(capsys):
    assert main(["--config", "a\0b.toml"]) == 2
    assert "--config must be the name of a file, got one with a null character." in capsys.readouterr().err


@pytest.mark.parametrize("command", [f"--name run {SMALL}", "sample run", "export run out"])
def test_a_newer_config_is_rejected_also_beside_a_checkpoint(command, place, rejected):
    """The checkpoint has a description of this format."""
    config = place / "runs/run/config.json"
    config.write_text(config.read_text().replace('"format": 1', '"format": 99'))
    assert "config.json must have format 1, which pretrain" in rejected(shlex.split(command))
