"""Feeds the readers of evidence what a coverage-guided fuzzer makes of the recorded failures.

    pip install atheris
    python -m tests.fuzz.evidence_readers -max_total_time=300 CORPUS    (a folder, empty the first time)

`make fuzz` checks the same target, and those of all other parsers, with random damage.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris  # type: ignore[import-untyped]

with atheris.instrument_imports(include=["rljob_memory"]):
    from rljob_testing.fuzz.targets import logs

RECORDED = Path(__file__).parents[1] / "data" / "oom"


def main() -> None:
    corpus = Path(sys.argv[-1])
    if corpus.is_dir() and not any(corpus.iterdir()):
        for path in RECORDED.glob("*/*.txt"):
            (corpus / path.name).write_bytes(path.read_bytes())
    atheris.Setup(sys.argv, logs)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
