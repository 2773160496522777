"""`rljob plan`: whether a job fits before it starts, what each phase needs, and what was chosen. Needs no torch."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rljob_api.exit_codes import ExitCode
from rljob_api.job import RLJobSpec
from rljob_api.manifest import ManifestError, only_job
from rljob_api.quantity import quantity_bytes
from rljob_client.errors import BadInput, RunError
from rljob_client.model_dimensions import described_dimensions, require_dense
from rljob_client.other_configs import Source, options_of, spec_from
from rljob_client.other_memory import as_configured, is_colocated
from rljob_memory.budget import PHASES, Budget, Phase, Pod, Setup, budget
from rljob_memory.fit import GPUS_OF_A_MACHINE, Fit, fit, machine_text, with_gpus
from rljob_memory.hardware import ASSUMED, GPU_TYPES, HOST_BYTES_PER_GPU, Hardware, type_of_product
from rljob_memory.model_shape import ModelShape, compute_bytes, shape_in_uri, with_adapters
from rljob_memory.plan import SWITCHES
from rljob_memory.plan_settings import is_pinned, name_of, text_of
from rljob_memory.sizes import GIB, TIB, human_bytes
from rljob_memory.workload import workload_of

DOES_NOT_FIT = 1
"""Exit code of a job that does not fit."""

_DEFAULT_GPU = "h100"
_MOST_GPUS = 4096
_LARGEST_BYTES = 64 * TIB
_MOST_PARAMETERS = 10**13
_SHOWN_PHASES: tuple[Phase, ...] = ("rollout", "update", "sync")
_SHOWN_USES = 3
"""Largest uses that are listed for each place."""


class InvalidOptions(RunError):
    """The options or the manifest are invalid."""

    exit_code = ExitCode.INVALID_MANIFEST


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of the command line."""

    gpu: str | None = None
    """Name of a type of GPU, or memory of one GPU, such as 80Gi; None: those of this machine, else an H100."""
    gpus: int | None = None
    """GPUs of the policy; None: those of the manifest."""
    host: str | None = None
    """Host memory of all machines; None: that of this machine if it has GPUs, else 256 GiB for each GPU."""
    source: Source | None = None
    """The file is a configuration of this trainer; None: an RLJob's manifest."""
    sweep: bool = False
    """Print a table of all known types of GPU instead."""
    as_json: bool = False
    settings: Sequence[str] = ()
    """Fields of the manifest that are set, as `path=value`."""


def run_plan(manifest: Path, options: PlanOptions) -> int:
    """Print the plan of the job in `manifest`, and return the exit code."""
    try:
        spec = _spec(manifest, options)
        if spec.trainer is not None:
            raise InvalidOptions("expected RLJob's own trainer, found another, whose memory is not known")
        setup = setup_for(spec, manifest.parent, options)
        if options.source == "trl" and setup.hardware.device == "cuda" and is_colocated(others := options_of(manifest)):
            settings, setup = as_configured(others, setup)
            spec = spec.model_copy(update={"memory": settings})
        found = fit(spec.memory, setup)
    except ManifestError as error:
        print(error, file=sys.stderr)
        return ExitCode.INVALID_MANIFEST
    except RunError as error:
        print(f"rljob plan: {error}", file=sys.stderr)
        return ExitCode.INVALID_MANIFEST
    if options.sweep:
        others = found.on_other_gpus()
        rows = {name: _short(other) for name, other in others.items()}
        print(json.dumps(rows, indent=2) if options.as_json else "\n".join(sweep_report(others)))
        return ExitCode.COMPLETE if any(rows.values()) else DOES_NOT_FIT
    # The changes that fit are written as in an RLJob's manifest.
    message = found.explanation if options.source is None else found.message
    if options.as_json:
        print(json.dumps(as_json(found, message), indent=2))
    else:
        is_assumed = options.gpu is None and _gpu_of_this_machine() is None
        print("\n".join(report(spec, found, message, is_assumed=is_assumed)))
    return DOES_NOT_FIT if found.lack else ExitCode.COMPLETE


def _spec(file: Path, options: PlanOptions) -> RLJobSpec:
    if options.source is None:
        return only_job(file, options.settings).load().spec
    if options.settings:
        raise InvalidOptions(f"--set changes the fields of a manifest: with --from {options.source}, change the file")
    return spec_from(options.source, file, options.gpus)


# --- the model and the machine ---


