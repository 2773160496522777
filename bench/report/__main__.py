"""Writes recorded results into the marked blocks of docs/.

    python -m bench.report [--check]

`--check` writes nothing and fails if a block differs from its result.
"""

from __future__ import annotations

import argparse
import sys

from bench.report.blocks import fill
from rljob_testing.repository import ROOT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is out of date")
    check = parser.parse_args().check
    pages = {path: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
    stale = {path: filled for path, text in pages.items() if (filled := fill(text)) != text}
    for path, filled in stale.items():
        if check:
            print(f"{path.relative_to(ROOT)} is out of date: run python -m bench.report", file=sys.stderr)
        else:
            path.write_text(filled)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
