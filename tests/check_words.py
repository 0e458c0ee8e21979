"""A check that files avoid the words of the glossary's column "not", and docstrings that open with a noun clause.

    python tests/check_words.py [FILE ...]

CONTRIBUTING.md holds the glossary. Without FILE, the check reads all files that git tracks, or would track, except
licenses, locked requirements, binary files and results of benchmarks. It prints each violation and exits with code 1 if
it has found one.
"""

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
GLOSSARY = ROOT / "CONTRIBUTING.md"
_SKIPPED = re.compile(
    r"(?:.*/)?(?:LICENSE|requirements\.txt|\.gitignore)|benchmarks/results/.*|.*/fixtures/.*|.*\.(?:gz|png)"
)
# These files hold the words as examples.
_EXAMPLES = (GLOSSARY, Path(__file__), Path(__file__).with_name("test_check_words.py"))
_ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \|$", re.M)
_NOUN_CLAUSE = re.compile(r'"""(?:How|Of|What|Where|Whether|Which) \w.*')


def read_glossary(text: str) -> dict[str, str]:
    """Return the standard word for each phrase of the glossary's column "not".

    Args:
        text: Markdown with a section `## Glossary`, which holds a table with the columns "use" and "not".

    Raises:
        ValueError: there is no such table.
    """
    section = re.search(r"^## Glossary$(.*?)(?=^## |\Z)", text, re.M | re.S)
    rows = _ROW.findall(section[1]) if section else []
    words = {phrase.strip(): use for use, phrases in rows[1:] for phrase in phrases.split(",")}
    if not words:
        raise ValueError("CONTRIBUTING.md must have a table in its section `## Glossary`, got none. Add the table.")
    return words


def find_violations(text: str, words: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Yield the line number and the description of each violation.

    Args:
        text: the content of a file.
        words: the standard word for each phrase to avoid. A phrase matches in any case, at word boundaries.
    """
    for word, use in words.items():
        # A phrase may go on in the next line, also in a comment.
        phrase = r"\s+(?:#\s*)?".join(map(re.escape, word.split()))
        for match in re.finditer(rf"(?<![\w-]){phrase}(?![\w-])", text, re.I):
            yield text.count("\n", 0, match.start()) + 1, f"{word!r} must be written as {use!r}"
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
    words = read_glossary(GLOSSARY.read_text(encoding="utf-8"))
    found = 0
    for path in map(Path, arguments) if arguments else list_files():
        for number, problem in find_violations(path.read_text(encoding="utf-8", errors="replace"), words):
            found += 1
            print(f"{path}:{number}: {problem}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
