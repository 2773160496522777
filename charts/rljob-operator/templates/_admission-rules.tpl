{{/* Rules of the admission policy, in CEL. The template of each role has the same ones. */}}

{{/* Roles with a pod template in the manifest. */}}
{{- define "rljob.templateRoles" -}}
controller policy rollout
{{- end }}

{{/*
Parts of a template that its rules refer to. They may have any shape, because the CRD's schema leaves templates open; the
first rule of the role requires the shapes that the others rely on.
*/}}
{{- define "rljob.templateVariables" -}}
- name: {{ . }}Template
  expression: object.spec.?{{ . }}.?template.orValue({})
- name: {{ . }}Text
  expression: '"%s".format([variables.{{ . }}Template])'
- name: {{ . }}Pod
  expression: variables.{{ . }}Template.?spec.orValue({})
- name: {{ . }}Containers
  expression: variables.{{ . }}Pod.?containers.orValue([]) + variables.{{ . }}Pod.?initContainers.orValue([])
- name: {{ . }}Volumes
  expression: variables.{{ . }}Pod.?volumes.orValue([])
{{- end }}

{{/*
Fields that a template may have: a field that a newer Kubernetes adds is refused until it is listed here. docs/security.md has
the reason for each field that is missing.
*/}}
{{- define "rljob.fieldVariables" -}}
- name: podFields
  expression: >-
    ["affinity", "automountServiceAccountToken", "containers", "dnsConfig", "dnsPolicy", "enableServiceLinks", "hostAliases",
    "hostIPC", "hostNetwork", "hostPID", "hostUsers", "imagePullSecrets", "initContainers", "nodeSelector",
    "priorityClassName", "resources", "runtimeClassName", "schedulerName", "schedulingGates", "securityContext",
    "serviceAccountName", "shareProcessNamespace", "terminationGracePeriodSeconds", "tolerations",
    "topologySpreadConstraints", "volumes"]
- name: containerFields
  expression: >-
    ["args", "command", "env", "envFrom", "image", "imagePullPolicy", "lifecycle", "livenessProbe", "name", "ports",
    "readinessProbe", "resizePolicy", "resources", "restartPolicy", "restartPolicyRules", "securityContext",
    "startupProbe", "stdin", "stdinOnce", "terminationMessagePath", "terminationMessagePolicy", "tty", "volumeDevices",
    "volumeMounts", "workingDir"]
- name: securityFields
  expression: '["appArmorProfile", "runAsGroup", "runAsNonRoot", "runAsUser", "seccompProfile"]'
- name: podSecurityFields
  expression: >-
    variables.securityFields + ["fsGroup", "fsGroupChangePolicy", "supplementalGroups", "supplementalGroupsPolicy"]
- name: containerSecurityFields
  expression: >-
    variables.securityFields + ["allowPrivilegeEscalation", "capabilities", "privileged", "procMount",
    "readOnlyRootFilesystem"]
{{- end }}

{{/* Types of volumes that Pod Security `restricted` allows; `image` has the model of an oci:// URI. */}}
{{- define "rljob.allowedVolumes" -}}
["name", "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected", "secret"]
{{- end }}

{{/* True if a name is in a list of values, in which "*" stands for every name. */}}
{{- define "rljob.isAllowed" -}}
{{- if has "*" .allowed }}true{{ else }}({{ .name }} in {{ toJson .allowed }}){{ end }}
{{- end }}

{{/* True if the security context `context` keeps what `restricted` requires of pods and containers alike. */}}
{{- define "rljob.keepsCommonSecurity" -}}
(!has(context.runAsNonRoot) || context.runAsNonRoot == true) &&
(!has(context.runAsUser) || context.runAsUser != 0) &&
["seccompProfile", "appArmorProfile"].all(name, !(name in context) ||
type(context[name]) == map && context[name].?type.orValue("") in ["RuntimeDefault", "Localhost"])
{{- end }}

