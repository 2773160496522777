"""Caches: in whatever order news arrives, the newest counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rljob_operator.kube.watch import Key
from rljob_operator.metrics import REGISTRY
from rljob_operator.observe.cache import Cache
from tests.unit.operator.observe.objects import Object

A: Key = ("research", "a")


def obj(version: int, value: str = "", name: str = "a", namespace: str = "research") -> Object:
    return {
        "metadata": {"namespace": namespace, "name": name, "resourceVersion": str(version)},
        "value": value or f"v{version}",
    }


class Changes(list[tuple[Key, str | None, str | None]]):
    def add(self, key: Key, before: str | None, after: str | None) -> None:
        self.append((key, before, after))


def cache(changes: Changes | None = None) -> Cache[str]:
    return Cache(lambda obj: str(obj["value"]), (Changes() if changes is None else changes).add)


def test_a_late_answer_to_a_write_does_not_bring_back_an_old_state() -> None:
    facts = cache()
    facts.put(obj(7))
    facts.put(obj(5))
    assert facts.get(A) == "v7"


def test_a_late_answer_does_not_bring_back_what_was_deleted() -> None:
    facts = cache()
    facts.put(obj(5))
    facts.remove(obj(9))
    facts.put(obj(7))
    assert facts.get(A) is None
    facts.put(obj(11))
    assert facts.get(A) == "v11", "a successor of the same name"


def test_a_late_deletion_does_not_take_the_successor() -> None:
    facts = cache()
    facts.put(obj(11))
    facts.remove(obj(9))
    assert facts.get(A) == "v11"


def test_a_listing_takes_away_what_it_does_not_hold_in_its_namespace() -> None:
    facts = cache()
    for name, namespace in (("a", "research"), ("b", "research"), ("a", "other")):
        facts.put(obj(5, name=name, namespace=namespace))
    facts.keep_only({("research", "b")}, "8", "research")
    assert dict(facts.items()).keys() == {("research", "b"), ("other", "a")}


def test_what_was_made_after_a_listing_stays() -> None:
    facts = cache()
    facts.put(obj(12))
    facts.keep_only(set(), "8", None)
    assert facts.get(A) == "v12"


def test_only_facts_that_differ_are_told() -> None:
    changes = Changes()
    facts = cache(changes)
    facts.put(obj(1, "same"))
    facts.put(obj(2, "same"))
    facts.put(obj(3, "other"))
    facts.remove(obj(4))
    assert changes == [(A, None, "same"), (A, "same", "other"), (A, "other", None)]


def test_what_a_write_did_not_find_is_forgotten() -> None:
    facts = cache()
    facts.put(obj(5))
    facts.forget(A)
    facts.forget(A)
    assert facts.get(A) is None


@given(history=st.lists(st.booleans(), min_size=1, max_size=8), data=st.data())
def test_any_order_of_delivery_ends_with_the_newest_state(history: list[bool], data: st.DataObject) -> None:
    """`history`: at each revision the object is there (True) or was deleted."""
    deliveries = data.draw(st.permutations(range(1, len(history) + 1)))
    facts = cache()
    for version in deliveries:
        if history[version - 1]:
            facts.put(obj(version))
        else:
            facts.remove(obj(version))
    assert facts.get(A) == (f"v{len(history)}" if history[-1] else None)


def test_an_object_that_cannot_be_reduced_is_ignored_and_counted() -> None:
    def count() -> float | None:
        return REGISTRY.get_sample_value("rljob_operator_unreadable_objects", {"resource": "things"})

    facts = Cache[str](lambda obj: str(obj["value"]), lambda *_: None, "things")
    facts.put(obj(5))
    broken = obj(6)
    del broken["value"]
    facts.put(broken)
    assert (facts.get(A), count()) == ("v5", 1.0)
    facts.put(obj(7))
    assert (facts.get(A), count()) == ("v7", 0.0)
    facts.put(broken | {"metadata": broken["metadata"] | {"resourceVersion": "8"}})
    facts.keep_only(set(), "9", None)
    assert (facts.get(A), count()) == (None, 0.0)
