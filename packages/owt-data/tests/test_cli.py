import json
import subprocess
import sys

import pytest

from owt_data._cli import main


def test_prepare_then_verify(articles, tmp_path, capsys):
    assert main(["prepare", str(articles), str(tmp_path / "out"), "--tokenizer", "bytes"]) == 0
    assert json.loads((tmp_path / "out/manifest.json").read_text())["tokenizer"] == "bytes"
    assert main(["verify", str(tmp_path / "out")]) == 0
    with (tmp_path / "out/val.bin").open("ab") as file:
        file.write(b"xx")
    assert main(["verify", str(tmp_path / "out")]) == 1
    assert "val.bin: expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["prepare", "nowhere.txt", "out"], "error: expected a file or folder, but nowhere.txt does not exist"),
        (["verify", "nowhere"], "error: expected manifest.json in nowhere, found none"),
    ],
)
def test_refusals_are_one_sentence_and_exit_2(args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    err = capsys.readouterr().err
    assert err.startswith(message)
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_unknown_options_exit_2(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["prepare", "a", "b", "--tokeniser", "bytes"])
    assert exit_.value.code == 2
    assert "--tokeniser" in capsys.readouterr().err


def test_help_imports_neither_datasets_nor_ray():
    code = (
        "import sys\nfrom owt_data._cli import main\n"
        "try: main(['prepare', '--help'])\n"
        "except SystemExit: sys.exit(bool({'datasets', 'ray', 'jax'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0
