from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.rewards.overlong import overlong_penalty


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_the_penalty_grows_linearly_in_the_buffer(factor: float) -> None:
    """DAPO's numbers: 16,384 expected tokens, and a buffer of 4,096."""
    found = overlong_penalty([0, 1, 16384, 16385, 18432, 20480], 20480, 4096, factor)
    np.testing.assert_allclose(found, factor * np.array([0, 0, 0, -1 / 4096, -0.5, -1], np.float32))
    assert found.dtype == np.float32


@given(st.integers(1, 64), st.integers(1, 64), st.floats(0.01, 100))
def test_it_is_never_positive_nor_below_the_factor(max_tokens: int, buffer: int, factor: float) -> None:
    found = overlong_penalty(range(max_tokens + 1), max_tokens, min(buffer, max_tokens), factor)
    assert (np.diff(found) <= 0).all()
    np.testing.assert_allclose([found[0], found[-1]], [0, -factor], rtol=1e-6)
