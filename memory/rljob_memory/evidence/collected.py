"""All that is known around a failure, and the builder that gathers it, bounded however much the readers find."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from rljob_api.memory_failure import GpuProcess, MemoryFailure
from rljob_api.memory_plan import MemoryPlan
from rljob_memory.budget import Setup
from rljob_memory.evidence.activity import activity_of
from rljob_memory.evidence.failure import Failure
from rljob_memory.evidence.figures import Measure
from rljob_memory.evidence.first_failure import failure_to_explain
from rljob_memory.evidence.model_facts import ModelFacts, micro_batch_tokens
from rljob_memory.programs import PROGRAMS, Effect
from rljob_memory.sample import MemorySample

_MOST_FAILURES_KEPT = 256
_MOST_SERIES = 256
_MOST_SAMPLES = 1_024
_MOST_SNAPSHOTS = 512
_MOST_RESTARTS = 4_096
_MOST_LIVES = 4
"""Processes of the same name, one after the other, whose samples are kept."""
_MOST_PROCESSES = 256
_TENSORS = Measure.TENSORS, False
_SHARES = sorted(
    {option.leaf for program in PROGRAMS.values() for option in program.options if option.effect is Effect.SHARE}
)
_SHARE = re.compile(r"0?\.\d+|1(?:\.0+)?")


@dataclass(frozen=True, slots=True)
class MemorySeries:
    """Samples of one process."""

    name: str
    """`policy-0`, or the name that another program's log uses."""

    samples: tuple[MemorySample, ...]
    """In the order in which they were taken; never empty."""

    measure: Measure = Measure.TENSORS
    """The memory that `allocated_bytes` counts in them; `rss_bytes` has the figures of host memory."""

    is_peak: bool = False
    """They are maxima, perhaps since the start of the program."""

    lengths: tuple[float, ...] = ()
    """Tokens of the sequences of the latest samples, if the lines have them."""

    @property
    def is_policy(self) -> bool:
        """True if they can be those of a trained model: every name but an engine's or the controller's."""
        return self.measure is not Measure.HOST and not self.name.startswith(("rollout", "controller"))


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """A vLLM engine as its log shows it."""

    seen: bool = False
    """True if the log mentions an engine at all."""

    asleep: bool = False

    freed_bytes: int | None = None
    """Memory that its last sleep freed."""

    still_in_use_bytes: int | None = None
    """Memory in use after its last sleep, by every process on the device."""

    kv_cache_bytes: int | None = None

    weights_bytes: int | None = None

    graphs_bytes: int | None = None
    """Its CUDA graphs."""

    sleep_level: int | None = None
    """Level of its sleeps, if the log has only one."""

    backed_up_bytes: int | None = None
    """Weights that its last sleep copied to the host."""

    in_process: bool = False
    """True if it is known to run in the failing process."""


@dataclass(kw_only=True)
class CollectedEvidence:
    """A failure, and all that is known around it."""

    failure: Failure | None = None
    """The first failure of the last attempt that failed; the others follow from it. None if nothing failed."""

    failures: int = 0
    """Out-of-memory messages of all attempts."""

    secondary: Counter[str] = field(default_factory=Counter)
    """Consequences of a failure elsewhere, counted by name."""

    series: Sequence[MemorySeries] = ()
    """Memory of each process up to the failure."""

    engine: EngineRecord = EngineRecord()

    gpu_processes: dict[int, list[GpuProcess]] = field(default_factory=dict)
    """Process tables, by GPU."""

    gpu_use: list[tuple[int, int]] = field(default_factory=list)
    """Bytes in use and in total of each GPU in tables of nvidia-smi and in HAMi's log, in their order."""

    siblings: tuple[str, ...] | None = None
    """Names of the other processes of its container that use a GPU; None if unknown."""

    host: MemorySample = field(default_factory=MemorySample)
    """Host memory of the container: the most that was seen in use."""

    plan: MemoryPlan | None = None
    """The memory plan that it failed under."""

    setup: Setup | None = None
    """The work, the model and the machine that the plan was made for."""

    engines_apart: bool = False
    """True if policy and engines have GPUs of their own (`topology: Disaggregated`)."""

    versions: dict[str, str] = field(default_factory=dict)

    programs: list[str] = field(default_factory=list)
    """Trainers and engines that the log shows, by their key in `PROGRAMS`."""

    is_of_rljob: bool = False
    """True if a file is of an RLJob: a file of its run, a report of its pods, or a log with lines of its own."""

    trains: bool = False
    """True if a traceback has a script that trains, by its name."""

    options: dict[str, list[str]] = field(default_factory=dict)
    """Different values of options of the programs, by the last part of the option's name."""

    option_spellings: dict[str, str] = field(default_factory=dict)
    """Whole names of options as the log has them, by the last part."""

    backend: str = "fsdp"
    """Backend of the trainer: `fsdp` or `megatron`."""

    host_owners: Counter[str] = field(default_factory=Counter)
    """Host memory by task in Ray's table of its largest users, in bytes."""

    model: ModelFacts = field(default_factory=ModelFacts)

    names: list[str] = field(default_factory=list)
    """Files that were read."""

    @property
    def option_values(self) -> Mapping[str, str]:
        """Values of the options that have one value in the log."""
        return {name: values[0] for name, values in self.options.items() if len(values) == 1}

    @property
    def shows_a_trainer(self) -> bool:
        """True if another trainer with an engine wrote the log: its model and its engine are processes of one job."""
        return any(not PROGRAMS[key].engine and PROGRAMS[key].option(Effect.SHARE) for key in self.programs)

    @property
    def engine_share(self) -> float | None:
        """The engine's configured share of the GPU, if the log has one."""
        values = (self.option_values.get(leaf) for leaf in _SHARES)
        return next((float(value) for value in values if value and _SHARE.fullmatch(value)), None)

    @property
    def shows_an_engines_start(self) -> bool:
        """True if the log has the size of a KV cache and nothing of a trainer: the engine did not wake, it started."""
        return self.engine.kv_cache_bytes is not None and not self.engine.asleep and not self.shows_a_trainer


