"""The balance of the failing process's GPU: observed memory by its holder, and what is expected of each holder.

It is computed once for a failure, and read by every cause.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rljob_api.memory_failure import Activity, DeviceMemory, FailureKind, GpuProcess
from rljob_memory.budget import Budget, others
from rljob_memory.budget.gpu import filled_chunk_tokens, float32_logits_bytes
from rljob_memory.diagnosis.expected import Expected, budget_of, expected_of, lines_at
from rljob_memory.diagnosis.growth import PastGrowth, allocated_growth
from rljob_memory.evidence.collected import CollectedEvidence, MemorySeries
from rljob_memory.evidence.failure import Failure
from rljob_memory.evidence.figures import Measure
from rljob_memory.sample import MemorySample

_UNSEEN_SHARE = 0.125
"""Smaller shares are often its own as well: workspaces, captured graphs, allocators other than torch's."""
ORDINARY_CACHE_SHARE = 0.08
"""Share of what torch has reserved that ordinary jobs leave in its cache."""
_LEAST_STATE, _MOST_STATE = 0.85, 1.1
"""Range of the expected state, as a share of the tensors, in which the state explains all tensors."""
_FULL = 0.7
"""Share of the GPU from which tensors fill it."""
_SAME = 0.05
"""Relative difference up to which a request has the size of the logits."""
_LATEST = 8
"""Samples of a series that count as its latest."""
_NOTABLE = 0.1
"""Share of the GPU from which growth that torch does not count is considered."""
LARGE_SHARE = 0.25
"""Share of the GPU above which an item explains a full one."""
LARGE_ENGINE_SHARE = 0.75
"""Share of the GPU with which an engine leaves a trainer too little, whatever torch's cache holds."""
_TIMES_THE_CACHE = 4
"""Ratio from which one of two amounts of memory is much larger: other processes' to torch's cache, cache to request."""
_FULL_OF_WEIGHTS, _SMALL_LOAD_REQUEST = 0.98, 0.01
"""Shares of the GPU: from the first, an engine's tensors fill it; up to the second, a request is that of a weight."""
_MODEL_CREATION = re.compile(r"\b(?:load|init|creat|build|shard|layer|warm)", re.IGNORECASE)
"""Searched in the text before a figure."""
_ENGINE_PROCESS = re.compile(
    r"vllm|enginecor|sglang|llmrayactor|trtllm|rolloutray|lmdeploy|text-generation", re.IGNORECASE
)
"""Names of an engine's processes, which the kernel cuts after 15 characters: `VLLM::EngineCor`, `sglang::schedul`."""


