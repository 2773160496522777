"""Labels, annotations, finalizer and field managers, which other programs may select."""

from __future__ import annotations

JOB_NAME = "rljob.dev/job-name"
JOB_UID = "rljob.dev/job-uid"
ROLE = "rljob.dev/role"
INDEX = "rljob.dev/index"
ATTEMPT = "rljob.dev/attempt"
PLAN_GENERATION = "rljob.dev/plan-generation"

SPEC_DIGEST = "rljob.dev/spec-digest"
"""Annotation of a pod: digest of the spec that it was created with."""

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY_OPERATOR = "rljob-operator"

NODE_HAS_GPUS = "rljob.dev/has-gpus"
"""On every node with allocatable GPUs, "true"; kept by the operator, absent on all other nodes."""

FINALIZER = "rljob.dev/pods-end-first"
"""Keeps a deleted job until its pods are gone: they commit their step and write to the volume until then."""

FIELD_MANAGER = "rljob-operator"
TRAINER_FIELD_MANAGER = "rljob-trainer"
