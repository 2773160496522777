{{/* Names, labels and images that several templates share. */}}

{{- define "rljob.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* At most 40 characters, because the longest suffix has 22. A release rljob is not rljob-rljob-operator. */}}
{{- define "rljob.fullname" -}}
{{- $name := include "rljob.name" . }}
{{- $joined := printf "%s-%s" .Release.Name $name }}
{{- if contains $name .Release.Name }}
{{- $joined = .Release.Name }}
{{- else if hasPrefix (printf "%s-" .Release.Name) $name }}
{{- $joined = $name }}
{{- end }}
{{- default $joined .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Names of cluster-scoped objects contain the namespace, so that releases of the same name do not conflict. */}}
{{- define "rljob.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "rljob.fullname" .) }}
{{- end }}

{{- define "rljob.serviceAccountName" -}}
{{- default (ternary (include "rljob.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name }}
{{- end }}

{{- define "rljob.selectorLabels" -}}
app.kubernetes.io/name: {{ include "rljob.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Labels of an object, of a dict {of, labels}: further ones and common ones do not replace those of selectors and of Helm. */}}
{{- define "rljob.labels" -}}
{{- $fixed := include "rljob.selectorLabels" .of | fromYaml }}
{{- $_ := set $fixed "app.kubernetes.io/managed-by" .of.Release.Service }}
{{- $own := dict
  "app.kubernetes.io/version" .of.Chart.AppVersion
  "app.kubernetes.io/component" "operator"
  "app.kubernetes.io/part-of" "rljob"
  "helm.sh/chart" (printf "%s-%s" .of.Chart.Name (.of.Chart.Version | replace "+" "_"))
}}
{{- merge $fixed (default dict .labels) .of.Values.commonLabels $own | toYaml }}
{{- end }}

{{/* Labels and annotations of an object, of a dict {of, labels, annotations}. */}}
{{- define "rljob.marks" -}}
labels:
  {{- include "rljob.labels" . | nindent 2 }}
{{- with merge dict (default dict .annotations) .of.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Image reference of a dict {image, tag}; `tag` replaces an empty image.tag. A digest takes precedence. */}}
{{- define "rljob.image" -}}
{{- if .image.digest }}
{{- printf "%s@%s" .image.repository .image.digest }}
{{- else }}
{{- printf "%s:%s" .image.repository (default .tag .image.tag) }}
{{- end }}
{{- end }}

{{- define "rljob.operatorImage" -}}
{{- include "rljob.image" (dict "image" .Values.image "tag" .Chart.AppVersion) }}
{{- end }}

{{- define "rljob.trainerImage" -}}
{{- include "rljob.image" (dict "image" .Values.trainer.image "tag" (printf "%s-%s" .Chart.AppVersion .Values.trainer.device)) }}
{{- end }}

{{/* The torch of the project's own trainer images, as their requirement files lock it. */}}
{{- define "rljob.torchVersion" -}}
{{- default (get (dict "gpu" "2.11.0" "cpu" "2.13.0") .Values.trainer.device) .Values.trainer.torchVersion }}
{{- end }}

{{/*
Ports of the API server as a JSON list: the value's, or those of the Service `kubernetes` and of its endpoints. Empty where
Helm does not talk to the cluster (`helm template`, Argo CD) and no value is set.
*/}}
{{- define "rljob.apiServerPorts" -}}
{{- $ports := list }}
{{- range .Values.networkPolicy.apiServerPorts }}
{{- $ports = append $ports (int .) }}
{{- end }}
{{- if and (empty $ports) .Values.rbac.create }}
{{- range (lookup "discovery.k8s.io/v1" "EndpointSlice" "default" "kubernetes").ports }}
{{- $ports = append $ports (int .port) }}
{{- end }}
{{- if $ports }}
{{- $ports = append $ports 443 }}
{{- end }}
{{- end }}
{{- uniq $ports | toJson }}
{{- end }}

{{/* "true" if the metrics have a certificate from a Secret. */}}
{{- define "rljob.mountsCertificate" -}}
{{- and .Values.metrics.enabled .Values.metrics.tls.enabled (ne .Values.metrics.tls.secretName "") }}
{{- end }}

{{/* "true" if the operator serves the admission webhook, which knows nothing without nodes. */}}
{{- define "rljob.servesAdmission" -}}
{{- and .Values.admissionWebhook.enabled .Values.nodes.watch }}
{{- end }}

{{/* Name of the webhook's Service, and of the Secret with its certificate if the chart makes it. */}}
{{- define "rljob.admissionName" -}}
{{- printf "%s-admission" (include "rljob.fullname" .) }}
{{- end }}

{{/* Name of the ServiceAccount, and of the Secret with its token, for a ServiceMonitor without its own credentials. */}}
{{- define "rljob.scraperName" -}}
{{- printf "%s-scraper" (include "rljob.fullname" .) }}
{{- end }}

{{/* "true" if the chart makes the token for the ServiceMonitor. */}}
{{- define "rljob.makesScraper" -}}
{{- and .Values.serviceMonitor.enabled .Values.metrics.authentication (empty .Values.serviceMonitor.authorization) }}
{{- end }}

{{/* Name of the Secret with the token of the metrics of jobs. */}}
{{- define "rljob.jobMetricsName" -}}
{{- default (printf "%s-job-metrics" (include "rljob.fullname" .)) .Values.jobs.metrics.secretName }}
{{- end }}

{{/* Peers that may reach the metrics of jobs, as a JSON list. */}}
{{- define "rljob.jobMetricsFrom" -}}
{{- $here := dict "namespaceSelector" (dict "matchLabels" (dict "kubernetes.io/metadata.name" .Release.Namespace)) }}
{{- default (list $here) .Values.jobs.metrics.from | toJson }}
{{- end }}

{{/*
The uid of a dict {value, capabilities}; 0 if the cluster assigns one. OpenShift refuses pods with a uid outside the range
of their namespace.
*/}}
{{- define "rljob.runAsUser" -}}
{{- if kindIs "string" .value }}
{{- ternary 0 10001 (.capabilities.APIVersions.Has "security.openshift.io/v1") }}
{{- else }}
{{- int64 (default 0 .value) }}
{{- end }}
{{- end }}

{{/* Namespaces that the binding of a policy applies to: a dict {namespaces, selector}. */}}
{{- define "rljob.policyNamespaces" -}}
{{- if .namespaces -}}
matchResources:
  namespaceSelector:
    matchExpressions:
      - {key: kubernetes.io/metadata.name, operator: In, values: {{ toJson .namespaces }}}
{{- else if .selector -}}
matchResources:
  namespaceSelector:
    {{- toYaml .selector | nindent 4 }}
{{- end }}
{{- end }}

{{/* Version of MutatingAdmissionPolicy that the API server serves; empty if it serves none. */}}
{{- define "rljob.mutatingPolicyVersion" -}}
{{- $versions := .Capabilities.APIVersions }}
{{- if $versions.Has "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy" }}v1
{{- else if $versions.Has "admissionregistration.k8s.io/v1beta1/MutatingAdmissionPolicy" }}v1beta1
{{- end }}
{{- end }}

{{/* Pod Security `restricted`, for every pod of the chart. */}}
{{- define "rljob.podSecurityContext" -}}
runAsNonRoot: true
{{- $user := include "rljob.runAsUser" (dict "value" .Values.runAsUser "capabilities" .Capabilities) }}
{{- if ne $user "0" }}
runAsUser: {{ $user }}
runAsGroup: {{ $user }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "rljob.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
