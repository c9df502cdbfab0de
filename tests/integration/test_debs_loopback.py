"""apt's resolver and our fetch against a real Debian archive on 127.0.0.1."""

import hashlib
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from loopback import Server, index_debs, make_deb, serve
from primus_images.errors import HostError, InputError
from primus_images.progress import Progress
from primus_images.versions.debs import resolve_debs
from primus_images.versions.fetch import fetch
from primus_images.versions.filecache import FileCache
from primus_images.versions.lock import BaseRequest, LockedFile, Request
from primus_images.versions.relock import resolve

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt"),
]


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    root = tmp_path / "www"
    pool = root / "pool"
    make_deb(pool, "core", "1:1.0-1", essential=True, needs="usrmerge | usr-is-merged")
    make_deb(pool, "usrmerge", "37", needs="perl-all")
    make_deb(pool, "usr-is-merged", "37")
    make_deb(pool, "perl-all", "5.36-1")
    make_deb(
        pool, "python3.11-minimal", "3.11.2-6+deb12u9", needs="libthing (>= 1)", padding=400_000
    )
    make_deb(pool, "libthing", "1.0-1")
    make_deb(pool, "unrelated", "1")
    make_deb(pool, "apt", "2.6.1")
    index_debs(root, "bookworm")
    with serve(root) as server:
        _use(tmp_path, monkeypatch, f"deb [trusted=yes] {server.url}/ bookworm main\n")
        yield server


@pytest.fixture
def later(archive: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """sid beside bookworm: a tool needs a newer library; nobody asks for the other new packages."""
    pool = archive.root / "pool"
    make_deb(pool, "tool", "2", needs="libtool (>= 2), only-later, libthing")
    make_deb(pool, "libtool", "2")
    make_deb(pool, "only-later", "2")
    make_deb(pool, "core", "2:9", essential=True)
    make_deb(pool, "libthing", "9")
    index_debs(
        archive.root,
        "sid",
        lambda file: "unrelated" not in file,
        valid_until="Wed, 08 Jan 2020 00:00:00 UTC",
    )
    make_deb(pool, "libtool", "1")
    old = {"core_9", "libthing_9", "tool_2", "libtool_2", "only-later_2"}
    index_debs(
        archive.root, "bookworm", keep=lambda file: file.removesuffix("_amd64.deb") not in old
    )
    _use(tmp_path, monkeypatch, f"deb [trusted=yes] {archive.url}/ bookworm main\n")
    return archive


def _use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: str) -> None:
    parts = tmp_path / "sources.list.d"
    parts.mkdir(exist_ok=True)
    (parts / "test.list").write_text(sources)
    conf = tmp_path / "apt.conf"
    conf.write_text(
        'Dir::Etc::sourcelist "/dev/null";\nDir::Etc::sourceparts '
        f'"{parts}";\nAcquire::http::Proxy "DIRECT";\n'
    )
    monkeypatch.setenv("APT_CONFIG", str(conf))
    for name in ("PRIMUS_DEBIAN_MIRROR", "PRIMUS_DEBIAN_KEYRING", "http_proxy"):
        monkeypatch.delenv(name, raising=False)


def _base(*packages: str, python: str = "3.11.2") -> BaseRequest:
    return BaseRequest(
        suite="bookworm", python=python, packages=packages or ("python3.11-minimal",)
    )


def _resolve(base: BaseRequest) -> dict[str, LockedFile]:
    return {f.name: f for f in resolve_debs("b", base)}


def _fetch(files: Iterable[LockedFile], folder: Path, base: BaseRequest | None = None) -> None:
    request = Request(target="t", channel="debian", python="3.11", bases={"b": base or _base()})
    cache, wanted = FileCache(folder), dict.fromkeys(files, request)
    fetch(wanted, cache, progress=Progress())
    assert all(cache.verify(file.sha256) for file in wanted)