def setup_for(spec: RLJobSpec, directory: Path, options: PlanOptions) -> Setup:
    """The job on the machine of the options. `directory`: that of the manifest. Raises `RunError`."""
    work = workload_of(spec)
    hardware = _hardware(options, work.policy_ranks, on_cpu=spec.policy.gpus_per_replica == 0 and options.gpu is None)
    setup = Setup(work, _shape(spec, hardware), hardware)
    if options.gpus is None:
        return setup
    if not 1 <= options.gpus <= _MOST_GPUS:
        raise InvalidOptions(f"--gpus: expected a number from 1 to {_MOST_GPUS:,}, found {options.gpus}")
    return replace(with_gpus(setup, options.gpus), hardware=hardware)


def _shape(spec: RLJobSpec, hardware: Hardware) -> ModelShape:
    """The shape in the model's `config.json` if that is on this machine, else the one in its URI. Raises `BadInput`."""
    size = compute_bytes(spec, hardware.device)
    scheme, _, location = spec.model.uri.partition("://")
    folder = Path("/", location) if scheme == "file" else _in_hub_cache(location) if scheme == "hf" else None
    if folder is not None:
        require_dense(folder)
        shape = described_dimensions(folder).shape(size)
        if shape.parameters > _MOST_PARAMETERS:
            raise BadInput(
                f"expected at most {_MOST_PARAMETERS:.0e} parameters, found {shape.parameters:.0e} in {folder}"
            )
        return shape if spec.policy.lora is None else with_adapters(shape, spec.policy.lora.rank)
    found = shape_in_uri(spec, size)
    if found is None:
        raise BadInput(
            f"expected a model whose size is known here, found {spec.model.uri}: its files are not on this machine, "
            "and its name has no size such as 8B; write file:// and a directory with its config.json"
        )
    return found


def _in_hub_cache(location: str) -> Path | None:
    """The newest snapshot of a model in the cache of huggingface_hub that has a config.json; None without one."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    repository = f"models--{location.partition('@')[0].replace('/', '--')}"
    configs = (home / "hub" / repository / "snapshots").glob("*/config.json")
    with suppress(OSError):
        newest = max(configs, key=lambda file: file.stat().st_mtime, default=None)
        return None if newest is None else newest.parent
    return None


def _hardware(options: PlanOptions, gpus: int, *, on_cpu: bool) -> Hardware:
    if on_cpu:
        return replace(ASSUMED["cpu"], host_memory_bytes=_host_bytes(options, 0, is_here=True))
    here = _gpu_of_this_machine() if options.gpu is None else None
    memory_bytes, name = _gpu(here or _DEFAULT_GPU if options.gpu is None else options.gpu)
    host_bytes = _host_bytes(options, options.gpus or gpus, is_here=here is not None)
    return Hardware("cuda", memory_bytes, host_bytes, gpu=name, layers_compiled=True)


def _gpu(given: str) -> tuple[int, str]:
    """Memory and type of a GPU. Raises `InvalidOptions`, with the known names."""
    name = given.lower().removeprefix("nvidia-")
    if name in GPU_TYPES:
        return GPU_TYPES[name].memory_bytes, name
    size = _size(given, "--gpu") if re.match(r"[0-9]", given) else None
    if size is None:
        close = get_close_matches(name, GPU_TYPES, n=1)
        hint = f"did you mean {close[0]}?" if close else "write one of these"
        raise InvalidOptions(
            f"--gpu: expected one of {', '.join(GPU_TYPES)}, or the memory of a GPU such as 80Gi, "
            f"found {given!r:.100}; {hint}"
        )
    return size, Hardware("cuda", size, 0).gpu_type.name


def _host_bytes(options: PlanOptions, gpus: int, *, is_here: bool) -> int:
    if options.host is not None:
        return _size(options.host, "--host")
    if is_here:
        pages = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"))
        return int(pages[1]) * 1024 if pages else ASSUMED["cpu"].host_memory_bytes
    return gpus * HOST_BYTES_PER_GPU


def _size(text: str, option: str) -> int:
    """Bytes of a quantity. Raises `InvalidOptions`."""
    with suppress(ValueError):
        size = quantity_bytes(text)
        if GIB <= size <= _LARGEST_BYTES:
            return size
    raise InvalidOptions(f"{option}: expected a size from 1Gi to 64Ti, found {text!r:.100}; write it like 80Gi")


def _gpu_of_this_machine() -> str | None:
    """Type of this machine's first GPU, by its driver; None without a GPU of a known type."""
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with suppress(OSError):
            model = re.search(r"Model:\s*(.+)", file.read_text(encoding="utf-8"))
            return type_of_product(model[1]) if model else None
    return None


