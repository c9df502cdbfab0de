"""A real Kubernetes API on this machine: etcd, kube-apiserver and kube-controller-manager, without
nodes.

Debian packages no server of Kubernetes, but the source of one (1.20.2, in bookworm). It is built
once, in about five minutes on two cores, below ``~/.cache/primus-tests``. This version ignores
fields of later ones, such as a Job's ``completionMode``; the schemas of current versions are tested
in tests/unit/launch/test_launch_kubernetes.py.
"""

import base64
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import yaml

from project_kit import free_port, until

PACKAGES = {
    "go": "golang-go",
    "etcd": "etcd-server",
    "openssl": "openssl",
    "kubectl": "kubernetes-client",
}
SERVERS = ("kube-apiserver", "kube-controller-manager")
# Pod Security admission is newer than this server. Kubernetes provides it for older ones as a
# program that the server asks: cmd/webhook of https://github.com/kubernetes/pod-security-admission.
POD_SECURITY = os.environ.get("PRIMUS_TEST_POD_SECURITY", "")
CONTROLLERS = (
    "job,garbagecollector,namespace,serviceaccount,serviceaccount-token,resourcequota,nodelifecycle"
)
CACHE = (
    Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    / "primus-tests"
    / "kubernetes-1.20"
)
SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
ROOT = "k8s.io/kubernetes"
# The source's own copy iterates over maps as Go before 1.18 did: custom resources crash a server
# built with it.
REFLECT = Path("/usr/share/gocode/src/github.com/modern-go/reflect2")


def missing() -> str:
    """Why no API server can run here; empty when it can."""
    lacking = [package for program, package in PACKAGES.items() if shutil.which(program) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)} (apt-get install {' '.join(lacking)})"
    if all((CACHE / name).exists() for name in SERVERS):
        return ""
    if not SOURCES.exists():
        return f"Debian's source of Kubernetes cannot be had: {SOURCES} is missing"
    return "" if REFLECT.exists() else "not installed: golang-github-modern-go-reflect2-dev"


def build() -> Path:
    """The folder with the servers, built from Debian's source unless they are there."""
    if all((CACHE / name).exists() for name in SERVERS):
        return CACHE
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="primus-kube-") as scratch:
        folder = Path(scratch)
        tree = folder / "go/src" / ROOT
        tree.mkdir(parents=True)
        (folder / "parts").mkdir()
        (folder / "lists/partial").mkdir(parents=True)
        text = SOURCES.read_text().replace("Types: deb\n", "Types: deb-src\n")
        (folder / "parts/debian.sources").write_text(text)
        apt = [
            "apt-get",
            "-q",
            "-o",
            "Dir::Etc::sourcelist=/dev/null",
            "-o",
            f"Dir::Etc::sourceparts={folder}/parts",
            "-o",
            f"Dir::State::lists={folder}/lists",
        ]
        subprocess.run([*apt, "update"], check=True)
        subprocess.run(
            [*apt, "source", "--download-only", "--only-source", "kubernetes"],
            check=True,
            cwd=folder,
        )
        (source,) = folder.glob("*.orig.tar.gz")
        subprocess.run(["tar", "-xzf", source, "--strip-components=1", "-C", tree], check=True)
        vendored = tree / "vendor/github.com/modern-go/reflect2"
        shutil.rmtree(vendored)
        shutil.copytree(REFLECT, vendored, symlinks=False)
        _compile(folder, tree)
    return CACHE


def _compile(folder: Path, tree: Path) -> None:
    environment = {
        **os.environ,
        "GOPATH": f"{folder}/go",
        "GO111MODULE": "off",
        "GOFLAGS": "",
        "CGO_ENABLED": "0",
        "GOCACHE": f"{folder}/cache",
    }

    def go(output: Path, *packages: str) -> None:
        subprocess.run(
            ["go", "build", "-o", output, *packages], check=True, cwd=tree, env=environment
        )

    go(folder / "openapi-gen", f"{ROOT}/vendor/k8s.io/kube-openapi/cmd/openapi-gen")
    packages = set()
    for top, place in (("pkg", "pkg"), ("staging/src", "vendor")):
        for file in (tree / top).rglob("*.go"):
            name = file.parent.relative_to(tree / top).as_posix()
            away = ("k8s.io/code-generator", "k8s.io/sample-apiserver")
            if not name.startswith(away) and "+k8s:openapi-gen=" in file.read_text(
                errors="replace"
            ):
                packages.add(f"{ROOT}/{place}/{name}")
    subprocess.run(
        [
            folder / "openapi-gen",
            "-i",
            ",".join(sorted(packages)),
            "-p",
            f"{ROOT}/pkg/generated/openapi",
            "-O",
            "zz_generated.openapi",
            "-h",
            "vendor/k8s.io/code-generator/hack/boilerplate.go.txt",
            "-r",
            folder / "violations",
        ],
        check=True,
        cwd=tree,
        env=environment,
    )
    (folder / "bin").mkdir()
    go(folder / "bin", *(f"{ROOT}/cmd/{name}" for name in SERVERS))
    for name in SERVERS:
        shutil.move(folder / "bin" / name, CACHE / name)


POD_SECURITY_SETTINGS = """
apiVersion: pod-security.admission.config.k8s.io/v1
kind: PodSecurityConfiguration
"""


