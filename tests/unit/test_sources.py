"""Sources beside pip's and apt's: asked at once, named when they do not answer, known for every locked file."""

from __future__ import annotations

import threading
import time

import pytest

from primus.errors import HostError, InputError
from primus.versions import ask as asking
from primus.versions.ask import ask
from primus.versions.lock import LockedFile
from primus.versions.sources import Sources


def test_silent_sources_cost_one_deadline_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "DEADLINE_S", 0.3)
    never = threading.Event()
    began = time.monotonic()
    with pytest.raises(HostError, match="two does not answer: no answer in time; channel amd needs it"):
        ask({"one": lambda: None, "two": never.wait, "three": never.wait}, "amd")
    assert time.monotonic() - began < 2
    never.set()


def test_the_cause_is_told_and_an_answer_is_enough() -> None:
    def refuse() -> None:
        raise HostError("the index at x does not answer: connection refused")

    with pytest.raises(HostError, match=r"two does not answer: connection refused\n"):
        ask({"one": lambda: None, "two": refuse})
    ask({"one": lambda: None})


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
