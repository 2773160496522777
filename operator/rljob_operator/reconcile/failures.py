"""The end of an attempt, read from its pods, and its meaning for the job.

Several pods end together when one fails, so the order of the causes matters: a cause that the trainer names (all steps
committed, out of memory, bad input) comes before an action of the cluster, and that before the consequences of either.
"""

from __future__ import annotations

from dataclasses import replace

from rljob_api.conditions import AttemptReason
from rljob_api.exit_codes import ExitCode
from rljob_api.termination_message import TerminationMessage
from rljob_memory.recovery import GiveUpReason
from rljob_operator.reconcile.desired import AttemptFailure, AttemptResult
from rljob_operator.reconcile.memory_recovery import (
    evidence_of_exit,
    evidence_of_kill,
    host_memory_advice,
    pod_of,
)
from rljob_operator.reconcile.observed import OUT_OF_MEMORY_CODES, ContainerTermination, ObservedPod
from rljob_operator.reconcile.pods import failed_restart_in_place, stuck_in_restarts
from rljob_operator.reconcile.view import JobView, elapsed_seconds

GRACE_SECONDS = 20.0
"""Time for the controller to notice a terminated worker, exit too, and report more about the cause; and for the pod of
a lost worker to terminate and show the cause, if the controller only reports the loss."""

LIVE_WORKER_GRACE_SECONDS = 5.0
"""Time for a lost worker to show the cause if the controller waits to be restarted: its pod may have lost nothing but
one process."""

