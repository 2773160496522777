{{/* The operator's settings: every option of `rljob-operator run` is a variable too. Lists are separated by spaces. */}}
{{- define "rljob.operatorEnv" -}}
{{- $jobs := .Values.jobs }}
{{- $labels := list }}
{{- range $name, $value := $jobs.podLabels }}
{{- $labels = append $labels (printf "%s=%s" $name $value) }}
{{- end }}
{{- $settings := dict
  "TRAINER_IMAGE" (include "rljob.trainerImage" .)
  "TRAINER_TORCH_VERSION" (include "rljob.torchVersion" .)
  "TRAINER_IMAGE_PULL_POLICY" .Values.trainer.image.pullPolicy
  "IMAGE_PULL_SECRETS" (join " " .Values.trainer.imagePullSecrets)
  "PROBE_IMAGE" (include "rljob.operatorImage" .)
  "PROBE_IMAGE_PULL_POLICY" .Values.image.pullPolicy
  "NAMESPACES" (join " " .Values.namespaces)
  "DIAGNOSE_PODS" .Values.podDiagnosis.enabled
  "WATCH_NODES" .Values.nodes.watch
  "LABEL_NODES" (and .Values.nodes.watch .Values.nodes.label)
  "GPU_RESOURCES" (join " " $jobs.gpuResources)
  "CHECKPOINT_STORAGE_CLASS" $jobs.checkpointClaim.storageClassName
  "CHECKPOINT_CLAIM_BYTES" $jobs.checkpointClaim.size
  "SHARED_MEMORY_BYTES" $jobs.sharedMemory
  "RUN_AS_USER" (include "rljob.runAsUser" (dict "value" $jobs.runAsUser "capabilities" .Capabilities))
  "NETWORK_POLICY" $jobs.networkPolicy.enabled
  "NETWORK_POLICY_EGRESS" (empty $jobs.networkPolicy.egress | ternary "" (toJson $jobs.networkPolicy.egress))
  "JOB_METRICS_FROM" (ternary (include "rljob.jobMetricsFrom" .) "" $jobs.metrics.enabled)
  "API_SERVER_PORTS" (join " " .Values.networkPolicy.apiServerPorts)
  "SHARED_ACCOUNT" .Values.stepReportPolicy.enabled
  "MEMORY_PROFILES" $jobs.memoryProfiles
  "POD_LABELS" (join " " $labels)
  "TERMINATION_GRACE_SECONDS" (int64 $jobs.terminationGraceSeconds)
  "PLACEMENT_TIMEOUT_SECONDS" $jobs.placementTimeoutSeconds
  "PLACEMENT_RETRY_SECONDS" $jobs.placementRetrySeconds
  "START_TIMEOUT_SECONDS" $jobs.startTimeoutSeconds
  "LOST_NODE_SECONDS" $jobs.lostNodeSeconds
  "RESTART_DELAY_SECONDS" $jobs.restartDelaySeconds
  "STATUS_INTERVAL_SECONDS" $jobs.statusIntervalSeconds
  "LEASE_NAME" (include "rljob.fullname" .)
  "RECONCILE_WORKERS" (int64 .Values.concurrency.jobs)
  "API_CONCURRENCY" (int64 .Values.concurrency.apiRequests)
  "METRICS_PORT" (ternary 8080 0 .Values.metrics.enabled)
  "METRICS_AUTH" .Values.metrics.authentication
  "METRICS_TLS" .Values.metrics.tls.enabled
  "METRICS_CERTIFICATE" (ternary "/etc/rljob-operator/tls" "" (include "rljob.mountsCertificate" . | eq "true"))
  "ADMISSION_CERTIFICATE" (ternary "/etc/rljob-operator/admission" "" (include "rljob.servesAdmission" . | eq "true"))
  "LOG_LEVEL" .Values.log.level
  "LOG_FORMAT" .Values.log.format
}}
{{- range $name, $value := $settings }}
{{- with toString $value }}
- name: RLJOB_OPERATOR_{{ $name }}
  value: {{ . | quote }}
{{- end }}
{{- end }}
{{- if $jobs.metrics.enabled }}
- name: RLJOB_OPERATOR_JOB_METRICS_TOKEN_SHA256
  valueFrom:
    secretKeyRef: {name: {{ include "rljob.jobMetricsName" . }}, key: sha256}
{{- end }}
{{- end }}
