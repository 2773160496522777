"""docs/metrics.md explains every column of kubectl, every field of a step and every metric of the loss."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import torch
import yaml

from rljob_client.run_directory.records import LedgerRecord, StepRecord
from rljob_trainer.algorithm.loss import TokenValues, policy_loss
from rljob_trainer.algorithm.loss_config import LossConfig

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def names_in(heading: str) -> set[str]:
    """Names in the first column of the table below a heading."""
    section = re.split(r"^#+ ", PAGE.split(f"# {heading}\n")[1], flags=re.MULTILINE)[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| ")][1:]
    return {name for row in rows for name in re.findall(r"[\w.\-]+", row)}


def test_every_column_of_kubectl_is_explained() -> None:
    crd = yaml.safe_load((ROOT / "crds" / "manifests" / "rljobs.rljob.dev.yaml").read_text())
    columns = crd["spec"]["versions"][0]["additionalPrinterColumns"]
    assert names_in("`kubectl get rljobs`") == {column["name"].upper() for column in columns}


def test_every_kind_of_record_is_explained() -> None:
    kinds = {record.model_fields["kind"].default for record in get_args(LedgerRecord)}
    assert names_in("`ledger.jsonl`") == kinds


def test_every_field_of_a_step_is_explained() -> None:
    explained = {name.partition(".")[0] for name in names_in("Fields of a step")}
    of_every_record = {"kind", "step", "attempt", "committed_at", "memory_counts"}
    assert set(StepRecord.model_fields) - of_every_record <= explained


def test_every_metric_of_the_loss_is_explained() -> None:
    token = torch.zeros(1)
    values = TokenValues(token.clone().requires_grad_(), token, token, token, token + 1, token + 1, token + 1, token)
    _, metrics = policy_loss(values, LossConfig(kl_coefficient=0.1, dual_clip=3.0))
    counts = {"tokens", "dropped_tokens", "skipped_tokens", "micro_batches", "skipped_updates", "compilations"}
    of_the_update = counts | {"grad_norm", "learning_rate"}
    of_the_step = {"uniform_groups", "reward_errors", "continued_responses", "continued_tokens"}
    of_the_step |= {"asleep_engine_bytes", "empty_responses"}
    assert names_in("`metrics` of a step") == set(metrics.sums) | set(metrics.maxima) | of_the_update | of_the_step
