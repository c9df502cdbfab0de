"""What becomes of Debian packages: over an image that a registry gave, and of their kernels."""

import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from primus_images.engine.kinds import debs
from primus_images.engine.kinds.debs import (
    kernel_files,
    tar_entries,
    unlisted,
    without_empty_merged,
)
from primus_images.errors import CheckFailed, HostError
from primus_images.oci.tar import Entry
from primus_images.plan.action import Action
from primus_images.versions.lock import LockedFile


def _deb(name: str) -> LockedFile:
    return LockedFile(kind="deb", name=name, version="1", file=name, size=1, sha256="0" * 64)


@pytest.mark.parametrize(("shared", "kind"), [("usr/lib", "dir"), ("usr/lib/file", "file")])
def test_two_packages_share_folders_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shared: str, kind: str
) -> None:
    def entries(deb: LockedFile, path: Path, scratch: Path) -> Iterator[Entry]:
        yield Entry(path=shared, kind=kind)  # type: ignore[arg-type]
        yield Entry(path=f"usr/share/{deb.name}")

    monkeypatch.setattr(debs, "_entries", entries)
    action = Action(name="a", kind="debs", inputs=(), files=(_deb("one"), _deb("two")))
    shop = SimpleNamespace(file=lambda deb: tmp_path)
    if kind == "dir":
        paths = [entry.path for entry in debs._over_entries(action, shop, tmp_path)]  # type: ignore[arg-type]
        assert paths == [shared, "usr/share/one", "usr/share/two"]
    else:
        with pytest.raises(HostError, match=f"/{shared} is in two packages, one of which is two"):
            debs._over_entries(action, shop, tmp_path)  # type: ignore[arg-type]


def tar_of(*members: tuple[str, str, str], **fields: Any) -> bytes:
    """A package's archive: path, kind, and content or target of a link."""
    kinds = {"dir": tarfile.DIRTYPE, "symlink": tarfile.SYMTYPE, "hardlink": tarfile.LNKTYPE}
    kinds["fifo"] = tarfile.FIFOTYPE
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, kind, text in members:
            member = tarfile.TarInfo(path)
            member.pax_headers = dict(fields.get("headers", {}))
            if kind == "file":
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text.encode()))
            else:
                member.type = kinds[kind]
                member.linkname = text
                archive.addfile(member)
    return stream.getvalue()


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """A file that a stand-in for dpkg-deb takes for a package with these members."""

    def dpkg_deb(option: str, path: Path, name: str, stdout: Any = None) -> bytes:
        if option == "--fsys-tarfile":
            stdout.write(path.read_bytes())
            return b""
        return f"Package: {name}\n\n".encode()

    monkeypatch.setattr(debs, "dpkg_deb", dpkg_deb)

    def package(*members: tuple[str, str, str]) -> Path:
        path = tmp_path / "package.deb"
        path.write_bytes(tar_of(*members))
        return path

    return package


def test_a_package_over_an_image_is_merged_trimmed_and_registered(
    unpacked: Callable[..., Path], tmp_path: Path
) -> None:
    path = unpacked(
        ("./bin", "dir", ""),
        ("./bin/tool", "file", "x"),
        ("./bin/same", "hardlink", "./bin/tool"),
        ("./lib/libx.so", "symlink", "bin/tool"),
        ("./usr/share/doc/x/README", "file", "no"),
        ("./usr/share/doc/x/copyright", "file", "yes"),
        ("./etc/x.conf", "file", "c"),
    )
    action = Action(name="a", kind="debs", inputs=(), files=(_deb("one"),))
    shop: Any = SimpleNamespace(file=lambda deb: path)
    entries = {entry.path: entry for entry in debs._over_entries(action, shop, tmp_path)}
    assert list(entries) == [
        "usr/bin/tool",
        "usr/bin/same",
        "usr/lib/libx.so",
        "usr/share/doc/x/copyright",
        "etc/x.conf",
        "var/lib/dpkg/status.d/one",
    ]
    assert entries["usr/bin/same"].link == "usr/bin/tool"
    assert entries["usr/lib/libx.so"].link == "bin/tool"
    record = b"Package: one\nStatus: install ok installed\n"
    status = entries["var/lib/dpkg/status.d/one"]
    assert (status.source, status.size) == (record, len(record))


