"""Matches a line with the wordings of out-of-memory failures in `signatures.yaml`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

import yaml

from rljob_memory.evidence.failure import FailureKind
from rljob_memory.sizes import size_bytes

CONSEQUENCE, OTHER_REASON, NO_SHORTAGE = "Consequence", "OtherReason", "NoShortage"
_FACTORS = {"gib": 1 << 30, "kib": 1 << 10, "bytes": 1}


@dataclass(frozen=True, slots=True)
class Signature:
    """One entry of the table; `signatures.yaml` has the meaning of each field."""

    kind: str
    any_of: tuple[str, ...]
    patterns: tuple[re.Pattern[str], ...]
    source: str
    example: str
    name: str = ""
    unless: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Match:
    """A line that fits an entry."""

    signature: Signature
    sizes: Mapping[str, int]
    """The sizes in it, each as `<name>_bytes`."""

    @property
    def kind(self) -> FailureKind | None:
        """None for a consequence, another reason, and no shortage."""
        return FailureKind(self.signature.kind) if self.signature.kind in set(FailureKind) else None


@cache
def signatures() -> tuple[Signature, ...]:
    """The entries of the table, in their order."""
    return tuple(_signature(entry) for entry in load_table("signatures.yaml"))


@cache
def load_table(name: str) -> Any:
    """The contents of a table in this folder."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(files(__package__).joinpath(name).read_text(encoding="utf-8"), loader)


@lru_cache(4096)
def match_signature(text: str) -> Match | None:
    """The first entry that `text` fits; None if there is none. Logs repeat their lines, so matches are cached."""
    lower = text.lower()
    found = {word for word in words() if word in lower}
    for signature in signatures() if found else ():
        if found.isdisjoint(signature.any_of):
            continue
        for pattern in signature.patterns:
            if match := pattern.search(text):
                return Match(signature, sizes_of(match))
    return None


@cache
def words() -> tuple[str, ...]:
    """The texts, in lower case, of which every line that fits an entry has one."""
    return tuple({word for signature in signatures() for word in signature.any_of})


def failure_kind(text: str) -> FailureKind | None:
    """The kind of failure that `text` reports, in one of its lines; None if it reports none."""
    matches = (match_signature(line) for line in text.splitlines())
    return next((match.kind for match in matches if match and match.kind), None)


def _signature(entry: dict[str, Any]) -> Signature:
    patterns = tuple(re.compile(pattern) for pattern in entry.pop("patterns"))
    words = tuple(str(word).lower() for word in entry.pop("any_of"))
    return Signature(any_of=words, patterns=patterns, unless=tuple(entry.pop("unless", ())), **entry)


def sizes_of(match: re.Match[str]) -> dict[str, int]:
    """The sizes in the named groups of a match, each as `<name>_bytes`; of `<name>_1` and `<name>_2`, the sum."""
    sizes = Counter[str]()
    for name, value in match.groupdict().items():
        base, _, unit = name.rpartition("_")
        if value is None:
            continue
        if unit not in _FACTORS:
            base, size = name, size_bytes(value)
        else:
            size = round(float(value) * _FACTORS[unit]) if value.replace(".", "", 1).isdigit() else None
        if size is not None:
            sizes[f"{base.rstrip('_12')}_bytes"] += size
    return dict(sizes)


@cache
def pattern(name: str) -> re.Pattern[str]:
    """The regular expressions of this name in `wordings.yaml`."""
    table = load_table("wordings.yaml")
    text = "|".join(table[name])
    for part, meaning in reversed(table["definitions"].items()):
        text = text.replace(f"%{part}%", meaning)
    return re.compile(text, re.IGNORECASE if name in table["any_case"] else 0)
