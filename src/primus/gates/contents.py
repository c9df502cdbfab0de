"""What the files of a layer say: versions, and what does not belong into an image.

Versions are stated by wheels, Debian packages, headers and libraries. Secrets, insecure apt settings, caches and paths
of the build machine do not belong into an image.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import IO, Literal

from primus.versions.lock import normalised

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
# File name → (component, how the macros of its version begin).
_HEADERS = {
    "hipblaslt-version.h": ("hipblaslt", "HIPBLASLT_VERSION"),
    "rccl.h": ("rccl", "NCCL"),
    "nccl.h": ("nccl", "NCCL"),
    "rocm_version.h": ("rocm", "ROCM_VERSION"),
}
# Library → (component, how its own text states the version). Libraries are installed without headers. hipBLASLt and
# MIOpen contain no such text; a distribution's file name ends with their version.
_LIBRARIES = {
    "librccl.so": ("rccl", rb"(?:RCCL version ?:? ?|NCCL version )([0-9]+\.[0-9]+\.[0-9]+)"),
    "librocblas.so": ("rocblas", rb"(?<![0-9.])([0-9]+\.[0-9]+\.[0-9]+)\.[0-9a-f]{7,40}(?:-dirty)?\x00"),
}
_VERSION_IN_NAME = r"lib(hipblaslt|MIOpen)\.so\.([0-9]+\.[0-9]+(?:\.[0-9]{1,3})?)(?:\..*)?"


@dataclass(frozen=True, kw_only=True)
class Stated:
    """A version that a file of the image states.

    ``licence`` are the rows about it in a wheel's metadata, ``source`` name and version of a Debian source package.

    ``name`` is normalised for wheels, the component for headers and libraries. ``requires`` are a wheel's
    requirements (PEP 508) without those of its extras.
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
    return _is_status(path) or bool(_METADATA.fullmatch(path)) or path.rpartition("/")[2] in _HEADERS


