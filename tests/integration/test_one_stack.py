"""Logins, certificates and proxies of a registry: what skopeo reads is what we read."""

import json
import subprocess
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from amd_channel import registry
from host_tools import needs
from loopback import make_certificate
from primus_images.errors import HostError, PrimusError
from primus_images.release.registry import Repository

pytestmark = [pytest.mark.integration, needs("docker-registry", "skopeo", "openssl")]

# htpasswd -B: the word is "word".
USERS = "me:$2b$04$Xex9Ua1VK1ho5O/jNcv2EO6fi2m4Wgwt0dmw3UGppMUUUjAWbrt0K\n"
ME = {"auth": b64encode(b"me:word").decode()}
# A credential helper by what it does.
HELPERS = {
    "good": 'read host; echo "{\\"Username\\":\\"me\\",\\"Secret\\":\\"word\\"}"',
    "none": 'echo "credentials not found in native keychain"; exit 1',
    "locked": 'echo "the key ring is locked"; exit 1',
    "garbage": "echo hello",
    "empty": "exit 0",
}


class Places(NamedTuple):
    """Two registries that want a login, one without TLS and one with it."""

    plain: str
    secure: str
    certificate: Path


class Machine(NamedTuple):
    """A user's folders, and the registries."""

    places: Places
    home: Path
    monkeypatch: pytest.MonkeyPatch

    @property
    def host(self) -> str:
        return self.places.secure

    def log_in(self, content: Any) -> None:
        path = self.home / "run/containers/auth.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))

    def trust(self, folder: str) -> None:
        path = self.home / folder / "containers/certs.d" / self.host
        path.mkdir(parents=True)
        (path / "ca.crt").write_bytes(self.places.certificate.read_bytes())

    def set(self, **variables: str) -> None:
        for name, value in variables.items():
            self.monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    root = tmp_path_factory.mktemp("stack")
    certificate = make_certificate(root / "server.pem")
    with ExitStack() as stack:
        plain = stack.enter_context(registry(root / "plain", USERS))
        secure = stack.enter_context(registry(root / "secure", USERS, certificate))
        yield Places(f"localhost:{plain}", f"127.0.0.1:{secure}", certificate)


@pytest.fixture
def machine(places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    folders = {"HOME": "home", "XDG_RUNTIME_DIR": "run", "XDG_CONFIG_HOME": "config"}
    for variable, name in folders.items():
        (tmp_path / name).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / name))
    for variable in ("REGISTRY_AUTH_FILE", "DOCKER_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    for name, text in HELPERS.items():
        path = programs / f"docker-credential-{name}"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    conf = tmp_path / "home/.config/containers/registries.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text(f'[[registry]]\nlocation = "{places.plain}"\ninsecure = true\n')
    return Machine(places, tmp_path, monkeypatch)


def asked_by_skopeo(name: str) -> bool:
    """Whether skopeo may list the tags; the repository is empty, which is status 404."""
    words = ["skopeo", "--command-timeout=20s", "list-tags", f"docker://{name}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.returncode == 0 or "404 (Not Found)" in done.stderr


def asked_by_us(name: str) -> bool:
    try:
        Repository(name).tags()
    except PrimusError:
        return False
    return True


# What is set before the registry with TLS is asked, and whether it then answers.
CERTIFICATES: dict[str, tuple[Callable[[Machine], None], bool]] = {
    "nothing": (lambda _: None, False),
    "in the home folder": (lambda m: m.trust("home/.config"), True),
    "in XDG_CONFIG_HOME": (lambda m: m.trust("config"), False),
    "SSL_CERT_FILE": (lambda m: m.set(SSL_CERT_FILE=str(m.places.certificate)), True),
    "the wrong folder first": (
        lambda m: (m.home / "home/.config/containers/certs.d" / m.host).mkdir(parents=True),
        False,
    ),
}


@pytest.mark.parametrize("name", CERTIFICATES)
def test_certificates_are_those_of_skopeo(machine: Machine, name: str) -> None:
    prepare, answers = CERTIFICATES[name]
    machine.log_in({"auths": {machine.host: ME}})
    prepare(machine)
    there = f"{machine.host}/a/b"
    assert (asked_by_skopeo(there), asked_by_us(there)) == (answers, answers)


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"])
@pytest.mark.parametrize("kind", ["plain", "secure"])
def test_no_proxy_stands_before_a_registry_of_this_machine(
    machine: Machine, variable: str, kind: str
) -> None:
    host = machine.places.plain if kind == "plain" else machine.host
    machine.log_in({"auths": {host: ME}})
    machine.trust("home/.config")
    machine.set(**{variable: "http://127.0.0.1:9"})
    there = f"{host}/a/b"
    assert (asked_by_skopeo(there), asked_by_us(there)) == (True, True)


def padded() -> dict[str, str]:
    """A login as Docker's first versions stored it."""
    return {"auth": b64encode(b"me:word\0\0").decode()}


LOGINS: dict[str, tuple[Callable[[str], Any], bool]] = {
    "the host": (lambda host: {"auths": {host: ME}}, True),
    "with a scheme": (lambda host: {"auths": {f"https://{host}": ME}}, True),
    "Docker's old address": (lambda host: {"auths": {f"https://{host}/v1/": ME}}, True),
    "a path after a scheme": (lambda host: {"auths": {f"https://{host}/other": ME}}, True),
    "a slash at the end": (lambda host: {"auths": {f"{host}/": ME}}, False),
    "the namespace": (lambda host: {"auths": {f"{host}/a": ME}}, True),
    "another namespace": (lambda host: {"auths": {f"{host}/other": ME}}, False),
    "zeros at the end": (lambda host: {"auths": {host: padded()}}, True),
    "words": (lambda host: {"auths": {host: {"username": "me", "password": "word"}}}, False),
    "nothing": (lambda host: {"auths": {host: {}}}, False),
    "null": (lambda _host: {"auths": None}, False),
    "a name alone": (lambda host: {"auths": {host: {"auth": b64encode(b"me").decode()}}}, False),
    "a good helper": (lambda host: {"credHelpers": {host: "good"}}, True),
    "a helper without it": (lambda host: {"credHelpers": {host: "none"}}, False),
    "a locked helper": (lambda host: {"credHelpers": {host: "locked"}}, False),
    "a helper that is not there": (
        lambda host: {"credHelpers": {host: "absent"}, "auths": {host: ME}},
        False,
    ),
    **{
        f"a login beside a store that is {store}": (
            lambda host, store=store: {"credsStore": store, "auths": {host: ME}},
            True,
        )
        for store in ("good", "none", "locked", "garbage", "empty", "absent")
    },
}


@pytest.mark.parametrize("name", LOGINS)
def test_logins_are_those_of_skopeo(machine: Machine, name: str) -> None:
    content, answers = LOGINS[name]
    machine.trust("home/.config")
    machine.log_in(content(machine.host))
    there = f"{machine.host}/a/b"
    assert (asked_by_skopeo(there), asked_by_us(there)) == (answers, answers)


@pytest.mark.parametrize("key", ["credHelpers", "credsStore"])
def test_a_helper_that_fails_is_named_with_its_words(machine: Machine, key: str) -> None:
    machine.trust("home/.config")
    machine.log_in({key: {machine.host: "locked"} if key == "credHelpers" else "locked"})
    expected = "docker-credential-locked, .* says: the key ring is locked"
    with pytest.raises(HostError, match=expected) as failed:
        Repository(f"{machine.host}/a/b").tags()
    assert "docker-credential-locked get" in str(failed.value.hint)
