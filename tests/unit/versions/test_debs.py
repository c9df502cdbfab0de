from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from primus_images.errors import HostError, InputError
from primus_images.versions import debs
from primus_images.versions.debs import check_python, parse_sources, preferences
from primus_images.versions.lock import BaseRequest, suites_of, upstream
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