# --- the report ---


def report(spec: RLJobSpec, found: Fit, message: str, *, is_assumed: bool = False) -> Iterator[str]:
    """Lines of the text output. `message`: the verdict and its reason. `is_assumed`: neither the options nor this
    machine name a type of GPU."""
    setup, predicted, plan = found.setup, found.choice.budget, found.choice.plan
    assumed = " (assumed; --gpu names another)" if is_assumed and setup.hardware.device == "cuda" else ""
    yield f"{_model(setup.model)} on {machine_text(setup)}{assumed}"
    yield ""
    yield message
    if setup.hardware.device == "cuda":
        yield seconds_line(predicted)
    yield ""
    yield from _phase_rows(setup, predicted)
    yield ""
    engines = ["tensor_parallel_size"] if setup.work.engine_processes > 1 else []
    for name in ("micro_batch_tokens", "kv_cache_bytes", *SWITCHES, "rollout_sleep", *engines):
        why = "pinned" if is_pinned(spec.memory, name) else _reason(found, name)
        yield f"{name_of(name):<24}{_value(name, getattr(plan, name)):<12}{why}".rstrip()
    yield ""
    yield from _alternatives(found)


def seconds_line(predicted: Budget) -> str:
    """`predicted: 23.8 s a step (rollout 8.1, update 14.9, sync 0.8), with responses of the maximum length`."""
    phases = ", ".join(f"{phase} {seconds:,.1f}" for phase, seconds in predicted.seconds_by_phase.items())
    return f"predicted: {predicted.seconds():,.1f} s a step ({phases}), with responses of the maximum length"


def _model(model: ModelShape) -> str:
    size = f"{model.parameters / 1e9:.2f} billion" if model.parameters >= 1e8 else f"{model.parameters:,}"
    adapters = f", {model.adapter_parameters / 1e6:.0f} million in adapters" if model.adapter_parameters else ""
    return f"{size} parameters{adapters}"


def _phase_rows(setup: Setup, predicted: Budget) -> Iterator[str]:
    yield f"{'phase':<16}{'needs':>12}{'can use':>13}   largest uses"
    if setup.hardware.device == "cuda":
        shown: list[tuple[str, Phase, Pod]] = [(phase, phase, "policy") for phase in _SHOWN_PHASES]
        if not setup.work.is_colocated:
            shown.append(("engines", "rollout", "rollout"))
        for name, phase, pod in shown:
            usable = setup.usable_bytes(phase, pod)
            yield _row(name, predicted.peak("gpu", phase, pod=pod), usable, _uses(predicted, "gpu", phase, pod))
    worst = predicted.peak_phase("host")
    host = setup.hardware.host_memory_bytes // setup.work.policy_pods
    yield _row("host memory", predicted.peak("host"), host, _uses(predicted, "host", worst, "policy"))
    yield _row("disk", predicted.peak("disk"), 0, _uses(predicted, "disk", "rollout", "policy"))


def _row(name: str, needed: int, usable: int, uses: str) -> str:
    return f"{name:<16}{human_bytes(needed):>12}{human_bytes(usable) if usable else '':>13}   {uses}"


def _uses(predicted: Budget, place: Any, phase: Phase, pod: Pod) -> str:
    lines = predicted.uses(place, phase, pod=pod)[:_SHOWN_USES]
    return ", ".join(f"{line.use} {human_bytes(line.bytes)}" for line in lines)


def _value(setting: str, value: object) -> str:
    return human_bytes(value) if setting.endswith("_bytes") and isinstance(value, int) else text_of(setting, value)


def _reason(found: Fit, setting: str) -> str:
    """The reason for the value of a setting that is `Auto`; empty for an ordinary one."""
    plan, predicted, work = found.choice.plan, found.choice.budget, found.setup.work
    if setting == "micro_batch_tokens":
        return f"{work.sequences_per_rank:,} sequences of up to {work.max_sequence_tokens:,} tokens on each rank"
    if setting == "kv_cache_bytes":
        [line] = [line for line in predicted.lines if line.use == "KV cache"]
        return line.reason
    if setting == "tensor_parallel_size":
        return f"{work.engine_processes // plan.tensor_parallel_size} engines" if work.auto_engines else "pinned"
    if setting not in SWITCHES or not getattr(plan, setting):
        return ""
    without = budget(found.setup, plan.model_copy(update={setting: False}))
    seconds = predicted.seconds() - without.seconds()
    phase: Phase = "rollout" if setting == "policy_offload" else "update"
    freed = without.total("gpu", phase) - predicted.total("gpu", phase)
    return f"frees {human_bytes(max(freed, 0))} in the {phase}, for {max(seconds, 0):,.1f} s a step"


