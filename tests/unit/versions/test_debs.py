import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from primus_images.errors import HostError, InputError
from primus_images.versions import debs
from primus_images.versions.debs import (
    check_python,
    download_debs,
    parse_sources,
    preferences,
    resolve_debs,
)
from primus_images.versions.lock import BaseRequest, LockedFile, suites_of, upstream
from tables import text_of

HOST = text_of("debian.sources")


def debian_stanzas(
    host: Sequence[debs.Stanza],
    suites: Sequence[str],
    environment: Mapping[str, str],
    default: str = "",
) -> list[debs.Stanza]:
    return [
        stanza
        for suite in suites
        for stanza in debs.debian_stanzas(host, suite, environment, lambda: default)
    ]


def _pairs(*suites: str, host: str = HOST, deb822: bool = True) -> list[tuple[str, str]]:
    return [
        (s["URIs"], s["Suites"]) for s in debian_stanzas(parse_sources(host, deb822), suites, {})
    ]


def test_sources_of_another_suite_come_from_the_hosts_own() -> None:
    assert _pairs("trixie") == [
        ("http://mirror.example/debian", "trixie trixie-updates"),
        ("http://mirror.example/debian-security", "trixie-security"),
    ]


def test_each_suite_of_a_base_has_its_sources() -> None:
    assert _pairs("sid", "experimental") == [
        ("http://mirror.example/debian", "sid"),
        ("http://mirror.example/debian", "experimental"),
    ]
    env = {"PRIMUS_DEBIAN_MIRROR": "http://x/debian http://x/debian-security"}
    assert [(s["URIs"], s["Suites"]) for s in debian_stanzas((), ("sid", "experimental"), env)] == [
        ("http://x/debian", "sid"),
        ("http://x/debian", "experimental"),
    ]


@pytest.mark.parametrize("env", [{}, {"PRIMUS_DEBIAN_MIRROR": "http://x/debian"}])
def test_only_suites_that_never_release_may_be_past_their_date(env: dict[str, str]) -> None:
    found = debian_stanzas(parse_sources(HOST, True), ("trixie", "sid", "experimental"), env)
    lax = {s["Suites"] for s in found if s.get("Check-Valid-Until") == "no"}
    assert lax == {"sid", "experimental"}


def test_preferences_hold_a_package_to_its_suite() -> None:
    assert preferences("sid", ("a", "b")) == ""
    text = preferences("sid", ("a", "librccl1/experimental", "c/trixie"))
    rules = [
        dict(line.split(": ") for line in block.splitlines())
        for block in text.strip().split("\n\n")
    ]
    assert [tuple(r.values()) for r in rules] == [
        ("*", "release a=experimental", "1"),
        ("*", "release n=trixie*", "1"),
        ("librccl1", "release n=sid*", "-1"),
        ("librccl1", "release a=experimental", "990"),
        ("librccl1", "release n=trixie*", "-1"),
        ("c", "release n=sid*", "-1"),
        ("c", "release a=experimental", "-1"),
        ("c", "release n=trixie*", "990"),
    ]
    assert suites_of("sid", ("a", "librccl1/experimental", "c/trixie", "d/sid")) == (
        "sid",
        "experimental",
        "trixie",
    )


def test_vendor_and_disabled_sources_stay_out_and_components_are_main() -> None:
    stanzas = debian_stanzas(parse_sources(HOST, True), ("bookworm",), {})
    assert not any("vendor" in s["URIs"] or "off." in s["URIs"] for s in stanzas)
    assert {s["Components"] for s in stanzas} == {"main"}
    assert all("debian-archive" in s["Signed-By"] for s in stanzas)


def test_one_line_sources_keep_their_options() -> None:
    text = (
        "deb [arch=amd64 trusted=yes] http://m.example/debian bookworm main # c\n"
        "deb-src http://m.example/debian bookworm main\n"
    )
    (stanza,) = debian_stanzas(parse_sources(text, False), ("trixie",), {})
    assert stanza["Trusted"] == "yes"
    assert stanza["Architectures"] == "amd64"
    assert stanza["Suites"] == "trixie"


