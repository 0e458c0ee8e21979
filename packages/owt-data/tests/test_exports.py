import subprocess
import sys

import owt_data


def test_public_names_load_and_are_seen_by_completion():
    assert "open_tokens" in dir(owt_data)
    for name in dir(owt_data):
        assert getattr(owt_data, name) is not None


def test_unknown_names_are_rejected():
    assert not hasattr(owt_data, "Nothing")


def test_importing_it_imports_nothing_heavy():
    code = "import sys, owt_data; sys.exit(bool({'jax', 'ray', 'datasets'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_preparing_files_does_not_import_datasets(articles, tmp_path):
    command = ["prepare", str(articles), str(tmp_path / "out"), "--tokenizer", "bytes"]
    code = f"import sys; from owt_data._cli import main; sys.exit(main({command}) or 'datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
