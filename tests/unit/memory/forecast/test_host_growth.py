"""Twenty patterns of host memory in a simulated pod: warnings, larger limits and new processes come before a kill.

The decisions are the real ones. Simulated are the memory of a colocated pod, second by second, and the time that a
report, the operator and the kubelet take together.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from rljob_api.memory_plan import MemoryPlan
from rljob_api.step_report import MemoryPressure
from rljob_memory.forecast import Forecast, worth_preventing
from rljob_memory.host_watch import HostWatch
from rljob_memory.recovery import RecoveryState, more_host_memory, prevent
from rljob_memory.sample import MemorySample
from rljob_memory.sizes import GIB, MIB
from tests.unit.memory.recovery.failures import FIRST_PLAN, IN_THE_TRAINER, NOON, constraints

LIMIT, BOUND = 16 * GIB, 24 * GIB
USED = {"policy-0": 4 * GIB, "rollout-0": 3 * GIB, "others": GIB}
"""Without growth: half of the limit, as the predicted limit is twice the prediction."""
STEPS, PHASE_SECONDS = 80, 20
REACTION_SECONDS = 6
START_SECONDS = 20


@dataclass(frozen=True)
class LifeMoment:
    """Second `second` of a phase, in the life of one process."""

    steps: int
    """Steps since the process started."""
    step: int
    """Steps since the job started."""
    phase: str
    second: int

    @property
    def time(self) -> float:
        """In steps, since the process started."""
        return self.steps + ((self.phase == "update") * PHASE_SECONDS + self.second) / (2 * PHASE_SECONDS)


Growth = Callable[[LifeMoment], float]
"""Bytes beyond those of a process that does not grow."""
Pattern = Callable[[random.Random], dict[str, Growth]]
"""The growth of the processes of a pod, or of its page cache."""


@dataclass
class Pod:
    growth: dict[str, Growth]
    is_watched: bool = True
    limit: int = LIMIT
    plan: MemoryPlan = FIRST_PLAN
    recycled: list[str] = field(default_factory=list)
    resized: int = 0
    killed_at: int | None = None
    _began: dict[str, int] = field(default_factory=lambda: dict.fromkeys(USED, 0))
    _forecast: Forecast = field(default_factory=lambda: Forecast(STEPS))
    _watch: HostWatch = field(default_factory=lambda: HostWatch("policy", 0))
    _second: int = 0
    _limit_due: int | None = None
    """Second at which the kubelet sets the limit of the plan."""

    def train(self) -> Pod:
        for step in range(1, STEPS + 1):
            samples = {}
            for actor, phase in (("rollout-0", "rollout"), ("policy-0", "update")):
                samples[actor] = {phase: self._work(step, actor, phase)}
                if self.killed_at is not None:
                    return self
            self._forecast.observe(step, samples)
            if self.is_watched and (pressure := self._forecast.pressure()) is not None:
                self._report(pressure)
                self._prevent(pressure, step)
        return self

    def _work(self, step: int, actor: str, phase: str) -> MemorySample:
        peak = 0
        for second in range(PHASE_SECONDS):
            used, own = self._at(step, actor, phase, second)
            peak = max(peak, own)
            if self._passes(step, used):
                break
        return MemorySample(
            rss_bytes=own,
            anonymous_bytes=own,
            peak_rss_bytes=peak,
            host_used_bytes=used,
            host_limit_bytes=self.limit,
        )

    def _at(self, step: int, actor: str, phase: str, second: int) -> tuple[int, int]:
        """Use of the container, and of the actor. The kernel drops the page cache before it kills."""
        sizes = dict(USED)
        for process, growth in self.growth.items():
            if process in sizes:
                sizes[process] += round(growth(LifeMoment(step - self._began[process], step, phase, second)))
        return sum(sizes.values()), sizes[actor]

    def _passes(self, step: int, used: int) -> bool:
        """One second. Returns True if the kernel has killed a process."""
        self._second += 1
        if self._limit_due is not None and self._limit_due <= self._second:
            self.limit, self._limit_due = self.plan.host_memory_bytes or LIMIT, None
        if used > self.limit:
            self.killed_at = step
            return True
        sample = MemorySample(host_used_bytes=used, host_limit_bytes=self.limit)
        if self.is_watched and (pressure := self._watch.look(self._second, sample)):
            self._report(pressure)
        return False

    def _report(self, pressure: MemoryPressure) -> None:
        given = constraints(host_memory_limit_bytes=self.limit, recovery={"maxHostMemory": str(BOUND)})
        plan = more_host_memory(pressure, RecoveryState(self.plan, STEPS), given)
        if plan is not None:
            self.plan, self.resized = plan, self.resized + 1
            self._limit_due = self._second + REACTION_SECONDS

    def _prevent(self, pressure: MemoryPressure, step: int) -> None:
        state = RecoveryState(self.plan, STEPS)
        if not worth_preventing(pressure):
            return
        answer = prevent(pressure, state, IN_THE_TRAINER_CONSTRAINTS, attempt=1, step=step + 1, time=NOON)
        if answer is None:
            return
        for role in answer.renew:
            self.recycled.append(role)
            self._began[f"{role}-0"] = step
        self._forecast.forget(answer.renew)
        self._second += START_SECONDS


IN_THE_TRAINER_CONSTRAINTS = constraints(IN_THE_TRAINER)


def mib(least: int, most: int) -> Callable[[random.Random], float]:
    return lambda draw: draw.uniform(least, most) * MIB


def leak(process: str, rate: Callable[[random.Random], float]) -> Pattern:
    def pattern(draw: random.Random) -> dict[str, Growth]:
        a_step = rate(draw)
        return {process: lambda at: a_step * at.time}

    return pattern


def by_step(process: str, values: Callable[[random.Random], list[float]]) -> Pattern:
    """Growth at the beginning of each step of the process: drawn once, for `STEPS` steps."""

    def pattern(draw: random.Random) -> dict[str, Growth]:
        drawn = values(draw)
        return {process: lambda at: drawn[min(at.steps, STEPS)]}

    return pattern


def summed(draw: random.Random, increment: Callable[[random.Random, int], float]) -> list[float]:
    values = [0.0]
    for step in range(STEPS):
        values.append(values[-1] + increment(draw, step))
    return values


def ramp(process: str, grown: float, seconds: int) -> Pattern:
    """Once, within the update of a step; the memory stays."""

    def pattern(draw: random.Random) -> dict[str, Growth]:
        when = draw.randint(5, STEPS - 5)

        def growth(at: LifeMoment) -> float:
            if at.step != when:
                return grown if at.step > when else 0.0
            return grown * min(at.second / seconds, 1.0) if at.phase == "update" else 0.0

        return {process: growth}

    return pattern


def two_leaks(draw: random.Random) -> dict[str, Growth]:
    return leak("policy-0", mib(150, 400))(draw) | leak("rollout-0", mib(150, 400))(draw)


def peaks_that_grow(draw: random.Random) -> dict[str, Growth]:
    """In the middle of the update alone."""
    rate = draw.uniform(100, 200) * MIB
    return {"policy-0": lambda at: rate * at.steps if at.phase == "update" and 4 < at.second < 15 else 0.0}


def teeth_within_a_step(draw: random.Random) -> dict[str, Growth]:
    height = draw.uniform(2, 4) * GIB
    return {"policy-0": lambda at: height * at.second / PHASE_SECONDS if at.phase == "update" else 0.0}


GROWING: dict[str, Pattern] = {
    "a leak of the policy": leak("policy-0", mib(150, 300)),
    "a fast leak of the policy": leak("policy-0", mib(700, 1000)),
    "a slow leak of the policy": leak("policy-0", mib(60, 100)),
    "a fast leak of the engine": leak("rollout-0", mib(700, 1000)),
    "a leak per sleep of the engine": by_step("rollout-0", lambda draw: summed(draw, lambda d, _: mib(200, 220)(d))),
    "two leaks": two_leaks,
    "a leak with noise": by_step("policy-0", lambda draw: summed(draw, lambda d, _: mib(50, 450)(d))),
    "a leak at random steps": by_step("policy-0", lambda draw: summed(draw, lambda d, _: d.choice([0, 500]) * MIB)),
    "a leak that accelerates": by_step("policy-0", lambda draw: summed(draw, lambda _, n: 100 * MIB * 1.08**n)),
    "a leak of another process": leak("others", mib(100, 180)),
    "peaks that grow": peaks_that_grow,
    "one ramp within a step": ramp("policy-0", 9 * GIB, 15),
}
HARMLESS: dict[str, Pattern] = {
    "one step up": ramp("rollout-0", 5 * GIB, 1),
    "a plateau": by_step("policy-0", lambda draw: [min(n, 6) * draw.uniform(700, 900) * MIB for n in range(STEPS + 1)]),
    "a warm-up": by_step("policy-0", lambda draw: [min(n, 2) * 1.5 * GIB for n in range(STEPS + 1)]),
    "teeth within a step": teeth_within_a_step,
    "teeth over ten steps": by_step("policy-0", lambda draw: [n % 10 * mib(200, 400)(draw) for n in range(STEPS + 1)]),
    "noise": by_step("policy-0", lambda draw: [draw.uniform(0, 1.5) * GIB for n in range(STEPS + 1)]),
    "the page cache": leak("page cache", mib(500, 900)),
}
TOO_MUCH: dict[str, Pattern] = {"12 GiB within two seconds": ramp("policy-0", 12 * GIB, 2)}
PATTERNS = GROWING | HARMLESS | TOO_MUCH


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_eighteen_of_twenty_patterns_end_without_a_kill_or_a_repeated_step(seed: int) -> None:
    """No step is repeated unless a process is killed: processes are replaced between two steps."""
    assert len(PATTERNS) == 20
    pods = {name: Pod(pattern(random.Random(seed))).train() for name, pattern in PATTERNS.items()}
    killed = {name for name, pod in pods.items() if pod.killed_at is not None}
    assert killed <= TOO_MUCH.keys()
    assert {name for name in HARMLESS if pods[name].recycled} == set(), "a false alarm"


def test_unwatched_most_patterns_that_grow_end_in_a_kill() -> None:
    pods = [Pod(pattern(random.Random(1)), is_watched=False).train() for pattern in GROWING.values()]
    assert sum(pod.killed_at is not None for pod in pods) >= 10


# --- within a step ---


def looks(*used_gib: float) -> list[MemoryPressure | None]:
    """The warnings of looks at a container with 16 GiB, one each second."""
    watch = HostWatch("policy", 1)
    return [
        watch.look(second, MemorySample(host_used_bytes=round(used * GIB), host_limit_bytes=LIMIT))
        for second, used in enumerate(used_gib)
    ]


@pytest.mark.parametrize(
    ("used_gib", "warned"),
    [
        ((1, 4, 7, 10), False),  # a model is loaded
        ((11, 11.5, 12), True),  # full in 8 s
        ((12, 12, 12, 12), False),
        ((12, 12.1, 12.1, 12.2), False),
        ((14.5, 14.5, 14.5), False),
        ((14.5, 14.51, 14.53), True),  # full in 100 s
        ((15.6,), True),
        ((13, 12.5, 12), False),
    ],
)
def test_a_container_that_is_about_to_be_full_gives_a_warning(used_gib: tuple[float, ...], warned: bool) -> None:
    pressure = looks(*used_gib)[-1]
    assert (pressure is not None) is warned
    if pressure is not None:
        assert (pressure.diagnosis.class_name, pressure.role, pressure.rank) == ("HostMemory", "policy", 1)
        assert pressure.steps_left == 0
        assert pressure.diagnosis.numbers["limit_bytes"] == LIMIT


def test_a_container_whose_limit_is_not_known_gives_no_warning() -> None:
    assert HostWatch("policy", 0).look(0, MemorySample(host_used_bytes=GIB)) is None
