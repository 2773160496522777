"""Seconds, host memory and bytes read when a checkpoint is written and resumed from, compared with the previous method.

    python -m bench.programs.checkpoints [--layers N] [--repeats N] [--output DIR]

Records `bench/results/checkpoints.json`. One policy rank on a CPU, with bfloat16 weights (168M parameters by default, a
checkpoint of 2 GB), random moments and remainders. `pieces`: as RLJob writes and loads. `whole`: the previous method:
one file, which was read again for its checksum, and a resume that read the file twice and held float32 masters of all
weights. The arms alternate; results are medians. Files are in the directory for temporary files: with TMPDIR=/dev/shm,
the disk has no influence. Fails unless both methods restore the same bits. Takes two minutes on two cores, 6 GB of
memory and 5 GB of space.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from bench.harness.peak_memory import growth_of_peak
from bench.harness.record import RESULTS, record
from rljob_testing.memory_plans import memory_plan
from rljob_trainer.algorithm.loss_config import LossConfig
from rljob_trainer.ledger.checkpoint_manifest import MANIFEST_NAME, CheckpointManifest, describe, digest_of
from rljob_trainer.models.resolve import resolve_model
from rljob_trainer.policy.config import PolicyConfig

Arm = Literal["whole", "pieces"]
ARMS: tuple[Arm, ...] = ("whole", "pieces")


def main(layers: int, repeats: int, output: Path) -> None:
    from rljob_trainer.policy.rank import PolicyRank

    uri = (
        f"random://qwen3?hidden=1024&intermediate=3072&layers={layers}&heads=16&kvHeads=8&headDim=64"
        "&vocabulary=32768&dtype=bfloat16"
    )
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = resolve_model(uri, Path(scratch))
        config = PolicyConfig(
            model_dir=model_dir,
            output_dir=Path(scratch) / "run",
            device="cpu",
            dtype="bfloat16",
            learning_rate=1e-4,
            memory=memory_plan(),
            loss=LossConfig(),
        )
        rank = PolicyRank(0, 1, config)
        rank.connect(*rank.rendezvous())
        parameters = rank.load().parameters
        _fill(rank)
        expected = _digest(rank)
        measured: dict[Arm, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
        for number in range(repeats + 1):
            for arm in ARMS:
                directory = Path(scratch) / arm
                row = _measure(arm, rank, directory)
                if _digest(rank) != expected:
                    raise SystemExit(f"expected the same bits after a resume ({arm}), found others")
                shutil.rmtree(directory)
                if number:  # the first touches memory that stays
                    measured[arm].append(row)
                    print(arm, row, flush=True)
    rows = [{"arm": arm, "parameters": parameters, "repeats": repeats, **_medians(measured[arm])} for arm in ARMS]
    place = "in memory (tmpfs)" if tempfile.gettempdir() == "/dev/shm" else "on a disk"
    note = f"{parameters:,} parameters, one rank with bfloat16 weights, files {place}"
    print(record("checkpoints", rows, note, output))


def _measure(arm: Arm, rank: Any, directory: Path) -> dict[str, Any]:
    written = _timed(lambda: _WRITE[arm](rank, directory))
    nbytes = sum(file.stat().st_size for file in directory.iterdir())
    loaded = _timed(lambda: _LOAD[arm](rank, directory))
    return {
        "checkpoint_bytes": nbytes,
        "files": len(list(directory.glob("__*"))),
        **{f"writing_{name}": value for name, value in written.items()},
        **{f"resuming_{name}": value for name, value in loaded.items()},
    }


def _timed(work: Callable[[], None]) -> dict[str, Any]:
    read, began, worked = _read_bytes(), time.monotonic(), time.process_time()
    peak = growth_of_peak(work)
    return {
        "seconds": time.monotonic() - began,
        "processor_seconds": time.process_time() - worked,
        "peak_rss_bytes": peak,
        "read_bytes": _read_bytes() - read,
    }


def _write_pieces(rank: Any, directory: Path) -> None:
    rank.start_checkpoint(directory)
    digests = rank.finish_checkpoint()
    (directory / MANIFEST_NAME).write_bytes(describe(directory, 1, {}, digests).to_json())


def _load_pieces(rank: Any, directory: Path) -> None:
    if damage := rank.load_checkpoint(directory):
        raise SystemExit(damage)


def _write_whole(rank: Any, directory: Path) -> None:
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    from rljob_trainer.policy import checkpoint

    memory = torch.empty(checkpoint._staged_bytes(rank._optimizer), dtype=torch.uint8)
    staged = checkpoint._staged(rank._optimizer, memory)
    save(checkpoint._as_saved(rank._optimizer, staged), storage_writer=FileSystemWriter(directory, sync_files=True))
    (directory / MANIFEST_NAME).write_bytes(describe(directory, 1, {}, {}).to_json())


def _load_whole(rank: Any, directory: Path) -> None:
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    from rljob_trainer.policy import checkpoint

    for name, digest in CheckpointManifest.load(directory).files.items():
        if digest_of(directory / name) != digest:
            raise SystemExit(f"{name} is damaged")
    optimizer = rank._optimizer
    values = checkpoint._in_place(optimizer)
    for of_parameter in values.values():
        of_parameter["master"] = torch.empty(of_parameter["master"].shape, dtype=torch.float32)
    load(checkpoint._as_saved(optimizer, values), storage_reader=FileSystemReader(directory))
    for name, of_parameter in values.items():
        optimizer.set_master(name, of_parameter["master"])


_WRITE: dict[Arm, Callable[[Any, Path], None]] = {"whole": _write_whole, "pieces": _write_pieces}
_LOAD: dict[Arm, Callable[[Any, Path], None]] = {"whole": _load_whole, "pieces": _load_pieces}


def _fill(rank: Any) -> None:
    """Give moments and remainders values of every kind."""
    import torch

    torch.manual_seed(0)
    arrays = rank._optimizer.state.arrays()
    arrays.exp_avg.normal_()
    arrays.exp_avg_sq.normal_()
    arrays.remainders.random_(-(1 << 15), 1 << 15)


def _digest(rank: Any) -> str:
    arrays = rank._optimizer.state.arrays()
    digest = hashlib.sha256(rank.weights_digest().encode())
    for array in (arrays.exp_avg, arrays.exp_avg_sq):
        digest.update(array.numpy())
    return digest.hexdigest()


def _medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    values = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return {name: round(value, 2) if name.endswith("seconds") else int(value) for name, value in values.items()}


def _read_bytes() -> int:
    """Bytes that this process has read, from disks or the page cache."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    main(arguments.layers, arguments.repeats, arguments.output)
