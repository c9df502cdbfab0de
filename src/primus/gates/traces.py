"""Traces in the files of a layer: secrets, insecure apt settings, caches, paths of the build machine."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from primus.gates.needles import needles as texts_of

Rule = Literal["secret", "insecure apt", "credentials", "cache", "build path"]

# Patterns are texts in this package: few files need one, and compiling all of them takes as long as a small layer. `re`
# keeps what it has compiled.
#
# Each kind of secret, the plain texts that it begins with or contains, and its pattern, whose group is the secret's
# body.
_SECRETS: tuple[tuple[str, tuple[bytes, ...], bytes], ...] = (
    (
        "a Hugging Face token",
        (b"hf_",),
        rb"hf_(?<![A-Za-z0-9_]hf_)([A-Za-z0-9]{30,40})(?![A-Za-z0-9_])",
    ),
    (
        "a GitHub token",
        (b"ghp_", b"gho_", b"ghu_", b"ghs_", b"ghr_", b"github_pat_"),
        rb"g(?<![A-Za-z0-9_]g)(?:h[pousr]_([A-Za-z0-9]{36})|ithub_pat_([A-Za-z0-9]{22}_[A-Za-z0-9]{59}))",
    ),
    (
        "a GitLab token",
        (b"glpat-",),
        rb"glpat-(?<![A-Za-z0-9_-]glpat-)([A-Za-z0-9_-]{20})(?![A-Za-z0-9_-])",
    ),
    ("an AWS key", (b"AKIA",), rb"AKIA(?<![A-Za-z0-9+/]AKIA)([A-Z0-9]{16})(?![A-Za-z0-9+/=])"),
    (
        "a private key",
        (b"PRIVATE KEY-----",),
        rb"-----BEGIN ((?:[A-Z0-9]+ )?PRIVATE KEY-----(?:\\r)?(?:\\n|\r?\n)(?:[A-Za-z-]+: [^\n]*\n|\r?\n)*"
        rb"[\"' ]*[A-Za-z0-9+/=]{32})",
    ),
)
_TEMPORARY, _HOMES = (b"/tmp/pip-", b"/tmp/build-env-"), (b"/home/", b"/root/")
_PATHS = rb"/tmp/(?:pip-[a-z][\w./+-]*|build-env-[\w./+-]+)"
# In text, home folders are usually examples; in a compiled file, they are where it was compiled.
_PATHS_IN_ELF = (
    rb"/(?:tmp/(?:pip-[a-z][\w./+-]*|build-env-[\w./+-]+)|(?<![\w.]/)(?:home/[\w.-]+/[\w./+-]+|root/[\w./+-]+))"
)
_TEXTS = (*(text for _, texts, _ in _SECRETS for text in texts), *_TEMPORARY, *_HOMES)
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
_CACHES: tuple[tuple[str, str], ...] = (
    (r"var/lib/apt/lists/.+", "apt's package lists"),
    (r"var/cache/apt/.+", "apt's cache"),
    (r"(?:root|home/[^/]+)/\.cache/.+", "a cache in a home folder"),
    (r"(?:.*/)?\.cache/(?:pip|uv|huggingface|torch)/.+", "a download cache"),
    (r"(?:tmp|var/tmp)/.+", "a temporary file"),
)
# Every path that the rules above describe contains or begins with one of these, and few others do.
_LIKE_A_CACHE, _CACHE_FOLDERS = "cache/", ("var/lib/apt/lists/", "tmp/", "var/tmp/")
_NO_CACHE = r"(?:.*/)?(?:lock|partial|auxfiles)"


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One piece of litter: the rule, the path, and what was found (a secret is never shown in full)."""

    rule: Rule
    path: str
    seen: str