{{/* Size of the template of a dict {role, values}. */}}
{{- define "rljob.templateSizeRule" -}}
{{- $path := printf "spec.%s.template" .role }}
- expression: size(bytes(variables.{{ .role }}Text)) <= {{ int64 .values.maxTemplateBytes }}
  messageExpression: >-
    "{{ $path }}: expected at most {{ int64 .values.maxTemplateBytes }} bytes, found "
    + string(size(bytes(variables.{{ .role }}Text))) + "; put long texts into a ConfigMap"
{{- end }}

{{/*
Size of what a user writes into all pods of a role, of a dict {role, values}: the operator builds and creates them one by one.
*/}}
{{- define "rljob.totalSizeRule" -}}
{{- $total := printf "size(bytes(variables.%sText + variables.sharedText)) * object.spec.%s.?replicas.orValue(1)" .role .role }}
- expression: '!has(object.spec.{{ .role }}) || {{ $total }} <= {{ int64 .values.maxTotalTemplateBytes }}'
  messageExpression: >-
    "spec.{{ .role }}: expected at most {{ int64 .values.maxTotalTemplateBytes }} bytes of template, env, envFrom and trainer, times replicas, found "
    + string({{ $total }}) + "; put long texts into a ConfigMap, or use fewer replicas"
{{- end }}

{{/* Rule that a list's objects have allowed fields only, of a dict {list, fields, path}. */}}
{{- define "rljob.fieldsRule" -}}
{{- $refused := printf "item.filter(field, !(field in %s))" .fields }}
- expression: '{{ .list }}.all(item, item.all(field, field in {{ .fields }}))'
  messageExpression: >-
    "{{ .path }}: expected fields that the policy allows, found "
    + {{ .list }}.map(item, {{ $refused }}).filter(fields, size(fields) > 0)[0].join(", ") + "; remove them"
{{- end }}

{{/* True if all keys of a map, of a dict {map, allowed}, are in a list of values, in which `/` ends a prefix. */}}
{{- define "rljob.allowsKeys" -}}
{{- if has "*" .allowed }}true{{ else -}}
{{ .map }}.all(key, {{ toJson .allowed }}.exists(name, key == name || name.endsWith("/") && key.startsWith(name)))
{{- end }}
{{- end }}

{{/* Content of the template of a dict {role, values, gpuResources}: no more than Pod Security `restricted` allows, and less. */}}
{{- define "rljob.restrictedTemplateRules" -}}
{{- $role := .role }}
{{- $values := .values }}
{{- $pod := printf "variables.%sPod" $role }}
{{- $containers := printf "variables.%sContainers" $role }}
{{- $volumes := printf "variables.%sVolumes" $role }}
{{- $metadata := printf "variables.%sTemplate.?metadata.orValue({})" $role }}
{{- $path := printf "spec.%s.template.spec" $role }}
- expression: >-
    ["containers", "imagePullSecrets", "initContainers", "tolerations", "volumes"].all(name,
    !(name in {{ $pod }}) || type({{ $pod }}[name]) == list)
    && ["affinity", "securityContext"].all(name, !(name in {{ $pod }}) || type({{ $pod }}[name]) == map)
    && ["annotations", "labels"].all(name, !(name in {{ $metadata }}) || type({{ $metadata }}[name]) == map)
    && {{ $volumes }}.all(volume, type(volume) == map && volume.all(key, type(volume[key]) == (key == "name" ? string : map)))
    && {{ $containers }}.all(container, type(container) == map
    && container.all(key, !(key in ["env", "envFrom", "ports"]) || type(container[key]) == list)
    && container.all(key, !(key in ["securityContext", "lifecycle", "livenessProbe", "readinessProbe", "startupProbe"])
    || type(container[key]) == map))
  message: >-
    spec.{{ $role }}.template: expected lists for containers, initContainers, volumes, imagePullSecrets, tolerations, env,
    envFrom and ports, and objects for labels, annotations, affinity, volumes' sources, probes and securityContext, as in a
    PodSpec without null; correct the field
