"""MemoryProfiles: the jobs that share one, and the first memory plan of a job that starts from one.

Which jobs share a profile has to be known before a trainer has read the model: the profile's name is made from the spec
and from the type of the GPUs. The trainer then compares the model and the machine with those of the profile.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from rljob_api.job import RLJobSpec
from rljob_api.memory_facts import MemoryFacts
from rljob_api.memory_plan import MemoryPlan
from rljob_api.memory_profile import MemoryProfileStatus, StartingProfile
from rljob_api.metadata import MAX_JOB_NAME_LENGTH
from rljob_memory.next_plan import other_trainers_first_plan
from rljob_memory.pod_memory import resources_in
from rljob_memory.recovery.constraints import within_max_gpus
from rljob_memory.recovery.other_machine import differing_facts, rederived
from rljob_memory.workload import workload_of

Profile = TypeVar("Profile")

_DIGEST_CHARACTERS = 12
_OF_DISK = frozenset({"kept_checkpoints", "exports_adapters", "caches_model", "caches_compiled_code"})
"""Parts of a workload that change no memory."""
_BOUNDS = {"max_gpus", "max_host_memory", "max_shared_memory"}
_OF_THE_HOST = {"gpu", "host_memory_bytes", "shared_memory_bytes"}
"""Facts that change no setting of the GPU, and the name of a GPU whose size is compared."""


def profile_for(spec: RLJobSpec, profiles: Mapping[str, Profile], gpus: Iterable[str] = ("",)) -> Profile | None:
    """The profile of jobs like this one, by name; None if there is none. Pure.

    `gpus`: types of the GPUs that the job may get, the preferred one first; an empty one stands for no GPU, or
    an unknown one.
    """
    names = (profile_name(spec, gpu) for gpu in gpus)
    return next((profiles[name] for name in names if name in profiles), None)


def profile_name(spec: RLJobSpec, gpu: str) -> str:
    """Name of the profile: the end of the model's URI, and a digest of everything that determines memory."""
    text = json.dumps([_settings(spec), gpu], sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    location = spec.model.uri.partition("?")[0].rstrip("/").rpartition("/")[2].lower()
    words = re.sub("[^a-z0-9]+", "-", location).lstrip("-0123456789")
    return f"{words[: MAX_JOB_NAME_LENGTH - _DIGEST_CHARACTERS - 1].strip('-') or 'model'}-{digest}"


def _settings(spec: RLJobSpec) -> dict[str, Any]:
    """Settings of a job that determine its memory, and the bounds within which a recovery may change it."""
    work = {name: value for name, value in asdict(workload_of(spec)).items() if name not in _OF_DISK}
    templates = (spec.controller.template, spec.policy.template, spec.rollout.template)
    return {
        "model": [spec.model.uri, spec.model.dtype],
        "work": work,
        "policy": spec.policy.model_dump(mode="json", exclude={"template"}),
        "rollout": spec.rollout.model_dump(mode="json", exclude={"template"}),
        "memory": spec.memory.model_dump(mode="json", exclude={"admission"}),
        "bounds": spec.recovery.model_dump(mode="json", include=_BOUNDS),
        "resources": [resources_in(template) for template in templates],
        "trainer": spec.trainer and spec.trainer.model_dump(mode="json"),
    }


# --- the first plan ---


def starting_plan(spec: RLJobSpec, held: MemoryProfileStatus) -> MemoryPlan:
    """The plan of generation 1 of a job that starts from a profile. RLJob's own trainer computes it again with
    `plan_on_machine`; another trainer gets the settings of its first plan, limited by those that held."""
    plan = within_max_gpus(held.plan, spec)
    if spec.trainer is not None:
        plan = rederived(plan, held.changes, other_trainers_first_plan(spec))
    return plan.model_copy(update={"generation": 1, "excluded_nodes": []})


def plan_on_machine(
    plan: MemoryPlan, profile: StartingProfile, fresh: MemoryPlan, facts: MemoryFacts
) -> tuple[MemoryPlan, list[str]]:
    """The plan with which a job that starts from `profile` begins on its machine, and the facts that differ.

    `plan`: of `starting_plan`. `fresh`: of the machine alone. `facts`: the job's own. If they differ from those of the
    profile, only its settings of pods are kept.
    """
    differences = differences_of_shape(profile.facts, facts)
    return rederived(plan, [] if differences else profile.changes, fresh), differences


def differences_of_shape(then: MemoryFacts | None, now: MemoryFacts | None) -> list[str]:
    """Facts about the model and the size of the GPUs that differ, for people; none if either is unknown."""
    if then is None or now is None:
        return []
    return differing_facts(then.model_dump(exclude=_OF_THE_HOST), now.model_dump())
