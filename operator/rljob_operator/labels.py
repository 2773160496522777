"""Labels, annotations, finalizer and field managers, which other programs may select."""

from __future__ import annotations

from rljob_api.metadata import INDEX_LABEL, JOB_NAME_LABEL, ROLE_LABEL

JOB_NAME = JOB_NAME_LABEL
JOB_UID = "rljob.dev/job-uid"
ROLE = ROLE_LABEL
INDEX = INDEX_LABEL
ATTEMPT = "rljob.dev/attempt"
PLAN_GENERATION = "rljob.dev/plan-generation"

RETAINED = "rljob.dev/retained"
"""Label "true" of a claim that outlives its job. It has no owner; the label with the job's uid makes it the job's."""

SHARED = "rljob.dev/shared"
"""Label "true" of an object that all jobs of a namespace use. It has no owner, and stays when the last job goes."""

SPEC_DIGEST = "rljob.dev/spec-digest"
"""Annotation of a pod: digest of the spec that it was created with."""

DIAGNOSE = "rljob.dev/diagnose"
"""Label "true" of a pod of any workload: its out-of-memory failures are reported."""

MEMORY_PLAN = "rljob.dev/memory-plan"
"""Annotation of a pod of another trainer: the memory plan as JSON, which its container finds as a file."""

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY_OPERATOR = "rljob-operator"
OF_EVERY_OBJECT = {
    "app.kubernetes.io/name": "rljob",
    "app.kubernetes.io/part-of": "rljob",
    MANAGED_BY: MANAGED_BY_OPERATOR,
}
"""Labels of every object that the operator makes."""

NODE_HAS_GPUS = "rljob.dev/has-gpus"
"""Label "true" of every node with allocatable GPUs; kept by the operator, absent on all other nodes."""

GPU_PRODUCTS = ("nvidia.com/gpu.product", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator")
"""Labels of nodes, of which each has the product name of the node's GPUs."""

GPU_MEMORY_MIB = "nvidia.com/gpu.memory"
"""Memory of one GPU in MiB, on nodes with NVIDIA's GPU feature discovery."""

OPERATOR = "rljob.dev/operator"
"""Annotation of an RLJob: the installation that reconciles it, as NAMESPACE/NAME of its Lease. Others leave the job
alone."""

FINALIZER = "rljob.dev/pods-end-first"
"""Keeps a deleted job until its pods are gone: they commit their step and write to the volume until then."""

FIELD_MANAGER = "rljob-operator"
TRAINER_FIELD_MANAGER = "rljob-trainer"
