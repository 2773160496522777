{{/* Placement of the chart's pods: the operator's, and the one that runs after an uninstall. */}}

{{/* Fields that both have in common. */}}
{{- define "rljob.podSettings" -}}
securityContext:
  {{- include "rljob.podSecurityContext" . | nindent 2 }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.dnsPolicy }}
dnsPolicy: {{ . }}
{{- end }}
{{- with .Values.dnsConfig }}
dnsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
affinity:
  {{- default (include "rljob.gpuFreeAffinity" . | fromYaml) .Values.affinity | toYaml | nindent 2 }}
{{- end }}

{{/* The operator needs no GPU, so it prefers nodes without GPUs. The first label is its own, the second NVIDIA's. */}}
{{- define "rljob.gpuFreeAffinity" -}}
nodeAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      preference:
        matchExpressions:
          - {key: rljob.dev/has-gpus, operator: DoesNotExist}
          - {key: nvidia.com/gpu.present, operator: NotIn, values: ["true"]}
{{- end }}

{{- define "rljob.spreadOverNodes" -}}
- topologyKey: kubernetes.io/hostname
  maxSkew: 1
  whenUnsatisfiable: ScheduleAnyway
  matchLabelKeys: [pod-template-hash]
  labelSelector:
    matchLabels:
      {{- include "rljob.selectorLabels" . | nindent 6 }}
{{- end }}
