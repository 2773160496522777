"""Names of memory profiles, and the plan of a job that starts from one, on its own machine."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rljob_api.job import RLJobSpec
from rljob_api.memory_profile import StartingProfile
from rljob_api.metadata import JOB_NAME_PATTERN, MAX_JOB_NAME_LENGTH
from rljob_memory.budget import facts_of
from rljob_memory.plan import first_plan
from rljob_memory.profile import plan_on_machine, profile_for, profile_name
from rljob_memory.sizes import GIB
from rljob_testing.memory_plans import memory_setup

SETUP = memory_setup()


def spec(**given: Any) -> RLJobSpec:
    fields = {"model": {"uri": "hf://Qwen/Qwen3-8B"}, "task": {"name": "digits"}, "algorithm": {"steps": 10}}
    return RLJobSpec.model_validate(fields | given)


FRESH = first_plan(spec().memory, SETUP)


def start(*changed: tuple[str, str, str], **facts: Any) -> StartingProfile:
    changes = [
        {"class": "Unknown", "role": "policy", "remedy": {"setting": setting, "before": before, "after": after}}
        for setting, before, after in changed
    ]
    of_profile = facts_of(memory_setup(**facts)).model_dump()
    return StartingProfile.model_validate({"name": "p", "namespace": "n", "facts": of_profile, "changes": changes})


# --- names ---


@pytest.mark.parametrize(
    ("uri", "begin"),
    [
        ("hf://Qwen/Qwen3-8B", "qwen3-8b-"),
        ("random://qwen3?hidden=64&layers=2", "qwen3-"),
        ("oci://registry.example/models/72b:1", "b-1-"),
        ("file:///models/Ünïcode%20Dir/", "n-code-20dir-"),
        ("pvc://claim/" + "long-" * 40, "long-long-"),
        ("file:///7", "model-"),
    ],
)
def test_a_name_begins_with_the_model_and_is_valid(uri: str, begin: str) -> None:
    name = profile_name(spec(model={"uri": uri}), "NVIDIA-H200")
    assert name.startswith(begin)
    assert len(name) <= MAX_JOB_NAME_LENGTH
    assert re.fullmatch(JOB_NAME_PATTERN.strip("^$"), name)


def test_the_gpus_that_are_preferred_are_looked_up_first() -> None:
    profiles = {profile_name(spec(), gpu): gpu for gpu in ("h100", "h200", "")}
    assert profile_for(spec(), profiles, ["h200", "h100"]) == "h200"
    assert profile_for(spec(), profiles, ["a100", "h100"]) == "h100"
    assert profile_for(spec(), profiles) == ""
    assert profile_for(spec(rollout={"engineArgs": {"enforce_eager": True}}), profiles, ["h200"]) is None


@pytest.mark.parametrize("shape", ["text", {"containers": 3}, {"containers": [7, {"resources": "no"}]}])
def test_a_template_of_any_shape_has_a_profile(shape: Any) -> None:
    given = shape if isinstance(shape, dict) else {"nodeSelector": shape}
    assert profile_name(spec(policy={"template": {"spec": given}}), "")


def test_a_memory_limit_in_a_template_makes_another_shape() -> None:
    """Without `recovery.maxHostMemory`, only a limit that RLJob has predicted may be raised."""
    container = {"name": "rljob", "resources": {"limits": {"memory": "8Gi"}}}
    limited = spec(policy={"template": {"spec": {"containers": [container]}}})
    assert profile_name(limited, "") != profile_name(spec(), "")


# --- the plan on the job's own machine ---


def test_sizes_that_were_lowered_are_limits_and_all_else_is_the_machines() -> None:
    held = FRESH.model_copy(update={"micro_batch_tokens": 64, "kv_cache_bytes": GIB, "activation_checkpointing": True})
    learned = start(("microBatchTokens", "8192", "64"), ("activationCheckpointing", "Disabled", "Enabled"))
    plan, differences = plan_on_machine(held, learned, FRESH, facts_of(SETUP))
    expected = {"micro_batch_tokens": 64, "activation_checkpointing": True, "generation": 2}
    assert (plan, differences) == (FRESH.model_copy(update=expected), [])


@pytest.mark.parametrize(
    ("before", "after", "held", "fresh", "expected"),
    [
        ("Disabled", "50%", 0.5, 0.0, 0.5),
        ("25%", "50%", 0.5, 1.0, 1.0),
        ("Disabled", "Enabled", 1.0, 0.25, 1.0),
        ("Enabled", "75%", 0.75, 1.0, 0.75),
        ("50%", "Disabled", 0.0, 0.5, 0.0),
    ],
)
def test_a_share_is_limited_in_the_direction_of_its_change(
    before: str, after: str, held: float, fresh: float, expected: float
) -> None:
    learned = start(("optimizerOffload", before, after))
    then, now = (FRESH.model_copy(update={"optimizer_offload": share}) for share in (held, fresh))
    plan, _ = plan_on_machine(then, learned, now, facts_of(SETUP))
    assert plan.optimizer_offload == expected


def test_settings_of_pods_stay_those_that_the_pods_have() -> None:
    held = FRESH.model_copy(update={"host_memory_bytes": 96 * GIB})
    plan, _ = plan_on_machine(held, start(("hostMemory", "default", "96Gi")), FRESH, facts_of(SETUP))
    assert plan is held


@pytest.mark.parametrize(
    ("facts", "difference"),
    [
        ({"device_memory_bytes": 24 * GIB}, "device_memory_bytes 24Gi, now 80Gi"),
        ({"layers": 48}, "layers 48, now 24"),
    ],
)
def test_another_model_or_gpu_takes_nothing_from_the_profile(facts: dict[str, Any], difference: str) -> None:
    held = FRESH.model_copy(update={"micro_batch_tokens": 64})
    learned = start(("microBatchTokens", "8192", "64"), **facts)
    plan, differences = plan_on_machine(held, learned, FRESH, facts_of(SETUP))
    assert (plan, differences) == (FRESH.model_copy(update={"generation": 2}), [difference])


def test_less_host_memory_is_no_difference() -> None:
    held = FRESH.model_copy(update={"micro_batch_tokens": 64})
    learned = start(("microBatchTokens", "8192", "64"), host_memory_bytes=512 * GIB)
    assert plan_on_machine(held, learned, FRESH, facts_of(SETUP)) == (held, [])
