"""Answers before a job starts: whether it fits its GPUs and hosts, at what price, and what else would fit. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from rljob_api.memory_plan import MemoryPlan, MemorySettings
from rljob_memory.budget import Setup
from rljob_memory.budget.gpu import activation_bytes_per_token
from rljob_memory.budget.host import USABLE_HOST_SHARE
from rljob_memory.budget.setup import Lack
from rljob_memory.engine_sizes import engine_sizes
from rljob_memory.hardware import GPU_TYPES, GpuType
from rljob_memory.plan import NOTICEABLE, Choice, best_choice
from rljob_memory.plan_settings import is_pinned, name_of, pinning_field
from rljob_memory.sizes import TIB, human_bytes

Verdict = Literal["fits", "fits at a price", "does not fit"]

_GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64)
GPUS_OF_A_MACHINE = 8
_LONGEST_RESPONSE = 1 << 20
_SHORTEST_SHARE = 4
"""Responses of less than this fraction of the maximum length are another task, and no change to recommend: 1/4."""
_MOST_CHANGES = 2


@dataclass(frozen=True, slots=True)
class Fit:
    """The best plan for a job on a machine, and how it compares with other plans and machines."""

    settings: MemorySettings
    setup: Setup
    choice: Choice
    lack: Lack | None
    """The phase that lacks most; None if the job fits."""

    @property
    def price_seconds(self) -> float:
        """Seconds of a step that more GPU memory would save; 0 without GPUs."""
        hardware = self.setup.hardware
        if hardware.device == "cpu":
            return 0.0
        roomy = replace(hardware, device_memory_bytes=TIB, engine_device_memory_bytes=0, gpu=hardware.gpu_type.name)
        without_limit = best_choice(self.settings, replace(self.setup, hardware=roomy))
        return max(self.choice.budget.seconds() - without_limit.budget.seconds(), 0.0)

    @property
    def verdict(self) -> Verdict:
        if self.lack is not None:
            return "does not fit"
        return "fits at a price" if self._is_noticeable(self.price_seconds) else "fits"

    def _is_noticeable(self, price_seconds: float) -> bool:
        seconds = self.choice.budget.seconds()
        return seconds > NOTICEABLE * (seconds - price_seconds)

    @property
    def message(self) -> str:
        """The verdict with its reason, such as `fits at a price of 3.1 s a step`."""
        if self.lack is not None:
            lack = self.lack
            predicted = self.choice.budget
            largest = predicted.uses(lack.place, lack.phase, pod=lack.pod)[:3]
            uses = ", ".join(f"{line.use} {human_bytes(line.bytes)}" for line in largest)
            where = "a GPU" if lack.place == "gpu" else "the hosts" if self.setup.work.policy_pods > 1 else "the host"
            return (
                f"does not fit, because the {lack.phase} needs {human_bytes(lack.needed_bytes)} of {where}, and "
                f"{human_bytes(lack.usable_bytes)} can be used ({uses})"
            )
        price = self.price_seconds
        return f"fits at a price of {price:,.1f} s a step" if self._is_noticeable(price) else "fits"

    @property
    def explanation(self) -> str:
        """The message, followed by the smallest changes with which a job fits that does not."""
        if self.lack is None:
            return self.message
        changes = ", or with ".join(islice(self.changes_that_fit(), _MOST_CHANGES))
        return f"{self.message}; " + (f"it fits with {changes}" if changes else "no single change makes it fit")

    def changes_that_fit(self) -> Iterator[str]:
        """Single changes with which the job fits, as the manifest writes them; those that a stored job allows first."""
        for setting in MemoryPlan.model_fields:
            released = self.settings.model_copy(update={str(pinning_field(setting)): "Auto"})
            if is_pinned(self.settings, setting) and self._fits_with(settings=released):
                yield f"memory.{name_of(setting)}: Auto"
        work, kind = self.setup.work, self.setup.hardware.gpu_type
        if self._fits_with_responses_of(max(work.max_response_tokens // _SHORTEST_SHARE, 1)):
            yield f"algorithm.maxResponseTokens: {_last(self._fits_with_responses_of, work.max_response_tokens)}"
        if self.setup.hardware.device == "cpu":
            return
        if faster := self.faster_tensor_parallel_size():
            yield f"rollout.tensorParallelSize: {faster[0]}"
        larger = sorted(GPU_TYPES.values(), key=lambda each: each.memory_bytes)
        larger = [each for each in larger if each.memory_bytes > kind.memory_bytes]
        other_type = next((each for each in larger if self._fits_with(setup=on_gpus(self.setup, each))), None)
        found = [f"{other_type.name} GPUs"] if other_type else []
        if more := self.on_fewest_gpus():
            pods, gpus = more.setup.work.policy_pods, more.setup.work.ranks_per_pod
            fields = {"policy.replicas": (work.policy_pods, pods), "policy.gpusPerReplica": (work.ranks_per_pod, gpus)}
            text = " and ".join(f"{field}: {new}" for field, (now, new) in fields.items() if new != now)
            found.insert(0 if pods <= work.policy_pods else 1, text)  # another type is simpler than more machines
        yield from found

    def _fits_with(self, *, settings: MemorySettings | None = None, setup: Setup | None = None) -> bool:
        possible = _smallest_and_largest_engines(setup or self.setup)
        return any(fit(settings or self.settings, each).lack is None for each in possible)

    def _fits_with_responses_of(self, tokens: int) -> bool:
        return self._fits_with(setup=self.setup.with_work(max_response_tokens=tokens))

    # --- other plans and machines ---

    def fewest_gpus(self) -> int | None:
        """The smallest number of such GPUs for the policy; None if 64 are not enough."""
        smallest = self.on_fewest_gpus()
        return None if smallest is None else smallest.setup.work.policy_ranks

    def on_fewest_gpus(self) -> Fit | None:
        """The fit on the smallest number of such GPUs for the policy; None if 64 are not enough."""
        # With fewer GPUs, each needs more memory.
        too_few = self.setup.work.policy_ranks if self.lack and self.lack.place == "gpu" else 0
        setups = (with_gpus(self.setup, count) for count in _GPU_COUNTS if count > too_few)
        found = next((setup for setup in setups if self._fits_with(setup=setup)), None)
        return fit(self.settings, found) if found else None

    def on_other_gpus(self) -> dict[str, Fit | None]:
        """The fit on the fewest GPUs of each known type, by its name; None where 64 are not enough."""
        found = {}
        for name, kind in GPU_TYPES.items():
            found[name] = fit(self.settings, on_gpus(self.setup, kind)).on_fewest_gpus()
        return found

    def largest_micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch that still fits under this plan, at most those of an update; 0 without GPUs."""
        hardware, plan = self.setup.hardware, self.choice.plan
        if hardware.device == "cpu":
            return 0
        each = activation_bytes_per_token(
            self.setup.model, checkpointing=plan.activation_checkpointing, compiled=hardware.layers_compiled
        )
        predicted = self.choice.budget
        others = predicted.total("gpu", "update") - predicted.bytes_of("activations", "gpu")
        step = self.setup.work.sequences_per_update * self.setup.work.max_sequence_tokens
        return min(max(self.setup.usable_bytes("update") - others, 0) // each, step)

    def longest_response_tokens(self) -> int:
        """The largest maxResponseTokens with which the job fits under any plan; 0 if none does."""
        return _last(self._fits_with_responses_of, _LONGEST_RESPONSE)

    def faster_tensor_parallel_size(self) -> tuple[int, float] | None:
        """The `tensorParallelSize` that Auto would choose in place of a number with which the job does not fit, or a
        step takes noticeably longer, and its seconds; None if there is none."""
        if self.setup.work.auto_engines:
            return None
        found = best_choice(self.settings, self.setup.with_work(auto_engines=True))
        size, seconds = found.plan.tensor_parallel_size, found.budget.seconds()
        gains = not self.choice.fits or self.choice.budget.seconds() >= NOTICEABLE * seconds
        return (size, seconds) if found.fits and size != self.setup.work.tensor_parallel_size and gains else None


def fit(settings: MemorySettings, setup: Setup) -> Fit:
    """The best plan by the budget, and whether it fits."""
    choice = best_choice(settings, setup)
    return Fit(settings, setup, choice, _lack(setup, choice))


def _smallest_and_largest_engines(setup: Setup) -> Iterator[Setup]:
    """The setup without a choice of engines. One of these fits if any choice does: the more GPUs an engine has, the
    less memory it needs on each."""
    if not setup.work.auto_engines:
        yield setup
        return
    sizes = engine_sizes(setup)
    for size in sorted({sizes[0], sizes[-1]}):
        yield replace(setup, work=replace(setup.work.with_engines_of(size), auto_engines=False))


def with_gpus(setup: Setup, count: int) -> Setup:
    """The setup with `count` GPUs for the policy, and for its engines if they share them."""
    work = setup.work
    pods = -(-count // GPUS_OF_A_MACHINE)
    host = setup.hardware.host_memory_bytes * pods // work.policy_pods
    if work.is_colocated:
        size = min(work.tensor_parallel_size, count)
        work = replace(work.with_engines(count // size, size), rollout_pods=pods)
    work = replace(work, policy_ranks=count, policy_pods=pods)
    return Setup(work, setup.model, replace(setup.hardware, host_memory_bytes=host))


def on_gpus(setup: Setup, kind: GpuType) -> Setup:
    """The setup on GPUs of another type, also for the engines."""
    size = kind.memory_bytes
    hardware = replace(setup.hardware, device_memory_bytes=size, engine_device_memory_bytes=0, gpu=kind.name)
    return replace(setup, hardware=hardware)


def machine_text(setup: Setup) -> str:
    """`4 × h100 (79.10 GiB), 1024.00 GiB of host memory`."""
    work, hardware = setup.work, setup.hardware
    host = f"{human_bytes(hardware.host_memory_bytes)} of host memory"
    if hardware.device == "cpu":
        return f"CPUs, {host}"
    engines = 0 if work.is_colocated else work.engine_processes
    others = f" + {engines} for engines" if engines else ""
    gpu = f"{hardware.gpu_type.name} ({human_bytes(hardware.device_memory_bytes)})"
    return f"{work.policy_ranks}{others} × {gpu}, {host}"


def _lack(setup: Setup, choice: Choice) -> Lack | None:
    """The phase of a GPU that lacks most memory, else the host's; None if everything fits."""
    predicted = choice.budget
    if lack := setup.gpu_lack(predicted):
        return lack
    phase = predicted.peak_phase("host")
    needed = setup.work.policy_pods * predicted.total("host", phase)
    host = Lack("host", "policy", phase, needed, int(setup.hardware.host_memory_bytes * USABLE_HOST_SHARE))
    return host if host.missing_bytes > 0 else None


def _last(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that holds, if smaller ones hold too; 0 if 1 does not."""
    if holds(most):
        return most
    low, high = 0, most
    while high - low > max(low // 100, 1):
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
