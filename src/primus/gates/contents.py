"""What the files of a layer say: versions, and what does not belong into an image. ``patterns.yaml`` says what to look
for.

Versions are stated by wheels, Debian packages, headers and libraries. Secrets, insecure apt settings, caches and paths
of the build machine do not belong into an image.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from mmap import MADV_DONTNEED, mmap
from pathlib import Path
from typing import Any, Literal, cast

from primus.versions.lock import normalised
from primus.yamlfile import read_values

Kind = Literal["wheel", "deb", "header", "library"]
Rule = Literal["secret", "insecure apt", "credentials", "cache", "build path"]

# A package vendored in another one (setuptools/_vendor) does not count; one from a deb is judged as a deb.
_METADATA = re.compile(r"(?!usr/lib/python3).*/(?:site|dist)-packages/[^/]+\.dist-info/METADATA")
# Nine of ten requirements are for an extra, and parsing them is slow. Markers with `or` are left to the parser.
_OF_EXTRA = r"^(?!.*\sor\s).*;.*\bextra\s*==\s*[\"']"
_ROWS = r"^(Name|Version|Requires-Dist|License-Expression|License|Classifier): (.+?)\s*$"
_STATUS = "var/lib/dpkg/status"
# The text is in the folder of a package, which may be a link to that of another package from the same source.
COPYRIGHT = re.compile(r"usr/share/doc/([^/]+)(/copyright)?")
# One file per package, in images whose dpkg database belongs to another layer.
_STATUS_OF_PACKAGE = f"{_STATUS}.d/"
_VERSION_IN_NAME = r"lib(hipblaslt|MIOpen)\.so\.([0-9]+\.[0-9]+(?:\.[0-9]{1,3})?)(?:\..*)?"
_TEMPORARY = rb"tmp/(?:pip-[a-z][\w./+-]*|build-env-[\w./+-]+)"
# In text, home folders are usually examples; in a compiled file, they are where it was compiled.
_HOMES = rb"(?<![\w.]/)(?:home/[\w.-]+/[\w./+-]+|root/[\w./+-]+)"
ELF = b"\x7fELF"
_PART = 1 << 20
# The longest match: a private key with header lines before its body.
_AHEAD = 1 << 14


@cache
def patterns() -> Mapping[str, Any]:
    """Return ``patterns.yaml``, which explains its parts."""
    return cast(Mapping[str, Any], read_values(Path(__file__).with_name("patterns.yaml")).data)


def _matches(pattern: re.Pattern[bytes], data: bytes | mmap) -> Iterator[re.Match[bytes]]:
    """Yield all matches. A search keeps all other threads from running, so each one is for a part of the data."""
    for begin in range(0, len(data), _PART):
        for match in pattern.finditer(data, begin, begin + _PART + _AHEAD):
            if match.start() < begin + _PART:
                yield match
        if isinstance(data, mmap):
            # Without it, all of a file of gigabytes that was searched would stay in the memory of this process.
            data.madvise(MADV_DONTNEED, begin, min(_PART, len(data) - begin))


@dataclass(frozen=True, kw_only=True)
class Stated:
    """A version that a file of the image states.

    ``name`` is normalised for wheels, the component for headers and libraries. ``requires`` are a wheel's requirements
    (PEP 508) without those of its extras, ``licence`` the rows about it in a wheel's metadata, ``source`` name and
    version of a Debian source package.
    """

    kind: Kind
    name: str
    version: str
    path: str
    requires: tuple[str, ...] = ()
    licence: tuple[tuple[str, str], ...] = ()
    source: str = ""


def states_versions(path: str) -> bool:
    """Whether :func:`stated_in` reads files with this name."""
    return _is_status(path) or bool(_METADATA.fullmatch(path)) or _file_name(path) in patterns()["headers"]


def stated_in(path: str, text: str) -> list[Stated]:
    """Return the versions in the file's text; none for other files."""
    if _is_status(path):
        packages = [
            dict(re.findall(r"^(Package|Version|Status|Source): (.+)$", block, re.M)) for block in text.split("\n\n")
        ]
        return [
            Stated(kind="deb", name=p["Package"], version=p["Version"], path=path, source=_source(p))
            for p in packages
            if p.get("Status", "").endswith(" installed")
        ]
    if _METADATA.fullmatch(path):
        rows = re.findall(_ROWS, text.partition("\n\n")[0], re.M)
        head = dict(rows)
        if not {"Name", "Version"} <= set(head):
            return []
        requires = tuple(value for name, value in rows if name == "Requires-Dist" and not re.search(_OF_EXTRA, value))
        licence = tuple((n, v) for n, v in rows if n.startswith("License") or v.startswith("License ::"))
        name, version = normalised(head["Name"]), head["Version"]
        return [Stated(kind="wheel", name=name, version=version, path=path, requires=requires, licence=licence)]
    component, prefix = patterns()["headers"].get(_file_name(path), ("", ""))
    numbers = dict(re.findall(rf"^\s*#\s*define\s+{prefix}_(MAJOR|MINOR|PATCH)\s+(\d+)", text, re.M)) if prefix else {}
    if len(numbers) < 3:
        return []
    version = f"{numbers['MAJOR']}.{numbers['MINOR']}.{numbers['PATCH']}"
    return [Stated(kind="header", name=component, version=version, path=path)]