def stated_in(path: str, text: str) -> list[Stated]:
    """Return the versions in the file's text; none for other files."""
    if _is_status(path):
        packages = [
            dict(re.findall(r"^(Package|Version|Status|Source): (.+)$", block, re.M)) for block in text.split("\n\n")
        ]
        return [
            Stated(
                kind="deb",
                name=package["Package"],
                version=package["Version"],
                path=path,
                source=_source(package.get("Source") or package["Package"], package["Version"]),
            )
            for package in packages
            if package.get("Status", "").endswith(" installed")
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
    component, prefix = _HEADERS.get(path.rpartition("/")[2], ("", ""))
    numbers = dict(re.findall(rf"^\s*#\s*define\s+{prefix}_(MAJOR|MINOR|PATCH)\s+(\d+)", text, re.M)) if prefix else {}
    if len(numbers) < 3:
        return []
    version = f"{numbers['MAJOR']}.{numbers['MINOR']}.{numbers['PATCH']}"
    return [Stated(kind="header", name=component, version=version, path=path)]


def _source(stated: str, version: str) -> str:
    """Return name and version: a binary package that was built again has another version than its source."""
    name, _, other = stated.rstrip(")").partition(" (")
    return f"{name} {other or version}"


def stated_in_library(path: str, file: IO[bytes]) -> list[Stated]:
    """Return the version in a library's own text; none for other libraries, and if the text has no version or two."""
    file_name = path.rpartition("/")[2]
    if match := re.fullmatch(_VERSION_IN_NAME, file_name):
        return [Stated(kind="library", name=match[1].lower(), version=match[2], path=path)]
    name, pattern = _LIBRARIES.get(file_name[: file_name.find(".so") + 3], ("", None))
    if pattern is None:
        return []
    versions: set[bytes] = set()
    file.seek(0)
    tail = b""
    # Libraries have gigabytes; a version is short.
    while block := file.read(8 << 20):
        versions |= set(re.findall(pattern, tail + block))
        tail = block[-128:]
    if len(versions) != 1:
        return []
    return [Stated(kind="library", name=name, version=versions.pop().decode(), path=path)]


def _is_status(path: str) -> bool:
    return path == _STATUS or path.startswith(_STATUS_OF_PACKAGE)


# Each pattern begins with plain text, which `re` searches for at more than a gigabyte per second: what must not stand
# before a secret is therefore checked after its first letters. The group is the secret's body.
_SECRETS = {
    "a Hugging Face token": re.compile(rb"hf_(?<![A-Za-z0-9_]hf_)([A-Za-z0-9]{30,40})(?![A-Za-z0-9_])"),
    "a GitHub token": re.compile(
        rb"g(?<![A-Za-z0-9_]g)(?:h[pousr]_(?P<a>[A-Za-z0-9]{36})|ithub_pat_(?P<b>[A-Za-z0-9]{22}_[A-Za-z0-9]{59}))"
    ),
    "a GitLab token": re.compile(rb"glpat-(?<![A-Za-z0-9_-]glpat-)([A-Za-z0-9_-]{20})(?![A-Za-z0-9_-])"),
    "an AWS key": re.compile(rb"AKIA(?<![A-Za-z0-9+/]AKIA)([A-Z0-9]{16})(?![A-Za-z0-9+/=])"),
    "a private key": re.compile(
        rb"-----BEGIN ((?:[A-Z0-9]+ )?PRIVATE KEY-----(?:\\r)?(?:\\n|\r?\n)(?:[A-Za-z-]+: [^\n]*\n|\r?\n)*"
        rb"[\"' ]*[A-Za-z0-9+/=]{32})"
    ),
}
_TEMPORARY = rb"tmp/(?:pip-[a-z][\w./+-]*|build-env-[\w./+-]+)"
# In text, home folders are usually examples; in a compiled file, they are where it was compiled.
_HOMES = rb"(?<![\w.]/)(?:home/[\w.-]+/[\w./+-]+|root/[\w./+-]+)"
_OVERLAP = 512
# A private key may have header lines before its body.
_AHEAD = 1 << 14
_APT = (
    r"(?mi)^\s*[^#\n]*\[[^\]\n]*(?:trusted|allow-insecure|allow-weak)\s*=\s*yes[^\]\n]*\]",
    r"(?mi)^\s*(?:Trusted|Allow-Insecure|Allow-Weak):\s*yes",
    (
        r"(?mi)^[^#\n/]*(?:AllowInsecureRepositories|AllowWeakRepositories|AllowDowngradeToInsecureRepositories|"
        r"AllowUnauthenticated|Verify-Peer\s+\"?false)[^\n]*"
    ),
)
_CREDENTIAL_FILES = (
    "/pip.conf", "/.netrc", "/netrc", "/.pypirc", "/.git-credentials", "/.gitconfig", "/.npmrc", "/.docker/config.json",
    "/.aws/credentials", "/huggingface/token", "/stored_tokens",
)  # fmt: skip
_CREDENTIALS = (
    r"(?mi)://[^/\s:@]+:[^/\s@]+@|\bpassword\b\s*[=: ]\s*\S+|\b_authToken\b|\"auth\"\s*:|aws_secret_access_key|^hf_\w+"
)
_CACHES = {
    r"var/lib/apt/lists/.+": "apt's package lists",
    r"var/cache/apt/.+": "apt's cache",
    r"(?:root|home/[^/]+)/\.cache/.+": "a cache in a home folder",
    r"(?:.*/)?\.cache/(?:pip|uv|huggingface|torch)/.+": "a download cache",
    r"(?:tmp|var/tmp)/.+": "a temporary file",
}
_NO_CACHE = r"(?:.*/)?(?:lock|partial|auxfiles)"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What does not belong into an image: the rule, the path, and what was seen. Of a secret, only its kind."""

    rule: Rule
    path: str
    seen: str


class Scanner:
    """Searches a file, streamed in chunks, for secrets and build paths; see :func:`primus.gates.examined.observe`."""

    def __init__(self, path: str, machine_paths: Sequence[bytes] = ()) -> None:
        self._path = path
        self._machine_paths = tuple(machine_paths)
        self._tail = b""
        self._seen: dict[tuple[Rule, str], None] = {}
        self._is_first = True
        self.elf = False

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the file."""
        if self._is_first:
            self.elf = chunk.startswith(b"\x7fELF")
            self._is_first = False
        # The seam between two chunks is searched on its own. Joining chunks would copy every byte of the image.
        seam = self._tail + chunk[:_AHEAD]
        for data in (seam, chunk) if len(chunk) > _AHEAD else (seam,):
            self._search(data)
        self._tail = chunk[-_OVERLAP:] if len(chunk) >= _OVERLAP else seam[-_OVERLAP:]

    def _search(self, data: bytes) -> None:
        for kind in secrets_in(data):
            self._seen["secret", kind] = None
        for match in _path_pattern(self._machine_paths, self.elf).finditer(data):
            text = match[0][:120].decode("utf-8", "replace")
            # Of temporary and home folders, one trace per file is enough; others are usually below the same folder.
            is_new = not any(rule == "build path" and seen[:6] == text[:6] for rule, seen in self._seen)
            if match["machine"] is not None or is_new:
                self._seen["build path", text] = None

    def traces(self) -> list[Trace]:
        """Return the traces, each once."""
        return [Trace(rule=rule, path=self._path, seen=seen) for rule, seen in self._seen]


@cache
def _path_pattern(machine_paths: tuple[bytes, ...], elf: bool) -> re.Pattern[bytes]:
    # The longest path first: a folder of this machine may lie in another one.
    machine = b"|".join(re.escape(path[1:]) for path in sorted(machine_paths, key=len, reverse=True)) or rb"(?!)"
    return re.compile(rb"/(?:(?P<machine>" + machine + rb")|" + _TEMPORARY + (rb"|" + _HOMES if elf else b"") + rb")")


def secrets_in(data: bytes) -> list[str]:
    """Return the kind of each secret in ``data``."""
    return [
        kind
        for kind, pattern in _SECRETS.items()
        for match in pattern.finditer(data)
        if _is_real(next(filter(None, match.groups())))
    ]


def _is_real(body: bytes) -> bool:
    # Placeholders repeat themselves or call themselves examples.
    return b"EXAMPLE" not in body.upper() and len(set(body)) >= 8


def reads_text(path: str) -> bool:
    """Whether :func:`text_traces` has a rule for files with this name."""
    return path.startswith("etc/apt/") or _may_hold_login(path)


def _may_hold_login(path: str) -> bool:
    of_apt = path == "etc/apt/auth.conf" or path.startswith("etc/apt/auth.conf.d/")
    return of_apt or f"/{path}".endswith(_CREDENTIAL_FILES)


def text_traces(path: str, text: str) -> list[Trace]:
    """Return what the settings in a small file allow or reveal."""
    traces: list[Trace] = []
    if path.startswith("etc/apt/"):
        for pattern in _APT:
            traces += [
                Trace(rule="insecure apt", path=path, seen=match[0].strip()[:120])
                for match in re.finditer(pattern, text)
                if "false" not in match[0].lower() or "verify-peer" in match[0].lower()
            ]
    if _may_hold_login(path) and re.search(_CREDENTIALS, text):
        traces.append(Trace(rule="credentials", path=path, seen="a login"))
    return traces


def path_traces(path: str, kind: str) -> list[Trace]:
    """Return the litter that a path's name alone identifies; empty folders do not count."""
    if kind == "dir" or re.fullmatch(_NO_CACHE, path):
        return []
    for pattern, meaning in _CACHES.items():
        if re.fullmatch(pattern, path):
            return [Trace(rule="cache", path=path, seen=meaning)]
    return []
