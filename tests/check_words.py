"""A check for words that readers have stumbled over, docstrings that open with a noun clause, and package indexes.

    python tests/check_words.py [FILE ...]

Without FILE, the check reads all files that git tracks, or would track, except licenses, locked requirements, binary
files and results of benchmarks. It prints each violation and exits with code 1 if it has found one.
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORDS = {
    "set aside": "quarantine",
    "sets aside": "quarantine",
    "setting aside": "quarantine",
    "taken away": "preempted",
    "obey": "acknowledge",
    "obeys": "acknowledge",
    "obeyed": "acknowledge",
    "refuse": "reject",
    "refuses": "reject",
    "refused": "reject",
    "refusal": "reject",
    "peer": "baseline",
    "peers": "baseline",
    "board": "control actor",
    "outlast": "survive",
    "outlasts": "survive",
    "anew": "again",
    "meanwhile": "while",
    "at hand": "available",
    "for ever": "forever",
    "said in a sentence": "in one sentence",
    "tests of the whole": "integration tests",
    "what it does not": "Limitations",
}
"""The word to use in place of each phrase."""

_SKIPPED = re.compile(
    r"(?:.*/)?(?:LICENSE|requirements\.txt|\.gitignore)|benchmarks/results/.*|.*/fixtures/.*|.*\.(?:gz|png)"
)
# These files hold the words as examples.
_EXAMPLES = (Path(__file__), Path(__file__).with_name("test_check_words.py"))
# A mirror serves as well as the public index, so no file names a host. The brackets keep this line from being one.
_INDEX_HOST = re.compile(r"(?:p[y]pi|python[h]osted)\.org|registry\.n[p]mjs", re.I)
_NOUN_CLAUSE = re.compile(r'"""(?:How|Of|What|Where|Whether|Which) \w.*')


def find_violations(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the description of each violation.

    A phrase matches in any case, at word boundaries.

    Args:
        text: the content of a file.
    """
    for word, use in WORDS.items():
        # A phrase may go on in the next line, also in a comment.
        phrase = r"\s+(?:#\s*)?".join(map(re.escape, word.split()))
        for match in re.finditer(rf"(?<![\w-]){phrase}(?![\w-])", text, re.I):
            yield text.count("\n", 0, match.start()) + 1, f"{word!r} must be written as {use!r}"
    for match in _INDEX_HOST.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, "a package must be named without the host of an index"
    for match in _NOUN_CLAUSE.finditer(text):
        number = text.count("\n", 0, match.start()) + 1
        yield number, f"a docstring must open with the name of the thing or with a verb, got {match[0]!r}"


def list_files() -> Iterable[Path]:
    """Yield the files that the check reads by default."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for path in (ROOT / name for name in names.rstrip("\0").split("\0") if not _SKIPPED.fullmatch(name)):
        if path.is_file() and path not in _EXAMPLES:
            yield path


def main(arguments: Sequence[str]) -> int:
    """Print the violations in these files, and return the exit code."""
    found = 0
    for path in map(Path, arguments) if arguments else list_files():
        for number, problem in find_violations(path.read_text(encoding="utf-8", errors="replace")):
            found += 1
            print(f"{path}:{number}: {problem}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
