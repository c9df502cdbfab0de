"""Sources beside pip's and apt's: asked at once, named when they do not answer, known for every locked file."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from loopback import serve
from primus.errors import HostError, InputError
from primus.fetch.download import Meter, NotThere, download
from primus.fetch.filecache import FileCache
from primus.progress import QuietProgress
from primus.versions import reachable
from primus.versions.indexes import Indexes, pip_failure_hides_network
from primus.versions.lock import LockedFile
from primus.versions.reachable import require_answers
from primus.versions.sources import Sources


def test_silent_sources_cost_one_deadline_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachable, "DEADLINE_S", 0.3)
    never = threading.Event()
    began = time.monotonic()
    with pytest.raises(HostError, match=r"two does not answer: no answer in time \(0.3 s\); channel amd needs it"):
        require_answers({"one": (lambda: None, ""), "two": (never.wait, ""), "three": (never.wait, "")}, "amd")
    assert time.monotonic() - began < 2
    never.set()


def test_the_cause_is_told_and_an_answer_is_enough() -> None:
    def refuse() -> None:
        raise HostError("the index at x does not answer: connection refused")

    with pytest.raises(HostError, match=r"two does not answer: connection refused\n"):
        require_answers({"one": (lambda: None, ""), "two": (refuse, "")})
    require_answers({"one": (lambda: None, "")})


def test_only_the_sources_of_the_files_are_asked() -> None:
    commit = "a" * 40
    all_of_them = Sources(
        indexes={"core": "http://127.0.0.1/core", "torch": "http://127.0.0.1/torch"},
        images={"ubuntu": "ubuntu@sha256:" + "0" * 64},
        repositories={commit: "https://127.0.0.1/turbo"},
    )

    def file(kind: str, name: str, **more: str) -> LockedFile:
        return LockedFile(kind=kind, name="x", version="1", file=name, size=1, sha256="0" * 64, **more)  # type: ignore[arg-type]

    files = [file("wheel", "x.whl", index="torch"), file("git", f"a-b-{commit}.tar"), file("wheel", "y.whl")]
    asked = all_of_them.of_files(files)
    assert asked == Sources(indexes={"torch": "http://127.0.0.1/torch"}, repositories=all_of_them.repositories)
    assert all_of_them.of_files([file("layer", "l", base="ubuntu")]).images == all_of_them.images
    with pytest.raises(InputError, match="the lock names gone"):
        all_of_them.of_files([file("wheel", "z.whl", index="gone")])


def test_403_means_not_here_as_404_does(tmp_path: Path) -> None:
    """AMD's indexes answer so for packages and files that they do not have."""
    (tmp_path / "files").mkdir()
    with serve(tmp_path) as server:
        index = Indexes(index_urls=(f"{server.url}/simple",))
        for status in (403, 404, 410):
            server.faults.status["/simple/torch/"] = [status, status]
            assert index.offers(index.session(), f"{server.url}/simple/torch/") == ()
            index.probe("torch")
            server.faults.status["/files/x.whl"] = [status]
            file = LockedFile(kind="wheel", name="x", version="1", file="x.whl", size=1, sha256="0" * 64)
            with pytest.raises(NotThere):
                download(
                    file, f"{server.url}/files/x.whl", FileCache(tmp_path / "cache"),
                    get=lambda url, headers: index.get(index.session(), url, headers=headers),
                    meter=Meter(QuietProgress(), file, own=False), stop=threading.Event(),
                )  # fmt: skip
        server.faults.status["/simple/torch/"] = [401]
        with pytest.raises(HostError, match="refused the request"):
            index.offers(index.session(), f"{server.url}/simple/torch/")
    line = "WARNING: Could not fetch URL http://x/simple/y/: {} Client Error: z - skipping"
    assert not pip_failure_hides_network(line.format(403))
    assert pip_failure_hides_network(line.format(407))


def test_an_index_is_asked_for_a_package_that_is_pinned_there() -> None:
    asked = Sources(indexes={"core": "http://127.0.0.1:9/core"}, packages={"core": "rocm-sdk"})
    packages = []

    class Seen(Indexes):
        def only(self, url: str) -> Indexes:
            return self

        def probe(self, name: str) -> None:
            packages.append(name)

    for probe, _ in asked.probes(lambda: Seen(index_urls=())).values():
        probe()
    assert packages == ["rocm-sdk"]


def test_a_source_that_fails_once_is_asked_again() -> None:
    answers = [HostError("the index at x does not answer: connection refused"), None]

    def one() -> None:
        if (error := answers.pop(0)) is not None:
            raise error

    require_answers({"one": (one, "")})
    assert answers == []
