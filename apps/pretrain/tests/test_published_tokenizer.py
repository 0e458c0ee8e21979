"""The tokenizer of weights in Hugging Face's format."""

import json
import os

import huggingface_hub
import pytest
from flax import nnx

from nnx_gpt2 import GPT2, GPT2Config
from owt_data import load_tokenizer, tokenizer_files, train_tokenizer
from pretrain import PRESETS, main
from pretrain._errors import UsageError
from pretrain._export.model_card import repeated_config
from pretrain._resolve.origin import find_origin, with_weights_of
from pretrain._run.published_tokenizer import published_tokenizer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tokenizer with as many ids as `bytes`, and the same end of text, but other ids."""
    place = tmp_path_factory.mktemp("trained")
    (place / "book.txt").write_text("Some words, and more words.")
    train_tokenizer(place / "book.txt", place / "tokenizer", vocab_size=257)
    return str(place / "tokenizer" / "tokenizer.json")


@pytest.fixture
def save(tmp_path):
    """A function that writes a model with the files of a tokenizer, as `export` does, and returns the folder."""

    def write(tokenizer, vocab_size=257):
        config = GPT2Config(vocab_size=vocab_size, seq_len=8, num_layers=1, num_heads=2, embed_dim=8, norm_epsilon=1e-6)
        GPT2(config, rngs=nnx.Rngs(0)).save_pretrained(tmp_path / "out", end_of_text=256)
        for name, text in tokenizer_files(tokenizer, max_tokens=8).items():
            (tmp_path / "out" / name).write_text(text)
        return tmp_path / "out"

    return write


def test_an_export_has_its_own_tokenizer(trained, save, tmp_path, capsys):
    out = save(trained)
    assert published_tokenizer(str(out), 257) == str(out / "tokenizer.json")
    assert main(["export", str(out), str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (out / "tokenizer.json").read_bytes()
    (tmp_path / "other.txt").write_text("Other words, and some more of them. " * 9)
    ids = load_tokenizer(trained).encode_ordinary("Other words")
    assert ids != load_tokenizer("bytes").encode_ordinary("Other words")
    capsys.readouterr()
    assert main(["eval", str(out), "--data", str(tmp_path / "other.txt")]) == 0
    assert json.loads(capsys.readouterr().out)["num_tokens"] == len("Other words, and some more of them. " * 9)


def test_a_run_from_an_export_takes_its_tokenizer(trained, save):
    out = save(trained)
    config = with_weights_of(PRESETS["quickstart"](), str(out))
    assert config.prepare.tokenizer == str(out / "tokenizer.json")


def test_a_run_from_an_export_takes_its_model_and_names_its_place_for_all_machines(save, monkeypatch):
    out = save("bytes")
    monkeypatch.chdir(out.parent)
    config = with_weights_of(PRESETS["quickstart"](), "out")
    assert (config.model.seq_len, config.model.num_layers, config.model.norm_epsilon) == (8, 1, 1e-6)
    origin = find_origin(config)
    assert origin is not None
    assert (origin.place, origin.step, origin.weights_only) == (str(out), None, True)


def test_a_named_tokenizer_keeps_its_name(save):
    assert published_tokenizer(str(save("bytes")), 257) == "bytes"


@pytest.mark.shared_data
@pytest.mark.skipif(not os.environ.get("TIKTOKEN_CACHE_DIR"), reason="needs TIKTOKEN_CACHE_DIR")
def test_the_tokenizer_of_gpt2_keeps_its_name(save):
    assert published_tokenizer(str(save("gpt2", 50_257)), 50_257) == "gpt2"


def test_files_that_cannot_be_downloaded_are_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match=r"^the download of the tokenizer of org/model has failed: .+ the command\.$"):
        published_tokenizer("org/model", 257)


def test_without_a_tokenizer_the_end_of_text_tells(save):
    out = save("bytes")
    (out / "tokenizer.json").unlink()
    assert published_tokenizer(str(out), 257) == "bytes"
    assert published_tokenizer(str(out), 256) is None


def test_a_tokenizer_with_more_ids_than_the_model_is_not_its_own(trained, save):
    out = save(trained)
    assert published_tokenizer(str(out), 256) is None


def test_a_damaged_tokenizer_is_one_sentence_when_it_is_needed(trained, save, capsys):
    out = save(trained)
    (out / "tokenizer.json").write_text("{")
    assert main(["sample", str(out)]) == 2
    assert "must be a tokenizer.json of the library tokenizers" in capsys.readouterr().err


def test_the_repeated_configuration_names_the_tokenizer_in_its_folder(trained):
    config = PRESETS["quickstart"]().with_options({"prepare.tokenizer": trained})
    assert json.loads(repeated_config(config))["prepare"]["tokenizer"] == "tokenizer.json"
    assert json.loads(repeated_config(PRESETS["quickstart"]()))["prepare"]["tokenizer"] == "bytes"
