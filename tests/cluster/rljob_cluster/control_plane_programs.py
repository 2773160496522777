"""Command lines of the control plane's programs, as pure functions of its layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rljob_cluster.certificates import Authority

SERVICE_RANGE = "10.96.0.0/16"
KUBERNETES_SERVICE_IP = "10.96.0.1"
ADMIN_USER = "kubernetes-admin"
ADMIN_GROUP = "system:masters"


@dataclass(frozen=True, slots=True)
class ControlPlaneLayout:
    """Folders, address and ports of a control plane."""

    binaries: Path
    """Folder of the programs."""
    directory: Path
    """Folder of all files, with keys that only their owner can read, and of the socket on which etcd listens."""
    address: str
    """IP address of the API server."""
    api_port: int
    controller_manager_port: int
    scheduler_port: int

    @property
    def url(self) -> str:
        return f"https://{self.address}:{self.api_port}"

    @property
    def authority(self) -> Authority:
        return Authority(self.directory / "certificates")

    @property
    def etcd_socket(self) -> Path:
        return self.directory / "etcd.sock"

    @property
    def etcd_url(self) -> str:
        return f"unix://{self.etcd_socket}"

    @property
    def admin_kubeconfig(self) -> Path:
        return self.directory / "kubeconfig"

    def kubeconfig(self, user: str) -> Path:
        return self.directory / f"{user}.kubeconfig"


def write_credentials(layout: ControlPlaneLayout) -> None:
    """Create the certificate authority, certificates and kubeconfigs that do not exist yet."""
    authority = layout.authority
    authority.ensure()
    authority.service_account_key()
    authority.client("kubelet-client", "kube-apiserver-kubelet-client", ADMIN_GROUP)
    authority.server("api-server", api_server_names(layout.address))
    authority.kubeconfig(layout.admin_kubeconfig, layout.url, ADMIN_USER, ADMIN_GROUP)
    for user in ("kube-controller-manager", "kube-scheduler"):
        authority.kubeconfig(layout.kubeconfig(user), layout.url, f"system:{user}")


def api_server_names(address: str) -> tuple[str, ...]:
    service = tuple(f"kubernetes{suffix}" for suffix in ("", ".default", ".default.svc", ".default.svc.cluster.local"))
    return (*service, "localhost", *dict.fromkeys(["127.0.0.1", KUBERNETES_SERVICE_IP, address]))


def etcd(layout: ControlPlaneLayout) -> list[str]:
    return [
        str(layout.binaries / "etcd"),
        f"--data-dir={layout.directory}/etcd",
        f"--listen-client-urls={layout.etcd_url}",
        f"--advertise-client-urls={layout.etcd_url}",
        f"--listen-peer-urls=unix://{layout.directory}/etcd-peer.sock",
        # The cluster does not survive a reboot, so its data need not be on disk.
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def api_server(layout: ControlPlaneLayout) -> list[str]:
    certificates = layout.authority.directory
    service_account_key = layout.authority.service_account_key()
    return [
        str(layout.binaries / "kube-apiserver"),
        f"--etcd-servers={layout.etcd_url}",
        f"--advertise-address={layout.address}",
        f"--bind-address={layout.address}",
        f"--secure-port={layout.api_port}",
        f"--client-ca-file={certificates}/ca.crt",
        f"--tls-cert-file={certificates}/api-server.crt",
        f"--tls-private-key-file={certificates}/api-server.key",
        f"--kubelet-client-certificate={certificates}/kubelet-client.crt",
        f"--kubelet-client-key={certificates}/kubelet-client.key",
        # The names of the nodes cannot be resolved.
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={service_account_key}",
        f"--service-account-signing-key-file={service_account_key}",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction,PodSecurity,OwnerReferencesPermissionEnforcement",
        "--allow-privileged=true",
        "--profiling=false",
    ]


def controller_manager(layout: ControlPlaneLayout) -> list[str]:
    return [
        str(layout.binaries / "kube-controller-manager"),
        f"--kubeconfig={layout.kubeconfig('kube-controller-manager')}",
        f"--service-account-private-key-file={layout.authority.service_account_key()}",
        f"--root-ca-file={layout.authority.pair.certificate}",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--secure-port={layout.controller_manager_port}",
        f"--cert-dir={layout.directory}/controller-manager",
    ]


def scheduler(layout: ControlPlaneLayout) -> list[str]:
    return [
        str(layout.binaries / "kube-scheduler"),
        f"--kubeconfig={layout.kubeconfig('kube-scheduler')}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--secure-port={layout.scheduler_port}",
        f"--cert-dir={layout.directory}/scheduler",
    ]
