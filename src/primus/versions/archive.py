"""A private view of the Debian archive: the host's apt configuration with another suite and no installed packages.

All of apt's files (indexes, cache, status) are in a private folder. Mirrors, proxies, CA, credentials and validity
checks are the host's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from primus.errors import HostError, LacksPackages
from primus.versions.suites import GLIBC, ROLLING, UBUNTU
from primus.versions.traffic import bare_url, cause, requesting

_ALIASES = ("stable", "oldstable", "testing", "unstable")
_POCKETS = ("", "-updates", "-security", "-backports", "/updates", "-proposed-updates")
_KEYRING = "/usr/share/keyrings/{}-archive-keyring.gpg"
# Ubuntu's apt has no Debian mirror configured, but its package debootstrap contains one.
_DEBOOTSTRAP = Path("/usr/sbin/debootstrap")

_AT_ONCE_S = 3.0

Stanza = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Archive:
    """apt with private indexes. Created by :func:`open_archive`, and valid as long as its folder."""

    folder: Path
    architecture: str
    maker: str = "debian"
    mirrors: tuple[str, ...] = ()

    @property
    def options(self) -> list[str]:
        """Return the options that make apt private. The rest of its configuration is the host's."""
        at = self.folder
        pairs = {
            "Dir::State": f"{at}/state",
            "Dir::State::lists": f"{at}/state/lists",
            "Dir::State::status": f"{at}/state/status",
            "Dir::State::extended_states": f"{at}/state/extended_states",
            "Dir::Cache": f"{at}/cache",
            "Dir::Cache::archives": f"{at}/cache/archives",
            "Dir::Etc::sourcelist": "/dev/null",
            "Dir::Etc::sourceparts": f"{at}/sources",
            # Preferences and a default release select packages for this host, and must not affect an image.
            "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": f"{at}/preferences",
            "APT::Default-Release": "",
            "APT::Architecture": self.architecture,
            "APT::Architectures": self.architecture,
            "APT::Sandbox::User": "",
            "APT::Install-Recommends": "false",
            "APT::Install-Suggests": "false",
            "APT::Get::Show-User-Simulation-Note": "false",
            "Acquire::Languages": "none",
            "Acquire::Retries": "1",
            "Acquire::http::Timeout": "6",
            "Acquire::https::Timeout": "6",
            # apt would treat itself as essential, but the image does not need it.
            "pkgCacheGen::ForceEssential": ",",
        }
        return [word for name, value in pairs.items() for word in ("-o", f"{name}={value}")]

    def run(self, tool: str, *args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run ``apt-get`` or ``apt-cache`` on this archive. The caller checks the exit code."""
        return subprocess.run(
            [tool, *self.options, *args],
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"LC_ALL": "C.UTF-8", "LANGUAGE": "", "DEBIAN_FRONTEND": "noninteractive"},
        )

    def update(self) -> None:
        """Fetch the indexes. Raises HostError if a source does not answer or is not trusted."""
        with requesting("apt", " ".join(self.mirrors), f"the {self.maker.title()} archive", "update") as request:
            command = ("apt-get", "-q", "-o", "APT::Update::Error-Mode=any", "-o", "Acquire::Retries=0", "update")
            began = time.monotonic()
            done = self.run(*command)
            # A failure at once may pass. One after silence has had its time.
            if done.returncode != 0 and time.monotonic() - began < _AT_ONCE_S:
                done = self.run(*command)
            if done.returncode == 0:
                request.answer(None)
                return
            text = done.stdout + done.stderr
            request.verdict = f"failed: {reason(text)}"
        failed = [uri for uri in self.mirrors if re.search(rf"^[EW]:.* {re.escape(uri)}", text, re.M)] or self.mirrors
        raise HostError(
            f"the {self.maker.title()} archive at {failed[0]} does not answer: {reason(text)}",
            hint=f"check apt-get update on this host, or set PRIMUS_{self.maker.upper()}_MIRROR to a mirror it reaches",
        )

    def expired(self, now: datetime) -> tuple[tuple[str, str], ...]:
        """Return suite and last valid day of each index that was used after that day."""
        found = []
        for file in sorted((self.folder / "state/lists").glob("*Release")):
            text = file.read_text(encoding="utf-8", errors="replace")
            fields = dict(re.findall(r"^(Suite|Codename|Valid-Until): (.+)$", text, re.M))
            suite = next((v for v in fields.values() if v in ROLLING), None)
            if suite and "Valid-Until" in fields and (until := parsedate_to_datetime(fields["Valid-Until"])) < now:
                found.append((suite, f"{until.day} {until:%B %Y}"))
        return tuple(found)


@contextmanager
def open_archive(
    suites: tuple[str, ...], architecture: str, preferences: str = "", status: str = ""
) -> Iterator[Archive]:
    """Return the archive of ``suites`` with fresh indexes, in a temporary folder.

    ``preferences`` select the source of a package, ``status`` (dpkg's) lists the installed ones. Raises HostError
    if the archive is not available.
    """
    if shutil.which("apt-get") is None:
        raise HostError(
            "apt-get is missing; it is needed to resolve Debian packages", hint="run it on Debian or Ubuntu"
        )
    with tempfile.TemporaryDirectory(prefix="primus-apt-") as name:
        folder = Path(name)
        for part in ("state/lists/partial", "cache/archives/partial", "sources", "preferences"):
            (folder / part).mkdir(parents=True)
        (folder / "state/status").write_text(status, encoding="utf-8")
        maker = _maker(suites[0])
        stanzas = host_stanzas(suites)
        for keyring in {s["Signed-By"] for s in stanzas if s.get("Signed-By", "").startswith("/")}:
            if not Path(keyring).exists():
                message = f"there is no keyring {keyring} to check the archive with"
                if keyring != _KEYRING.format(maker):
                    raise HostError(message, hint="correct the path, or install the package that provides it")
                raise LacksPackages(message, (f"{maker}-archive-keyring",), f"set PRIMUS_{maker.upper()}_KEYRING")
        text = "\n\n".join("\n".join(f"{key}: {value}" for key, value in stanza.items()) for stanza in stanzas)
        (folder / "sources/debian.sources").write_text(text + "\n", encoding="utf-8")
        (folder / "preferences/suites").write_text(preferences, encoding="utf-8")
        mirrors = dict.fromkeys(bare_url(uri) for stanza in stanzas for uri in stanza["URIs"].split())
        archive = Archive(folder=folder, architecture=architecture, maker=maker, mirrors=tuple(mirrors))
        archive.update()
        yield archive


def host_stanzas(suites: tuple[str, ...]) -> tuple[Stanza, ...]:
    """Return the sources of ``suites`` on this host, see :func:`debian_stanzas`."""
    return debian_stanzas(_host_stanzas(), suites, os.environ, _default_mirror(_DEBOOTSTRAP))


def debian_stanzas(
    host: Sequence[Stanza], suites: tuple[str, ...], environment: Mapping[str, str], default: str = ""
) -> tuple[Stanza, ...]:
    """Return the sources of ``suites``: PRIMUS_DEBIAN_MIRROR, or the host's Debian sources, or the mirrors of
    ``default``.

    Raises HostError if there is none of these, as on a new Ubuntu.
    """
    return tuple(stanza for suite in suites for stanza in _stanzas(host, suite, environment, default))


def _stanzas(host: Sequence[Stanza], suite: str, environment: Mapping[str, str], default: str) -> tuple[Stanza, ...]:
    # These two archives are frozen, so there is no newer index. The lock has the hashes of their files, so an expired
    # index does no harm.
    stale = {"Check-Valid-Until": "no"} if suite in ROLLING else {}
    maker = _maker(suite)
    mirrors = environment.get(f"PRIMUS_{maker.upper()}_MIRROR", "").split()
    if mirrors:
        signed = {"Signed-By": environment.get(f"PRIMUS_{maker.upper()}_KEYRING") or _KEYRING.format(maker)}
        common = {"Types": "deb", "Components": "main", **signed}
        if maker == "ubuntu":
            every = " ".join(suite + pocket for pocket in _POCKETS[:3])
            return tuple({**common, "URIs": uri, "Suites": every} for uri in mirrors)
        security = [uri.rstrip("/").endswith("-security") for uri in mirrors]
        return tuple(
            {**common, **stale, "URIs": uri, "Suites": f"{suite}-security" if secure else suite}
            for uri, secure in zip(mirrors, security, strict=True)
            if not (secure and suite in ROLLING)
        )
    found: dict[tuple[str, str], Stanza] = {}
    for stanza in host:
        if not _is_of(maker, stanza):
            continue
        pockets = {suite_of(word)[1] for word in stanza["Suites"].split()}
        suites = [suite + p for p in _POCKETS[:3] if p in pockets and not (p and suite in ROLLING)]
        # If a pocket is listed for another mirror as well, keep it once per URI.
        if suites:
            wanted: dict[str, str] = {**stanza, **stale, "Types": "deb", "Components": "main"}
            wanted["Suites"] = " ".join(suites)
            wanted.pop("Enabled", None)
            found[(stanza["URIs"], wanted["Suites"])] = wanted
    if any(suite in stanza["Suites"].split() for stanza in found.values()):
        return tuple(found.values())
    if maker == "debian" and default:
        return _stanzas((), suite, {**environment, "PRIMUS_DEBIAN_MIRROR": default}, "")
    message = f"apt on this host names no source of {maker.title()} {suite}"
    also = " and its debian-security" if maker == "debian" else ""
    hint = (
        f"set PRIMUS_{maker.upper()}_MIRROR to the URIs of a {maker.title()} mirror{also} "
        f"(and PRIMUS_{maker.upper()}_KEYRING to its keyring)"
    )
    if maker == "debian":
        raise LacksPackages(message, ("debootstrap", "debian-archive-keyring"), hint)
    raise HostError(message, hint=hint)


def _default_mirror(script: Path) -> str:
    """Return Debian's mirror and its security archive from debootstrap's ``script``; empty if it is missing."""
    text = script.read_text(encoding="utf-8") if script.is_file() else ""
    found = re.search(r'^DEF_MIRROR="([^"\s]+)"$', text, re.M)
    return f"{found[1]} {found[1]}-security" if found else ""


def _maker(suite: str) -> str:
    """Return the publisher of a suite."""
    return "ubuntu" if suite in UBUNTU else "debian"


def titled(suite: str) -> str:
    """Return the suite with its publisher: ``Debian bookworm``."""
    return f"{_maker(suite).title()} {suite}"


def suite_of(word: str) -> tuple[str, str]:
    """Split a suite into ``(release, pocket)``: ``bookworm-updates`` → ``("bookworm", "-updates")``; else ``("",
    "")``.
    """
    for name in (*GLIBC, *_ALIASES):
        if word.startswith(name) and word[len(name) :] in _POCKETS:
            return name, word[len(name) :]
    return "", "?"


def parse_sources(text: str, deb822: bool) -> tuple[Stanza, ...]:
    """Return the stanzas of one apt sources file, with one-line entries converted to deb822."""
    if deb822:
        blocks = re.split(r"\n\s*\n", re.sub(r"(?m)^#.*\n?", "", text))
        stanzas = [_fields(block) for block in blocks if block.strip()]
        return tuple(s for s in stanzas if s.get("Enabled", "yes").lower() not in ("no", "false", "0"))
    found: list[Stanza] = []
    pattern = re.compile(r"^\s*(deb)\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s*([^#\n]*)", re.M)
    for kind, options, uri, suite, components in pattern.findall(text):
        stanza = {"Types": kind, "URIs": uri, "Suites": suite, "Components": components.strip()}
        for option in options.split():
            name, _, value = option.partition("=")
            stanza[_OPTION_NAMES.get(name.lower(), name.title())] = value.replace(",", " ")
        found.append(stanza)
    return tuple(found)


_OPTION_NAMES = {"arch": "Architectures", "lang": "Languages", "target": "Targets"}


def _fields(block: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    key = ""
    for line in block.splitlines():
        if line[:1] in (" ", "\t") and key:
            fields[key] += "\n" + line
        elif ":" in line:
            key, _, value = line.partition(":")
            key = key.strip().title().replace("Uris", "URIs")
            fields[key] = value.strip()
    return fields


def _is_of(maker: str, stanza: Stanza) -> bool:
    words = stanza.get("Suites", "").split()
    # Other publishers use these suite names, too. If a keyring is named, it tells them apart.
    signed = stanza.get("Signed-By", "")
    return (
        "deb" in stanza.get("Types", "").split()
        and "main" in stanza.get("Components", "").split()
        and any((release := suite_of(word)[0]) and _maker(release) == maker for word in words)
        and (not signed.startswith("/") or f"{maker}-archive" in signed)
    )


def _host_stanzas() -> tuple[Stanza, ...]:
    script = "apt-config shell LIST Dir::Etc::sourcelist/f PARTS Dir::Etc::sourceparts/d"
    done = subprocess.run(script.split(), capture_output=True, text=True, check=False)
    places = dict(re.findall(r"(LIST|PARTS)='([^']*)'", done.stdout))
    files = [Path(places["LIST"])] if "LIST" in places else []
    if "PARTS" in places and Path(places["PARTS"]).is_dir():
        files += sorted(p for p in Path(places["PARTS"]).iterdir() if p.suffix in (".list", ".sources"))
    return tuple(
        stanza
        for file in files
        if file.is_file()
        for stanza in parse_sources(file.read_text(encoding="utf-8"), file.suffix == ".sources")
    )


def reason(text: str) -> str:
    """Return the first cause in apt's output, without its URL, which may contain credentials."""
    if status := re.search(r" (5\d\d) +[A-Z]", text):
        return f"HTTP status {status[1]}"
    if known := cause("apt", text):
        return known
    errors = [re.sub(r"\S+://\S+\s*", "", line[3:]) for line in text.splitlines() if line.startswith("E: ")]
    return errors[0].strip() if errors else "no reason given"
