"""Files, lines and repeated class names of each part, for one or several checkouts of the repository.

    python -m bench.programs.code_size before=../old after=.

A file that holds one line, such as most `__init__.py`, does not count.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness.record import record

PARTS = ("crds", "memory", "operator", "trainer", "probe", "cluster")
_SMALL_LINES = 40
_CLASS = re.compile(r"^class (\w+)", re.MULTILINE)


def main(checkouts: list[str]) -> None:
    rows = []
    for checkout in checkouts:
        name, _, directory = checkout.partition("=")
        root = Path(directory or ".")
        sources = {part: _sources(root / part) for part in PARTS}
        rows += [{"checkout": name, "part": part, **_sizes(texts)} for part, texts in sources.items()]
        rows.append({"checkout": name, "part": "all", **_sizes([text for texts in sources.values() for text in texts])})
    for row in rows:
        print(*(f"{value!s:<{12 if isinstance(value, str) else 7}}" for value in row.values()))
    print(record("code_size", rows, "production code; a file of one line does not count"))


def _sources(part: Path) -> list[str]:
    return [text for path in sorted(part.rglob("*.py")) if len((text := path.read_text()).splitlines()) > 1]


def _sizes(texts: list[str]) -> dict[str, Any]:
    """Files, lines, median lines of a file, files under 40 lines, and class names that are defined more than once."""
    lines = [len(text.splitlines()) for text in texts]
    classes = Counter(name for text in texts for name in _CLASS.findall(text) if not name.startswith("_"))
    return {
        "files": len(lines),
        "lines": sum(lines),
        "median_lines": median(lines),
        "files_under_40_lines": sum(count < _SMALL_LINES for count in lines),
        "repeated_class_names": sum(count > 1 for count in classes.values()),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", metavar="NAME=DIRECTORY")
    main(**vars(parser.parse_args()))
