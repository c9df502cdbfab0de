"""Debian packages: a base's packages with all dependencies, resolved and downloaded by apt itself.

apt runs with the host's configuration, but with other suites and no installed packages: its
indexes, cache and status are in a private folder. Mirrors, proxies, CA, credentials and validity
checks are the host's. Every function here that uses apt raises HostError if the archive is not
available.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from primus_images.errors import HostError, InputError
from primus_images.files import text_if_readable
from primus_images.programs import install
from primus_images.versions.lock import (
    SUITES,
    BaseRequest,
    LockedFile,
    name_of,
    suites_of,
    upstream,
)
from primus_images.versions.traffic import bare_url, run_tool, seconds_for

_ALIASES = ("stable", "oldstable", "testing", "unstable")
_POCKETS = ("", "-updates", "-security", "-backports", "/updates", "-proposed-updates")
_KEYRING = "/usr/share/keyrings/{}-archive-keyring.gpg"
# Ubuntu's apt has no Debian mirror configured, but its package debootstrap contains one.
_DEBOOTSTRAP = Path("/usr/sbin/debootstrap")
# What apt-get prints with --print-uris.
# What apt-helper prints about a file whose bytes are not the expected ones.
_OTHER_BYTES = re.compile(
    r"^E: Failed to fetch (\S+)\s+Hash Sum mismatch.*?received file:\n\s*- SHA256:([0-9a-f]{64})",
    re.M | re.S,
)
_URI = re.compile(
    r"^'([^']*)' ([^_ ]+)_(\S+)_[^_ ]+\.deb ([0-9]+)(?: SHA256:([0-9a-f]{64}))?", re.M
)

Stanza = Mapping[str, str]


@dataclass(frozen=True)
class Apt:
    """apt's tools on the archive of some suites, with settings and indexes in ``folder``."""

    folder: Path
    mirrors: tuple[str, ...]

    def run(self, tool: str, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a tool of apt. ``options`` are those of :func:`run_tool`."""
        environment = os.environ | {
            "LC_ALL": "C.UTF-8",
            "LANGUAGE": "",
            "DEBIAN_FRONTEND": "noninteractive",
        }
        command = next(word for word in words if not word.startswith("-") and "=" not in word)
        words = (tool, "-c", str(self.folder / "apt.conf"), *words)
        return run_tool(words, " ".join(self.mirrors), command, env=environment, **options)

    def update(self, maker: str) -> None:
        """Get fresh indexes. Raises HostError if a mirror does not answer."""
        strict = ("-o", "APT::Update::Error-Mode=any", "-o", "Acquire::Retries=0")
        done = self.run("apt-get", "-q", *strict, "update")
        if done.returncode == 0:
            return
        log = done.stdout + done.stderr
        failed = [
            uri for uri in self.mirrors if re.search(rf"^[EW]:.* {re.escape(uri)}", log, re.M)
        ]
        uri = [*failed, *self.mirrors][0]
        raise HostError(
            f"the {maker.title()} archive at {uri} does not answer: {_reason(log)}",
            hint=f"check apt-get update on this host, or set PRIMUS_{maker.upper()}_MIRROR to a "
            "mirror it reaches",
        )


@contextmanager
def open_archive(suites: tuple[str, ...], preferences: str = "", status: str = "") -> Iterator[Apt]:
    """Yield apt for the archive of ``suites``, with fresh indexes in a temporary folder.

    ``preferences`` select the source of a package, ``status`` (dpkg's) lists the installed ones.
    """
    if shutil.which("apt-get") is None:
        raise HostError(
            "apt-get is missing; it is needed to resolve Debian packages",
            hint="run it on Debian or Ubuntu",
        )
    maker = _maker(suites[0])
    host = _host_stanzas()
    stanzas: list[Stanza] = []
    for suite in suites:
        stanzas += debian_stanzas(host, suite, os.environ, _default_mirror)
    _require_keyrings(stanzas, maker)
    with tempfile.TemporaryDirectory(prefix="primus-apt-") as name:
        folder = Path(name)
        for part in ("state/lists/partial", "cache/archives/partial", "sources", "preferences"):
            (folder / part).mkdir(parents=True)
        settings = Path(__file__).with_name("apt.conf").read_text(encoding="utf-8")
        (folder / "apt.conf").write_text(settings.replace("FOLDER", name), encoding="utf-8")
        (folder / "state/status").write_text(status, encoding="utf-8")
        (folder / "sources/debian.sources").write_text(_deb822(stanzas), encoding="utf-8")
        (folder / "preferences/suites").write_text(preferences, encoding="utf-8")
        uris = " ".join(stanza["URIs"] for stanza in stanzas).split()
        apt = Apt(folder, tuple(dict.fromkeys(map(bare_url, uris))))
        apt.update(maker)
        yield apt


def _deb822(stanzas: Sequence[Stanza]) -> str:
    blocks = ["".join(f"{key}: {text}\n" for key, text in stanza.items()) for stanza in stanzas]
    return "\n".join(blocks)


def _require_keyrings(stanzas: Sequence[Stanza], maker: str) -> None:
    for keyring in {stanza.get("Signed-By", "") for stanza in stanzas}:
        if not keyring.startswith("/") or Path(keyring).exists():
            continue
        message = f"there is no keyring {keyring} to check the archive with"
        if keyring != _KEYRING.format(maker):
            hint = "correct the path, or install the package that provides it"
            raise HostError(message, hint=hint)
        _need(message, (f"{maker}-archive-keyring",), f"set PRIMUS_{maker.upper()}_KEYRING")


def debian_stanzas(
    host: Sequence[Stanza],
    suite: str,
    environment: Mapping[str, str],
    default: Callable[[], str] = str,
) -> list[Stanza]:
    """Return the sources of ``suite``, best first.

    They are those of PRIMUS_DEBIAN_MIRROR, or the ``host``'s Debian sources, or ``default()``.
    """
    maker = _maker(suite)
    variable = f"PRIMUS_{maker.upper()}"
    common = {"Types": "deb", "Components": "main"}
    pockets: tuple[str, ...] = _POCKETS[:3]
    if SUITES.get(suite, {}).get("rolling", False):
        # A copy of a suite that never releases may be frozen, so that there is no newer index. The
        # lock has the hashes of its files, so an expired index does no harm.
        common["Check-Valid-Until"] = "no"
        pockets = ("",)
    mirrors = environment.get(f"{variable}_MIRROR", "").split()
    if not mirrors:
        stanzas = _sources_of_host(host, suite, pockets, common)
        if stanzas:
            return stanzas
        if maker == "debian":
            mirrors = default().split()
    if not mirrors:
        raise HostError(
            f"apt on this host names no source of {_titled(suite)}",
            hint=f"set {variable}_MIRROR to the URIs of a mirror (and {variable}_KEYRING to its "
            "keyring)",
        )
    keyring = environment.get(f"{variable}_KEYRING") or _KEYRING.format(maker)
    stanzas = []
    for uri in mirrors:
        offered = pockets
        if maker == "debian":
            # Debian's security archive has only that pocket, and its other mirrors do not have it.
            secure = uri.rstrip("/").endswith("-security")
            offered = ("-security" if secure else "",)
        present = " ".join(suite + pocket for pocket in offered if pocket in pockets)
        if present:
            stanzas.append({**common, "Signed-By": keyring, "URIs": uri, "Suites": present})
    return stanzas


def _sources_of_host(
    host: Sequence[Stanza], suite: str, pockets: Sequence[str], common: Stanza
) -> list[Stanza]:
    """Return the host's sources with ``suite`` in place of theirs; empty if none has the suite."""
    stanzas: dict[tuple[str, str], Stanza] = {}
    for stanza in host:
        if not _is_of(_maker(suite), stanza):
            continue
        listed = {suite_of(word)[1] for word in stanza["Suites"].split()}
        present = " ".join(suite + pocket for pocket in pockets if pocket in listed)
        # If a pocket is listed for another mirror as well, keep it once per URI.
        if present:
            own = {**stanza, **common, "Suites": present, "Enabled": "yes"}
            stanzas[stanza["URIs"], present] = own
    if any(suite in stanza["Suites"].split() for stanza in stanzas.values()):
        return list(stanzas.values())
    return []


def _default_mirror() -> str:
    """Return the mirrors that the package debootstrap names, which it installs if need be."""
    if not _DEBOOTSTRAP.is_file():
        _need(
            "apt on this host names no source of Debian",
            ("debootstrap", "debian-archive-keyring"),
            "set PRIMUS_DEBIAN_MIRROR to the URIs of a mirror (and PRIMUS_DEBIAN_KEYRING to its "
            "keyring)",
        )
    mirror = re.search(r'^DEF_MIRROR="([^"\s]+)"$', text_if_readable(_DEBOOTSTRAP), re.M)
    if mirror:
        return f"{mirror[1]} {mirror[1]}-security"
    return ""


def _need(message: str, packages: Sequence[str], other: str) -> None:
    """Install packages of this host. A HostError has ``message`` in front."""
    try:
        install({package: package for package in packages})
    except HostError as error:
        hint = f"apt-get install {' '.join(packages)}, or {other}"
        raise HostError(f"{message}; {error.message}", hint=hint) from None


def _maker(suite: str) -> str:
    return str(SUITES.get(suite, {}).get("maker", "debian"))


def _titled(suite: str) -> str:
    return f"{_maker(suite).title()} {suite}"


def suite_of(word: str) -> tuple[str, str]:
    """Split a suite: ``bookworm-updates`` → ``("bookworm", "-updates")``; else ``("", "?")``."""
    match = re.fullmatch(rf"({'|'.join((*SUITES, *_ALIASES))})({'|'.join(_POCKETS)})", word)
    if match:
        return (match[1], match[2])
    return ("", "?")


def parse_sources(text: str, deb822: bool) -> tuple[Stanza, ...]:
    """Return the stanzas of one apt sources file, with one-line entries converted to deb822."""
    if deb822:
        blocks = re.split(r"\n\s*\n", re.sub(r"(?m)^#.*\n?", "", text))
        stanzas = map(_fields, blocks)
        return tuple(stanza for stanza in stanzas if stanza and _is_enabled(stanza))
    entries = []
    pattern = r"^\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s*([^#\n]*)"
    for options, uri, suite, components in re.findall(pattern, text, re.M):
        entry = {"Types": "deb", "URIs": uri, "Suites": suite, "Components": components.strip()}
        for option in options.split():
            name, _, value = option.partition("=")
            key = "Architectures" if name.lower() == "arch" else name.title()
            entry[key] = value.replace(",", " ")
        entries.append(entry)
    return tuple(entries)


def _is_enabled(stanza: Stanza) -> bool:
    return stanza.get("Enabled", "yes").lower() not in ("no", "false", "0")


def _fields(block: str) -> dict[str, str]:
    fields = re.findall(r"^([^\s:]+):[ \t]*(.*(?:\n[ \t].*)*)", block, re.M)
    return {name.title().replace("Uris", "URIs"): value.strip() for name, value in fields}


def _is_of(maker: str, stanza: Stanza) -> bool:
    """Whether a source has packages of ``maker``."""
    if "deb" not in stanza.get("Types", "").split():
        return False
    if "main" not in stanza.get("Components", "").split():
        return False
    # Other publishers use these suite names, too. If a keyring is named, it tells them apart.
    keyring = stanza.get("Signed-By", "")
    if keyring.startswith("/") and f"{maker}-archive" not in keyring:
        return False
    releases = [suite_of(word)[0] for word in stanza.get("Suites", "").split()]
    return any(release and _maker(release) == maker for release in releases)


def _host_stanzas() -> list[Stanza]:
    script = ["LIST", "Dir::Etc::sourcelist/f", "PARTS", "Dir::Etc::sourceparts/d"]
    done = subprocess.run(
        ["apt-config", "shell", *script], capture_output=True, errors="replace", check=False
    )
    places = dict(re.findall(r"(LIST|PARTS)='([^']*)'", done.stdout))
    files = [Path(places.get("LIST", "/nowhere"))]
    files += sorted(Path(places.get("PARTS", "/nowhere")).glob("*"))
    stanzas: list[Stanza] = []
    for file in files:
        if file.suffix in (".list", ".sources") and file.is_file():
            text = file.read_text(encoding="utf-8")
            stanzas += parse_sources(text, file.suffix == ".sources")
    return stanzas


def _reason(text: str) -> str:
    # Without the URL, which may contain credentials.
    error = re.search(r"^E: (.*)", text, re.M)
    if error:
        return re.sub(r"(Failed to fetch )?\S+://\S+\s*", "", error[1]).strip()
    return "no reason given"


def resolve_debs(base_name: str, base: BaseRequest, status: str = "") -> tuple[LockedFile, ...]:
    """Return every deb of the base: essential and requested packages and their dependencies.

    For a base over an image, whose dpkg ``status`` lists the installed packages, return only the
    missing ones. Recommended packages are left out. Raises InputError for a package or Python that
    the suite does not have.
    """
    suites = suites_of(base.suite, base.packages)
    packages = [name_of(package) for package in base.packages]
    if not base.image:
        # usrmerge converts a running system and depends on all of perl. A root file system that is
        # merged from the start fulfills the same dependency with a marker package, which
        # mmdebstrap's hook for it installs.
        if "usrmerge" not in packages:
            packages.insert(0, "usr-is-merged")
        packages.insert(0, "?essential")
    with open_archive(suites, preferences(base.suite, base.packages), status) as apt:
        text = _closure(apt, base, packages)
    files = []
    for uri, name, version, size, sha256 in sorted(_URI.findall(text), key=itemgetter(1)):
        file = LockedFile(
            kind="deb",
            name=name,
            version=unquote(version),
            file=unquote(urlsplit(uri).path.rpartition("/")[2]),
            size=int(size),
            sha256=sha256,
            base=base_name,
        )
        files.append(file)
    check_python(base_name, base, {file.name: file.version for file in files})
    return tuple(files)


def download_debs(files: Sequence[LockedFile], suites: tuple[str, ...], folder: Path) -> None:
    """Let apt download the debs that the archive still has to ``folder``, named by their sha256."""
    with open_archive(suites) as apt:
        uris = _uris(apt, files)
        words: list[str] = []
        for file, uri in uris.items():
            words += [uri, file.sha256, f"SHA256:{file.sha256}"]
        if not words:
            return
        seconds = seconds_for(sum(file.size for file in uris))
        helper = "/usr/lib/apt/apt-helper"
        done = apt.run(helper, "download-file", *words, cwd=folder, timeout=seconds)
        _refuse_other_bytes(done.stderr, {uri: file for file, uri in uris.items()}, suites)
        # Whether a file that is not there any more matters is the caller's to judge.
        lost = r"^E: Failed to fetch (?!.*( 40[34] |not found)).*"
        fault = re.search(lost, done.stdout + done.stderr, re.M)
        if fault:
            raise HostError(
                f"the archive of {' and '.join(suites)} does not send its packages: "
                f"{_reason(fault[0])}",
                hint="check the network, and run it again",
            )


def _refuse_other_bytes(text: str, files: Mapping[str, LockedFile], suites: Sequence[str]) -> None:
    """Raise HostError for a file of which apt-helper says that its bytes are not the locked ones.

    ``files`` are by address.
    """
    for uri, sha256 in _OTHER_BYTES.findall(text):
        file = files.get(uri)
        if file:
            raise HostError(
                f"{file.file} from the archive of {' and '.join(suites)} has sha256 {sha256}, but "
                f"sha256 {file.sha256} is locked for {file.name} {file.version}",
                hint="do not trust that source; if its maker replaced the file on purpose: "
                f"primus lock --refresh-package {file.name}",
            )


def _uris(apt: Apt, files: Sequence[LockedFile]) -> dict[LockedFile, str]:
    """Return the address of each file of which the archive has any version."""
    records = apt.run("apt-cache", "show", *(file.name for file in files)).stdout
    present = set(re.findall(r"^Package: (\S+)$.*?^Version: (\S+)$", records, re.M | re.S))
    names = {name for name, _ in present}
    words = []
    for file in files:
        if (file.name, file.version) in present:
            words.append(f"{file.name}={file.version}")
        elif file.name in names:
            words.append(file.name)
    if not words:
        return {}
    listing = apt.run("apt-get", "download", "--print-uris", *words).stdout
    uris = {name: (uri, unquote(version)) for uri, name, version, _, _ in _URI.findall(listing)}
    addresses = {}
    for file in files:
        if file.name in uris:
            uri, version = uris[file.name]
            if version != file.version:
                # A pool keeps files for a while after the index drops them, next to their
                # successors.
                uri = f"{uri.rpartition('/')[0]}/{file.file.replace('+', '%2b')}"
            addresses[file] = uri
    return addresses


def preferences(suite: str, packages: Sequence[str]) -> str:
    """Return apt preferences with which each package comes from its suite.

    apt's own ``name/suite`` on the command line would also allow the package's dependencies to come
    from there.
    """
    suites = suites_of(suite, packages)
    # Priority 1: apt uses such a package only if no other version of it exists; -1: never.
    rules = [("*", other, 1) for other in suites[1:]]
    for package in packages:
        name, _, own = package.partition("/")
        if own:
            rules += [(name, other, 990 if other == own else -1) for other in suites]
    text = ""
    for name, other, priority in rules:
        # experimental has another codename. Pockets have theirs after the suite's.
        release = "a=experimental" if other == "experimental" else f"n={other}*"
        text += f"Package: {name}\nPin: release {release}\nPin-Priority: {priority}\n\n"
    return text


def check_python(base_name: str, base: BaseRequest, versions: Mapping[str, str]) -> None:
    """Raise InputError if the suite's Python differs from the base's stated version."""
    provided = [
        upstream(version)
        for name, version in versions.items()
        if re.fullmatch(r"python3\.[0-9]+-minimal", name)
    ]
    if provided and base.python not in provided:
        raise InputError(
            f"base {base_name} states Python {base.python}, but {_titled(base.suite)} has "
            f"{' and '.join(provided)}",
            hint=f"write python: {provided[0]} in versions.yaml",
        )


def _closure(apt: Apt, base: BaseRequest, packages: Sequence[str]) -> str:
    """Return apt's list of the files of ``packages`` and their dependencies."""
    done = apt.run("apt-get", "-q", "-y", "install", "--print-uris", *packages)
    if done.returncode == 0:
        return done.stdout
    unknown = re.search(
        r"E: (?:Unable to locate package|Package '?([^' ]+)'? has no installation candidate) "
        r"?(\S*)",
        done.stderr,
    )
    if unknown:
        name = unknown[1] or unknown[2]
        suites = dict(package.split("/") for package in base.packages if "/" in package)
        raise InputError(
            f"{_titled(suites.get(name, base.suite))} has no package {name}",
            hint="correct it under `packages`",
        )
    unmet = re.search(
        r"The following packages have unmet dependencies:\n(.*?)\n(?:E:|$)",
        done.stdout + "\n",
        re.S,
    )
    reason = done.stderr.strip()[:300]
    if unmet:
        reason = "; ".join(line.strip() for line in unmet[1].splitlines())
    hint = None
    later = suites_of(base.suite, base.packages)[1:]
    if later:
        hint = f"list what must come from {' or '.join(later)} too, as package/{later[0]}"
    raise InputError(
        f"the packages of {_titled(base.suite)} are not compatible: {reason}", hint=hint
    )