- expression: '!variables.{{ $role }}Text.contains("$patch")'
  message: >-
    spec.{{ $role }}.template: directives ($patch) could remove RLJob's security settings, and are not allowed; remove them
{{- include "rljob.fieldsRule" (dict "list" (printf "[%s]" $pod) "fields" "variables.podFields" "path" $path) }}
{{- include "rljob.fieldsRule" (dict "list" $containers "fields" "variables.containerFields" "path" (printf "%s.containers" $path)) }}
- expression: >-
    ["automountServiceAccountToken", "hostIPC", "hostNetwork", "hostPID", "hostUsers", "shareProcessNamespace"].all(name,
    {{ $pod }}[?name].orValue(false) == false)
  message: >-
    {{ $path }}: automountServiceAccountToken, hostIPC, hostNetwork, hostPID, hostUsers and shareProcessNamespace are not
    allowed; remove them
{{- range $field, $allowed := dict "priorityClassName" $values.allowedPriorityClasses "runtimeClassName" $values.allowedRuntimeClasses "schedulerName" $values.allowedSchedulers "serviceAccountName" $values.allowedServiceAccounts }}
- expression: >-
    !has({{ $pod }}.{{ $field }}) ||
    {{ include "rljob.isAllowed" (dict "name" (printf "%s.%s" $pod $field) "allowed" $allowed) }}
  message: >-
    {{ $path }}.{{ $field }}: {{ include "rljob.allowedOnly" $allowed }}; remove it, or ask the cluster's administrator
{{- end }}
{{- if not (has "*" $values.allowedTolerations) }}
{{- $allowed := concat $.gpuResources $values.allowedTolerations | uniq }}
- expression: '{{ $pod }}.?tolerations.orValue([]).all(toleration, toleration.?key.orValue("") in {{ toJson $allowed }})'
  message: >-
    {{ $path }}.tolerations: {{ include "rljob.allowedOnly" $allowed }}, as the key of a taint; remove the others, or ask the
    cluster's administrator
{{- end }}
- expression: >-
    ["podAffinity", "podAntiAffinity"].all(kind, [{{ $pod }}.?affinity[?kind].orValue({})].all(rules,
    rules.?requiredDuringSchedulingIgnoredDuringExecution.orValue([]).all(term,
    !has(term.namespaces) && !has(term.namespaceSelector))
    && rules.?preferredDuringSchedulingIgnoredDuringExecution.orValue([]).all(preference,
    !has(preference.podAffinityTerm.namespaces) && !has(preference.podAffinityTerm.namespaceSelector))))
  message: >-
    {{ $path }}.affinity: namespaces and namespaceSelector are not allowed, since they could keep the pods of other namespaces
    off nodes; remove them
- expression: >-
    !has({{ $pod }}.terminationGracePeriodSeconds) || type({{ $pod }}.terminationGracePeriodSeconds) == int
    && {{ $pod }}.terminationGracePeriodSeconds <= 86400
  message: '{{ $path }}.terminationGracePeriodSeconds: expected at most 86400 (a day); lower it'
- expression: '{{ $volumes }}.all(volume, volume.all(key, key in {{ include "rljob.allowedVolumes" . }}))'
  message: >-
    {{ $path }}.volumes: hostPath and other sources that Pod Security restricted refuses are not allowed; use
    persistentVolumeClaim, emptyDir, configMap, projected or csi
- expression: >-
    {{ $volumes }}.all(volume, {{ include "rljob.isSafeVolume" (dict "volume" "volume" "values" $values) }})
  message: >-
    {{ $path }}.volumes: {{ include "rljob.safeVolumes" $values }}
