"""A cache of reduced facts, fed by watches and by the answers to the operator's own writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import structlog

from rljob_operator.kube.resources import Object, revision
from rljob_operator.kube.watch import Key, key_of
from rljob_operator.metrics import UNREADABLE_OBJECTS

_log = structlog.get_logger(__name__)

Fact = TypeVar("Fact")

_DELETIONS_REMEMBERED = 4096


class Cache(Generic[Fact]):
    """Facts of all objects of one kind, each from the newest version of its object.

    Watch events and responses to writes arrive in any order: a version that is older than the known one, or than the
    object's deletion, is ignored. Bodies are not kept. `reduce` makes the fact; `changed(key, before, after)` is called
    for each fact that differs from the last one (None: absent).
    """

    def __init__(
        self,
        reduce: Callable[[Object], Fact],
        changed: Callable[[Key, Fact | None, Fact | None], None],
        resource: str = "",
    ) -> None:
        """`resource`: its name in metrics and logs."""
        self._reduce = reduce
        self._changed = changed
        self._facts: dict[Key, tuple[int, Fact]] = {}
        self._deleted: dict[Key, int] = {}
        self._unreadable: set[Key] = set()
        self._resource = resource

    def get(self, key: Key) -> Fact | None:
        entry = self._facts.get(key)
        return entry[1] if entry else None

    def values(self) -> Iterator[Fact]:
        return (fact for _, fact in self._facts.values())

    def items(self) -> Iterator[tuple[Key, Fact]]:
        return ((key, fact) for key, (_, fact) in self._facts.items())

    def __len__(self) -> int:
        return len(self._facts)

    def put(self, obj: Object) -> None:
        key, version = key_of(obj), revision(obj["metadata"]["resourceVersion"])
        known = self._facts.get(key)
        if version <= (known[0] if known else self._deleted.get(key, 0)):
            return
        try:
            fact = self._reduce(obj)
        except Exception as error:
            self._note_unreadable(key, error)
            return
        self._note_unreadable(key, None)
        self._facts[key] = (version, fact)
        before = known[1] if known else None
        if fact != before:
            self._changed(key, before, fact)

    def remove(self, obj: Object) -> None:
        self._drop(key_of(obj), revision(obj["metadata"]["resourceVersion"]))

    def keep_only(self, keys: set[Key], resource_version: str, namespace: str | None) -> None:
        for key in [
            key for key in (*self._facts, *self._unreadable) if key not in keys and namespace in (None, key[0])
        ]:
            self._drop(key, revision(resource_version))

    def forget(self, key: Key) -> None:
        """Remove an object that a write did not find: it was deleted after it was last observed."""
        if key in self._facts:
            self._drop(key, self._facts[key][0])

    def _drop(self, key: Key, version: int) -> None:
        known = self._facts.get(key)
        if known and known[0] > version:
            return
        self._deleted[key] = max(version, self._deleted.pop(key, 0))
        if len(self._deleted) > _DELETIONS_REMEMBERED:
            del self._deleted[next(iter(self._deleted))]
        self._note_unreadable(key, None)
        if known:
            del self._facts[key]
            self._changed(key, known[1], None)

    def _note_unreadable(self, key: Key, error: Exception | None) -> None:
        """Count an object that cannot be read; its last fact, if any, stays. `error`: None if it can be read again or
        is gone."""
        if (error is not None) == (key in self._unreadable):
            return
        self._unreadable ^= {key}
        UNREADABLE_OBJECTS.labels(self._resource).set(len(self._unreadable))
        if error is not None:
            problem = f"{type(error).__name__}: {error}"
            _log.error("unreadable object ignored", resource=self._resource, object="/".join(key), error=problem)