class Scanner:
    """Searches a file, streamed in chunks, for secrets and build paths."""

    def __init__(self, path: str, needles: Sequence[bytes] = ()) -> None:
        self._path = path
        self._tail = b""
        self._seen: dict[tuple[Rule, str], None] = {}
        self._needles = frozenset(needles)
        self._texts = texts_of(*_TEXTS, *needles)
        self._first = True
        self.elf = False

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the file."""
        if self._first:
            self.elf = chunk.startswith(b"\x7fELF")
            self._first = False
        # A text that spans two chunks is not found. Joining chunks would copy every byte of the image.
        across = self._tail + chunk[:_AHEAD]
        for data in (across, chunk) if len(chunk) > _AHEAD else (across,):
            # This takes a seventh of a second per gigabyte. Each pattern takes three times as long and holds the GIL.
            if held := self._texts.found_in(data):
                self._look(data, held)
        self._tail = chunk[-_OVERLAP:] if len(chunk) >= _OVERLAP else across[-_OVERLAP:]

    def _look(self, data: bytes, held: frozenset[bytes]) -> None:
        for what in secrets_in(data, held):
            self._seen["secret", what] = None
        if not held.isdisjoint((*_TEMPORARY, *_HOMES) if self.elf else _TEMPORARY):
            for match in re.finditer(_PATHS_IN_ELF if self.elf else _PATHS, data):
                text = match[0][:120].decode("utf-8", "replace")
                # One trace per kind and file is enough; others are usually below the same folder.
                if not any(rule == "build path" and seen[:6] == text[:6] for rule, seen in self._seen):
                    self._seen["build path", text] = None
        needles = held & self._needles
        for needle in sorted(n for n in needles if not any(n in other for other in needles - {n})):
            self._seen["build path", needle.decode("utf-8", "replace")] = None

    def traces(self) -> list[Trace]:
        """Return the traces, each once."""
        return [Trace(rule=rule, path=self._path, seen=seen) for rule, seen in self._seen]


def secrets_in(data: bytes, held: Collection[bytes] | None = None) -> list[str]:
    """Describe what looks like a secret in ``data``, without revealing it. ``held`` are the marker texts that
    ``data`` contains, if known.
    """
    found = []
    for what, texts, pattern in _SECRETS:
        if held is not None and not any(text in held for text in texts):
            continue
        for match in re.finditer(pattern, data):
            body = next(filter(None, match.groups()))
            if _is_real(body):
                begin = data[match.start() : match.end() - len(body) + 4].decode("utf-8", "replace")
                found.append(what + ("" if what == "a private key" else f" {begin}…"))
    return found


def _is_real(body: bytes) -> bool:
    """Whether a body is a real secret: placeholders repeat themselves or call themselves examples."""
    return b"EXAMPLE" not in body.upper() and len(set(body)) >= 8


def reads_text(path: str) -> bool:
    """Whether :func:`text_traces` has a rule for files with this name."""
    return path.startswith("etc/apt/") or _has_credentials(path)


def _has_credentials(path: str) -> bool:
    """Whether a file with this name may hold a login."""
    of_apt = path == "etc/apt/auth.conf" or path.startswith("etc/apt/auth.conf.d/")
    return of_apt or f"/{path}".endswith(_CREDENTIAL_FILES)


def text_traces(path: str, text: str) -> list[Trace]:
    """Return what the settings in a small file allow or reveal."""
    found: list[Trace] = []
    if path.startswith("etc/apt/"):
        for pattern in _APT:
            found += [
                Trace(rule="insecure apt", path=path, seen=match[0].strip()[:120])
                for match in re.finditer(pattern, text)
                if "false" not in match[0].lower() or "verify-peer" in match[0].lower()
            ]
    if _has_credentials(path) and re.search(_CREDENTIALS, text):
        found.append(Trace(rule="credentials", path=path, seen="a login"))
    return found


def path_traces(path: str, kind: str) -> list[Trace]:
    """Return the litter that a path's name alone identifies; empty folders do not count."""
    if kind == "dir" or not (_LIKE_A_CACHE in path or path.startswith(_CACHE_FOLDERS)):
        return []
    return [
        Trace(rule="cache", path=path, seen=what)
        for pattern, what in _CACHES
        if re.fullmatch(pattern, path) and not re.fullmatch(_NO_CACHE, path)
    ][:1]