def reachable(port: int) -> bool:
    """Whether a program of this machine listens on the port."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


class Kubernetes:
    """The API below ``folder``. ``config`` is a kubeconfig with every right; nothing runs pods."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, folder / "kubeconfig"
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        programs, port, token = build(), free_port(), "test-token"
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        key = folder / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        (folder / "tokens.csv").write_text(f"{token},admin,1\n")
        self.write_config(self.config, port, token)
        self.port = port
        # kubectl would refuse fields that this old server does not know, such as a Job's
        # completionMode.
        (folder / "bin").mkdir()
        wrapper = folder / "bin/kubectl"
        wrapper.write_text(
            "#!/bin/sh\n"
            # `primus launch` refuses this old server.
            '[ "$2" != version ] || { echo "{}"; exit; }\n'
            '[ "$2" = create ] && set -- "$@" --validate=false\nexec '
            f'{shutil.which("kubectl")} "$@"\n'
        )
        wrapper.chmod(0o755)
        try:
            self._start(
                "etcd",
                "etcd",
                "--data-dir",
                folder / "etcd",
                "--listen-client-urls",
                client,
                "--advertise-client-urls",
                client,
                "--listen-peer-urls",
                peer,
                "--initial-advertise-peer-urls",
                peer,
                "--initial-cluster",
                f"default={peer}",
            )
            self._start(
                "kube-apiserver",
                programs / "kube-apiserver",
                "--etcd-servers",
                client,
                "--secure-port",
                port,
                "--bind-address",
                "127.0.0.1",
                "--advertise-address",
                "127.0.0.1",
                "--cert-dir",
                folder / "certificates",
                "--token-auth-file",
                folder / "tokens.csv",
                "--authorization-mode",
                "AlwaysAllow",
                # As kubeadm sets it: Pod Security decides.
                "--allow-privileged=true",
                "--default-not-ready-toleration-seconds=1",
                "--default-unreachable-toleration-seconds=1",
                "--service-account-issuer",
                "https://127.0.0.1",
                "--service-account-key-file",
                key,
                "--service-account-signing-key-file",
                key,
            )
            self._until_ready()
            if POD_SECURITY:
                self._start_pod_security()
            self._start(
                "kube-controller-manager",
                programs / "kube-controller-manager",
                "--kubeconfig",
                self.config,
                "--leader-elect=false",
                "--controllers",
                CONTROLLERS,
                "--service-account-private-key-file",
                key,
                # A node is lost some seconds after its last sign of life.
                "--node-monitor-period=1s",
                "--node-monitor-grace-period=5s",
                "--bind-address",
                "127.0.0.1",
                "--secure-port",
                free_port(),
                "--port",
                "0",
                "--cert-dir",
                folder / "certificates",
            )
            self.until_accounts("default")
        except BaseException:
            self.stop()
            raise

    def until_accounts(self, *namespaces: str) -> None:
        """Wait for the service accounts of the namespaces, without which they take no pods."""

        def there() -> bool:
            words = ("get", "serviceaccounts", "--all-namespaces", "--output=json")
            items = json.loads(self.kubectl(*words))["items"]
            found = [item["metadata"] for item in items if item.get("secrets")]
            named = {one["namespace"] for one in found if one["name"] == "default"}
            return named >= set(namespaces)

        assert until(there), self._logs()

    def _start_pod_security(self) -> None:
        """Let Kubernetes' own program judge the pods of namespaces that have a label for it."""
        port = free_port()
        certificate, key = self.folder / "pod-security.crt", self.folder / "pod-security.key"
        words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        words += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
        subprocess.run(
            [*words, "-out", certificate, "-keyout", key], check=True, capture_output=True
        )
        settings = self.folder / "pod-security.yaml"
        settings.write_text(POD_SECURITY_SETTINGS)
        self._start(
            "pod-security",
            POD_SECURITY,
            f"--kubeconfig={self.config}",
            f"--config={settings}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
        )
        authority = base64.b64encode(certificate.read_bytes()).decode()
        client = {"url": f"https://127.0.0.1:{port}/", "caBundle": authority}
        rules = []
        for group, resources in (("", ["pods"]), ("batch", ["jobs"])):
            rules.append(
                {
                    "apiGroups": [group],
                    "apiVersions": ["v1"],
                    "operations": ["CREATE", "UPDATE"],
                    "resources": resources,
                }
            )
        webhook = {
            "name": "pod-security-webhook.kubernetes.io",
            "failurePolicy": "Fail",
            "clientConfig": client,
            "rules": rules,
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "timeoutSeconds": 5,
        }
        configuration = {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": "pod-security-webhook.kubernetes.io"},
            "webhooks": [webhook],
        }
        self.kubectl("create", "--filename=-", stdin=json.dumps(configuration))
        assert until(lambda: reachable(port)), self._logs()

    def write_config(self, path: Path, port: int, token: str) -> None:
        """A kubeconfig for the server at ``port``. Its certificate is its own, made at start."""
        cluster = {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
        path.write_text(yaml.safe_dump(document))

    def _start(self, name: str, *words: object) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._servers[name] = subprocess.Popen(
                [str(word) for word in words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
            )

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        """What kubectl prints."""
        command = ["kubectl", f"--kubeconfig={self.config}", "--request-timeout=5s", *words]
        return subprocess.run(
            command, input=stdin, capture_output=True, text=True, check=True
        ).stdout

    def names(self, kind: str) -> set[str]:
        """The names of the objects of a kind."""
        return set(self.kubectl("get", kind, "--output=name").replace("/", " ").split()[1::2])

    def _until_ready(self) -> None:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            assert all(server.poll() is None for server in self._servers.values()), self._logs()
            with suppress(subprocess.CalledProcessError):
                self.kubectl("get", "namespace", "default")
                return
            time.sleep(0.5)
        raise AssertionError(self._logs())

    def _logs(self) -> str:
        return "\n".join(
            path.read_text(errors="replace")[-1500:] for path in sorted(self.folder.glob("*.log"))
        )

    def stop(self) -> None:
        """End the servers, the last one first."""
        for server in reversed(list(self._servers.values())):
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(timeout=10)
                continue
            server.kill()
            server.wait()