def test_a_host_without_debian_takes_the_mirror_that_debootstrap_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ubuntu = parse_sources("deb http://archive.example/ubuntu noble main universe\n", False)
    with pytest.raises(HostError, match="names no source of Debian bookworm"):
        debian_stanzas(ubuntu, ("bookworm",), {})
    script = tmp_path / "debootstrap"
    monkeypatch.setattr(debs, "_DEBOOTSTRAP", script)
    packages: list[str] = []
    monkeypatch.setattr(debs, "install", packages.extend)
    assert debs._default_mirror() == ""
    assert packages == ["debootstrap", "debian-archive-keyring"]
    script.write_text(
        '#!/bin/sh\nDEF_MIRROR="http://x.example/debian"\nDEF_HTTPS_MIRROR="https://x.example/debian"\n'
    )
    stanzas = debian_stanzas(ubuntu, ("bookworm", "sid"), {}, debs._default_mirror())
    assert [(s["URIs"], s["Suites"], s["Signed-By"]) for s in stanzas] == [
        ("http://x.example/debian", "bookworm", "/usr/share/keyrings/debian-archive-keyring.gpg"),
        (
            "http://x.example/debian-security",
            "bookworm-security",
            "/usr/share/keyrings/debian-archive-keyring.gpg",
        ),
        ("http://x.example/debian", "sid", "/usr/share/keyrings/debian-archive-keyring.gpg"),
    ]


def test_debians_own_sources_win_over_debootstraps_mirror() -> None:
    stanzas = debian_stanzas(
        parse_sources(HOST, True), ("bookworm",), {}, "http://x.example/debian"
    )
    assert not any("x.example" in s["URIs"] for s in stanzas)


def test_the_mirror_variable_wins_and_knows_security() -> None:
    env = {
        "PRIMUS_DEBIAN_MIRROR": "http://x/debian http://x/debian-security",
        "PRIMUS_DEBIAN_KEYRING": "/k.gpg",
    }
    stanzas = debian_stanzas(parse_sources(HOST, True), ("trixie",), env)
    assert [(s["URIs"], s["Suites"], s["Signed-By"]) for s in stanzas] == [
        ("http://x/debian", "trixie", "/k.gpg"),
        ("http://x/debian-security", "trixie-security", "/k.gpg"),
    ]


@pytest.mark.parametrize(
    ("version", "bare"),
    [
        ("3.11.2-6+deb12u9", "3.11.2"),
        ("1:3.13.5-2", "3.13.5"),
        ("3.12.0~rc1-1", "3.12.0"),
        ("3.11.2", "3.11.2"),
        # Upstream's own hyphens precede the last one.
        ("1:2.0-beta-3", "2.0-beta"),
        ("1.0+dfsg-2", "1.0"),
    ],
)
def test_upstream(version: str, bare: str) -> None:
    assert upstream(version) == bare


def test_another_python_in_the_suite_is_named() -> None:
    base = BaseRequest(suite="bookworm", python="3.11.9", packages=("python3.11-minimal",))
    with pytest.raises(
        InputError, match=r"states Python 3\.11\.9, but Debian bookworm has 3\.11\.2"
    ):
        check_python("bookworm", base, {"python3.11-minimal": "3.11.2-6+deb12u9"})
    check_python("tools", base, {"gcc": "1"})
    with pytest.raises(InputError, match=r"bookworm has 3\.12\.1"):
        check_python("bookworm", base, {"python3.12-minimal": "3.12.1-1"})


