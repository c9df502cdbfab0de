"""The logins that podman, skopeo and Docker stored, found as those programs find them.

See https://github.com/containers/image/blob/main/docs/containers-auth.json.5.md.
"""

import json
import os
import re
import subprocess
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from primus_images.errors import HostError, InputError
from primus_images.files import require_readable
from primus_images.programs import captured
from primus_images.schema import read_json

# Docker's name of a user who logs in with an identity token.
_TOKEN = "<token>"
_DOCKER_HUB = "https://index.docker.io/v1/"
# What Docker wrote before it had a folder: the logins alone.
_OLDEST = ".dockercfg"
# What every helper says of a server that it has no login for.
_NOT_STORED = "credentials not found"
# Seconds. A helper may ask its user to unlock a key ring.
_HELPER_PATIENCE = 30.0


class Login(NamedTuple):
    """A user's name and password; both are empty for nobody."""

    username: str = ""
    password: str = ""

    @property
    def refresh_token(self) -> str:
        """The identity token that is the password, if it is one."""
        return self.password if self.username == _TOKEN else ""

    @property
    def basic(self) -> str:
        """The header for HTTP's basic authentication; empty for nobody."""
        if not self.username or self.refresh_token:
            return ""
        return f"Basic {b64encode(f'{self.username}:{self.password}'.encode()).decode()}"


def login_for(repository: str) -> Login:
    """Return the login for a repository (``host[:port]/path``), or for a host.

    The first file that has one counts. Raises HostError if the logins cannot be read.
    """
    for path in login_files():
        if not path.exists():
            continue
        login = _login_in_file(path, repository)
        if login.username:
            return login
    return Login()


def login_files() -> Iterator[Path]:
    """Yield the files that may have logins, in the order of skopeo and podman."""
    if os.environ.get("REGISTRY_AUTH_FILE"):
        yield Path(os.environ["REGISTRY_AUTH_FILE"])
        return
    if os.environ.get("DOCKER_CONFIG"):
        yield Path(os.environ["DOCKER_CONFIG"]) / "config.json"
        return
    if os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(os.environ["XDG_RUNTIME_DIR"]) / "containers/auth.json"
    else:
        yield Path(f"/run/containers/{os.getuid()}/auth.json")
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    yield Path(config) / "containers/auth.json"
    yield Path.home() / ".docker/config.json"
    yield Path.home() / _OLDEST


def _login_in_file(path: Path, repository: str) -> Login:
    host = host_of(repository)
    try:
        require_readable(path)
        config: Any = read_json(path).data
        if path.name == _OLDEST:
            config = {"auths": config}
        # For skopeo, a part that is null is empty.
        config = {name: part for name, part in config.items() if part is not None}
        return _login_in(config, repository)
    except (InputError, OSError) as error:
        reason = re.sub(r"^\[Errno \d+\] ", "", str(error))
    except (ValueError, TypeError, KeyError, AttributeError):
        reason = f"what {path} names for it is not a login"
    raise HostError(
        f"the login for {host} cannot be read: {reason}",
        hint=f"log in again: skopeo login {host}",
    )


def _login_in(config: Mapping[str, Any], repository: str) -> Login:
    names = _names(repository)
    for name in names:
        helper = config.get("credHelpers", {}).get(name)
        if helper:
            return _ask_helper(helper, name)
    auths = config.get("auths", {})
    for name in names:
        for key, entry in auths.items():
            # Docker leaves an empty entry here if its store has the login.
            if _key(key) == _key(name) and entry:
                return _login_of(entry)
    # podman and skopeo do not ask Docker's store.
    if config.get("credsStore"):
        server = _DOCKER_HUB if host_of(repository) == "docker.io" else host_of(repository)
        return _ask_helper(config["credsStore"], server)
    return Login()


def _names(repository: str) -> list[str]:
    """Return the names under which a login may be stored: the path first, the host last."""
    host, *parts = repository.split("/")
    names = []
    for number in range(len(parts), 0, -1):
        names.append("/".join([host, *parts[:number]]))
    if host == "docker.io":
        names.append(_DOCKER_HUB)
    return [*names, host]


def _key(name: str) -> str:
    """Return a name of the logins; the host of an address, as Docker's older versions wrote it."""
    bare = re.sub(r"^https?://", "", name)
    return bare if bare == name else bare.partition("/")[0]


def _login_of(entry: Mapping[str, Any]) -> Login:
    if entry.get("identitytoken"):
        return Login(_TOKEN, entry["identitytoken"])
    auth = entry.get("auth")
    if not auth:
        return Login()
    # What has no colon is no login; for skopeo, neither.
    username, password = b64decode(auth).decode().split(":", maxsplit=1)
    return Login(username, password.strip("\0"))  # Docker's first versions padded it


def _ask_helper(helper: str, server: str) -> Login:
    program = f"docker-credential-{helper}"
    try:
        answer = captured([program, "get"], program, text=server, timeout=_HELPER_PATIENCE)
    except subprocess.TimeoutExpired:
        raise HostError(
            f"{program}, which keeps the login for {server}, does not answer within "
            f"{_HELPER_PATIENCE:.0f} s",
            hint=f"see what it waits for: echo {server} | {program} get",
        ) from None
    if answer.returncode:
        words = " ".join((answer.stdout or answer.stderr).split())
        if _NOT_STORED in words:
            return Login()
        raise HostError(
            f"{program}, which keeps the login for {server}, says: {words or 'nothing'}",
            hint=f"see what it needs: echo {server} | {program} get",
        )
    login = json.loads(answer.stdout)
    return Login(login["Username"], login["Secret"])


def host_of(server: str) -> str:
    """Return the host in the name or address of a server."""
    return re.sub(r"^https?://", "", server).partition("/")[0]
