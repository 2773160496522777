"""How a pod's process says how it ended: the termination message that Kubernetes keeps, and its exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rljob_api.exit_codes import ExitCode
from rljob_api.manifest import ManifestError
from rljob_api.termination_message import TerminationMessage
from rljob_trainer.errors import TrainerError
from rljob_trainer.pods.environment import TERMINATION_LOG, TERMINATION_LOG_VARIABLE


@dataclass(slots=True)
class EarlyEnding:
    """`exit_code`: of the failure that ended the block."""

    exit_code: ExitCode = ExitCode.COMPLETE


@contextmanager
def ended_early(variables: Mapping[str, str]) -> Iterator[EarlyEnding]:
    """A failure of the block goes to the log and the termination message, and no further."""
    ending = EarlyEnding()
    try:
        yield ending
    except ManifestError as error:
        ending.exit_code, sentence = ExitCode.INVALID_MANIFEST, str(error)
    except TrainerError as error:
        ending.exit_code, sentence = error.exit_code, str(error)
    except Exception as error:
        traceback.print_exc()
        ending.exit_code, sentence = ExitCode.ERROR, f"unexpected {type(error).__name__}: {error}"
    else:
        return
    print(f"rljob: {sentence}", flush=True)
    tell_ending(_termination_log(variables), TerminationMessage(exit_code=ending.exit_code, message=sentence))


def tell_silent_end(variables: Mapping[str, str], exit_code: int) -> None:
    """For a controller that ended with exit code 1 and said nothing, as was seen where a process of Ray's own in its
    pod had been killed: nothing in Python raises then."""
    log = _termination_log(variables)
    if exit_code == ExitCode.ERROR and not (log.is_file() and log.stat().st_size):
        sentence = "the controller ended without a word, as it may where a process of Ray's own in its pod has died"
        print(f"rljob: {sentence}", flush=True)
        tell_ending(log, TerminationMessage(exit_code=ExitCode.ERROR, message=sentence))


def _termination_log(variables: Mapping[str, str]) -> Path:
    """Not from the environment as it is read: that may be what failed."""
    return Path(variables.get(TERMINATION_LOG_VARIABLE) or TERMINATION_LOG)


def tell_ending(log: Path, message: TerminationMessage) -> None:
    """Leave `message` where the kubelet reads it when the container has ended."""
    try:
        log.write_bytes(message.to_json())
    except OSError as error:
        print(f"rljob: the termination message could not be written to {log}: {error}", file=sys.stderr, flush=True)