@pytest.fixture
def archive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Path, Sequence[str]]]:
    """An archive whose apt-get update works; the list has the folder and words of each call."""
    calls: list[tuple[Path, Sequence[str]]] = []

    def run(apt: debs.Apt, tool: str, *words: str) -> subprocess.CompletedProcess[str]:
        calls.append((apt.folder, (tool, *words)))
        return subprocess.CompletedProcess(words, 0, "", "")

    keyring = tmp_path / "own.gpg"
    keyring.touch()
    monkeypatch.setenv(
        "PRIMUS_DEBIAN_MIRROR", "http://me:SECRET@a.example/debian http://b.example/d"
    )
    monkeypatch.setenv("PRIMUS_DEBIAN_KEYRING", str(keyring))
    monkeypatch.setattr(debs.Apt, "run", run)
    monkeypatch.setattr(debs.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(debs, "_host_stanzas", list)
    return calls


def test_an_archive_is_a_folder_with_suites_preferences_and_installed_packages(
    archive: list[tuple[Path, Sequence[str]]], tmp_path: Path
) -> None:
    with debs.open_archive(("bookworm", "trixie"), "Package: gcc", "Package: bash") as apt:
        sources = parse_sources((apt.folder / "sources/debian.sources").read_text(), True)
        assert [(row["Suites"], row["URIs"]) for row in sources] == [
            ("bookworm", "http://me:SECRET@a.example/debian"),
            ("bookworm", "http://b.example/d"),
            ("trixie", "http://me:SECRET@a.example/debian"),
            ("trixie", "http://b.example/d"),
        ]
        assert {row["Signed-By"] for row in sources} == {str(tmp_path / "own.gpg")}
        assert (apt.folder / "preferences/suites").read_text() == "Package: gcc"
        assert (apt.folder / "state/status").read_text() == "Package: bash"
        assert f'Dir::State "{apt.folder}/state"' in (apt.folder / "apt.conf").read_text()
        assert (apt.folder / "state/lists/partial").is_dir()
        assert (apt.folder / "cache/archives/partial").is_dir()
        assert apt.mirrors == ("http://a.example/debian", "http://b.example/d")
    ((folder, words),) = archive
    assert (folder, words[0], words[-1]) == (apt.folder, "apt-get", "update")
    assert not folder.exists()


@pytest.mark.parametrize(
    ("log", "mirror", "reason"),
    [
        (
            "W: Failed to fetch http://b.example/d/dists/x  Connection refused\n"
            "E: Failed to fetch http://b.example/d/dists/x  Connection refused\n",
            "http://b.example/d",
            "Connection refused",
        ),
        ("E: Some index files failed", "http://a.example/debian", "Some index files failed"),
        ("W: old", "http://a.example/debian", "no reason given"),
    ],
)
def test_the_mirror_that_does_not_answer_is_named(
    archive: list[tuple[Path, Sequence[str]]],
    monkeypatch: pytest.MonkeyPatch,
    log: str,
    mirror: str,
    reason: str,
) -> None:
    def run(*words: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, 100, "", log)

    monkeypatch.setattr(debs.Apt, "run", run)
    with pytest.raises(HostError) as caught, debs.open_archive(("bookworm",)):
        pass
    said = f"the Debian archive at {mirror} does not answer: {reason}"
    assert caught.value.message == said


def test_a_keyring_that_is_not_there_is_installed_only_if_it_is_the_makers(
    archive: list[tuple[Path, Sequence[str]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed: list[str] = []
    monkeypatch.setattr(debs, "install", installed.extend)
    monkeypatch.setenv("PRIMUS_DEBIAN_KEYRING", str(tmp_path / "none.gpg"))
    with (
        pytest.raises(HostError, match=r"no keyring .*none\.gpg"),
        debs.open_archive(("bookworm",)),
    ):
        pass
    assert (installed, archive) == ([], [])
    monkeypatch.delenv("PRIMUS_DEBIAN_KEYRING")
    monkeypatch.setattr(debs, "_KEYRING", f"{tmp_path}/{{}}-archive-keyring.gpg")
    with debs.open_archive(("bookworm",)):
        assert installed == ["debian-archive-keyring"]


def test_a_host_without_apt_is_told_what_has_it(
    archive: list[tuple[Path, Sequence[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debs.shutil, "which", lambda _name: None)
    with pytest.raises(HostError, match="apt-get is missing"), debs.open_archive(("bookworm",)):
        pass
    assert archive == []


SHA = "a" * 64
MIRRORS = ("https://a.example/debian", "https://b.example/debian")


class StandIn(debs.Apt):
    """apt of which each tool says what a test lets it say: (tool, command) → code, out, err."""

    answers: ClassVar[dict[tuple[str, str], tuple[int, str, str]]] = {}
    asked: ClassVar[list[tuple[str, ...]]] = []

    def run(self, tool: str, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        self.asked.append((tool, *words))
        for (name, command), (code, out, err) in self.answers.items():
            if name == tool and command in words:
                return subprocess.CompletedProcess(words, code, out, err)
        raise AssertionError((tool, words))


@pytest.fixture
def apt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIn:
    stand_in = StandIn(tmp_path, MIRRORS)
    monkeypatch.setattr(StandIn, "answers", {})
    monkeypatch.setattr(StandIn, "asked", [])

    @contextmanager
    def open_archive(*words: Any) -> Iterator[StandIn]:
        StandIn.asked.append(("open", *map(str, words)))
        yield stand_in

    monkeypatch.setattr(debs, "open_archive", open_archive)
    return stand_in


def uri_line(name: str, version: str, size: int = 9, sha256: str = SHA) -> str:
    file = f"{name}_{version.replace('%3a', '%3A')}_amd64.deb"
    return f"'http://m/pool/{name}/{file}' {name}_{version}_amd64.deb {size} SHA256:{sha256}\n"


def base_of(**fields: Any) -> BaseRequest:
    usual: dict[str, Any] = {"suite": "bookworm", "python": "3.11.2", "packages": ("gcc",)}
    return BaseRequest(**{**usual, **fields})


def test_the_files_of_a_base_are_those_that_apt_would_install(apt: StandIn) -> None:
    listing = uri_line("zlib1g", "1%3a1.2") + uri_line("gcc", "12", 7, "b" * 64)
    apt.answers["apt-get", "install"] = (0, f"Reading...\n{listing}", "")
    files = resolve_debs("small", base_of())
    assert [(file.name, file.version, file.size, file.base) for file in files] == [
        ("gcc", "12", 7, "small"),
        ("zlib1g", "1:1.2", 9, "small"),
    ]
    assert [file.file for file in files] == ["gcc_12_amd64.deb", "zlib1g_1:1.2_amd64.deb"]
    assert [file.sha256 for file in files] == ["b" * 64, SHA]


@pytest.mark.parametrize(
    ("base", "packages", "status"),
    [
        (base_of(), ["?essential", "usr-is-merged", "gcc"], ""),
        (base_of(packages=("usrmerge",)), ["?essential", "usrmerge"], ""),
        (base_of(image="docker.io/x@sha256:1"), ["gcc"], "Package: x"),
        (base_of(packages=("gcc/trixie",)), ["?essential", "usr-is-merged", "gcc"], ""),
    ],
)
def test_a_base_of_packages_alone_has_what_every_system_needs(
    apt: StandIn, base: BaseRequest, packages: list[str], status: str
) -> None:
    apt.answers["apt-get", "install"] = (0, "", "")
    assert resolve_debs("small", base, status) == ()
    opened, asked = apt.asked
    assert opened[-1] == status
    assert asked[asked.index("--print-uris") + 1 :] == tuple(packages)


@pytest.mark.parametrize(
    ("base", "out", "err", "message", "hint"),
    [
        (
            base_of(),
            "",
            "E: Unable to locate package gcc",
            "Debian bookworm has no package gcc",
            "correct it under `packages`",
        ),
        (
            base_of(packages=("gcc/trixie",)),
            "",
            "E: Package 'gcc' has no installation candidate",
            "Debian trixie has no package gcc",
            "correct it under `packages`",
        ),
        (
            base_of(),
            "The following packages have unmet dependencies:\n a : Depends: b\n c : Depends: d\n",
            "E: Unable to correct problems",
            "the packages of Debian bookworm are not compatible: a : Depends: b; c : Depends: d",
            None,
        ),
        (
            base_of(packages=("gcc", "cmake/trixie")),
            "",
            "  E: broken  ",
            "the packages of Debian bookworm are not compatible: E: broken",
            "list what must come from trixie too, as package/trixie",
        ),
    ],
)
def test_packages_that_apt_cannot_install_are_named(
    apt: StandIn, base: BaseRequest, out: str, err: str, message: str, hint: str | None
) -> None:
    apt.answers["apt-get", "install"] = (100, out, err)
    with pytest.raises(InputError) as caught:
        resolve_debs("small", base)
    assert (caught.value.message, caught.value.hint) == (message, hint)


def deb(name: str, version: str, sha256: str = SHA) -> LockedFile:
    file = f"{name}_{version}_amd64.deb"
    return LockedFile(kind="deb", name=name, version=version, file=file, size=9, sha256=sha256)


def test_debs_are_downloaded_of_the_version_or_beside_their_successors(
    apt: StandIn, tmp_path: Path
) -> None:
    apt.answers["apt-cache", "show"] = (
        0,
        "Package: gcc\nArchitecture: amd64\nVersion: 12\n\nPackage: zlib\nVersion: 2\n",
        "",
    )
    listing = uri_line("gcc", "12") + uri_line("zlib", "2")
    apt.answers["apt-get", "download"] = (0, listing, "")
    apt.answers["/usr/lib/apt/apt-helper", "download-file"] = (0, "", "")
    files = [deb("gcc", "12"), deb("zlib", "1+b1", "b" * 64), deb("gone", "3")]
    download_debs(files, ("bookworm",), tmp_path)
    _, _, named, downloaded = apt.asked
    assert named[-2:] == ("gcc=12", "zlib")
    assert downloaded[2:] == (
        "http://m/pool/gcc/gcc_12_amd64.deb",
        SHA,
        f"SHA256:{SHA}",
        "http://m/pool/zlib/zlib_1%2bb1_amd64.deb",
        "b" * 64,
        f"SHA256:{'b' * 64}",
    )


def test_of_an_archive_that_has_none_of_the_files_nothing_is_downloaded(
    apt: StandIn, tmp_path: Path
) -> None:
    apt.answers["apt-cache", "show"] = (0, "Package: zlib\nVersion: 2\n", "")
    download_debs([deb("gcc", "12")], ("bookworm",), tmp_path)
    assert len(apt.asked) == 2


@pytest.mark.parametrize(
    ("err", "message"),
    [
        (
            "E: Failed to fetch http://m/pool/gcc/gcc_12_amd64.deb  Hash Sum mismatch\n"
            f"   Hashes of received file:\n    - SHA256:{'f' * 64}\n",
            f"gcc_12_amd64.deb from the archive of bookworm and trixie has sha256 {'f' * 64}, but "
            f"sha256 {SHA} is locked for gcc 12",
        ),
        (
            "E: Failed to fetch http://m/x.deb  Could not connect to m:80\n",
            "the archive of bookworm and trixie does not send its packages: Could not connect to "
            "m:80",
        ),
        ("E: Failed to fetch http://m/x.deb  404  Not Found\n", None),
        ("E: Failed to fetch http://m/x.deb  File not found\n", None),
    ],
)
def test_only_a_file_that_is_not_there_any_more_is_for_the_caller_to_judge(
    apt: StandIn, tmp_path: Path, err: str, message: str | None
) -> None:
    apt.answers["apt-cache", "show"] = (0, "Package: gcc\nVersion: 12\n", "")
    apt.answers["apt-get", "download"] = (0, uri_line("gcc", "12"), "")
    apt.answers["/usr/lib/apt/apt-helper", "download-file"] = (100, "", err)
    suites = ("bookworm", "trixie")
    if message is None:
        download_debs([deb("gcc", "12")], suites, tmp_path)
        return
    with pytest.raises(HostError) as caught:
        download_debs([deb("gcc", "12")], suites, tmp_path)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (
            f"W: GPG error: {MIRRORS[1]} bookworm\nE: The repository is not signed.\n",
            f"the Debian archive at {MIRRORS[1]} does not answer: The repository is not signed.",
        ),
        (
            f"E: Failed to fetch {MIRRORS[0]}/x  404  Not Found\n",
            f"the Debian archive at {MIRRORS[0]} does not answer: 404  Not Found",
        ),
        ("", f"the Debian archive at {MIRRORS[0]} does not answer: no reason given"),
    ],
)
def test_an_archive_that_does_not_answer_is_named(apt: StandIn, log: str, message: str) -> None:
    apt.answers["apt-get", "update"] = (100, "", log)
    with pytest.raises(HostError) as caught:
        apt.update("debian")
    assert caught.value.message == message
    assert str(caught.value.hint).endswith("set PRIMUS_DEBIAN_MIRROR to a mirror it reaches")
    apt.answers["apt-get", "update"] = (0, "", log)
    apt.update("debian")


@pytest.mark.parametrize(
    ("versions", "found"),
    [
        ({"python3.11-minimal": "3.11.2-6"}, None),
        ({"python3.11-minimal": "1:3.11.9-6+b1"}, "3.11.9"),
        ({"python3.11": "3.11.9-6"}, None),
        ({"libpython3.11-minimal": "3.11.9-6"}, None),
        ({}, None),
    ],
)
def test_the_python_of_a_suite_is_that_of_the_base(
    versions: dict[str, str], found: str | None
) -> None:
    if found is None:
        check_python("small", base_of(), versions)
        return
    with pytest.raises(InputError) as caught:
        check_python("small", base_of(), versions)
    assert caught.value.message == (
        f"base small states Python 3.11.2, but Debian bookworm has {found}"
    )
    assert caught.value.hint == f"write python: {found} in versions.yaml"
