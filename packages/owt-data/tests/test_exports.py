import subprocess
import sys

import owt_data


def test_public_names_are_sorted_and_load():
    assert owt_data.__all__ == sorted(
        owt_data.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name)
    )
    for name in owt_data.__all__:
        assert getattr(owt_data, name) is not None
    assert set(owt_data._MODULE_OF) <= set(owt_data.__all__)


def test_unknown_names_are_refused():
    assert not hasattr(owt_data, "Nothing")


def test_importing_it_imports_nothing_heavy():
    code = "import sys, owt_data; sys.exit(bool({'jax', 'ray', 'datasets'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
