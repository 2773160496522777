"""Log-probabilities of the policy compared with vLLM's, for tiny random models of every kind, on CPUs in float32.

    python -m bench.programs.supported_models [--output DIR] [KIND...]

Records `bench/results/supported_models.json`: for each kind the largest difference over the tokens of some responses,
after the policy's weights were sent to the engine as in training, and again after an update of the policy; or the
message with which the kind is refused. Fails if a kind differs by more than 1e-4, or if an update changes too little to
notice stale weights. Takes about 2 minutes on two cores. `tests/integration/test_rollout_weight_sync.py` compares the
same.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from bench.harness.record import RESULTS, record
from rljob_client.errors import BadInput
from rljob_testing.supported_models import KINDS, TOLERANCE, Kind, architecture, compare, engine_host
from rljob_trainer.models.consistency import require_trainable
from rljob_trainer.policy.packed_attention import PACKED_KINDS


def main(output: Path, wanted: list[str]) -> None:
    kinds = [kind for kind in KINDS if not wanted or kind.model_type in wanted]
    with engine_host() as host, tempfile.TemporaryDirectory() as directory:
        rows = []
        for kind in kinds:
            rows.append(_row(kind, Path(directory), host))
            print(rows[-1], flush=True)
    note = "2 layers, random weights, float32, one engine after the other, before and after an update of the policy"
    print(record("supported_models", rows, note, output))
    wrong = [row["kind"] for kind, row in zip(kinds, rows, strict=True) if not _as_expected(kind, row)]
    if wrong:
        raise SystemExit(
            f"expected a difference of at most {TOLERANCE}, or a refusal; found otherwise: {', '.join(wrong)}"
        )


def _as_expected(kind: Kind, row: dict[str, Any]) -> bool:
    return bool(row.get("agrees")) if kind.refused is None else kind.refused in row.get("refused", "")


def _row(kind: Kind, directory: Path, host: Any) -> dict[str, Any]:
    folder = directory / kind.model_type
    folder.mkdir()
    kind.write(folder)
    row = {"kind": kind.model_type, "name": kind.name, "architecture": architecture(folder)}
    try:
        require_trainable(folder)
        found = compare(folder, host)
    except BadInput as refusal:
        return row | {"refused": str(refusal).replace(str(folder), "DIR")}
    except RayError as failure:
        return row | {"failed": str(failure).strip().splitlines()[-1]}
    measured = {"largest_difference": found.largest, "change_by_update": found.change, "agrees": found.holds}
    return row | measured | {"packed": kind.model_type in PACKED_KINDS}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="as model_type; default: all")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    main(arguments.output, arguments.kinds)
