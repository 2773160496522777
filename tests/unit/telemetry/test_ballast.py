"""Another process on the GPU of this one, on machines with several."""

from __future__ import annotations

import pytest

from rljob_testing.ballast import environment_for


@pytest.mark.parametrize(("gpu", "visible"), [(None, "1"), (0, "0")])
def test_the_ballast_is_on_the_gpu_of_its_parent_unless_another_is_named(
    monkeypatch: pytest.MonkeyPatch, gpu: int | None, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    environment = environment_for(gpu)
    assert environment["CUDA_VISIBLE_DEVICES"] == visible
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID", "the order of NVML"
