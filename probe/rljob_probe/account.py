"""Why a program ended, where memory was the cause: said by the process that knows, once, in the termination message."""

from __future__ import annotations

from typing import Any, NamedTuple

from rljob_probe import cgroup, circumstances, notes
from rljob_probe.failure import DEVICE, HOST, SHARED, MemoryFailure, memory_failure
from rljob_probe.termination_log import tell

_WHICH_MEMORY = {DEVICE: "GPU memory", HOST: "host memory", SHARED: "shared memory (/dev/shm)"}
_LONGEST_MESSAGE, _LONGEST_LINE = 2500, 400


class Account(NamedTuple):
    exit_code: int
    """DEVICE, HOST or SHARED: what was short. The process keeps its own exit code."""
    sentence: str
    evidence: dict[str, Any]
    """`rljob_api.step_report.Evidence`, by its JSON names."""


def tell_why_it_ended(log: str, error: BaseException | None, *, first: bool, kills: int) -> None:
    """`error`: what ended this process, if an exception did. `first`: whether all processes of the program come from
    this one, which then speaks for those that cannot. `kills`: processes that the kernel killed meanwhile."""
    account = _of_error(error) or _of_own_note()
    if account is None and first:
        account = _of_others_note() or _of_kills(kills)
    if account is not None:
        tell(log, account.exit_code, account.sentence, account.evidence)


def _of_error(error: BaseException | None) -> Account | None:
    failure = memory_failure(error)
    if failure is None:
        return None
    noted = notes.own() if failure.exit_code == DEVICE else None
    evidence = {**(noted or _evidence_of(failure)), "message": failure.text[:_LONGEST_MESSAGE]}
    return account_of(failure.exit_code, evidence)


def _of_own_note() -> Account | None:
    """Where the error was caught, and the process ended over it nevertheless: no step was done since."""
    note = notes.own()
    if note is None:
        return None
    if circumstances.current_step() > note["step"]:
        notes.forget()
        return None
    return account_of(DEVICE, note)


def _of_others_note() -> Account | None:
    note = notes.earliest_of_others()
    return account_of(DEVICE, note) if note is not None else None


def _of_kills(kills: int) -> Account | None:
    if kills <= 0:
        return None
    limit = cgroup.memory_limit_bytes()
    at_limit = f" at its memory limit of {limit / (1 << 20):.0f} MiB" if limit is not None else ""
    message = f"OOMKilled: the kernel killed {kills} process(es) of the container{at_limit}"
    return account_of(HOST, {**_circumstances(), "message": message})


def _evidence_of(failure: MemoryFailure) -> dict[str, Any]:
    phase = circumstances.phase_of(circumstances.sources_of_traceback(failure.error.__traceback__))
    return {**_circumstances(), **({"phase": phase} if phase else {})}


def _circumstances() -> dict[str, Any]:
    place = circumstances.place()
    memory = {"role": place["role"], "rank": place["rank"], "peakRssBytes": circumstances.peak_rss_bytes()}
    return {
        "time": circumstances.timestamp(),
        **place,
        "step": circumstances.current_step(),
        "memory": memory,
    }


def account_of(exit_code: int, evidence: dict[str, Any]) -> Account:
    """With a sentence for people made of the evidence."""
    first_line = evidence["message"].partition("\n")[0][:_LONGEST_LINE]
    where = f"rank {evidence['rank']} ran out of {_WHICH_MEMORY[exit_code]} in step {evidence['step']}"
    return Account(exit_code, f"{where}: {first_line}", evidence)
