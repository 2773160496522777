{{/* Default placement of the operator's pods. */}}

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