@dataclass(frozen=True)
class Balance:
    """The holders of the failing process's GPU. Sizes are 0 if they are unknown."""

    failure: Failure
    evidence: CollectedEvidence

    @property
    def device(self) -> DeviceMemory | None:
        """Memory of the GPU, as the failing process saw it."""
        return self.failure.device

    @property
    def requested_bytes(self) -> int:
        """The request that failed."""
        return self.failure.requested_bytes or 0

    @property
    def missing_bytes(self) -> int:
        """The request less the free memory."""
        return max(self.requested_bytes - ((self.device.free_bytes if self.device else None) or 0), 0)

    @cached_property
    def total_bytes(self) -> int:
        device = self.failure.device
        return (device.total_bytes if device else None) or 0

    def share(self, size_bytes: int) -> float:
        """Return `size_bytes` as a share of the GPU; 0 if its size is unknown."""
        return size_bytes / self.total_bytes if self.total_bytes else 0.0

    @cached_property
    def budget(self) -> Budget | None:
        """The budget of the GPUs of the failing process; None if the job's setup or its plan is unknown."""
        return budget_of(self.failure, self.evidence)

    @cached_property
    def expected_of_others_bytes(self) -> int | None:
        """Memory of the job's other processes on the GPU by the budget, with their contexts; None without a budget."""
        return (
            None
            if self.budget is None
            else sum(line.bytes for line in lines_at(self.failure, self.budget, of_others=True))
        )

    def foreign_bytes(self, known_bytes: int = 0) -> int:
        """Memory that other processes hold, if it is more than the driver's own and the request lacked it; else 0.

        `known_bytes`: memory of other processes that is accounted for, and not included.
        """
        device = self.failure.device
        if device is None or device.total_bytes is None or device.had_enough_free:
            return 0
        least = self._least_foreign_bytes
        if device.process_bytes is None:
            least = max(least + others.OUTSIDE_TORCH_BYTES, round(_UNSEEN_SHARE * device.total_bytes))
        foreign = device.foreign_bytes - known_bytes
        return foreign if foreign >= least else 0

    @property
    def _least_foreign_bytes(self) -> int:
        return max(others.LEAST_FOREIGN_BYTES, round(others.LEAST_FOREIGN_SHARE * self.total_bytes))

    @cached_property
    def contexts_bytes(self) -> int:
        """Memory of the other processes that hold about as much as a bare CUDA context."""
        return sum(process.used_bytes for process in (self.device.others if self.device else ()) if is_context(process))

    @property
    def others_outweigh_the_cache(self) -> bool:
        """True if the pieces of torch's cache are a small item, compared with what other processes hold of the GPU.

        A foreign process is unexpected there. An engine of the same job takes its share in a healthy run too.
        """
        device, foreign = self.device, self.foreign_bytes()
        if device is None or not device.total_bytes or self.evidence.shows_a_trainer or self.failure.role is not None:
            return False
        return foreign >= max(LARGE_SHARE * device.total_bytes, _TIMES_THE_CACHE * (device.cached_bytes or 0))

    @property
    def has_cache_for_the_request(self) -> bool:
        """True if torch's cache in the failing process has several times the memory of the request."""
        cached = self.device.own_cache_bytes if self.device else 0
        return cached >= _TIMES_THE_CACHE * max(self.requested_bytes, 1)

    @property
    def has_a_cache_instead(self) -> bool:
        """True if the message lists no other process, and torch's cache in its own has enough for the request."""
        device = self.device
        if device is None or device.process_bytes is None or device.others:
            return False
        ordinary_bytes = round(ORDINARY_CACHE_SHARE * (device.reserved_bytes or 0))
        return device.own_cache_bytes >= max(device.requested_bytes, ordinary_bytes)

    @property
    def shows_a_holder_of_cache(self) -> bool:
        """True if the evidence shows a process with a cache of torch's: a trainer, or an engine that woke."""
        evidence, kind = self.evidence, self.failure.kind
        if evidence.shows_a_trainer or evidence.engine.seen or evidence.series or evidence.siblings:
            return True
        is_in_torchs_error = kind is FailureKind.NCCL and "NCCL WARN" not in self.failure.text
        return kind is FailureKind.ENGINE_WAKE or is_in_torchs_error

    @property
    def weights_fill_the_engine(self) -> bool:
        """True if an engine without a telling stack has filled the GPU by small requests, and has no CUDA graphs yet.

        It keeps a part of the GPU free of its KV cache for activations, but does not bound its weights.
        """
        failure, device = self.failure, self.device
        if failure.kind is not FailureKind.ALLOCATOR or not failure.in_engine or failure.activity or device is None:
            return False
        held = (device.allocated_bytes or 0) - device.asleep_bytes
        is_small = self.share(device.requested_bytes) <= _SMALL_LOAD_REQUEST
        return self.share(held) >= _FULL_OF_WEIGHTS and is_small and not device.private_pool_bytes

    @cached_property
    def engine_siblings(self) -> tuple[str, ...]:
        """Names of the engines among the other processes of the container that use a GPU."""
        return tuple(name for name in self.evidence.siblings or () if _ENGINE_PROCESS.search(name))

    @cached_property
    def shares_with_ranks_only(self) -> bool:
        """True if the container's other processes are known, and none of them is an engine."""
        return bool(self.evidence.siblings) and not self.engine_siblings

    @cached_property
    def engine_holds_little(self) -> bool:
        """True if, by the memory plan, RLJob's own engine was asleep at the time or not yet started."""
        plan, failure = self.evidence.plan, self.failure
        return (
            plan is not None
            and plan.rollout_sleep_level > 0
            and failure.role == "policy"
            and failure.phase in (None, "update")
        )

    @cached_property
    def engine_kv_cache_bytes(self) -> int:
        """KV cache of an engine that the log shows, and that was not asleep at the time; 0 if there is none.

        The engine may be in the failing process: TRL runs it in the process of its model, where torch counts its
        memory as tensors.
        """
        device, engine, failure = self.failure.device, self.evidence.engine, self.failure
        if device is None or engine.asleep or not engine.kv_cache_bytes or failure.in_engine:
            return 0
        return engine.kv_cache_bytes if self._most_an_engine_holds >= engine.kv_cache_bytes else 0

    @cached_property
    def engine_bytes(self) -> int:
        """Share of an engine that is awake next to the policy: its KV cache, its weights and its CUDA graphs."""
        engine = self.evidence.engine
        if not self.engine_kv_cache_bytes:
            return 0
        known = (engine.kv_cache_bytes, engine.weights_bytes, engine.graphs_bytes)
        return min(sum(size for size in known if size), self._most_an_engine_holds)

    @cached_property
    def engine_is_in_the_process(self) -> bool:
        device = self.failure.device
        return bool(device and self.engine_kv_cache_bytes and device.foreign_bytes < self.engine_kv_cache_bytes)

    @property
    def _most_an_engine_holds(self) -> int:
        device, evidence = self.failure.device, self.evidence
        if device is None:
            return 0
        within = evidence.shows_a_trainer or evidence.engine.in_process
        return max(device.foreign_bytes, (device.allocated_bytes or 0) - device.asleep_bytes if within else 0)

    @cached_property
    def sleeping_engine_bytes(self) -> int:
        """Memory that an engine may keep on the GPU while it sleeps: by the budget, and as much again as the driver."""
        if self.expected_of_others_bytes is not None and self.engine_holds_little:
            return self.expected_of_others_bytes + self._least_foreign_bytes
        return min(others.SLEEPING_ENGINE_BYTES, round(others.SLEEPING_ENGINE_SHARE * self.total_bytes))

    @cached_property
    def policy_next_to_engine_bytes(self) -> int:
        """Memory of the policy on the GPU of a colocated engine that failed; 0 for other failures."""
        shares_gpu = self.failure.role == "rollout" and not self.evidence.engines_apart
        return self.policy_reserved_bytes if shares_gpu else 0

    @cached_property
    def policy_cache_bytes(self) -> int | None:
        """Cache of the policy process that has the largest one, at its last sample; None if unknown."""
        caches = (sample.cache_bytes for sample in self._last_of_torch)
        return max((cache for cache in caches if cache is not None), default=None)

    @cached_property
    def policy_reserved_bytes(self) -> int:
        """Memory that torch held in the policy process that holds most, at its last sample."""
        return max((sample.reserved_bytes or sample.allocated_bytes for sample in self._last_of_torch), default=0)

    @cached_property
    def _last_of_torch(self) -> list[MemorySample]:
        return [series.samples[-1] for series in self.evidence.series if _is_of_torch(series)]

    @cached_property
    def growths(self) -> Sequence[tuple[PastGrowth, MemorySeries]]:
        """Memory that grew up to the failure, as tensors that are kept do.

        Memory that is not known to be in tensors must have grown by a tenth of the GPU, and not while a model was made.
        """
        return [
            (growth, series)
            for series in self.evidence.series
            if series.is_policy
            and (growth := allocated_growth(series))
            and not self._is_of_a_load(series)
            and (_is_of_torch(series) or self.share(growth.trend.growth_bytes) >= _NOTABLE or not self.total_bytes)
        ]

    def _is_of_a_load(self, series: MemorySeries) -> bool:
        """True for figures that were printed while a model was made."""
        loads = self.failure.activity is Activity.MODEL_LOAD or series.measure is not Measure.TENSORS
        return loads and _MODEL_CREATION.search(series.name) is not None

    @cached_property
    def expected(self) -> Expected | None:
        """Tensors of the failing process by the job's budget, else by the size of the model in the log; None if neither
        is known."""
        if self.budget is not None and self.evidence.setup is not None:
            lines = lines_at(self.failure, self.budget, of_others=False)
            parameters = self.evidence.setup.model.parameters
            return Expected(tuple(line for line in lines if line.is_in_torch), parameters, is_guess=False)
        return expected_of(self.evidence.model)

    @cached_property
    def tensors_bytes(self) -> int:
        """Tensors of the failing process without an engine that is awake or asleep in it."""
        device = self.failure.device
        if device is None:
            return 0
        within = self.engine_bytes if self.engine_is_in_the_process else 0
        return max((device.allocated_bytes or 0) - device.asleep_bytes - within, 0)

    @cached_property
    def state_share(self) -> float:
        """Share of its tensors that the model's weights, gradients and Adam's state explain; 0 if unknown.

        A value far from 1 says nothing: the state may be sharded over any number of GPUs.
        """
        if self.expected is None or not self.tensors_bytes or self.failure.in_engine:
            return 0.0
        return self.expected.training_bytes / self.tensors_bytes

    @cached_property
    def activations_bytes(self) -> int:
        """Tensors of the failing process beyond those between two steps: by its samples, else by the model's size.

        0 if neither is known, or if the model's state explains all of them.
        """
        between = [
            min(sample.allocated_bytes for sample in series.samples[-_LATEST:])
            for series in self.evidence.series
            if _is_of_torch(series) and not series.is_peak
        ]
        if between:
            return max(self.tensors_bytes - max(between), 0)
        if self.expected is None or self.expected.is_guess or self.failure.in_engine:
            return 0
        return max(self.tensors_bytes - self.expected.training_bytes, 0)

    @property
    def is_full_of_state(self) -> bool:
        """True if the tensors fill the GPU, and are what weights, gradients and Adam's state of the model take."""
        return _LEAST_STATE <= self.state_share <= _MOST_STATE and self.share(self.tensors_bytes) >= _FULL

    @cached_property
    def logits_bytes(self) -> int:
        """Logits of one pass, or of one chunk of it, in float32; 0 if their number is unknown."""
        evidence, model = self.evidence, self.evidence.model
        if evidence.setup is not None and evidence.plan is not None:
            tokens = filled_chunk_tokens(evidence.setup.work, evidence.plan)
            return float32_logits_bytes(evidence.setup.model.vocabulary, tokens)
        return float32_logits_bytes(model.vocabulary or 0, model.micro_batch_tokens or 0)

    @property
    def asks_for_logits(self) -> bool:
        """True if the request that failed is of the size of the logits, in float32 or in 16 bits."""
        ratio = (self.failure.requested_bytes or 0) / self.logits_bytes if self.logits_bytes else 0.0
        return any(abs(ratio - share) <= _SAME * share for share in (1.0, 0.5))

    @property
    def has_an_unexpected_holder(self) -> bool:
        """True if other processes, or an engine in this one, hold all of the missing memory beyond what is expected.

        Any excess over the budget counts; without a budget, one that takes a large share of the GPU.
        """
        least = 0.0 if self.budget is not None else LARGE_SHARE
        within = self.engine_bytes if self.engine_is_in_the_process and not self.failure.in_engine else 0
        excess = max(within, self._unexpected_of_others_bytes)
        return excess > 0 and excess >= self.missing_bytes and self.share(excess) >= least

    @property
    def others_exceed_the_budget(self) -> bool:
        """True if other processes hold as much more than the job's own should, as is missing."""
        return self.budget is not None and self._unexpected_of_others_bytes >= max(self.missing_bytes, 1)

    @cached_property
    def _unexpected_of_others_bytes(self) -> int:
        """Memory of other processes beyond that of the job's own, by the budget or by its plan."""
        if self.expected_of_others_bytes is not None:
            return self.foreign_bytes(self.expected_of_others_bytes)
        return 0 if self.engine_holds_little else self.foreign_bytes(self.policy_next_to_engine_bytes)


def is_context(process: GpuProcess) -> bool:
    """True if a process holds about as much as a CUDA context."""
    return others.SMALLEST_CONTEXT_BYTES <= process.used_bytes <= others.LARGEST_CONTEXT_BYTES


def _is_of_torch(series: MemorySeries) -> bool:
    """True if its samples are what torch holds in a policy process, not what a GPU has in use."""
    return series.is_policy and series.measure is Measure.TENSORS
