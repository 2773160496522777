"""Pod Security's `restricted` profile, for pods on Linux: https://kubernetes.io/docs/concepts/security/pod-security-standards/"""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]

_HOST_FIELDS = ("hostNetwork", "hostPID", "hostIPC")
_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def restricted_violations(pod: Object) -> list[str]:
    """Violations that keep `pod` out of a namespace that enforces `restricted`."""
    spec = pod["spec"]
    pod_context = spec.get("securityContext", {})
    violations = [f for f in _HOST_FIELDS if spec.get(f)]
    violations += [f"volume {v['name']}" for v in spec["volumes"] if v.keys() - {"name"} - _VOLUMES]
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        context = {**pod_context, **container.get("securityContext", {})}
        name = container["name"]
        capabilities = context.get("capabilities", {})
        checks = {
            "allowPrivilegeEscalation": context.get("allowPrivilegeEscalation") is False,
            "privileged": not context.get("privileged"),
            "capabilities.drop": "ALL" in capabilities.get("drop", []),
            "capabilities.add": not set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"},
            "runAsNonRoot": context.get("runAsNonRoot") is True and context.get("runAsUser") != 0,
            "seccompProfile": context.get("seccompProfile", {}).get("type") in ("RuntimeDefault", "Localhost"),
            "hostPort": not any(port.get("hostPort") for port in container.get("ports", [])),
        }
        violations += [f"{name}: {check}" for check, holds in checks.items() if not holds]
    return violations