def _alternatives(found: Fit) -> Iterator[str]:
    setup = found.setup
    if setup.hardware.device == "cpu":
        return
    fewest, now = found.fewest_gpus(), setup.work.policy_ranks
    kind = f"{setup.hardware.gpu_type.name} GPUs"
    yield f"fewest GPUs that fit: {fewest}" if fewest else f"no number of {kind} up to 64 fits"
    if fewest and fewest > now and fewest > GPUS_OF_A_MACHINE:
        yield f"which takes {-(-fewest // GPUS_OF_A_MACHINE)} machines of {GPUS_OF_A_MACHINE} GPUs"
    if found.lack is None:
        yield f"largest micro-batch that fits this plan: {found.largest_micro_batch_tokens():,} tokens"
        yield f"longest responses that fit: {found.longest_response_tokens():,} tokens"
    yield from faster_engines(found)


def faster_engines(found: Fit) -> Iterator[str]:
    """A line that names a larger or smaller `tensorParallelSize`, if a step is noticeably faster with it."""
    if faster := found.faster_tensor_parallel_size():
        size, seconds = faster
        yield f"with rollout.tensorParallelSize: {size}, a step is predicted to take {seconds:,.1f} s"


def sweep_report(fits: Mapping[str, Fit | None]) -> Iterator[str]:
    """A row for each type of GPU: the fewest that fit, and the time of a step on them."""
    yield f"{'type':<10}{'memory':>12}{'fewest GPUs':>13}{'s a step':>11}   plan"
    for name, found in fits.items():
        memory = f"{name:<10}{human_bytes(GPU_TYPES[name].memory_bytes):>12}"
        if found is None:
            yield f"{memory}{'more than 64':>13}"
            continue
        plan = found.choice.plan
        chosen = {name_of(switch): text_of(switch, value) for switch in SWITCHES if (value := getattr(plan, switch))}
        switches = ", ".join(name if text == "Enabled" else f"{name} {text}" for name, text in chosen.items()) or "–"
        seconds = f"{found.choice.budget.seconds():,.1f}"
        yield f"{memory}{found.setup.work.policy_ranks:>13}{seconds:>11}   {switches}"


def _short(found: Fit | None) -> Mapping[str, Any] | None:
    if found is None:
        return None
    plan = found.choice.plan.model_dump(mode="json", by_alias=True)
    return {"gpus": found.setup.work.policy_ranks, "secondsPerStep": found.choice.budget.seconds(), "plan": plan}


def as_json(found: Fit, message: str) -> Mapping[str, Any]:
    """The report as values, with `message`, the verdict and its reason: sizes in bytes, times in seconds."""
    setup, predicted = found.setup, found.choice.budget
    on_gpu = setup.hardware.device == "cuda"
    return {
        "verdict": found.verdict,
        "message": message,
        "lack": asdict(found.lack) if found.lack else None,
        "priceSeconds": found.price_seconds,
        "secondsPerStep": predicted.seconds(),
        "seconds": dict(predicted.seconds_by_phase),
        "plan": found.choice.plan.model_dump(mode="json", by_alias=True),
        "model": asdict(setup.model),
        "hardware": asdict(setup.hardware),
        "peakBytes": {
            "gpu": {
                pod: {phase: predicted.peak("gpu", phase, pod=pod) for phase in PHASES} for pod in predicted.pods()
            },
            "host": {pod: predicted.peak("host", pod=pod) for pod in predicted.pods()},
            "disk": predicted.peak("disk"),
        },
        "lines": [{**asdict(line), "phases": sorted(line.phases)} for line in predicted.lines],
        "fewestGpus": found.fewest_gpus() if on_gpu else None,
        "largestMicroBatchTokens": found.largest_micro_batch_tokens() if on_gpu else None,
        "longestResponseTokens": found.longest_response_tokens() if on_gpu and not found.lack else None,
    }
