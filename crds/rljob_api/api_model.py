"""Base of the API types: spelling, strictness, and rules between fields."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

Toggle = Literal["Auto", "Enabled", "Disabled"]
"""A switch whose default depends on the machine. The values are not On and Off, which YAML reads as booleans."""

Timestamp = Annotated[AwareDatetime, Field(strict=False, json_schema_extra={"maxLength": 64})]
"""RFC 3339 with a time zone, as Kubernetes writes it."""

MAX_INTEGER = 2**53
"""Upper bound of sizes and counts: the largest range of integers that every JSON reader represents exactly."""

Count = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
"""A size in bytes, or a count."""

PositiveCount = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
"""A size or count of at least 1, or a number that counts from 1."""

Seconds = Annotated[float, Field(ge=0, le=1e9)]
"""A duration, of at most 31 years."""

FreeForm = dict[str, Any]
"""An object whose fields RLJob does not define (Kubernetes, vLLM, a data set)."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for one field, or between the fields of one type, checked by the API server and by local validation.

    The API server evaluates all rules at every write, also of the status. For each field that a rule reads, it copies
    the schemas of all fields of the same object twice (`Structural.Properties`, Kubernetes 1.36), which costs more than
    the rest of the evaluation. A rule should therefore begin with the field that decides it for most jobs.
    """

    cel: str
    """CEL expression over `self`, the object, for the API server. If it reads only `field`, it is evaluated only if the
    field is present."""
    holds: Callable[[Any], bool]
    """The same rule over the parsed object, for local validation."""
    field: str
    """Field that the error names, as a dotted path from the object."""
    message: str
    """Error message, with what to write instead."""
    hint: Callable[[Any], str] = lambda _: ""
    """An addition to the message, from the parsed object. For local validation only."""

    @property
    def reads_only_its_field(self) -> bool:
        """True if the rule can be attached to the field itself, where the API server copies no other schemas."""
        field = re.escape(self.field)
        others = re.sub(rf"(?<!has\()\bself\.{field}\b", "", self.cel)
        return "self" not in others

    def as_kubernetes(self) -> dict[str, str]:
        """The validation of the object, or of the field if the rule reads nothing else."""
        if self.reads_only_its_field:
            return {"rule": self.cel.replace(f"self.{self.field}", "self"), "message": self.message}
        return {"rule": self.cel, "message": self.message, "fieldPath": f".{self.field}"}

    def as_error(self, value: Any) -> InitErrorDetails:
        """The error about `value`, the parsed object."""
        message = f"{self.message}{self.hint(value)}"
        error = PydanticCustomError("conflict", "{message}", {"message": message, "rule": self})
        return InitErrorDetails(type=error, loc=tuple(self.field.split(".")), input=None)

    def reads(self, path: str) -> bool:
        """True if the rule reads the field at `path` (dotted), a part of it, or an object that contains it."""
        paths = re.findall(r"\bself\.([\w.]+)", self.cel)
        return any(f"{p}.".startswith(f"{path}.") or f"{path}.".startswith(f"{p}.") for p in paths)


class ApiModel(BaseModel):
    """Base of the API types: snake_case in Python, camelCase in manifests. Unknown fields are errors; values are
    frozen.

    A field with the value `null` counts as absent, as it does for the API server.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict) or None not in data.values():
            return data
        known = {name for field, info in cls.model_fields.items() for name in (field, info.alias)}
        unknown_is_absent = cls.model_config.get("extra") == "allow"
        return {name: v for name, v in data.items() if v is not None or not (name in known or unknown_is_absent)}

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        problems = [*(rule.as_error(self) for rule in self.rules if not rule.holds(self)), *self.further_problems()]
        if problems:
            raise ValidationError.from_exception_data(type(self).__name__, problems)
        return self

    def further_problems(self) -> list[InitErrorDetails]:
        """Problems that a rule cannot express. Types override this method."""
        return []

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        json_schema = handler.resolve_ref_schema(handler(schema))
        for rule in cls.rules:
            validated = json_schema["properties"][rule.field] if rule.reads_only_its_field else json_schema
            validated.setdefault("x-kubernetes-validations", []).append(rule.as_kubernetes())
        return json_schema


@dataclass(frozen=True, slots=True)
class Text:
    """Annotation of a string that must match a pattern, for the API server and for local validation."""

    pattern: str
    """Regular expression, valid in both Python and Go."""
    expected: str
    """Description of valid strings, for error messages."""
    max_length: int = 253
    """Maximum number of characters."""

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(schema) | {"pattern": self.pattern, "maxLength": self.max_length}

    def _check(self, text: str) -> str:
        if len(text) > self.max_length:
            raise PydanticCustomError(
                "text", "{expected}", {"expected": f"{self.expected}, of at most {self.max_length} characters"}
            )
        # In Python, $ also matches before a line break at the end of the text; in Go it does not.
        if not re.search(re.sub(r"\$$", r"\\Z", self.pattern), text):
            raise PydanticCustomError("text", "{expected}", {"expected": self.expected})
        return text


ATOMIC: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}
"""Schema extension of a list that server-side apply replaces as a whole."""


def keyed_by(field: str) -> dict[str, Any]:
    """Schema extension of a list of objects that server-side apply merges by their value of `field`."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [field]}


_IMMUTABLE = "cannot change after the job is created"


def immutable() -> dict[str, Any]:
    """Schema extension of a field that cannot change after the job is created."""
    message = f"{_IMMUTABLE}: delete the job and create it again"
    return {"x-kubernetes-validations": [{"rule": "self == oldSelf", "message": message}]}


def only_raised() -> dict[str, Any]:
    """Schema extension of a number that can be raised, but not lowered, after the job is created."""
    message = "can only be raised after the job is created"
    return {"x-kubernetes-validations": [{"rule": "self >= oldSelf", "message": message}]}


def immutable_presence(*fields: str) -> dict[str, Any]:
    """Schema extension of an object whose optional `fields` (camelCase) must stay present, or stay absent."""
    rules = [{"rule": f"has(self.{f}) == has(oldSelf.{f})", "message": f"{f} {_IMMUTABLE}"} for f in fields]
    return {"x-kubernetes-validations": rules}
