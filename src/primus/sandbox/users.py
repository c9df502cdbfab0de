"""The user inside a container, resolved with the image's own passwd and group files, never the host's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from primus.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Numeric user, group and supplementary groups, and the home directory."""

    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()
    home: str = "/"
    name: str = ""


def _rows(path: Path, least: int) -> list[list[str]]:
    try:
        text = path.read_text(errors="surrogateescape")
    except OSError:
        return []
    rows = [line.split(":") for line in text.splitlines() if line and not line.startswith("#")]
    return [row for row in rows if len(row) >= least]


def identity(spec: str | None, passwd: Path, group: Path) -> Identity:
    """Resolve ``user``, ``uid``, ``user:group`` or ``uid:gid`` against the image's files.

    A number does not have to be in the files. Raises InputError for an unknown name.
    """
    user, _, wanted = (spec or "0").partition(":")
    user = user or "0"
    users = [row for row in _rows(passwd, 6) if row[2].isdigit() and row[3].isdigit()]
    row = next((r for r in users if r[0] == user), None)
    if row is None and user.isdecimal():
        row = next((r for r in users if r[2] == user), None)
    if row is None and not user.isdecimal():
        raise InputError(f"the image has no user {user!r}", hint="name one of its users, or a numeric uid[:gid]")
    uid, gid = (int(row[2]), int(row[3])) if row else (int(user), 0)
    name = row[0] if row else ""
    known = [r for r in _rows(group, 3) if r[2].isdigit()]
    groups: tuple[int, ...] = ()
    if wanted:
        match = next((r for r in known if r[0] == wanted), None)
        if match is None and not wanted.isdecimal():
            raise InputError(f"the image has no group {wanted!r}", hint="name one of its groups, or a numeric gid")
        gid = int(match[2]) if match else int(wanted)
    elif name:
        groups = tuple(int(r[2]) for r in known if len(r) > 3 and name in r[3].split(","))
    if uid >= 1 << 32 or gid >= 1 << 32:
        raise InputError(f"{spec!r} is not a user: IDs go up to {(1 << 32) - 1}")
    home = (row[5] if row else "") or ("/root" if uid == 0 and row is None else "/")
    return Identity(uid=uid, gid=gid, groups=groups, home=home, name=name)
