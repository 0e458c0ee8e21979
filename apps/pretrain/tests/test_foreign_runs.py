"""Runs on token files of other programs, on tokens of 32 bits, and with a tokenizer of a file."""

import pytest
from many_runs import results

SCRIPT = """
from owt_data import open_tokens, train_tokenizer
from pretrain._commands.evaluate import evaluate
from rich.console import Console

def evaluated(name):
    found = evaluate(name, data=None, batch_size=8, console=Console(quiet=True))
    return found.val_loss, found.val_bits_per_byte

train(changed(BASE, name="text"))
cached = read_description(RunFolder(Path("runs/text").absolute())).data.tokens
tokens = {split: np.fromfile(Path(cached, f"{split}.bin"), "<u2") for split in ("train", "val")}

def write(folder, split, number, part, magic, version, dtype):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(part)
    Path(folder).mkdir(exist_ok=True)
    path = Path(folder, f"book_{split}_{number:06d}.bin")
    path.write_bytes((header.tobytes() if magic else b"") + part.astype(dtype).tobytes())

for split, part in tokens.items():
    for number, shard in enumerate(np.array_split(part, 3 if split == "train" else 1)):
        write("llm.c", split, number, shard, 20240520, 1, "<u2")
        write("llama", split, number, shard, 20240801, 7, "<u4")
    write("raw32", split, 0, part, 0, 0, "<u4")
end = digest("text", 13)
for name in ("llm.c", "llama", "raw32"):
    train(changed(BASE, name=name, data=name))
    found[name] = [digest(name, 13) == end, losses(name) == losses("text"), evaluated(name) == evaluated("text")]
rewind("llama", 4)
train(changed(BASE, name="llama", data="llama"))
found["continued"] = digest("llama", 13) == end

train_tokenizer("book.txt", "mine", vocab_size=270)
trained = changed(BASE, name="mine", prepare__tokenizer="mine")
train(trained)
shutil.copytree("mine", "copy")
shutil.rmtree("mine")
Path("copy").rename("elsewhere")
before = digest("mine", 13)
rewind("mine", 8)
train(changed(trained, prepare__tokenizer="elsewhere"))
model = load_trained("mine")
found["mine"] = [
    model.config.model.vocab_size, model.tokenizer.decode(model.tokenizer.encode_ordinary("A short book")),
    evaluated("mine")[1] > 0, digest("mine", 13) == before,
]

file = json.loads(Path("elsewhere/tokenizer.json").read_text())
vocab = file["model"]["vocab"]
vocab.update({piece: number + 70_000 for piece, number in vocab.items() if number > 255})
Path("large.json").write_text(json.dumps(file))
large = changed(trained, name="large", prepare__tokenizer="large.json", train__mask_documents=True)
train(large)
before = digest("large", 13)
rewind("large", 4)
train(large)
model = load_trained("large")
tokens = open_tokens(model.description.data.tokens, tokenizer="gpt2")
found["large"] = [
    model.config.model.vocab_size, evaluated("large")[1] > 0, digest("large", 13) == before, tokens.train.dtype.str,
]
found["other"] = rejection(changed(trained, prepare__tokenizer="bytes"))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return results(SCRIPT, tmp_path_factory.mktemp("runs"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llm.c", "llama", "raw32"])
def test_foreign_shards_train_the_run_of_the_same_tokens(name, found):
    assert found[name] == [True, True, True]


@pytest.mark.slow
def test_a_run_on_foreign_shards_continues_after_a_kill(found):
    assert found["continued"]


@pytest.mark.slow
def test_a_run_with_ids_above_16_bits_continues(found):
    assert found["large"] == [70_269, True, True, "<u4"]


@pytest.mark.slow
def test_a_run_with_a_trained_tokenizer_continues_with_the_same_file_elsewhere(found):
    assert found["mine"] == [270, "A short book", True, True]
    assert "tokenizer must be" in found["other"]