@dataclass(kw_only=True)
class EvidenceBuilder(CollectedEvidence):
    """Collects what the readers find, then builds the evidence."""

    found: list[Failure] = field(default_factory=list)
    snapshots: deque[Failure] = field(default_factory=lambda: deque(maxlen=_MOST_SNAPSHOTS))
    restarts: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_RESTARTS))
    """Times at which the job began, or resumed after a failure, in seconds since the epoch."""
    lives: dict[str, deque[deque[MemorySample]]] = field(default_factory=dict)
    """Samples of the processes of each name, one after the other."""
    lengths: dict[str, deque[float]] = field(default_factory=dict)
    """Tokens of the sequences, by the series of memory in the same lines."""
    measures: dict[str, tuple[Measure, bool]] = field(default_factory=dict)
    """The measure of each series, and if its figures are maxima."""

    @property
    def is_full(self) -> bool:
        """True if no more failures are added."""
        return len(self.found) >= _MOST_FAILURES_KEPT

    def add_failure(self, failure: Failure) -> None:
        self.failures += 1
        if not self.is_full:
            self.found.append(failure)

    def add_account(self, failure: MemoryFailure, source: str) -> None:
        """A failure as its process recorded it, with what the process knows around it."""
        self.snapshots.append(_structured(failure, source))
        self.add_circumstances(failure)

    def add_report(self, failure: MemoryFailure, source: str) -> None:
        """A failure that a report contains."""
        self.add_circumstances(failure)
        self.add_failure(_structured(failure, source))

    def add_circumstances(self, failure: MemoryFailure) -> None:
        """The engine, the other processes, host memory and samples in the account of a failing process."""
        if engine := failure.engine:
            self.engine = replace(
                self.engine,
                seen=True,
                in_process=engine.in_process,
                asleep=engine.asleep,
                kv_cache_bytes=engine.kv_cache_bytes or self.engine.kv_cache_bytes,
                weights_bytes=engine.weights_bytes or self.engine.weights_bytes,
            )
        for key, program in PROGRAMS.items():
            if key not in self.programs and any(mark in frame for mark in program.recognize for frame in failure.stack):
                self.programs.append(key)
        if failure.siblings is not None:
            self.siblings = tuple(failure.siblings)
        if host := failure.host:
            self.add_host(
                MemorySample(
                    host_used_bytes=host.used_bytes,
                    host_limit_bytes=host.limit_bytes,
                    oom_kills=host.oom_kills,
                    shared_memory_used_bytes=host.shared_memory_used_bytes,
                    shared_memory_bytes=host.shared_memory_bytes,
                )
            )
        for step, each in enumerate(failure.samples):
            held = {"allocated_bytes": each.allocated_bytes, "reserved_bytes": each.reserved_bytes}
            self.add_sample("the process", MemorySample(step=step, phase="update", **held))

    def begin_series(self, name: str) -> None:
        """Later samples under this name belong to another process than earlier ones."""
        if name in self.lives or len(self.lives) < _MOST_SERIES:
            self.lives.setdefault(name, deque(maxlen=_MOST_LIVES)).append(deque(maxlen=_MOST_SAMPLES))

    def add_sample(
        self,
        name: str,
        sample: MemorySample,
        measure: Measure = Measure.TENSORS,
        *,
        is_peak: bool = False,
        length: float | None = None,
    ) -> None:
        """The latest ones are kept: they are nearest to the failure."""
        if name not in self.lives:
            self.begin_series(name)
            self.measures[name] = measure, is_peak
        if name in self.lives:
            self.lives[name][-1].append(sample)
        if length is not None and name in self.lives:
            self.lengths.setdefault(name, deque(maxlen=_MOST_SAMPLES)).append(length)

    def add_host(self, host: MemorySample) -> None:
        """Host memory of the same container: the most that was in use, the latest value of every other number."""
        known = self.host
        self.host = MemorySample(
            host_used_bytes=max(known.host_used_bytes, host.host_used_bytes),
            host_limit_bytes=host.host_limit_bytes or known.host_limit_bytes,
            oom_kills=max(known.oom_kills, host.oom_kills),
            shared_memory_used_bytes=max(known.shared_memory_used_bytes, host.shared_memory_used_bytes),
            shared_memory_bytes=host.shared_memory_bytes or known.shared_memory_bytes,
        )

    def add_gpu_process(self, gpu: int, process: GpuProcess) -> None:
        processes = self.gpu_processes.setdefault(gpu, [])
        if len(processes) < _MOST_PROCESSES and process.pid not in {known.pid for known in processes}:
            processes.append(process)

    def add_gpu_use(self, used_bytes: int, total_bytes: int) -> None:
        if total_bytes and len(self.gpu_use) < _MOST_PROCESSES:
            self.gpu_use.append((used_bytes, total_bytes))

    def add_all(self, other: EvidenceBuilder) -> None:
        """Add what `other` knows around its failures: samples, engine, siblings, programs."""
        for name, lives in other.lives.items():
            measure, is_peak = other.measures.get(name, _TENSORS)
            for sample in lives[-1]:
                self.add_sample(name, sample, measure, is_peak=is_peak)
        self.engine = other.engine if other.engine.seen else self.engine
        self.siblings = self.siblings if other.siblings is None else other.siblings
        self.model = self.model if other.model == ModelFacts() else other.model
        self.versions.update(other.versions)
        self.programs.extend(key for key in other.programs if key not in self.programs)
        self.is_of_rljob = self.is_of_rljob or other.is_of_rljob
        self.trains = self.trains or other.trains
        self.options.update(other.options)

    def build(self) -> CollectedEvidence:
        """The evidence of the first failure of the last attempt among those that were found."""
        failures = [failure for failure in self.found if not self._is_explained(failure)]
        count = self.failures - (len(self.found) - len(failures))
        failure = failure_to_explain(failures, self.snapshots, self.restarts)
        return self._around(failure, count or len(self.snapshots), self.plan)

    def _is_explained(self, failure: Failure) -> bool:
        """True if it only shows that something is gone, and the log has another reason for that than memory.

        Also true if the program retried with less memory and continued: a failure of the retry has a report of its own.
        """
        if failure.retried and failure.is_of_the_gpu:
            return True
        return any(self.secondary[name] for name in failure.unless)

    def build_for(self, account: MemoryFailure, plan: MemoryPlan | None) -> CollectedEvidence:
        """The evidence of a failure whose process gave its account. `plan`: the one it failed under, if known."""
        self.add_circumstances(account)
        return self._around(_structured(account), 1, plan)

    def _around(self, failure: Failure | None, failures: int, plan: MemoryPlan | None) -> CollectedEvidence:
        known = {each.name: getattr(self, each.name) for each in fields(CollectedEvidence)}
        series = tuple(
            MemorySeries(name, samples, *self.measures.get(name, _TENSORS), tuple(self.lengths.get(name, ())))
            for name, lives in self.lives.items()
            if (samples := _samples_before(lives, failure))
        )
        model = replace(self.model, micro_batch_tokens=micro_batch_tokens(self.option_values))
        changed = {"failure": failure, "failures": failures, "series": series, "plan": plan, "model": model}
        return CollectedEvidence(**known | changed)


def _structured(account: MemoryFailure, source: str = "") -> Failure:
    if isinstance(account, Failure):
        return account
    given = {name: getattr(account, name) for name in MemoryFailure.model_fields}
    given["activity"] = account.activity or activity_of(account.stack)
    clock = ("epoch", account.time.timestamp()) if account.time else None
    return Failure(**given, is_structured=True, clock=clock, source=source)


def _samples_before(lives: Sequence[Sequence[MemorySample]], failure: Failure | None) -> tuple[MemorySample, ...]:
    """Samples of the process that ran at the time of the failure; of the last process if the time is unknown."""
    if failure is None or failure.clock is None or failure.clock[0] != "epoch":
        return tuple(lives[-1])
    failed_at = failure.clock[1]
    for samples in reversed(lives):
        before = tuple(sample for sample in samples if sample.time is None or sample.time <= failed_at)
        if before:
            return before
    return ()
