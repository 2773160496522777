"""Plan changes and memory pressure in the StepReport."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_api.plan_change import Phase
from rljob_api.step_report import MemoryPressure, StepReportStatus
from rljob_memory.sample import MemorySample
from rljob_testing.memory_plans import memory_profile
from rljob_trainer.recovery.early_warning import EarlyWarning
from rljob_trainer.run_listener import RunListener
from rljob_trainer.step_report.reporter import StepReporter
from tests.unit.ledger.samples import plan_change, plan_change_record

GIB = 1 << 30
PROFILE = memory_profile()


class Store:
    def __init__(self) -> None:
        self.applied: list[StepReportStatus] = []

    def read(self) -> StepReportStatus | None:
        return None

    def apply(self, report: StepReportStatus) -> None:
        self.applied.append(report)


def test_the_report_has_the_profile_the_plan_and_every_change_once() -> None:
    store = Store()
    reporter = StepReporter(store, attempt=2)
    reporter.memory_profile_found(PROFILE, [plan_change(2, seconds=1.0)])
    reporter.plan_changed(plan_change(3, step=5), plan_change_record(3, micro_batch_tokens=1024).plan)
    reporter.recovered(plan_change(3, step=5, seconds=2.5))
    reporter.close(2)
    report = store.applied[-1]
    assert report.memory_profile == PROFILE
    assert report.plan is not None
    assert (report.plan_generation, report.plan.micro_batch_tokens) == (3, 1024)
    assert [(c.generation, c.seconds_to_recover) for c in report.plan_changes] == [(2, 1.0), (3, 2.5)]


class Listener(RunListener):
    def __init__(self) -> None:
        self.pressures: list[MemoryPressure | None] = []

    def pressure(self, pressure: MemoryPressure | None) -> None:
        self.pressures.append(pressure)


def rising(step: int) -> Mapping[str, Mapping[Phase, MemorySample]]:
    """Tensors that grow by 4 GiB per step on a GPU of 80 GiB."""
    allocated = (10 + 4 * step) * GIB
    sample = MemorySample(
        allocated_bytes=allocated,
        reserved_bytes=allocated,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=allocated,
        device_free_bytes=80 * GIB - allocated,
        device_total_bytes=80 * GIB,
    )
    return {"policy-0": {"update": sample}}


def test_memory_pressure_warns_once_and_is_reported_every_step() -> None:
    listener, lines, asked = Listener(), [], []  # type: ignore[var-annotated]

    def cannot_prevent(pressure: MemoryPressure, step: int) -> bool:
        asked.append((pressure.diagnosis.class_name, step))
        return False

    warning = EarlyWarning(1_000, cannot_prevent, listener, lines.append)
    for step in range(1, 15):
        warning.look(step, rising(step))
    assert listener.pressures[0] is None
    assert listener.pressures[-1] is not None
    warned = "MemoryPressure: policy rank 0 is projected to run out of memory"
    assert len([line for line in lines if line.startswith(warned) and "RetainedGraph" in line]) == 1
    assert asked
    assert asked[-1] == ("RetainedGraph", 15), "the plan would be changed before the next step"


def test_a_change_resets_the_forecast() -> None:
    listener = Listener()
    prevented: list[int] = []

    def prevent(_pressure: MemoryPressure, step: int) -> bool:
        prevented.append(step)
        return True

    warning = EarlyWarning(1_000, prevent, listener, lambda _line: None)
    step = 0
    while not prevented:
        step += 1
        warning.look(step, rising(step))
    warning.look(step + 1, rising(step + 1))
    assert listener.pressures[-1] is None
    assert prevented == [step + 1]
