"""Conditions as kstatus, kubectl wait and the page docs/job-life.md have them."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import get_args

import pytest

from rljob_api.conditions import AttemptReason, ConditionReason, ConditionType
from rljob_api.exit_codes import ExitCode
from rljob_api.status import RLJobStatus
from rljob_api.step_report import TrainingWarningReason
from rljob_memory.recovery import GiveUpReason
from rljob_operator.reconcile.status_draft import EventReason
from rljob_operator.reconcile.status_write import display
from rljob_testing.simulated_cluster import CONTROLLER, POLICY_0, SimulatedCluster, created_job, job_spec, running_job

BROKEN = {"template": {"spec": {"containers": "rljob"}}}
PAGE = (Path(__file__).parents[4] / "docs" / "job-life.md").read_text(encoding="utf-8")


def kstatus(cluster: SimulatedCluster) -> str:
    """The rules of sigs.k8s.io/cli-utils/pkg/kstatus/status for kinds that it does not know."""
    if cluster.stored.observed_generation != cluster.generation:
        return "InProgress"
    if cluster.holds(ConditionType.STALLED):
        return "Failed"
    return "Current" if cluster.holds(ConditionType.READY) else "InProgress"


def kubectl_wait(cluster: SimulatedCluster, type_: ConditionType) -> bool:
    """The rule of kubectl wait: a condition about an earlier generation does not count."""
    condition = cluster.condition(type_)
    return condition.status == "True" and (condition.observed_generation or 0) >= cluster.generation


def test_a_job_is_in_progress_until_it_runs_as_a_batch_job_is() -> None:
    cluster = SimulatedCluster(spec=job_spec(suspend=True))
    cluster.settled(phase="Suspended")
    assert kstatus(cluster) == "InProgress"
    cluster.change_spec(suspend=False).settled()
    cluster.unschedulable("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.", *cluster.pods).tick(60)
    cluster.settled(phase="Pending", ready="Pending", ready_says="Insufficient")
    assert kstatus(cluster) == "InProgress"
    cluster.run().expect(ready="Running")
    assert kstatus(cluster) == "Current"
    cluster.end(CONTROLLER, 1, sentence="it broke", step=3)
    cluster.settled(ready="Recovering", ready_says="it broke (restart 1 of 3)")
    assert kstatus(cluster) == "InProgress"
    cluster.next_attempt_runs()
    cluster.end(CONTROLLER, 0, sentence="done", step=60).settled(ready="Complete")
    assert kstatus(cluster) == "Current"


def test_a_failed_job_is_stalled_for_its_reason() -> None:
    cluster = running_job().end(CONTROLLER, ExitCode.BAD_INPUT, sentence="the data set is empty")
    cluster.settled(stalled="BadInput", stalled_says="the data set is empty")
    assert kstatus(cluster) == "Failed"
    cluster.change_spec(retry=1)
    assert kstatus(cluster) == "InProgress", "the new generation is not observed yet"
    cluster.settled()
    assert kstatus(cluster) == "InProgress"


@pytest.mark.parametrize("facts", [{"foreign_pods": (POLICY_0,)}, {"foreign_object": "claim c exists"}])
def test_a_job_that_waits_for_a_person_is_stalled(facts: dict[str, object]) -> None:
    cluster = SimulatedCluster()
    cluster.round()
    cluster.facts = facts
    cluster.settled()
    assert kstatus(cluster) == "Failed"
    cluster.facts = {}
    cluster.tick(31)
    assert kstatus(cluster.run()) == "Current"


@pytest.mark.parametrize("code", [0, int(ExitCode.BAD_INPUT)])
def test_conditions_of_a_finished_job_keep_up_with_edits(code: int) -> None:
    cluster = running_job().end(CONTROLLER, code, sentence="the end", step=60).settled()
    final = ConditionType.FAILED if code else ConditionType.COMPLETE
    assert kubectl_wait(cluster, final)
    cluster.change_spec(ttlSecondsAfterFinished=86400)
    assert not kubectl_wait(cluster, final)
    cluster.settled()
    assert kubectl_wait(cluster, final)


def test_only_stalled_and_ready_are_about_a_spec_that_cannot_be_used() -> None:
    cluster = running_job()
    cluster.facts = {"problem": "spec.rollout.engineArgs: must not set model"}
    cluster.change_spec().settled()
    assert kstatus(cluster) == "Failed"
    observed = {condition.type: condition.observed_generation for condition in cluster.stored.conditions}
    assert (observed["Stalled"], observed["Ready"], observed["Running"]) == (2, 2, 1)


def test_an_invalid_spec_stored_by_an_earlier_version_is_no_failure() -> None:
    cluster = created_job(policy=BROKEN)
    old = cluster.condition(ConditionType.FAILED).model_copy(update={"status": "True", "reason": "InvalidSpec"})
    kept = [it for it in cluster.stored.conditions if it.type not in ("Failed", "Stalled", "Ready")]
    cluster.set_status(cluster.stored.model_copy(update={"conditions": [*kept, old]}))
    cluster.settled(phase="Invalid", failed=False)
    assert kstatus(cluster) == "Failed"
    cluster.change_spec(policy={"replicas": 2}).run().expect(phase="Running")


@pytest.mark.parametrize(
    ("step", "steps", "shown"), [(None, 10, "0/10"), (3, 10, "3/10"), (40, 10, "40"), (3, None, "")]
)
def test_more_committed_steps_than_requested_are_no_fraction(step: int | None, steps: int | None, shown: str) -> None:
    assert display(RLJobStatus(step=step, steps=steps)).step == shown


def documented(section: str) -> set[str]:
    """First column of the table under a heading."""
    text = re.split(r"^#+ ", PAGE.split(f"# {section}\n")[1], flags=re.MULTILINE)[0]
    return set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE))


def test_every_reason_of_a_condition_is_documented() -> None:
    of_the_engine = set(GiveUpReason) - {GiveUpReason.NOTHING_LEFT, GiveUpReason.LEFT_TO_SUPERVISOR}
    reasons = {reason.value for reason in [*ConditionReason, *of_the_engine]} | set(get_args(TrainingWarningReason))
    assert set().union(*(documented(type_.value) for type_ in ConditionType)) == reasons


@pytest.mark.parametrize(("section", "reasons"), [("Attempts", AttemptReason), ("Events", EventReason)])
def test_every_reason_of_attempts_and_events_is_documented(section: str, reasons: type[StrEnum]) -> None:
    assert documented(section) == {reason.value for reason in reasons}
