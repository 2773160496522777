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

{{- define "rljob.labels" -}}
{{ include "rljob.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: rljob
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
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

{{/* Pod Security `restricted`, for every pod of the chart. */}}
{{- define "rljob.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "rljob.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Hook annotations of the objects that the uninstall Job needs: created before it, deleted after it. */}}
{{- define "rljob.hookBeforeJob" -}}
helm.sh/hook: post-delete
helm.sh/hook-weight: "-1"
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}
