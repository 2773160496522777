"""Termination messages: how the processes of a pod report their end to Kubernetes."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from rljob_api.exit_codes import ExitCode
from rljob_api.manifest import ManifestError
from rljob_api.termination_message import TerminationMessage
from rljob_client.errors import RunError
from rljob_trainer.pods.environment import TERMINATION_LOG, TERMINATION_LOG_VARIABLE


def exit_code_of(run: Callable[[], ExitCode], variables: Mapping[str, str]) -> ExitCode:
    """The exit code of `run`. An error that it raises goes to the log and to the termination message of the pod."""
    try:
        return run()
    except ManifestError as error:
        code, message = ExitCode.INVALID_MANIFEST, str(error)
    except RunError as error:
        code, message = error.exit_code, str(error)
    except Exception as error:
        traceback.print_exc()
        code, message = ExitCode.ERROR, f"unexpected {type(error).__name__}: {error}"
    print(f"rljob: {message}", flush=True)
    write_termination_message(_termination_log(variables), TerminationMessage(exit_code=code, message=message))
    return code


def report_silent_exit(variables: Mapping[str, str], exit_code: int) -> None:
    """Write a termination message for a controller that exited with code 1 and wrote none.

    This was observed when a system process of Ray in its pod had been killed: Python raises nothing then.
    """
    log = _termination_log(variables)
    if exit_code == ExitCode.ERROR and not (log.is_file() and log.stat().st_size):
        message = (
            "the controller exited without an error message; this can happen when a Ray system process in its pod dies"
        )
        print(f"rljob: {message}", flush=True)
        write_termination_message(log, TerminationMessage(exit_code=ExitCode.ERROR, message=message))


def _termination_log(variables: Mapping[str, str]) -> Path:
    """Read directly from the variables, since parsing the environment may have failed."""
    return Path(variables.get(TERMINATION_LOG_VARIABLE) or TERMINATION_LOG)


def write_termination_message(log: Path, message: TerminationMessage) -> None:
    """Write `message` to the file that the kubelet reads when the container has exited."""
    try:
        log.write_bytes(message.to_json())
    except OSError as error:
        print(f"rljob: the termination message could not be written to {log}: {error}", file=sys.stderr, flush=True)
