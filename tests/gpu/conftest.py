from __future__ import annotations

import pytest

from rljob_testing.induced_failures.card import has_gpu


@pytest.fixture(autouse=True)
def _gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not has_gpu():
        pytest.skip("needs an NVIDIA GPU")
