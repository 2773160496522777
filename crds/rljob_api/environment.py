"""Environment variables of a job's containers, in the shape of a Kubernetes container's `env` and `envFrom`."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import Field

from rljob_api.api_model import ApiModel, Rule, Text
from rljob_api.mounted_files import ObjectName

VariableName = Annotated[
    str,
    Text(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        expected="the name of an environment variable: letters, digits and _, such as HF_TOKEN",
        max_length=128,
    ),
]
Key = Annotated[str, Text(pattern=r"^[-._a-zA-Z0-9]+$", expected="a key: letters, digits, -, _ and .", max_length=253)]

OWN_PREFIXES = ("RLJOB_", "RAY_AUTH_", "PET_")
"""Prefixes of variables that RLJob sets itself."""

OWN_NAMES = ("CUDA_VISIBLE_DEVICES", "HOME", "NODE_NAME", "NVIDIA_VISIBLE_DEVICES", "POD_IP", "USER")
"""Variables that RLJob sets itself."""

ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that differ between policy and rollout."""


_SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL)", re.IGNORECASE)


def is_secret_name(variable: str) -> bool:
    """True if the value of a variable with this name is probably a secret, which must not be shown."""
    return _SECRET_NAME.search(variable) is not None


def _cel_list(names: tuple[str, ...]) -> str:
    return f"[{', '.join(repr(name) for name in names)}]"


class KeyRef(ApiModel):
    """A key of a Secret or a ConfigMap in the job's namespace."""

    name: ObjectName
    """Name of the Secret or ConfigMap."""

    key: Key
    """Key in it."""

    optional: bool = False
    """If true, pods start without the variable if the object or the key does not exist."""


class VariableSource(ApiModel):
    """Source of the value of an environment variable."""

    secret_key_ref: KeyRef | None = None
    """Key of a Secret."""

    config_map_key_ref: KeyRef | None = None
    """Key of a ConfigMap."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.secretKeyRef) != has(self.configMapKeyRef)",
            holds=lambda source: (source.secret_key_ref is None) != (source.config_map_key_ref is None),
            field="secretKeyRef",
            message="write either secretKeyRef or configMapKeyRef",
        ),
    )


class Variable(ApiModel):
    """An environment variable."""

    name: VariableName
    """Name of the variable."""

    value: Annotated[str, Field(max_length=32768)] | None = None
    """Value. It is stored in the job in plain text: reference a Secret for tokens and passwords."""

    value_from: VariableSource | None = None
    """Source of the value."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.value) != has(self.valueFrom)",
            holds=lambda variable: (variable.value is None) != (variable.value_from is None),
            field="value",
            message="write either value or valueFrom",
        ),
        Rule(
            cel=" && ".join(f"!self.name.startsWith('{prefix}')" for prefix in OWN_PREFIXES)
            + f" && !(self.name in {_cel_list(OWN_NAMES)})",
            holds=lambda variable: not variable.name.startswith(OWN_PREFIXES) and variable.name not in OWN_NAMES,
            field="name",
            message="is set by RLJob: remove it",
        ),
        Rule(
            cel=f"!(self.name in {_cel_list(ALLOCATOR_NAMES)})",
            holds=lambda variable: variable.name not in ALLOCATOR_NAMES,
            field="name",
            message="differs between policy and rollout: write it in policy.template or rollout.template",
        ),
    )


class ObjectRef(ApiModel):
    """A Secret or a ConfigMap in the job's namespace."""

    name: ObjectName
    """Name of the Secret or ConfigMap."""

    optional: bool = False
    """If true, pods start without the variables if the object does not exist."""


class VariablesSource(ApiModel):
    """A Secret or ConfigMap whose keys become environment variables."""

    prefix: Annotated[str, Field(max_length=128)] | None = None
    """Prefix of the names of the variables."""

    secret_ref: ObjectRef | None = None
    """The Secret."""

    config_map_ref: ObjectRef | None = None
    """The ConfigMap."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.secretRef) != has(self.configMapRef)",
            holds=lambda source: (source.secret_ref is None) != (source.config_map_ref is None),
            field="secretRef",
            message="write either secretRef or configMapRef",
        ),
    )