_UNCOUNTED_CODES = (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
_REASON_OF_CODE = {
    ExitCode.INVALID_MANIFEST: AttemptReason.INVALID_MANIFEST,
    ExitCode.DEVICE_OUT_OF_MEMORY: AttemptReason.DEVICE_OUT_OF_MEMORY,
    ExitCode.HOST_OUT_OF_MEMORY: AttemptReason.HOST_OUT_OF_MEMORY,
    ExitCode.SHARED_MEMORY_EXHAUSTED: AttemptReason.SHARED_MEMORY_EXHAUSTED,
    ExitCode.WORKER_LOST: AttemptReason.WORKER_LOST,
    ExitCode.BAD_INPUT: AttemptReason.BAD_INPUT,
    ExitCode.OUTPUT_UNAVAILABLE: AttemptReason.OUTPUT_UNAVAILABLE,
    **dict.fromkeys(_UNCOUNTED_CODES, AttemptReason.INTERRUPTED),
}
_NAMES_ITS_CAUSE = frozenset(_REASON_OF_CODE) - {ExitCode.WORKER_LOST, *_UNCOUNTED_CODES}
_AMBIGUOUS = frozenset({ExitCode.INVALID_MANIFEST, ExitCode.BAD_INPUT, *_UNCOUNTED_CODES})
"""Codes that programs use for other failures: they have RLJob's meaning for another trainer only if its termination
message has them too. The meaning of the others of 80-85 cannot end a job."""
_FINAL = {ExitCode.INVALID_MANIFEST: GiveUpReason.TRAINER_ERROR, ExitCode.BAD_INPUT: GiveUpReason.BAD_INPUT}


def attempt_result(view: JobView) -> AttemptResult | None:
    """Return None while the attempt runs, or while the cause of its end is not clear yet."""
    return (
        failed_restart_in_place(view)
        or _completed(view)
        or _out_of_host_memory(view)
        or _reported_by_trainer(view)
        or _pending_exit(view)
        or _init_container_failed(view)
        or _evicted(view)
        or _disrupted(view)
        or stuck_in_restarts(view)
        or _stopped_or_failed(view)
    )


def seconds_until_cause_is_clear(view: JobView) -> float | None:
    """Return the seconds until a pod that ended is taken for the cause; None if no pod waits for another's report."""
    waits = [_seconds_left_for_others(pod, view) for pod in view.pods if pod.ended]
    waits.append(_seconds_left_for_its_workers(view))
    return min((seconds for seconds in waits if seconds), default=None)


# --- Causes, in the order in which they are looked for ---


def _completed(view: JobView) -> AttemptResult | None:
    deciding = [pod for pod in view.pods if pod.role == "controller"] if view.own_trainer else view.pods
    ends = [pod.end for pod in deciding if pod.ended and pod.end and pod.end.exit_code == ExitCode.COMPLETE]
    if not ends or len(ends) < len(deciding) or (not view.own_trainer and view.missing):
        return None
    wanted, committed = view.spec.algorithm.steps, ends[0].message.step if ends[0].message else None
    if committed is None or committed >= wanted:
        reason, message, failure = AttemptReason.ALL_STEPS_COMMITTED, "all steps are committed", None
    elif view.attempt is not None and committed < view.attempt.from_step:
        message = f"the trainer exited with code 0, but committed only {committed} of {wanted} steps"
        reason, failure = AttemptReason.ERROR, AttemptFailure()
    else:
        message = f"{committed} steps are committed, and algorithm.steps has been raised to {wanted} since"
        reason, failure = AttemptReason.STEPS_RAISED, None
    return AttemptResult(reason, message, failure, ExitCode.COMPLETE)


def _out_of_host_memory(view: JobView) -> AttemptResult | None:
    for pod in view.pods:
        if pod.end and pod.end.reason == "OOMKilled":
            message = f"pod {pod.name} ({pod.role}) was OOMKilled: it ran out of host memory"
            evidence = evidence_of_kill(pod, pod.end, message, view)
            failure = AttemptFailure(evidence=evidence, pod=pod, advice=host_memory_advice(pod))
            return AttemptResult(AttemptReason.HOST_OUT_OF_MEMORY, message, failure, pod.end.exit_code)
    return None


def _reported_by_trainer(view: JobView) -> AttemptResult | None:
    for pod in _controller_first(view):
        if pod.end is None:
            continue
        end, message = pod.end, pod.end.message
        if not view.own_trainer and message and end.exit_code != ExitCode.COMPLETE:
            # Another trainer has its own exit codes: if it failed, the message of the probe names the cause.
            end = replace(end, exit_code=message.exit_code) if message.exit_code in OUT_OF_MEMORY_CODES else end
        if _known_code(end, view) in _NAMES_ITS_CAUSE:
            return _by_exit_code(pod, end, view)
    return None


def _pending_exit(view: JobView) -> AttemptResult | None:
    """The controller reports it while it waits for the next attempt."""
    pending, controller = view.pending_exit, view.controller
    if pending is None or controller is None or _seconds_left_for_its_workers(view):
        return None
    message = TerminationMessage(exit_code=pending.exit_code, message=pending.message)
    return _by_exit_code(controller, ContainerTermination(pending.exit_code, "Error", None, message), view)


def _init_container_failed(view: JobView) -> AttemptResult | None:
    for pod in view.pods:
        failure = pod.failed_init_container
        if failure and not (pod.disruption or pod.deleting):
            message = failure.message("init container", pod.name)
            return AttemptResult(AttemptReason.INIT_CONTAINER_FAILED, message, AttemptFailure())
    return None


def _evicted(view: JobView) -> AttemptResult | None:
    """A pod was evicted because it exceeded a limit of its own."""
    for pod in view.pods:
        if pod.evicted is not None:
            cause = pod.evicted.rstrip(". ") or "it exceeded a limit of its own"
            message = f"pod {pod.name} was evicted: {cause}; raise that limit in spec.{pod.role}.template"
            return AttemptResult(
                AttemptReason.EVICTED, message, AttemptFailure(), pod.end.exit_code if pod.end else None
            )
    return None


def _disrupted(view: JobView) -> AttemptResult | None:
    for pod in view.pods:
        if pod.disruption:
            message = f"pod {pod.name} was removed by the cluster ({pod.disruption})"
        elif pod.deleting:
            message = f"pod {pod.name} is being deleted"
        elif pod.taken_by_cluster:
            message = f"pod {pod.name} ended{f' on node {pod.node}' if pod.node else ''} before its container did"
        else:
            continue
        exit_code = pod.end.exit_code if pod.end else None
        return AttemptResult(AttemptReason.PODS_DISRUPTED, message, exit_code=exit_code)
    if view.missing and view.begun:
        return AttemptResult(AttemptReason.PODS_DISRUPTED, f"pod {view.missing[0]} is gone")
    return None


def _stopped_or_failed(view: JobView) -> AttemptResult | None:
    for pod in _controller_first(view):
        waits = _seconds_left_for_others(pod, view)
        if pod.role == "controller" and waits:
            return None
        if not pod.ended or not pod.end or waits:
            continue
        if pod.end.exit_code != ExitCode.COMPLETE:
            return _by_exit_code(pod, pod.end, view)
        if view.own_trainer and pod.role != "controller":
            message = f"pod {pod.name} ended while the controller still runs"
            return AttemptResult(AttemptReason.WORKER_LOST, message, AttemptFailure(), pod.end.exit_code)
    return None


# --- Shared by the causes ---


def _controller_first(view: JobView) -> list[ObservedPod]:
    return sorted(view.pods, key=lambda pod: (pod.role != "controller", pod.role, pod.index))


def _seconds_left_for_others(pod: ObservedPod, view: JobView) -> float:
    """Seconds for other pods to show why `pod` ended; 0 if there is nothing to wait for."""
    if not pod.end or not pod.end.finished_at:
        return 0.0
    if pod.role == "controller":
        waits = pod.end.exit_code == ExitCode.WORKER_LOST and any(not other.ended for other in view.pods)
    else:
        waits = view.controller is not None and not view.controller.ended
    return max(0.0, GRACE_SECONDS - elapsed_seconds(pod.end.finished_at, view.now)) if waits else 0.0


def _seconds_left_for_its_workers(view: JobView) -> float:
    """Seconds for the end of a worker's pod to show why the waiting controller lost it."""
    if view.pending_exit is None or view.pending_exit.exit_code != ExitCode.WORKER_LOST:
        return 0.0
    reported_at = view.report.update_time if view.report else None
    return max(0.0, LIVE_WORKER_GRACE_SECONDS - elapsed_seconds(reported_at, view.now)) if reported_at else 0.0


def _known_code(end: ContainerTermination, view: JobView) -> ExitCode:
    """The exit code by RLJob's table; ERROR for codes that are not in it, or that mean something else."""
    confirmed = end.message is not None and end.message.exit_code == end.exit_code
    if end.exit_code not in set(ExitCode) or (not view.own_trainer and not confirmed and end.exit_code in _AMBIGUOUS):
        return ExitCode.ERROR
    return ExitCode(end.exit_code)


def _by_exit_code(pod: ObservedPod, end: ContainerTermination, view: JobView) -> AttemptResult:
    code = _known_code(end, view)
    if end.message and end.message.message:
        message = end.message.message
    else:
        meaning = f" ({code.meaning})" if code == end.exit_code else f" ({end.reason})" if end.reason else ""
        text = f": {end.text.strip()}" if end.text.strip() else f"; kubectl logs {pod.name} has more"
        message = f"pod {pod.name} exited with code {end.exit_code}{meaning}{text}"
    failure = None if code in _UNCOUNTED_CODES else AttemptFailure(_FINAL.get(code))
    if code in OUT_OF_MEMORY_CODES:
        evidence = evidence_of_exit(pod, end, message, view)
        full = pod_of(evidence, pod, view)
        advice = f"in pod {full.name}, {host_memory_advice(full)}" if code == ExitCode.HOST_OUT_OF_MEMORY else ""
        failure = AttemptFailure(evidence=evidence, pod=full, advice=advice)
    return AttemptResult(_REASON_OF_CODE.get(code, AttemptReason.ERROR), message, failure, end.exit_code)
