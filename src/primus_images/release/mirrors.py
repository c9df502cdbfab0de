"""Where the images of a registry are read, and which registries are blocked: registries.conf.

skopeo and podman read the same files. See
https://github.com/containers/image/blob/main/docs/containers-registries.conf.5.md, version 2.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from primus_images.errors import InputError

_SYSTEM = Path("/etc/containers")
_HINT = "man containers-registries.conf describes the file"


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A repository at one place. ``location`` is ``host[:port]/path``.

    ``insecure``: no certificate is asked for, and TLS need not be spoken. A mirror may be for
    ``tags`` or for ``digests`` alone.
    """

    location: str
    insecure: bool = False
    tags: bool = True
    digests: bool = True


@dataclass(frozen=True, kw_only=True)
class _Registry:
    """One table ``registry``: what is known of all repositories whose names begin with ``prefix``.

    The locations are those of the prefix. That of the registry may be empty: names stay. One that
    is ``blocked`` is never asked, but its mirrors are.
    """

    prefix: str
    path: Path
    origin: Endpoint
    mirrors: tuple[Endpoint, ...]
    blocked: bool


def endpoint_of(repository: str) -> Endpoint:
    """Return where a repository is written: under its own name, whatever mirrors there are.

    Raises InputError if its registry is blocked, or for a file that is damaged.
    """
    registry = _registry_of(repository)
    if registry and registry.blocked:
        raise _blocked(repository, registry)
    return Endpoint(location=repository, insecure=bool(registry and registry.origin.insecure))


def sources_of(repository: str) -> list[Endpoint]:
    """Return where a repository is read: its mirrors in their order, and its registry last.

    One that is blocked is left out. Raises InputError as :func:`endpoint_of` if nothing is left.
    """
    registry = _registry_of(repository)
    if registry is None:
        return [Endpoint(location=repository)]
    matched = _matched(repository, registry.prefix)
    sources = []
    for mirror in registry.mirrors:
        location = mirror.location + repository[matched:]
        other = _registry_of(location)
        if not (other and other.blocked):
            sources.append(replace(mirror, location=location))
    if not registry.blocked:
        location = repository
        if registry.origin.location:
            location = registry.origin.location + repository[matched:]
        sources.append(replace(registry.origin, location=location))
    if not sources:
        raise _blocked(repository, registry)
    return sources


def _blocked(repository: str, registry: _Registry) -> InputError:
    return InputError(
        f"the registry of {repository} is blocked: {registry.prefix}",
        where=registry.path,
        hint="choose another registry, or ask who administers this machine",
    )


def _registry_of(repository: str) -> _Registry | None:
    """Return the table with the longest prefix of a repository."""
    candidates = []
    for registry in _registries().values():
        if _matched(repository, registry.prefix):
            candidates.append(registry)
    return max(candidates, key=lambda registry: len(registry.prefix), default=None)


def _matched(repository: str, prefix: str) -> int:
    """Return the length of the part of a name that a prefix stands for; 0 for another name."""
    end = len(prefix)
    if prefix.startswith("*."):
        host = repository.partition("/")[0]
        end = host.find(prefix[1:]) + len(prefix) - 1
        if prefix[1:] not in host:
            return 0
    elif not repository.startswith(prefix):
        return 0
    return end if repository[end : end + 1] in ("", ":", "/") else 0


def _registries() -> dict[str, _Registry]:
    """Return the tables of all files by prefix. Of two with one prefix, the later file counts."""
    registries: dict[str, _Registry] = {}
    for path in configuration_files():
        tables: dict[str, _Registry] = {}
        for row in _list(_content(path).get("registry"), path, "registry"):
            table = _table(row, path)
            tables.setdefault(table.prefix, table)
        registries |= tables
    return registries


def configuration_files() -> Iterator[Path]:
    """Yield the files that are there, the last of which counts most.

    The user's own file stands in place of all those of the system.
    """
    user = Path.home() / ".config/containers"
    folders = [user]
    if (user / "registries.conf").exists():
        yield user / "registries.conf"
    else:
        folders.insert(0, _SYSTEM)
        if (_SYSTEM / "registries.conf").exists():
            yield _SYSTEM / "registries.conf"
    for folder in folders:
        yield from sorted((folder / "registries.conf.d").glob("*.conf"))


def _content(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        where = str(path)
        position = re.search(r" \(at line (\d+), column (\d+)\)$", str(error))
        if position:
            where += f":{position[1]}:{position[2]}"
        reason = str(error).partition(" (at ")[0]
        raise InputError(f"it is not TOML: {reason}", where=where, hint=_HINT) from None
    except UnicodeDecodeError:
        raise InputError("it is not UTF-8", where=path, hint=_HINT) from None
    except OSError as error:
        raise InputError(f"it cannot be read: {error.strerror}", where=path, hint=_HINT) from None


def _table(row: Any, path: Path) -> _Registry:
    if not isinstance(row, dict):
        raise InputError("`registry` is not a list of tables", where=path, hint=_HINT)
    location = _name(row, "location", path)
    prefix = _name(row, "prefix", path) or location
    if not location and not prefix.startswith("*."):
        raise InputError("a `registry` has no `location`", where=path, hint=_HINT)
    by_digest_only = _flag(row, "mirror-by-digest-only", path)
    mirrors = []
    for mirror in _list(row.get("mirror"), path, "mirror"):
        if not isinstance(mirror, dict) or not _name(mirror, "location", path):
            raise InputError(f"a mirror of {prefix} has no `location`", where=path, hint=_HINT)
        kind = mirror.get("pull-from-mirror", "")
        if kind not in ("", "all", "digest-only", "tag-only"):
            raise InputError(
                f"`pull-from-mirror` of {prefix} is {kind!r}",
                where=path,
                hint="it is all, digest-only or tag-only",
            )
        mirrors.append(
            Endpoint(
                location=_name(mirror, "location", path),
                insecure=_flag(mirror, "insecure", path),
                tags=not by_digest_only and kind != "digest-only",
                digests=kind != "tag-only",
            )
        )
    return _Registry(
        prefix=prefix,
        path=path,
        origin=Endpoint(location=location, insecure=_flag(row, "insecure", path)),
        mirrors=tuple(mirrors),
        blocked=_flag(row, "blocked", path),
    )


def _list(value: Any, path: Path, key: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise InputError(f"`{key}` is not a list of tables", where=path, hint=_HINT)
    return value


def _name(row: Mapping[str, Any], key: str, path: Path) -> str:
    """Return a name of a registry or repository; empty if the key is missing."""
    name = row.get(key, "")
    if not isinstance(name, str):
        raise InputError(f"`{key}` is {name!r}, which is no text", where=path, hint=_HINT)
    if re.match("https?://", name):
        raise InputError(f"`{key}` is {name}", where=path, hint="leave out http:// or https://")
    return name.rstrip("/")


def _flag(row: Mapping[str, Any], key: str, path: Path) -> bool:
    flag = row.get(key, False)
    if not isinstance(flag, bool):
        raise InputError(f"`{key}` is {flag!r}", where=path, hint="it is true or false")
    return flag
