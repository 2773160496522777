"""The order of waiting jobs: running ones first, namespaces in turn."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rljob_operator.kube.watch import Key
from rljob_operator.runtime.fair_order import FairOrder, Priority

PENDING, RUNNING = Priority.PENDING, Priority.RUNNING


def order_of(*entries: tuple[str, str, Priority]) -> FairOrder:
    order = FairOrder()
    for namespace, name, priority in entries:
        order.put((namespace, name), priority)
    return order


def taken(order: FairOrder, *, running_only: bool = False) -> list[str]:
    names = []
    while found := order.take(running_only=running_only):
        names.append(found[0][1])
    return names


def test_running_jobs_are_taken_before_pending_ones() -> None:
    assert taken(order_of(("a", "p", PENDING), ("a", "r", RUNNING), ("b", "s", RUNNING))) == ["r", "s", "p"]


def test_namespaces_take_turns() -> None:
    order = order_of(*[("flood", f"f{n}", PENDING) for n in range(4)], ("b", "b0", PENDING), ("c", "c0", PENDING))
    assert taken(order) == ["f0", "b0", "c0", "f1", "f2", "f3"]


def test_within_a_namespace_first_come_is_first_served() -> None:
    assert taken(order_of(*[("a", f"j{n}", PENDING) for n in range(3)])) == ["j0", "j1", "j2"]


def test_a_job_that_runs_by_now_overtakes_pending_ones() -> None:
    order = order_of(("a", "p", PENDING), ("a", "x", PENDING))
    order.put(("a", "x"), RUNNING)
    order.put(("a", "x"), PENDING)
    assert len(order) == 2
    assert taken(order) == ["x", "p"]


def test_pending_jobs_get_one_turn_in_ten() -> None:
    order = order_of(*[("a", f"r{n}", RUNNING) for n in range(30)], ("b", "p", PENDING))
    assert taken(order).index("p") == 9


def test_reserved_workers_leave_pending_jobs() -> None:
    order = order_of(("a", "p", PENDING), *[("a", f"r{n}", RUNNING) for n in range(12)])
    assert taken(order, running_only=True) == [f"r{n}" for n in range(12)]
    assert taken(order) == ["p"]


KEYS = st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"))


@given(st.lists(st.one_of(st.tuples(KEYS, st.sampled_from(Priority)), st.booleans())))
def test_each_key_waits_once_and_none_is_lost(steps: list[tuple[Key, Priority] | bool]) -> None:
    order, waiting = FairOrder(), set[Key]()
    for step in steps:
        if isinstance(step, tuple):
            order.put(*step)
            waiting.add(step[0])
        elif found := order.take(running_only=step):
            waiting.remove(found[0])
        assert len(order) == len(waiting) == sum(order.depth(priority) for priority in Priority)
        assert all(key in order for key in waiting)
