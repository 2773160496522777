{{/* What the operator may do: one rule a purpose, no more verbs than it calls. */}}

{{/* In every namespace it looks after. */}}
{{- define "rljob.jobRules" -}}
# Jobs: watched; their finalizer is put on and taken off; deleted when their time to live is over. Nobody can grant a
# right that they lack: get goes to the job's own pods.
- apiGroups: [rljob.dev]
  resources: [rljobs]
  verbs: [get, list, watch, patch, delete]
- apiGroups: [rljob.dev]
  resources: [rljobs/status]
  verbs: [patch]
# What a job owns names it with blockOwnerDeletion, which the API server allows to those who may set its finalizers.
- apiGroups: [rljob.dev]
  resources: [rljobs/finalizers]
  verbs: [update]
# Made for each job and watched; get and patch go to the job's own pods.
- apiGroups: [rljob.dev]
  resources: [stepreports]
  verbs: [get, list, watch, create, patch]
# One is got where its name was taken already: it may be the job's own.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
# Server-side apply is a patch, and a create where the object does not exist.
- apiGroups: [""]
  resources: [services, configmaps, serviceaccounts]
  verbs: [create, patch]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [create, patch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create, patch]
- apiGroups: [scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [create, patch]
# Kueue lets go of pods that it has not admitted when their Workload is deleted.
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [delete]
# Never listed nor watched: only what goes by the name of a job's own is touched.
- apiGroups: [""]
  resources: [secrets, persistentvolumeclaims]
  verbs: [create, patch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}

{{/* Of the cluster itself; empty where the values want none of it. */}}
{{- define "rljob.clusterRules" -}}
{{- if .Values.nodes.watch -}}
# Which nodes have GPUs.
- apiGroups: [""]
  resources: [nodes]
  verbs: {{ ternary "[list, watch, patch]" "[list, watch]" .Values.nodes.label }}
{{- end }}
{{- if and .Values.metrics.enabled .Values.metrics.authentication }}
# Who asks for the metrics, and whether they may.
- apiGroups: [authentication.k8s.io]
  resources: [tokenreviews]
  verbs: [create]
- apiGroups: [authorization.k8s.io]
  resources: [subjectaccessreviews]
  verbs: [create]
{{- end }}
{{- end }}

{{/* In the operator's own namespace: the Lease by which one replica leads. A create cannot be held to a name. */}}
{{- define "rljob.leaderRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "rljob.fullname" . }}]
  verbs: [get, update]
{{- end }}