def test_members_of_an_archive_have_their_bytes_and_attributes(tmp_path: Path) -> None:
    tar = tmp_path / "a.tar"
    headers = {"SCHILY.xattr.security.capability": "\x01", "comment": "x"}
    tar.write_bytes(
        tar_of(("./", "dir", ""), ("dev/x", "file", "no"), ("a", "file", "abc"), headers=headers)
    )
    (entry,) = tar_entries(tar, ["dev/*"])
    assert (entry.path, entry.kind, entry.size) == ("a", "file", 3)
    assert entry.xattrs == {"security.capability": b"\x01"}
    assert b"".join(entry.chunks()) == b"abc"


def test_an_archive_has_files_folders_and_links_only(tmp_path: Path) -> None:
    tar = tmp_path / "a.tar"
    tar.write_bytes(tar_of(("run/pipe", "fifo", "")))
    with pytest.raises(CheckFailed, match="the base contains /run/pipe, which is not a file"):
        list(tar_entries(tar))
    assert list(tar_entries(tar, ["run/*"])) == []


def test_empty_folders_of_a_merged_usr_are_left_out_with_their_links() -> None:
    paths = ["lib64", "usr/lib64", "usr/lib64/ld.so", "lib32", "usr/lib32", "usr/libx", "etc"]
    left = without_empty_merged([Entry(path=path) for path in paths])
    assert [entry.path for entry in left] == [
        "lib64",
        "usr/lib64",
        "usr/lib64/ld.so",
        "usr/libx",
        "etc",
    ]


def listing(name: str, *files: str) -> Entry:
    text = "\n".join(files).encode()
    return Entry(path=f"var/lib/dpkg/info/{name}.list", size=len(text), source=text)


def test_packages_with_kernels_that_no_pattern_names_are_found() -> None:
    entries = [
        listing("rocblas:amd64", "/opt/rocblas/a.co"),
        listing("listed", "/opt/rocblas/b.co"),
        listing("hipblaslt", "/usr/x", "/opt/hip/c.co"),
        listing("plain", "/usr/bin/a"),
        Entry(path="var/lib/dpkg/info/rocblas.md5sums"),
    ]
    kernels = {"listed": ["/opt/rocblas/*"], "other": ["/opt/hip/*"]}
    assert unlisted(entries, kernels) == ["hipblaslt", "rocblas"]


@pytest.mark.parametrize(
    ("arch", "paths"),
    [
        ("gfx942", ["opt/a_gfx942.co", "opt/link_gfx942"]),
        ("gfx94", []),
        ("gfx90a", ["opt/b_gfx90a.dat"]),
        (None, ["opt/a_gfx942.co", "opt/link_gfx942", "opt/b_gfx90a.dat"]),
    ],
)
def test_kernels_of_other_architectures_are_left_out_by_their_names(
    unpacked: Callable[..., Path], tmp_path: Path, arch: str | None, paths: list[str]
) -> None:
    path = unpacked(
        ("opt", "dir", ""),
        ("opt/a_gfx942.co", "file", "a"),
        ("opt/link_gfx942", "symlink", "a_gfx942.co"),
        ("opt/b_gfx90a.dat", "file", "b"),
        ("usr/c_gfx942.co", "file", "c"),
    )
    entries = kernel_files(arch, path, ["/opt/*"], tmp_path / "folder")
    assert [entry.path for entry in entries] == paths


@pytest.mark.parametrize(
    ("member", "found", "message"),
    [
        (
            ("opt/x_gfx942", "hardlink", "opt/y"),
            True,
            "/opt/x_gfx942 is neither a file nor a symbolic link",
        ),
        (("opt/x.so", "file", "x"), False, "/opt/x.so holds no GPU code and names no architecture"),
        (("opt/x.so", "file", "x"), ValueError("it is cut"), "/opt/x.so: it is cut"),
    ],
)
def test_a_file_without_readable_gpu_code_is_refused(
    unpacked: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    member: tuple[str, str, str],
    found: Any,
    message: str,
) -> None:
    def keep_only(*_: object) -> bool:
        if isinstance(found, Exception):
            raise found
        return bool(found)

    monkeypatch.setattr(debs, "keep_only", keep_only)
    with pytest.raises(CheckFailed) as caught:
        kernel_files("gfx942", unpacked(member), ["/opt/*"], tmp_path / "folder")
    assert caught.value.message == message
    assert str(caught.value.hint).startswith("narrow the base's pattern under `kernels`")


