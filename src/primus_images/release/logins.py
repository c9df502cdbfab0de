"""The logins that `docker login` stored."""

import json
import os
import re
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any, NamedTuple

from primus_images.errors import HostError, InputError
from primus_images.files import require_readable
from primus_images.programs import captured
from primus_images.schema import read_json

# Docker's name of a user who logs in with an identity token.
_TOKEN = "<token>"
_DOCKER_HUB = "https://index.docker.io/v1/"


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
        if not self.username:
            return ""
        return f"Basic {b64encode(f'{self.username}:{self.password}'.encode()).decode()}"


def login_for(host: str) -> Login:
    """Return the login for a registry. Raises HostError if the logins cannot be read."""
    path = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    if not path.exists():
        return Login()
    require_readable(path)
    try:
        return _login_in(read_json(path).data, host)
    except (InputError, OSError) as error:
        reason = re.sub(r"^\[Errno \d+\] ", "", str(error))
    except (ValueError, TypeError, KeyError, AttributeError):
        reason = f"what {path} names for it is not a login"
    raise HostError(f"Docker's logins cannot be read: {reason}", hint=f"docker login {host}")


def _login_in(config: Any, host: str) -> Login:
    server = _DOCKER_HUB if host == "docker.io" else host
    helper = config.get("credHelpers", {}).get(server) or config.get("credsStore")
    if helper:
        return _ask_helper(helper, server)
    for name, entry in config.get("auths", {}).items():
        if host_of(name) == host_of(server):
            if entry.get("identitytoken"):
                return Login(_TOKEN, entry["identitytoken"])
            username, _, password = b64decode(entry.get("auth", "")).decode().partition(":")
            return Login(username, password)
    return Login()


def _ask_helper(helper: str, server: str) -> Login:
    words = [f"docker-credential-{helper}", "get"]
    answer = captured(words, words[0], text=server)
    if answer.returncode:
        return Login()
    login = json.loads(answer.stdout)
    return Login(login["Username"], login["Secret"])


def host_of(server: str) -> str:
    """Return the host in the name or address of a server."""
    return re.sub(r"^https?://", "", server).partition("/")[0]
