"""Counts of right and wrong diagnoses."""

from __future__ import annotations

from typing import Any

from bench.report.confusion_matrix import score, table


def row(induced: str, *said: tuple[str, float], program: str = "program") -> dict[str, Any]:
    diagnoses = [{"class": name, "confidence": confidence} for name, confidence in said]
    return {"induced": induced, "program": program, "ended": "failed" if said else "skipped", "diagnoses": diagnoses}


def test_only_the_first_diagnosis_counts_as_right() -> None:
    rows = [
        row("Fragmentation", ("Fragmentation", 0.9), ("ActivationSpike", 0.5)),
        row("AllocatorCache", ("ForeignProcess", 0.6), ("AllocatorCache", 0.5)),
    ]
    assert score(rows)["right_first"] == 1
    assert score(rows)["right_first_share"] == 0.5


def test_a_wrong_class_above_0_8_counts_in_any_place() -> None:
    rows = [
        row("Unknown", ("HostMemory", 0.8), program="just-not-sure"),
        row("Unknown", ("Unknown", 0.9), ("HostMemory", 0.85), program="sure-in-second-place"),
    ]
    assert score(rows)["wrong_and_sure"] == ["Unknown.sure-in-second-place"]


def test_a_failure_that_was_not_induced_is_listed_but_not_counted() -> None:
    rows = [row("Fragmentation", ("Fragmentation", 0.9)), row("HostMemory")]
    assert score(rows)["failures"] == 1
    assert score(rows)["not_induced"] == ["HostMemory.program: skipped"]
    assert "HostMemory" not in table(rows)


def test_a_failure_that_was_not_diagnosed_counts_as_a_mistake() -> None:
    missed = row("SharedMemory") | {"ended": "not diagnosed"}
    assert score([missed])["right_first_share"] == 0.0
    assert score([missed])["failures"] == 1
    assert "| SharedMemory | 1 | nothing ×1 | – |" in table([missed])


def test_the_table_has_a_line_for_each_class_with_its_diagnoses() -> None:
    rows = [
        row("Fragmentation", ("Fragmentation", 0.85)),
        row("Fragmentation", ("Fragmentation", 0.9)),
        row("Fragmentation", ("ActivationSpike", 0.6)),
    ]
    assert "| Fragmentation | 3 | Fragmentation ×2, ActivationSpike ×1 | 0.60–0.90 |" in table(rows)