def test_code_of_other_architectures_is_removed_from_a_file(
    unpacked: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep_only(arch: str, source: IO[bytes], size: int, out: IO[bytes]) -> bool:
        out.write(source.read()[:size].replace(b"gfx90a", b"\0" * 6))
        return arch == "gfx942"

    monkeypatch.setattr(debs, "keep_only", keep_only)
    path = unpacked(("opt/x.so", "file", "gfx942gfx90a"), ("opt/l", "symlink", "x.so"))
    pruned, link = kernel_files("gfx942", path, ["/opt/*"], tmp_path / "folder")
    assert b"".join(pruned.chunks()) == b"gfx942" + b"\0" * 6
    assert (pruned.size, link.link) == (12, "x.so")
    whole, _ = kernel_files(None, path, ["/opt/*"], tmp_path / "other")
    assert b"".join(whole.chunks()) == b"gfx942gfx90a"


def test_a_package_of_an_archive_is_named_by_its_hash(
    unpacked: Callable[..., Path], tmp_path: Path
) -> None:
    archive = tmp_path / "archive"
    archive.mkdir()
    package = unpacked(("a", "file", "x"))
    stanza = debs._publish(_deb("one"), package, archive)
    name = f"{'0' * 16}.deb"
    assert stanza.decode() == (f"Package: one\nFilename: ./{name}\nSize: 1\nSHA256: {'0' * 64}\n")
    assert (archive / name).read_bytes() == package.read_bytes()


@pytest.mark.parametrize(("over", "asked"), [(True, []), (False, ["mmdebstrap"])])
def test_only_a_root_file_system_of_packages_needs_mmdebstrap(
    over: bool, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: list[str] = []
    monkeypatch.setattr(debs, "lacks_ids", lambda: None)
    monkeypatch.setattr(debs, "need", lambda tool, package: needed.append(tool))
    spec: dict[str, Any] = {"over": "base"} if over else {}
    shop: Any = None
    debs.prepare([Action(name="a", kind="debs", inputs=(), spec=spec)], shop)
    assert needed == asked
    monkeypatch.setattr(debs, "lacks_ids", lambda: ("there are no ids", "add some"))
    if over:
        debs.prepare([Action(name="a", kind="debs", inputs=(), spec=spec)], shop)
    else:
        with pytest.raises(HostError, match=r"this user cannot build .*: there are no ids"):
            debs.prepare([Action(name="a", kind="debs", inputs=(), spec=spec)], shop)


# Notes its arguments and the archive that it is given, and makes the file system of `root.tar`.
MMDEBSTRAP = """#!/bin/sh
for word; do echo "$word" >> {folder}/words; done
while [ $# -gt 2 ]; do shift; done
archive=${{2#*copy:}}
cp "${{archive% ./}}/Packages" "${{archive% ./}}/Release" {folder}
[ -e {folder}/fails ] && cat {folder}/fails && exit 25
cp {folder}/root.tar "$1"
"""


@pytest.fixture
def rooted(
    unpacked: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Entry]]:
    """Make a root file system of the packages `one` and `two`, with these members."""
    tool = tmp_path / "tool"
    tool.mkdir()
    (tool / "mmdebstrap").write_text(MMDEBSTRAP.format(folder=tool))
    (tool / "mmdebstrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool}:{os.environ['PATH']}")
    package = unpacked(("a", "file", "x"))

    def make(*members: tuple[str, str, str], folder: str = "scratch", **spec: Any) -> list[Entry]:
        (tool / "root.tar").write_bytes(tar_of(*members))
        spec = {"suite": "bookworm", **spec}
        files = (replace(_deb("two"), sha256="2" * 64), _deb("one"))
        action = Action(name="a", kind="debs", inputs=(), files=files, spec=spec)
        shop: Any = SimpleNamespace(file=lambda deb: package, log=lambda _: tmp_path / "log")
        scratch = Path(tempfile.mkdtemp(dir=tmp_path)) / folder
        scratch.mkdir()
        return debs.root_entries(action, shop, scratch)

    return make


def test_a_root_file_system_is_made_of_exactly_the_locked_packages(
    rooted: Callable[..., list[Entry]], tmp_path: Path
) -> None:
    entries = rooted(("usr/bin/a", "file", "abc"), ("dev/null", "fifo", ""))
    assert [entry.path for entry in entries] == ["usr/bin/a"]
    assert b"".join(entries[0].chunks()) == b"abc"
    words = (tmp_path / "tool/words").read_text().splitlines()
    assert words[0] == f"--mode={'unshare' if os.geteuid() else 'root'}"
    assert "--include=one,two" in words
    assert words[-3] == "bookworm"
    stanzas = (tmp_path / "tool/Packages").read_text().split("\n\n")
    assert [stanza.splitlines()[0] for stanza in stanzas] == ["Package: one", "Package: two"]
    assert (tmp_path / "tool/Release").read_text() == "Codename: bookworm\n"


def test_kernels_that_a_base_leaves_out_are_not_unpacked(
    rooted: Callable[..., list[Entry]], tmp_path: Path
) -> None:
    kernels = {"one": ["/opt/one/*"], "two": ["/opt/two/*"]}
    rooted(("usr/bin/a", "file", "abc"), kernels=kernels)
    words = (tmp_path / "tool/words").read_text().splitlines()
    assert "--dpkgopt=path-exclude=/opt/one/*" in words
    assert "--dpkgopt=path-exclude=/opt/two/*" in words
    listed = ("var/lib/dpkg/info/three.list", "file", "/opt/two/x.co\n")
    with pytest.raises(CheckFailed, match="three has files where a pattern of `kernels`"):
        rooted(listed, kernels=kernels)


def test_a_base_that_cannot_be_installed_is_told_with_the_end_of_its_log(
    rooted: Callable[..., list[Entry]], tmp_path: Path
) -> None:
    (tmp_path / "tool/fails").write_text("E: unmet dependencies\n")
    said = r"could not be installed \(mmdebstrap ended with 25\):\nE: unmet dependencies"
    with pytest.raises(CheckFailed, match=said):
        rooted()
    (tmp_path / "tool/fails").write_text("dpkg: No space left on device\n")
    with pytest.raises(HostError, match="is full"):
        rooted()


@pytest.mark.parametrize("user", [0, 1000])
def test_apt_can_name_the_folder_of_the_packages(
    user: int,
    rooted: Callable[..., list[Entry]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(debs.os, "geteuid", lambda: user)
    for name in ("a folder [1]", "plain"):
        rooted(("usr/bin/a", "file", "abc"), folder=name)
        line = (tmp_path / "tool/words").read_text().splitlines()[-1]
        path = line.removeprefix("deb [trusted=yes] copy:").removesuffix(" ./")
        assert set("[] ").isdisjoint(path)
        # An ordinary user's subordinate ids may not enter a home folder.
        assert path.startswith(str(tmp_path)) is (user == 0 and name == "plain")


@pytest.mark.parametrize(
    ("user", "absent", "works", "words"),
    [
        (0, "", True, ["setpriv", "--pdeathsig", "KILL", "unshare"]),
        (0, "", False, []),
        (0, "unshare", True, []),
        (0, "setpriv", True, []),
        (1000, "", True, []),
    ],
)
def test_root_installs_in_namespaces_if_it_can(
    user: int,
    absent: str,
    works: bool,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in {"setpriv", "unshare"} - {absent}:
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {0 if works else 1}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(debs.os, "geteuid", lambda: user)
    assert debs._own_processes()[:4] == words


def test_what_is_no_package_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.deb").write_text("no package")
    with pytest.raises(HostError, match=r"a\.deb is not a Debian package"):
        debs.dpkg_deb("-f", tmp_path / "a.deb", "a.deb")


@pytest.mark.parametrize(("spec", "made"), [({"over": "base"}, "over"), ({}, "root")])
def test_packages_over_an_image_are_unpacked_and_others_installed(
    spec: dict[str, Any], made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debs, "_over_entries", lambda *_: ["over"])
    monkeypatch.setattr(debs, "root_entries", lambda *_: ["root"])
    shop: Any = SimpleNamespace(write=lambda action, entries: entries)
    action = Action(name="a", kind="debs", inputs=(), spec=spec)
    assert debs.make(action, shop, tmp_path) == [made]
