"""The objects of the hostile tenant: each kind is there, and the API server can be expected to take most."""

from __future__ import annotations

import json
from collections import Counter

from rljob_testing.hostile_tenant import Victim, hostile_objects

VICTIM = Victim("honest", "5f0c1c9a-0f3c-4d55-9f3b-6f2f3a3d6f10")
ETCD_LIMIT = 1_500_000


def test_every_kind_of_hostility_is_there() -> None:
    kinds = Counter(hostile.kind for hostile in hostile_objects(1, 500, VICTIM))
    assert kinds.keys() == COMMON | {"large", "replicated"}
    assert (kinds["large"], kinds["replicated"]) == (5, 5)
    assert min(kinds[kind] for kind in COMMON) > 50


COMMON = {"deep", "number", "time", "type", "name", "pod", "quantity", "annotations", "sidecars"}


def test_objects_have_names_of_their_own_and_fit_into_etcd() -> None:
    objects = list(hostile_objects(1, 500, VICTIM))
    assert len({(hostile.collection, hostile.name) for hostile in objects}) == 500
    assert max(len(hostile.text.encode()) for hostile in objects) < ETCD_LIMIT
    for hostile in objects:
        assert hostile.path("ns").count("/namespaces/ns/") == 1
        if hostile.kind not in ("deep", "number"):
            assert json.loads(hostile.text)["metadata"]["name"] == hostile.name


def test_the_seed_determines_the_objects() -> None:
    assert list(hostile_objects(7, 60, VICTIM)) == list(hostile_objects(7, 60, VICTIM))