- expression: >-
    [{{ $pod }}.?securityContext.orValue({})].all(context,
    context.all(field, field in variables.podSecurityFields) &&
    {{ include "rljob.keepsCommonSecurity" . | replace "\n" "\n    " }})
  message: >-
    {{ $path }}.securityContext: runAsNonRoot: false, runAsUser: 0, an unconfined seccomp or AppArmor profile, and fields
    other than users, groups and these profiles (seLinuxOptions, windowsOptions, sysctls) are not allowed; remove them
- expression: >-
    {{ $containers }}.all(container, [container.?securityContext.orValue({})].all(context,
    context.all(field, field in variables.containerSecurityFields) &&
    {{ include "rljob.keepsCommonSecurity" . | replace "\n" "\n    " }}
    && (!has(context.privileged) || context.privileged == false)
    && (!has(context.procMount) || context.procMount == "Default")
    && (has(context.allowPrivilegeEscalation) ? context.allowPrivilegeEscalation == false :
    container.?name.orValue("rljob") == "rljob")
    && (!has(context.capabilities) || type(context.capabilities) == map
    && context.capabilities.?add.orValue([]).all(name, name == "NET_BIND_SERVICE"))
    && (context.?capabilities.?drop.hasValue() ? "ALL" in context.capabilities.drop :
    container.?name.orValue("rljob") == "rljob")))
  message: >-
    {{ $path }}.containers: a securityContext may not be privileged, run as root, add capabilities, or set seLinuxOptions,
    procMount or an unconfined profile; a container of your own needs allowPrivilegeEscalation: false and
    capabilities: {drop: [ALL]}
- expression: >-
    {{ $containers }}.all(container, container.?ports.orValue([]).all(port, port.?hostPort.orValue(0) == 0)
    && ["livenessProbe", "readinessProbe", "startupProbe"].all(probe,
    container[?probe].?httpGet.?host.orValue("") == "" && container[?probe].?tcpSocket.?host.orValue("") == "")
    && ["postStart", "preStop"].all(hook, container.?lifecycle[?hook].?httpGet.?host.orValue("") == ""
    && container.?lifecycle[?hook].?tcpSocket.?host.orValue("") == ""))
  message: '{{ $path }}.containers: hostPort, and a host in a probe or lifecycle hook, are not allowed; remove them'
- expression: >-
    {{ $containers }}.all(container, container.?envFrom.orValue([]).all(source,
    source.all(field, field in ["configMapRef", "prefix", "secretRef"]))
    && container.?env.orValue([]).all(variable, !has(variable.valueFrom) || variable.valueFrom.all(source,
    source in ["configMapKeyRef", "fieldRef", "fileKeyRef", "resourceFieldRef", "secretKeyRef"])))
  message: >-
    {{ $path }}.containers: expected variables from ConfigMaps, Secrets, files, and fields of the pod only; remove the others
{{- if not (has "*" $values.allowedSecrets) }}
{{- $allowed := toJson $values.allowedSecrets }}
- expression: >-
    {{ $volumes }}.all(volume, {{ include "rljob.usesAllowedSecrets" (dict "volume" "volume" "allowed" $allowed) }})
    && {{ $pod }}.?imagePullSecrets.orValue([]).all(secret, secret.?name.orValue("") in {{ $allowed }})
    && {{ $containers }}.all(container, {{ include "rljob.readsAllowedSecrets" (dict "container" "container" "allowed" $allowed) }})
  message: >-
    {{ $path }}: Secrets in volumes, env, envFrom and imagePullSecrets: {{ include "rljob.allowedOnly" $values.allowedSecrets }};
    remove them, or ask the cluster's administrator
{{- end }}
{{- if not (has "*" $values.allowedPodLabels) }}
- expression: >-
    variables.{{ $role }}Template.?metadata.?labels.orValue({}).all(label, label in {{ toJson $values.allowedPodLabels }})
  message: >-
    spec.{{ $role }}.template.metadata.labels: {{ include "rljob.allowedOnly" $values.allowedPodLabels }}, since Services and
    NetworkPolicies select pods by labels; remove the others
{{- end }}
- expression: >-
    {{ $metadata }}.?annotations.orValue({}).all(key, !key.startsWith("container.apparmor.security.beta.kubernetes.io/"))
    && {{ include "rljob.allowsKeys" (dict "map" (printf "%s.?annotations.orValue({})" $metadata) "allowed" $values.allowedPodAnnotations) }}
  message: >-
    spec.{{ $role }}.template.metadata.annotations: {{ include "rljob.allowedOnly" $values.allowedPodAnnotations }}, and none
    for AppArmor, since annotations can give a pod roles, networks and sidecars; remove the others, or ask the cluster's
    administrator
{{- if eq $role "controller" }}
- expression: >-
    size({{ $pod }}.?initContainers.orValue([])) == 0
    && {{ $containers }}.all(container, container.?name.orValue("rljob") == "rljob")
  message: >-
    {{ $path }}: further containers in the controller's pod are not allowed, since they could use its token; put them into
    the workers' pods
{{- end }}
{{- end }}