def _source(package: Mapping[str, str]) -> str:
    """Return name and version: a binary package that was built again has another version than its source."""
    name, _, other = package.get("Source", package["Package"]).rstrip(")").partition(" (")
    return f"{name} {other or package['Version']}"


def stated_in_library(path: str, data: bytes | mmap) -> list[Stated]:
    """Return the version in a library's own text; none for other libraries, and if the text has no version or two."""
    file_name = _file_name(path)
    if match := re.fullmatch(_VERSION_IN_NAME, file_name):
        return [Stated(kind="library", name=match[1].lower(), version=match[2], path=path)]
    name, pattern = patterns()["libraries"].get(file_name[: file_name.find(".so") + 3], ("", None))
    versions = {match[1].decode() for match in _matches(re.compile(pattern.encode()), data)} if pattern else set()
    return [Stated(kind="library", name=name, version=v, path=path) for v in versions] if len(versions) == 1 else []


def _is_status(path: str) -> bool:
    return path == _STATUS or path.startswith(_STATUS_OF_PACKAGE)


def _file_name(path: str) -> str:
    return path.rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What does not belong into an image: the rule, the path, and what was seen. Of a secret, only its kind."""

    rule: Rule
    path: str
    seen: str


def traces_in(path: str, data: bytes | mmap, machine_paths: Sequence[bytes] = ()) -> list[Trace]:
    """Return the secrets and build paths in a file, each once. ``machine_paths`` are folders of the build machine."""
    seen: dict[tuple[Rule, str], None] = {("secret", kind): None for kind in secrets_in(data)}
    for match in _matches(_path_pattern(tuple(machine_paths), data[:4] == ELF), data):
        text = match[0][:120].decode("utf-8", "replace")
        # Of temporary and home folders, one trace per file is enough; others are usually below the same folder.
        is_new = not any(rule == "build path" and other[:6] == text[:6] for rule, other in seen)
        if match["machine"] is not None or is_new:
            seen["build path", text] = None
    return [Trace(rule=rule, path=path, seen=what) for rule, what in seen]


@cache
def _path_pattern(machine_paths: tuple[bytes, ...], elf: bool) -> re.Pattern[bytes]:
    # The longest path first: a folder of this machine may lie in another one.
    machine = b"|".join(re.escape(path[1:]) for path in sorted(machine_paths, key=len, reverse=True)) or rb"(?!)"
    return re.compile(rb"/(?:(?P<machine>" + machine + rb")|" + _TEMPORARY + (rb"|" + _HOMES if elf else b"") + rb")")


def secrets_in(data: bytes | mmap) -> list[str]:
    """Return the kind of each secret in ``data``."""
    return [
        kind
        for kind, pattern in patterns()["secrets"].items()
        for match in _matches(re.compile(pattern.encode()), data)
        # Placeholders repeat themselves or call themselves examples.
        if b"EXAMPLE" not in (body := next(filter(None, match.groups()))).upper() and len(set(body)) >= 8
    ]


def reads_text(path: str) -> bool:
    """Whether :func:`text_traces` has a rule for files with this name."""
    return path.startswith("etc/apt/") or _may_hold_login(path)


def _may_hold_login(path: str) -> bool:
    of_apt = path == "etc/apt/auth.conf" or path.startswith("etc/apt/auth.conf.d/")
    return of_apt or f"/{path}".endswith(tuple(patterns()["login_files"]))


def text_traces(path: str, text: str) -> list[Trace]:
    """Return what the settings in a small file allow or reveal."""
    traces = [
        Trace(rule="insecure apt", path=path, seen=match[0].strip()[:120])
        for pattern in (patterns()["insecure_apt"] if path.startswith("etc/apt/") else ())
        for match in re.finditer(pattern, text)
        if "false" not in match[0].lower() or "verify-peer" in match[0].lower()
    ]
    if _may_hold_login(path) and re.search(patterns()["login"], text):
        traces.append(Trace(rule="credentials", path=path, seen="a login"))
    return traces


def path_traces(path: str, kind: str) -> list[Trace]:
    """Return the litter that a path's name alone identifies; empty folders do not count."""
    if kind == "dir" or re.fullmatch(patterns()["no_cache"], path):
        return []
    caches = (meaning for pattern, meaning in patterns()["caches"].items() if re.fullmatch(pattern, path))
    return [Trace(rule="cache", path=path, seen=meaning) for meaning in caches][:1]
