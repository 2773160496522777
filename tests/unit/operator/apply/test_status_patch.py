"""The patch turns the one status into the other, and says nothing about what is the same."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rljob_api.status import RLJobStatus, StatusDisplay
from rljob_operator.apply.status_patch import merge_patch, status_object

VALUES = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)


def patched(target: Any, patch: Any) -> Any:
    """MergePatch of RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = patched(result.get(name), value)
    return result


@given(before=OBJECTS, after=OBJECTS)
def test_applied_to_the_one_it_gives_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert patched(before, merge_patch(before, after)) == after


@given(status=OBJECTS)
def test_equal_ones_need_no_write(status: dict[str, Any]) -> None:
    assert merge_patch(status, status) == {}


def test_a_status_is_written_in_the_spelling_of_the_api() -> None:
    status = RLJobStatus(observed_generation=2, step=3, display=StatusDisplay(phase="Running"))
    written = status_object(status)
    assert written["observedGeneration"] == 2
    assert "reward" not in written
    assert merge_patch({"reward": 0.5, "step": 2} | {"observedGeneration": 2}, written)["reward"] is None