{{/* True if a volume, of a dict {volume, values}, has no token, driver or annotation of a claim that the values do not allow. */}}
{{- define "rljob.isSafeVolume" -}}
(!has({{ .volume }}.projected) || {{ .volume }}.projected.?sources.orValue([]).all(source,
    source.all(field, field in ["clusterTrustBundle", "configMap", "downwardAPI", "secret"])))
    {{- if not (has "*" .values.allowedCsiDrivers) }}
    && (!has({{ .volume }}.csi) || {{ .volume }}.csi.?driver.orValue("") in {{ toJson .values.allowedCsiDrivers }})
    {{- end }}
    && (!has({{ .volume }}.ephemeral) || [{{ .volume }}.ephemeral.?volumeClaimTemplate.?metadata.?annotations.orValue({})].all(annotations,
    {{ include "rljob.allowsKeys" (dict "map" "annotations" "allowed" .values.allowedPodAnnotations) }}))
{{- end }}
{{- define "rljob.safeVolumes" -}}
tokens of ServiceAccounts and pod certificates are not allowed; of inline CSI drivers, {{ include "rljob.allowedOnly" .allowedCsiDrivers }};
    of annotations of ephemeral claims, {{ include "rljob.allowedOnly" .allowedPodAnnotations }}; use persistentVolumeClaim
{{- end }}

{{/* True if a volume, of a dict {volume, allowed}, has only Secrets of the list. */}}
{{- define "rljob.usesAllowedSecrets" -}}
(!has({{ .volume }}.secret) || {{ .volume }}.secret.?secretName.orValue("") in {{ .allowed }})
    && (!has({{ .volume }}.projected) || {{ .volume }}.projected.?sources.orValue([]).all(source,
    !has(source.secret) || source.secret.?name.orValue("") in {{ .allowed }}))
    && (!has({{ .volume }}.csi) || !has({{ .volume }}.csi.nodePublishSecretRef)
    || {{ .volume }}.csi.nodePublishSecretRef.?name.orValue("") in {{ .allowed }})
{{- end }}

{{/* True if the variables of a container, of a dict {container, allowed}, come only from Secrets of the list. */}}
{{- define "rljob.readsAllowedSecrets" -}}
{{ .container }}.?envFrom.orValue([]).all(source,
    !has(source.secretRef) || source.secretRef.?name.orValue("") in {{ .allowed }})
    && {{ .container }}.?env.orValue([]).all(variable,
    !has(variable.valueFrom) || !has(variable.valueFrom.secretKeyRef)
    || variable.valueFrom.secretKeyRef.?name.orValue("") in {{ .allowed }})
{{- end }}

{{/* The names of a list, for messages. */}}
{{- define "rljob.allowedOnly" -}}
{{- if has "*" . }}all are allowed{{ else if . }}only {{ join ", " . }} {{ ternary "is" "are" (eq (len .) 1) }} allowed{{ else }}none is allowed{{ end }}
{{- end }}
