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
type(context[name]) == map && context[name].?type.orValue("") in ["RuntimeDefault", "Localhost"]) &&
!has(context.seLinuxOptions) && !has(context.windowsOptions)
{{- end }}

{{/* Size of the template of a dict {role, values}. */}}
{{- define "rljob.templateSizeRule" -}}
{{- $path := printf "spec.%s.template" .role }}
- expression: size(bytes(variables.{{ .role }}Text)) <= {{ int64 .values.maxTemplateBytes }}
  messageExpression: >-
    "{{ $path }}: expected at most {{ int64 .values.maxTemplateBytes }} bytes, found "
    + string(size(bytes(variables.{{ .role }}Text))) + "; put long texts into a ConfigMap"
{{- end }}

{{/* Content of the template of a dict {role, values}: no more than Pod Security `restricted` allows, and less. */}}
{{- define "rljob.restrictedTemplateRules" -}}
{{- $role := .role }}
{{- $values := .values }}
{{- $pod := printf "variables.%sPod" $role }}
{{- $containers := printf "variables.%sContainers" $role }}
{{- $volumes := printf "variables.%sVolumes" $role }}
{{- $path := printf "spec.%s.template.spec" $role }}
- expression: >-
    (!has({{ $pod }}.containers) || type({{ $pod }}.containers) == list)
    && (!has({{ $pod }}.initContainers) || type({{ $pod }}.initContainers) == list)
    && (!has({{ $pod }}.volumes) || type({{ $pod }}.volumes) == list)
    && (!has({{ $pod }}.imagePullSecrets) || type({{ $pod }}.imagePullSecrets) == list)
    && (!has({{ $pod }}.securityContext) || type({{ $pod }}.securityContext) == map)
    && {{ $volumes }}.all(volume, type(volume) == map && volume.all(key, type(volume[key]) == (key == "name" ? string : map)))
    && {{ $containers }}.all(container, type(container) == map
    && container.all(key, !(key in ["env", "envFrom", "ports"]) || type(container[key]) == list)
    && container.all(key, !(key in ["securityContext", "lifecycle", "livenessProbe", "readinessProbe", "startupProbe"])
    || type(container[key]) == map))
  message: >-
    {{ $path }}: expected lists for containers, initContainers, volumes, imagePullSecrets, env, envFrom and ports, and objects
    for volumes' sources, probes and securityContext, as in a PodSpec without null; correct the field
- expression: '!variables.{{ $role }}Text.contains("$patch")'
  message: >-
    spec.{{ $role }}.template: directives ($patch) could remove RLJob's security settings, and are not allowed; remove them
- expression: '!["hostNetwork", "hostPID", "hostIPC"].exists(name, {{ $pod }}[?name].orValue(false) != false)'
  message: '{{ $path }}: hostNetwork, hostPID and hostIPC are not allowed; remove them'
- expression: '!has({{ $pod }}.nodeName)'
  message: '{{ $path }}.nodeName: not allowed, since it bypasses the scheduler; use nodeSelector or affinity'
- expression: >-
    !has({{ $pod }}.serviceAccount) && (!has({{ $pod }}.serviceAccountName) ||
    {{ include "rljob.isAllowed" (dict "name" (printf "%s.serviceAccountName" $pod) "allowed" $values.allowedServiceAccounts) }})
  message: >-
    {{ $path }}.serviceAccountName: {{ include "rljob.allowedOnly" $values.allowedServiceAccounts }}; remove it, or ask the
    cluster's administrator
- expression: >-
    {{ $pod }}.?automountServiceAccountToken.orValue(false) == false && {{ $volumes }}.all(volume,
    !has(volume.projected) || volume.projected.?sources.orValue([]).all(source, !has(source.serviceAccountToken)))
  message: >-
    {{ $path }}: tokens of ServiceAccounts are not allowed, neither by automountServiceAccountToken nor in a projected volume;
    remove them
- expression: >-
    !has({{ $pod }}.priorityClassName) ||
    {{ include "rljob.isAllowed" (dict "name" (printf "%s.priorityClassName" $pod) "allowed" $values.allowedPriorityClasses) }}
  message: >-
    {{ $path }}.priorityClassName: {{ include "rljob.allowedOnly" $values.allowedPriorityClasses }}; remove it, or ask the
    cluster's administrator
- expression: '{{ $volumes }}.all(volume, volume.all(key, key in {{ include "rljob.allowedVolumes" . }}))'
  message: >-
    {{ $path }}.volumes: hostPath and other sources that Pod Security restricted refuses are not allowed; use
    persistentVolumeClaim, emptyDir, configMap, projected or csi
- expression: >-
    [{{ $pod }}.?securityContext.orValue({})].all(context,
    {{ include "rljob.keepsCommonSecurity" . | replace "\n" "\n    " }}
    && size(context.?sysctls.orValue([])) == 0)
  message: >-
    {{ $path }}.securityContext: runAsNonRoot: false, runAsUser: 0, an unconfined seccomp or AppArmor profile, seLinuxOptions,
    windowsOptions and sysctls are not allowed; remove them
- expression: >-
    {{ $containers }}.all(container, [container.?securityContext.orValue({})].all(context,
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
{{- if eq $role "controller" }}
- expression: >-
    size({{ $pod }}.?initContainers.orValue([])) == 0
    && {{ $containers }}.all(container, container.?name.orValue("rljob") == "rljob")
  message: >-
    {{ $path }}: further containers in the controller's pod are not allowed, since they could use its token; put them into
    the workers' pods
{{- end }}
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
{{- if . }}only {{ join ", " . }} {{ ternary "is" "are" (eq (len .) 1) }} allowed{{ else }}none is allowed{{ end }}
{{- end }}
