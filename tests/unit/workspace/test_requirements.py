"""Properties of the locked requirement files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[3] / "requirements"
LOCKED = sorted(REQUIREMENTS.glob("*.txt"))


def packages(file: Path) -> set[str]:
    return {match[1] for line in file.read_text().splitlines() if (match := re.match(r"([a-z0-9.-]+)==", line))}


@pytest.mark.parametrize("file", LOCKED, ids=lambda file: file.name)
def test_every_package_is_pinned_with_hashes_and_no_address_is_recorded(file: Path) -> None:
    text = file.read_text()
    assert packages(file)
    assert "://" not in text
    assert "--index" not in text
    entries = re.split(r"\n(?=[a-z0-9])", text)
    assert all("--hash=sha256:" in entry for entry in entries if "==" in entry)


def test_the_operators_image_carries_no_torch() -> None:
    assert not packages(REQUIREMENTS / "operator.txt") & {"torch", "vllm", "ray", "transformers"}


def test_both_trainers_carry_the_same_ray() -> None:
    ray = [
        next(line for line in (REQUIREMENTS / name).read_text().splitlines() if line.startswith("ray=="))
        for name in ("trainer-cpu.txt", "trainer-gpu.txt")
    ]
    assert ray[0] == ray[1]
