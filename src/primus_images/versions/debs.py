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
from pathlib import Path
from urllib.parse import unquote, urlsplit

from primus_images.errors import HostError, InputError
from primus_images.files import text_if_readable
from primus_images.programs import install
from primus_images.refusals import refusal
from primus_images.versions.lock import (
    SUITES,
    BaseRequest,
    LockedFile,
    name_of,
    suites_of,
    upstream,
)
from primus_images.versions.traffic import bare_url, run_tool

_ALIASES = ("stable", "oldstable", "testing", "unstable")
_POCKETS = ("", "-updates", "-security", "-backports", "/updates", "-proposed-updates")
_KEYRING = "/usr/share/keyrings/{}-archive-keyring.gpg"
# Ubuntu's apt has no Debian mirror configured, but its package debootstrap contains one.
_DEBOOTSTRAP = Path("/usr/sbin/debootstrap")
# What apt-get prints with --print-uris.
_URI = re.compile(
    r"^'([^']*)' ([^_ ]+)_(\S+)_[^_ ]+\.deb ([0-9]+)(?: SHA256:([0-9a-f]{64}))?", re.M
)

Stanza = Mapping[str, str]
Apt = Callable[..., subprocess.CompletedProcess[str]]


@contextmanager
def open_archive(suites: tuple[str, ...], preferences: str = "", status: str = "") -> Iterator[Apt]:
    """Yield a function that runs a tool of apt on the archive of ``suites``, with fresh indexes in
    a temporary folder.

    ``preferences`` select the source of a package, ``status`` (dpkg's) lists the installed ones.
    """
    if shutil.which("apt-get") is None:
        raise HostError(
            "apt-get is missing; it is needed to resolve Debian packages",
            hint="run it on Debian or Ubuntu",
        )
    with tempfile.TemporaryDirectory(prefix="primus-apt-") as name:
        folder = Path(name)
        for part in ("state/lists/partial", "cache/archives/partial", "sources", "preferences"):
            (folder / part).mkdir(parents=True)
        text = (
            Path(__file__).with_name("apt.conf").read_text(encoding="utf-8").replace("FOLDER", name)
        )
        (folder / "apt.conf").write_text(text, encoding="utf-8")
        (folder / "state/status").write_text(status, encoding="utf-8")
        maker = _maker(suites[0])
        host = _host_stanzas()
        stanzas = [
            stanza
            for suite in suites
            for stanza in debian_stanzas(host, suite, os.environ, _default_mirror)
        ]
        for keyring in {s["Signed-By"] for s in stanzas if s.get("Signed-By", "").startswith("/")}:
            if not Path(keyring).exists():
                message = f"there is no keyring {keyring} to check the archive with"
                if keyring != _KEYRING.format(maker):
                    raise HostError(
                        message, hint="correct the path, or install the package that provides it"
                    )
                _need(message, (f"{maker}-archive-keyring",), f"set PRIMUS_{maker.upper()}_KEYRING")
        text = "\n\n".join(
            "\n".join(f"{key}: {value}" for key, value in stanza.items()) for stanza in stanzas
        )
        (folder / "sources/debian.sources").write_text(text + "\n", encoding="utf-8")
        (folder / "preferences/suites").write_text(preferences, encoding="utf-8")
        mirrors = dict.fromkeys(
            bare_url(uri) for stanza in stanzas for uri in stanza["URIs"].split()
        )
        env = os.environ | {
            "LC_ALL": "C.UTF-8",
            "LANGUAGE": "",
            "DEBIAN_FRONTEND": "noninteractive",
        }

        def apt(tool: str, *args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
            command = next(word for word in args if not word.startswith("-") and "=" not in word)
            words = [tool, "-c", str(folder / "apt.conf"), *args]
            return run_tool(words, " ".join(mirrors), command, cwd=cwd, env=env)

        done = apt(
            "apt-get",
            "-q",
            "-o",
            "APT::Update::Error-Mode=any",
            "-o",
            "Acquire::Retries=0",
            "update",
        )
        if done.returncode != 0:
            text = done.stdout + done.stderr
            failed = [
                uri for uri in mirrors if re.search(rf"^[EW]:.* {re.escape(uri)}", text, re.M)
            ]
            words = {
                "maker": maker.title(),
                "variable": f"PRIMUS_{maker.upper()}_MIRROR",
                "reason": _reason(text),
            }
            raise refusal("silent_archive", uri=[*failed, *mirrors][0], **words)
        yield apt


def debian_stanzas(
    host: Sequence[Stanza],
    suite: str,
    environment: Mapping[str, str],
    default: Callable[[], str] = str,
) -> list[Stanza]:
    """Return the sources of ``suite``: PRIMUS_DEBIAN_MIRROR, or the host's Debian sources, or
    ``default()``.
    """
    # These two archives are frozen, so there is no newer index. The lock has the hashes of their
    # files, so an expired index does no harm.
    rolling = SUITES.get(suite, {}).get("rolling", False)
    common = {
        "Types": "deb",
        "Components": "main",
        **({"Check-Valid-Until": "no"} if rolling else {}),
    }
    maker = _maker(suite)
    variable = f"PRIMUS_{maker.upper()}"
    if rolling:
        pockets = ("",)
    else:
        pockets = _POCKETS[:3]
    mirrors = environment.get(f"{variable}_MIRROR", "").split()
    stanzas: dict[tuple[str, str], Stanza] = {}
    for stanza in (entry for entry in host if not mirrors and _is_of(maker, entry)):
        present = {suite_of(word)[1] for word in stanza["Suites"].split()}
        suites = " ".join(suite + pocket for pocket in pockets if pocket in present)
        # If a pocket is listed for another mirror as well, keep it once per URI.
        if suites:
            stanzas[stanza["URIs"], suites] = {
                **stanza,
                **common,
                "Suites": suites,
                "Enabled": "yes",
            }
    if any(suite in stanza["Suites"].split() for stanza in stanzas.values()):
        return [*stanzas.values()]
    if maker == "debian":
        mirrors = mirrors or default().split()
    if not mirrors:
        raise HostError(
            f"apt on this host names no source of {maker.title()} {suite}",
            hint=f"set {variable}_MIRROR to the URIs of a mirror (and {variable}_KEYRING to its "
            "keyring)",
        )
    keyring = environment.get(f"{variable}_KEYRING") or _KEYRING.format(maker)
    result: list[Stanza] = []
    for uri in mirrors:
        # Debian's security archive has only that pocket, and its other mirrors do not have it.
        # Ubuntu's have all.
        secure = ""
        if uri.rstrip("/").endswith("-security"):
            secure = "-security"
        own = [suite + pocket for pocket in pockets if maker == "ubuntu" or pocket == secure]
        if own:
            result.append({**common, "Signed-By": keyring, "URIs": uri, "Suites": " ".join(own)})
    return result


def _default_mirror() -> str:
    """Return the mirrors that the package debootstrap names. Installs it, with Debian's keyring, if
    it is missing.
    """
    if not _DEBOOTSTRAP.is_file():
        hint = (
            "set PRIMUS_DEBIAN_MIRROR to the URIs of a mirror (and PRIMUS_DEBIAN_KEYRING to "
            "its keyring)"
        )
        _need(
            "apt on this host names no source of Debian",
            ("debootstrap", "debian-archive-keyring"),
            hint,
        )
    mirror = re.search(r'^DEF_MIRROR="([^"\s]+)"$', text_if_readable(_DEBOOTSTRAP), re.M)
    if mirror:
        return f"{mirror[1]} {mirror[1]}-security"
    return ""


def _need(message: str, packages: Sequence[str], hint: str) -> None:
    """Install packages of this host. Raises HostError, with ``message`` in front, if that is not
    possible.
    """
    try:
        install({package: package for package in packages})
    except HostError as error:
        hint = f"apt-get install {' '.join(packages)}, or {hint}"
        raise HostError(f"{message}; {error.message}", hint=hint) from None


def _maker(suite: str) -> str:
    return str(SUITES.get(suite, {}).get("maker", "debian"))


def _titled(suite: str) -> str:
    return f"{_maker(suite).title()} {suite}"


def suite_of(word: str) -> tuple[str, str]:
    """Split a suite: ``bookworm-updates`` → ``("bookworm", "-updates")``; ``("", "?")`` for others."""
    match = re.fullmatch(rf"({'|'.join((*SUITES, *_ALIASES))})({'|'.join(_POCKETS)})", word)
    if match:
        return (match[1], match[2])
    return ("", "?")


def parse_sources(text: str, deb822: bool) -> tuple[Stanza, ...]:
    """Return the stanzas of one apt sources file, with one-line entries converted to deb822."""
    if deb822:
        blocks = re.split(r"\n\s*\n", re.sub(r"(?m)^#.*\n?", "", text))
        stanzas = [_fields(block) for block in blocks if block.strip()]
        return tuple(
            s for s in stanzas if s.get("Enabled", "yes").lower() not in ("no", "false", "0")
        )
    entries = []
    pattern = r"^\s*deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s*([^#\n]*)"
    for options, uri, suite, components in re.findall(pattern, text, re.M):
        entry = {"Types": "deb", "URIs": uri, "Suites": suite, "Components": components.strip()}
        for name, _, value in (option.partition("=") for option in options.split()):
            entry[{"arch": "Architectures"}.get(name.lower(), name.title())] = value.replace(
                ",", " "
            )
        entries.append(entry)
    return tuple(entries)


def _fields(block: str) -> dict[str, str]:
    fields = re.findall(r"^([^\s:]+):[ \t]*(.*(?:\n[ \t].*)*)", block, re.M)
    return {name.title().replace("Uris", "URIs"): value.strip() for name, value in fields}


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
    script = [
        "apt-config",
        "shell",
        "LIST",
        "Dir::Etc::sourcelist/f",
        "PARTS",
        "Dir::Etc::sourceparts/d",
    ]
    done = subprocess.run(script, capture_output=True, errors="replace", check=False)
    places = dict(re.findall(r"(LIST|PARTS)='([^']*)'", done.stdout))
    parts = Path(places.get("PARTS", "/nowhere")).glob("*")
    files = [
        Path(places.get("LIST", "/nowhere")),
        *sorted(p for p in parts if p.suffix in (".list", ".sources")),
    ]
    return tuple(
        stanza
        for file in files
        if file.is_file()
        for stanza in parse_sources(file.read_text(encoding="utf-8"), file.suffix == ".sources")
    )


def _reason(text: str) -> str:
    # Without the URL, which may contain credentials.
    error = re.search(r"^E: (.*)", text, re.M)
    if error:
        return re.sub(r"(Failed to fetch )?\S+://\S+\s*", "", error[1]).strip()
    return "no reason given"


def resolve_debs(base_name: str, base: BaseRequest, status: str = "") -> tuple[LockedFile, ...]:
    """Return every deb of the base's root file system: essential and requested packages and their
    dependencies.

    For a base over an image, whose dpkg ``status`` lists the installed packages, return only the
    missing ones. Recommended packages are left out. Raises InputError for a package or Python that
    the suite does not have.
    """
    suites = suites_of(base.suite, base.packages)
    names = [name_of(p) for p in base.packages]
    with open_archive(suites, preferences(base.suite, base.packages), status) as apt:
        # usrmerge converts a running system and depends on all of perl. A root file system that is
        # merged from the start fulfills the same dependency with a marker package, which
        # mmdebstrap's hook for it installs.
        essential = ["?essential", *(() if "usrmerge" in names else ("usr-is-merged",))]
        text = _closure(apt, base, names if base.image else [*essential, *names])
    files = tuple(
        LockedFile(
            kind="deb",
            name=name,
            version=unquote(version),
            file=unquote(urlsplit(uri).path.rpartition("/")[2]),
            size=int(size),
            sha256=sha256,
            base=base_name,
        )
        for uri, name, version, size, sha256 in sorted(_URI.findall(text), key=lambda row: row[1])
    )
    check_python(base_name, base, {file.name: file.version for file in files})
    return files


def download_debs(files: Sequence[LockedFile], suites: tuple[str, ...], folder: Path) -> None:
    """Let apt download the debs that the archive still has to ``folder``, each named by its sha256."""
    with open_archive(suites) as apt:
        records = apt("apt-cache", "show", *(f.name for f in files)).stdout
        present = set(re.findall(r"^Package: (\S+)$.*?^Version: (\S+)$", records, re.M | re.S))
        names = {name for name, _ in present}
        words = [
            f"{f.name}={f.version}" if (f.name, f.version) in present else f.name
            for f in files
            if f.name in names
        ]
        text = ""
        if words:
            text = apt("apt-get", "download", "--print-uris", *words).stdout
        uris = {(name, unquote(version)): uri for uri, name, version, _, _ in _URI.findall(text)}
        nearby = {name: uri.rpartition("/")[0] for (name, _), uri in uris.items()}
        # A pool keeps files for a while after the index drops them, next to their successors.
        triples = [
            word
            for f in files
            if f.name in nearby
            for uri in [
                uris.get((f.name, f.version)) or f"{nearby[f.name]}/{f.file.replace('+', '%2b')}"
            ]
            for word in (uri, f.sha256, f"SHA256:{f.sha256}")
        ]
        if not triples:
            return
        done = apt("/usr/lib/apt/apt-helper", "download-file", *triples, cwd=folder)
        # Whether a file that is not there any more matters is the caller's to judge.
        fault = re.search(
            r"^E: Failed to fetch (?!.*( 40[34] |not found)).*", done.stdout + done.stderr, re.M
        )
        if fault:
            suites_text = " and ".join(suites)
            raise HostError(
                f"the archive of {suites_text} does not send its packages: {_reason(fault[0])}",
                hint="check the network, and run it again",
            )


def preferences(suite: str, packages: Sequence[str]) -> str:
    """Return apt preferences with which each package comes from its suite.

    apt's own ``name/suite`` on the command line would also allow the package's dependencies to come
    from there.
    """
    suites = suites_of(suite, packages)
    # Priority 1: apt uses such a package only if no other version of it exists; -1: never.
    rules = [("*", other, 1) for other in suites[1:]]
    for name, _, own in (package.partition("/") for package in packages):
        rules += [(name, other, 990 if other == own else -1) for other in suites if own]
    # experimental has another codename. Pockets have theirs after the suite's.
    releases = {
        suite: f"a={suite}" if suite == "experimental" else f"n={suite}*" for suite in suites
    }
    return "".join(
        f"Package: {n}\nPin: release {releases[s]}\nPin-Priority: {p}\n\n" for n, s, p in rules
    )


def check_python(base_name: str, base: BaseRequest, chosen: Mapping[str, str]) -> None:
    """Raise InputError if the suite's Python differs from the base's stated version."""
    provided = [
        upstream(v) for name, v in chosen.items() if re.fullmatch(r"python3\.[0-9]+-minimal", name)
    ]
    if provided and base.python not in provided:
        there = {
            "suite": _titled(base.suite),
            "provided": " and ".join(provided),
            "first": provided[0],
        }
        raise refusal("other_python", base=base_name, python=base.python, **there)


def _closure(apt: Apt, base: BaseRequest, packages: Sequence[str]) -> str:
    done = apt("apt-get", "-q", "-y", "install", "--print-uris", *packages)
    if done.returncode == 0:
        return done.stdout
    unknown = re.search(
        r"E: (?:Unable to locate package|Package '?([^' ]+)'? has no installation candidate) "
        r"?(\S*)",
        done.stderr,
    )
    if unknown:
        name = unknown[1] or unknown[2]
        suite = dict(package.split("/") for package in base.packages if "/" in package).get(
            name, base.suite
        )
        raise InputError(
            f"{_titled(suite)} has no package {name}", hint="correct it under `packages`"
        )
    unmet = re.search(
        r"The following packages have unmet dependencies:\n(.*?)\n(?:E:|$)",
        done.stdout + "\n",
        re.S,
    )
    if unmet:
        reason = "; ".join(line.strip() for line in unmet[1].splitlines())
    else:
        reason = done.stderr.strip()[:300]
    later = suites_of(base.suite, base.packages)[1:]
    hint = None
    if later:
        hint = f"list what must come from {' or '.join(later)} too, as package/{later[0]}"
    raise InputError(
        f"the packages of {_titled(base.suite)} are not compatible: {reason}", hint=hint
    )
