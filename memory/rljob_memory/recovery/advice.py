"""Advice for people when recovery gives up: settings of this job, and those that only another job can have. Pure."""

from __future__ import annotations

from rljob_memory.diagnosis import FailureClass
from rljob_memory.recovery import messages
from rljob_memory.recovery.failure import Case
from rljob_memory.recovery.families.policy_gpu_memory import OPTIMIZER_OFFLOAD

_MOMENTS, _ADAPTERS = "policy.optimizer.moments: bfloat16", "policy.lora"

_HELPING = {
    FailureClass.ACTIVATION_SPIKE: (_MOMENTS, _ADAPTERS),
    FailureClass.MODEL_WEIGHTS: (_ADAPTERS,),
    FailureClass.OPTIMIZER_STATE: (_MOMENTS, _ADAPTERS),
}
_SMALLEST_PART = 50
"""A saving of less than this part of a GPU is not worth another job."""


def own_advice(case: Case) -> str:
    """The settings of this job that help, without one that frees nothing."""
    of_class = case.failure_class.own_advice
    if case.failure_class is not FailureClass.OPTIMIZER_STATE or case.profile is None:
        return of_class
    return of_class if OPTIMIZER_OFFLOAD.next_change(case) else messages.MORE_POLICY_GPUS


def smaller_job_advice(case: Case) -> str:
    """A sentence with the bytes that each setting would save; empty if none would help, or if it is not known.

    Settings that save less than the failure lacked are not named.
    """
    profile = case.profile
    if profile is None or not profile.device_total_bytes or not (case.role == "policy" or case.shares_gpu):
        return ""
    least = max(profile.device_total_bytes // _SMALLEST_PART, case.need_bytes or 0)
    saved = _savings(case)
    helping = [(setting, saved[setting]) for setting in _HELPING.get(case.failure_class, ()) if saved[setting] >= least]
    return messages.smaller_job_message(helping) if helping else ""


def _savings(case: Case) -> dict[str, int]:
    """Bytes of one GPU by setting. A state in host memory takes none of it."""
    profile, offloaded = case.profile, case.plan.optimizer_offload
    assert profile is not None
    kept = profile.trained_bytes + (0 if offloaded else profile.optimizer_bytes)
    has_adapters_to_gain = profile.trained_bytes and profile.adapter_policy_bytes
    return {
        _MOMENTS: 0 if offloaded else profile.smaller_moments_bytes,
        _ADAPTERS: max(kept - profile.adapter_policy_bytes, 0) if has_adapters_to_gain else 0,
    }