def test_closure_is_essential_and_asked_without_usrmerge(archive: Server) -> None:
    found = _resolve(_base())
    assert set(found) == {"core", "usr-is-merged", "python3.11-minimal", "libthing"}
    core = found["core"]
    data = (archive.root / "pool" / core.file).read_bytes()
    assert (core.version, core.file, core.base) == ("1:1.0-1", "core_1.0-1_amd64.deb", "b")
    assert (core.size, core.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_wrong_python_and_unknown_package_are_named(archive: Server) -> None:
    with pytest.raises(
        InputError, match=r"states Python 3\.11\.9, but Debian bookworm has 3\.11\.2"
    ):
        _resolve(_base(python="3.11.9"))
    with pytest.raises(InputError, match="Debian bookworm has no package nothere"):
        _resolve(_base("nothere"))


def test_unmet_needs_are_one_sentence(archive: Server) -> None:
    make_deb(archive.root / "pool", "broken", "1", needs="libthing (>= 9)")
    index_debs(archive.root, "bookworm")
    with pytest.raises(
        InputError, match=r"are not compatible: .*broken : Depends: libthing \(>= 9\)"
    ):
        _resolve(_base("broken"))


def test_packages_of_another_suite_leave_the_rest_alone(later: Server, tmp_path: Path) -> None:
    base = _base("python3.11-minimal", "tool/sid", "libtool/sid")
    files = resolve_debs("b", base)
    found = {f.name: f.version for f in files}
    assert found == {
        "core": "1:1.0-1",
        "libthing": "1.0-1",
        "libtool": "2",
        "only-later": "2",
        "python3.11-minimal": "3.11.2-6+deb12u9",
        "tool": "2",
        "usr-is-merged": "37",
    }
    _fetch(files, tmp_path / "c", base)


def test_an_extra_has_what_its_base_lacks_and_not_what_only_maintainer_scripts_call(
    archive: Server,
) -> None:
    for name, needs in {
        "adduser": "passwd",
        "passwd": "",
        "libverbs": "adduser, libthing",
        "verbs": "libverbs",
    }.items():
        make_deb(archive.root / "pool", name, "1", needs=needs)
    index_debs(archive.root, "bookworm")
    over = BaseRequest(
        suite="bookworm", python="3.11.2", packages=("python3.11-minimal", "verbs"), over="b"
    )
    request = Request(
        target="t", channel="debian", python="3.11", bases={"b": _base(), "b rdma": over}
    )
    lock = resolve(request, None, {}, Progress())
    assert {f.name for f in lock.of("deb", "b rdma")} == {"libverbs", "verbs"}
    assert {"core", "libthing"} <= {f.name for f in lock.of("deb", "b")}


def test_what_must_come_from_the_other_suite_too_is_said(later: Server) -> None:
    with pytest.raises(
        InputError, match=r"are not compatible: tool : Depends: libtool \(>= 2\)"
    ) as caught:
        _resolve(_base("tool/sid"))
    assert caught.value.hint == "list what must come from sid too, as package/sid"
    with pytest.raises(InputError, match="Debian sid has no package unrelated"):
        _resolve(_base("tool/sid", "libtool/sid", "unrelated/sid"))


def test_unreachable_archive_answers_in_seconds(
    archive: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = _resolve(_base()).values()
    _use(tmp_path, monkeypatch, "deb [trusted=yes] http://me:SECRET@127.0.0.1:9/ bookworm main\n")
    for work in (lambda: _resolve(_base()), lambda: _fetch(files, tmp_path / "c")):
        began = time.monotonic()
        with pytest.raises(
            HostError, match=r"the Debian archive at \S+ does not answer: .*Connection refused"
        ) as caught:
            work()
        assert time.monotonic() - began < 5
        assert "SECRET" not in str(caught.value)


def test_a_suite_the_archive_lacks_is_named(archive: Server) -> None:
    with pytest.raises(HostError, match=r"the Debian archive at .* does not answer: 404"):
        resolve_debs("b", BaseRequest(suite="trixie", python="3.13.5", packages=("a",)))


def test_an_untrusted_archive_is_refused(
    archive: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use(tmp_path, monkeypatch, f"deb {archive.url}/ bookworm main\n")
    with pytest.raises(HostError, match="the Debian archive"):
        _resolve(_base())


def test_a_missing_keyring_says_how_to_get_it(
    archive: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIMUS_DEBIAN_MIRROR", archive.url)
    monkeypatch.setenv("PRIMUS_DEBIAN_KEYRING", "/nowhere.gpg")
    with pytest.raises(HostError, match=r"no keyring /nowhere\.gpg"):
        _resolve(_base())


def test_a_host_without_debian_installs_what_names_a_mirror(
    archive: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = _resolve(_base())
    _use(tmp_path, monkeypatch, "deb [trusted=yes] http://127.0.0.1:9/ubuntu noble main\n")
    asked: list[dict[str, str]] = []
    script, keyring = tmp_path / "functions", tmp_path / "keyring.gpg"

    def install(packages: dict[str, str]) -> None:
        asked.append(packages)
        if len(asked) == 1:
            raise HostError("debootstrap is missing")
        script.write_text('DEF_MIRROR="http://127.0.0.1:9/named-by-debootstrap"\n')

    keyring.touch()
    monkeypatch.setenv("PRIMUS_DEBIAN_KEYRING", str(keyring))
    monkeypatch.setattr("primus_images.versions.debs.install", install)
    monkeypatch.setattr("primus_images.versions.debs._DEBOOTSTRAP", script)
    with pytest.raises(
        HostError, match="names no source of Debian; debootstrap is missing"
    ) as error:
        _fetch(files.values(), tmp_path / "c")
    assert "PRIMUS_DEBIAN_MIRROR" in str(error.value)
    with pytest.raises(HostError, match="named-by-debootstrap"):
        _fetch(files.values(), tmp_path / "c")
    assert (
        asked
        == [{"debootstrap": "debootstrap", "debian-archive-keyring": "debian-archive-keyring"}] * 2
    )


def test_debs_are_fetched_resumed_and_verified(archive: Server, tmp_path: Path) -> None:
    files = _resolve(_base())
    python = files["python3.11-minimal"]
    archive.faults.cut["/pool/" + python.file] = [150_000]
    _fetch(files.values(), tmp_path / "c")
    assert archive.asked(python.file) == [None, "bytes=150000-"]


def test_other_bytes_of_a_deb_are_named(archive: Server, tmp_path: Path) -> None:
    files = _resolve(_base())
    thing = files["libthing"]
    other = replace(thing, sha256="0" + thing.sha256[1:].replace("0", "1"))
    with pytest.raises(HostError) as caught:
        _fetch([*(file for file in files.values() if file is not thing), other], tmp_path / "c")
    assert str(caught.value).startswith(
        f"{thing.file} from the archive of bookworm has sha256 {thing.sha256}, but sha256 "
        f"{other.sha256} is locked for libthing 1.0-1"
    )


def test_a_file_archive_needs_no_server(
    archive: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use(tmp_path, monkeypatch, f"deb [trusted=yes] file:{archive.root}/ bookworm main\n")
    archive.log.clear()
    files = _resolve(_base())
    _fetch(files.values(), tmp_path / "c")
    assert archive.log == []


def test_a_vanished_deb_is_gone_and_locked_again(archive: Server, tmp_path: Path) -> None:
    request = Request(target="t", channel="debian", python="3.11", bases={"b": _base()})
    lock = resolve(request, None, {}, Progress())
    pool = archive.root / "pool"
    (pool / "libthing_1.0-1_amd64.deb").unlink()
    make_deb(pool, "libthing", "1.0-2")
    index_debs(archive.root, "bookworm")
    with pytest.raises(HostError, match=r"for offers: libthing 1\.0-1"):
        _fetch(lock.files, tmp_path / "c")
    gone = [f for f in lock.files if f.name == "libthing"]
    assert resolve(request, lock, {}, Progress()) == lock, "without being told, a lock stays"
    again = resolve(request, lock, {}, Progress(), gone)
    assert {f.name: f.version for f in again.files} == {f.name: f.version for f in lock.files} | {
        "libthing": "1.0-2"
    }
    _fetch(again.files, tmp_path / "c")


def test_a_deb_that_left_the_index_but_not_the_pool_is_still_found(
    archive: Server, tmp_path: Path
) -> None:
    files = _resolve(_base())
    make_deb(archive.root / "pool", "libthing", "1.0-2")
    index_debs(archive.root, "bookworm", keep=lambda file: file != "libthing_1.0-1_amd64.deb")
    _fetch(files.values(), tmp_path / "c")


def test_credentials_in_auth_conf_reach_the_pool(
    archive: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.faults.login = ("me", "SECRET")
    with pytest.raises(HostError):
        _resolve(_base())
    netrc = tmp_path / "auth.conf"
    netrc.write_text("machine http://127.0.0.1 login me password SECRET\n")
    with (tmp_path / "apt.conf").open("a") as conf:
        conf.write(f'Dir::Etc::netrc "{netrc}";\n')
    files = _resolve(_base())
    _fetch(files.values(), tmp_path / "c")
