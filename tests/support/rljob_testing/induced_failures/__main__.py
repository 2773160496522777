"""Runs one program: `python -m rljob_testing.induced_failures TITLE FOLDER`.

Its evidence goes to FOLDER; its output is its log.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from rljob_testing.induced_failures.catalogue import SKIPPED_EXIT_CODE, NotPossibleHere, programs


def main(title: str, folder: Path) -> int:
    """Exit code of the program: 1 if it failed."""
    program = next(program for program in programs() if program.title == title)
    try:
        program.run(folder)
    except NotPossibleHere as reason:
        print(reason, file=sys.stderr)
        return SKIPPED_EXIT_CODE
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    exit_code = main(sys.argv[1], Path(sys.argv[2]))
    sys.stdout.flush()
    # At once: an engine, or NCCL, that ran out of memory may wait forever for its own threads.
    os._exit(exit_code)
