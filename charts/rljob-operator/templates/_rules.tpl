{{/* Permissions of the operator: one rule per purpose, with only the verbs that it uses. */}}

{{/* In every watched namespace. */}}
{{- define "rljob.jobRules" -}}
# Jobs: watch them, add and remove their finalizer, delete them after their time to live.
- apiGroups: [rljob.dev]
  resources: [rljobs]
  verbs: [list, watch, patch, delete]
- apiGroups: [rljob.dev]
  resources: [rljobs/status]
  verbs: [patch]
# Objects of a job refer to it with blockOwnerDeletion, which requires permission to set its finalizers.
- apiGroups: [rljob.dev]
  resources: [rljobs/finalizers]
  verbs: [update]
# Created for each job and watched. Read if its name is already taken: only the job's own report is believed.
- apiGroups: [rljob.dev]
  resources: [stepreports]
  verbs: [get, list, watch, create]
# The decision about a restart in place. Also granted to the job's own pods: the operator can only grant permissions that
# it has.
- apiGroups: [rljob.dev]
  resources: [stepreports/status]
  verbs: [patch]
{{- if ne .Values.jobs.memoryProfiles "Disabled" }}
# Settings that held for jobs of one shape: written by server-side apply, deleted when they expire.
- apiGroups: [rljob.dev]
  resources: [memoryprofiles]
  verbs: [list, watch, create, patch, delete]
{{- end }}
# Read if the name of an object is already taken: it may be the job's own object.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
# Memory limits of running pods are raised, within recovery.maxHostMemory. Nothing else of a pod can be patched by it.
- apiGroups: [""]
  resources: [pods/resize]
  verbs: [patch]
# Created, or patched by server-side apply. Read if the name is already taken: only the job's own object is patched.
- apiGroups: [""]
  resources: [services, configmaps, serviceaccounts]
  verbs: [create, get, patch]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [create, get, patch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create, get, patch]
- apiGroups: [scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [create, get, patch]
# Kueue releases pods that it has not admitted when their Workload is deleted.
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [delete]
# A claim is read if its name is already taken. Secrets are never read: their names have the uid of the job.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [create, get]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- if .Values.podDiagnosis.enabled }}
# Owners of labelled pods: Events are about those that exist with the uid of the reference.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get]
- apiGroups: [jobset.x-k8s.io]
  resources: [jobsets]
  verbs: [get]
- apiGroups: [ray.io]
  resources: [rayclusters, rayjobs]
  verbs: [get]
- apiGroups: [trainer.kubeflow.org]
  resources: [trainjobs]
  verbs: [get]
{{- end }}
{{- end }}

{{/* In the whole cluster; empty if the values require no permission there. */}}
{{- define "rljob.clusterRules" -}}
{{- if .Values.nodes.watch -}}
# Nodes: their GPUs, and the label for them.
- apiGroups: [""]
  resources: [nodes]
  verbs: {{ ternary "[list, watch, patch]" "[list, watch]" .Values.nodes.label }}
{{- end }}
{{- if and .Values.metrics.enabled .Values.metrics.authentication }}
# Authentication and authorization of requests for metrics.
- apiGroups: [authentication.k8s.io]
  resources: [tokenreviews]
  verbs: [create]
- apiGroups: [authorization.k8s.io]
  resources: [subjectaccessreviews]
  verbs: [create]
{{- end }}
{{- end }}

{{/* In the operator's own namespace: the Lease for leader election. RBAC cannot restrict `create` to a name. */}}
{{- define "rljob.leaderRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "rljob.fullname" . }}]
  verbs: [get, update]
{{- end }}

{{/* In the namespace `default`: the endpoints of the API server. */}}
{{- define "rljob.apiServerPortsRules" -}}
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  resourceNames: [kubernetes]
  verbs: [get]
{{- end }}
