"""The lock against twins of its sources: each recorded behaviour works, or is one sentence with a next step."""

from __future__ import annotations

import hashlib
import re
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from primus.errors import PrimusError
from primus.progress import QuietProgress
from primus.versions import registry, relock, traffic, wheels
from primus.versions.indexes import Indexes
from primus.versions.lock import BaseRequest, Commit, LockedFile, Request
from primus.versions.registry import copy_image
from primus.versions.traffic import Patience, listening
from source_twins import FILE, SHA, Behaviour, Twins, twins
from twin_indexes import INDEXES
from twin_registries import REGISTRIES, image
from twin_repositories import REPOSITORIES, make_repositories
from twin_wheels import WHEELS

BEHAVIOURS = (*INDEXES, *WHEELS, *REGISTRIES, *REPOSITORIES)

# A person hears within this time of a source that does not answer, counted from the first request to it.
FIRST_WORD_S = 5.0
QUICK = Patience(connect_s=2.0, read_s=4.5, tries=3, pause_s=0.2, longest_pause_s=2.0)


@dataclass
class Outcome:
    files: tuple[LockedFile, ...] = ()
    error: PrimusError | None = None
    said: list[tuple[float, str]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    rows: int = 0


class _Heard(QuietProgress):
    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def say(self, text: str) -> None:
        self._outcome.said.append((time.monotonic(), text))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    with twins(tmp_path_factory.mktemp("twins"), BEHAVIOURS) as here:
        make_repositories(here)
        here.tops = {one.name: hashlib.sha256(image(one.name)["top"]).hexdigest() for one in REGISTRIES}
        here.tops["other-manifest"] = hashlib.sha256(b"other bytes").hexdigest()
        yield here


@pytest.fixture(scope="module")
def outcomes(served: Twins, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Every behaviour, all at once: most of their time is waiting. They end before the first test, since pytest changes
    the environment between tests, which requests reads.
    """
    home = tmp_path_factory.mktemp("home")
    conf = home / ".config/containers/registries.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text(f'[[registry]]\nlocation = "127.0.0.1:{served.port}"\ninsecure = true\n')
    known = socket.getaddrinfo

    def resolve(host: Any, *args: Any, **more: Any) -> Any:
        if str(host).endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known(host, *args, **more)

    def of_host() -> Indexes:
        login = {f"127.0.0.1:{served.port}": ("me", "secret")}
        return Indexes(index_urls=(), cert=str(served.certificate), credentials=login)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", resolve)
        patch.setattr(Indexes, "of_host", of_host)
        patch.setattr(traffic, "PATIENCE", QUICK)
        patch.setenv("HOME", str(home))
        patch.delenv("XDG_CONFIG_HOME", raising=False)
        patch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{served.port}/nowhere/simple")
        patch.setenv("PIP_CONFIG_FILE", "/dev/null")
        patch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
        patch.delenv("PIP_FIND_LINKS", raising=False)
        # pip works rather than waits.
        waiting, working = ThreadPoolExecutor(12), ThreadPoolExecutor(2)
        pools = {one.name: working if one.way == "wheel" else waiting for one in BEHAVIOURS}
        futures = {one.name: pools[one.name].submit(_locked, one, served, home) for one in BEHAVIOURS}
        outcomes = {name: future.result(90) for name, future in futures.items()}
        # A probe that was given up sits in its own thread until its server's silence is long enough.
        time.sleep(max(0.0, QUICK.read_s - (time.monotonic() - max(o.ended for o in outcomes.values()))))
        return outcomes


def _locked(one: Behaviour, here: Twins, home: Path) -> Outcome:
    outcome = Outcome()
    progress = _Heard(outcome)
    address = here.address(one)
    common: dict[str, Any] = {"target": "mi300x", "channel": "amd", "python": "3.12"}
    try:
        if one.way == "wheel":
            # pip alone; the probe before it is the same as an sdist's.
            base = BaseRequest(suite="noble", python="3.12.3", packages=())
            request = Request(**common, bases={"b": base}, wheels={one.package: one.version},
                              indexes={"core": address}, indexed=frozenset({one.package}))  # fmt: skip
            with listening(progress.say) as rows:
                outcome.files = wheels.resolve_wheels(request, progress=progress)
            outcome.rows = sum(row.tool == "pip" for row in rows)
        elif one.way == "image":
            base = BaseRequest(suite="noble", python="3.12.3", packages=(), image=address)
            request = Request(**common, bases={"b": base})
            outcome.files = relock.resolve(request, previous=None, progress=progress).files
            copy_image(address, "amd64", home / one.name)
        else:
            sdist = one.way == "sdist"
            commit = here.commits["with-pointer" if one.name == "lfs-pointer" else "with-submodule"]
            if one.name == "commit-of-nobody":
                commit = "1" * 40
            request = Request(
                **common,
                sdists={one.package: one.version} if sdist else {},
                indexes={"rocm-core": address} if sdist else {},
                indexed=frozenset({one.package}) if sdist else frozenset(),
                gits={} if sdist else {"main": Commit(url=address, commit=commit, version="1.0")},
            )
            outcome.files = relock.resolve(request, previous=None, progress=progress).files
    except PrimusError as error:
        outcome.error = error
    outcome.ended = time.monotonic()
    return outcome


@pytest.mark.parametrize("one", [pytest.param(one, id=one.name) for one in BEHAVIOURS])
def test_each_behaviour_works_or_is_one_sentence(one: Behaviour, served: Twins, outcomes: dict[str, Outcome]) -> None:
    if one.way == "image" and not shutil.which("skopeo"):
        pytest.skip("skopeo is not installed")
    outcome = outcomes[one.name]
    # The others run at the same time, and every listener hears of every request.
    own = [(at, text) for at, text in outcome.said if f"/{one.name}/" in text]
    said = [text for _, text in own]
    first = min([outcome.ended, *(at for at, _ in own)]) - served.began.get(one.name, outcome.began)
    assert first <= FIRST_WORD_S or outcome.error is None, (first, said, outcome.error)
    if one.warns:
        assert any(one.warns in text for text in said), (said, outcome.error)
    if one.says is None:
        assert outcome.error is None, outcome.error
        assert outcome.files
        if one.way == "sdist":
            assert [(file.size, file.sha256) for file in outcome.files] == [(len(FILE), SHA)]
        if one.way == "wheel":
            assert [file.sha256 for file in outcome.files] == [hashlib.sha256(served.wheel.read_bytes()).hexdigest()]
            assert outcome.rows
        assert one.check(served, outcome)
        return
    assert outcome.error is not None
    sentence = outcome.error.message
    assert re.search(one.says, f"{sentence}\n{outcome.error.hint}"), str(outcome.error)
    assert "\n" not in sentence
    # The pin, the source and the next step.
    package = {"image": f"{one.name}/x", "git": "main"}.get(one.way, one.package)
    assert package in sentence
    assert outcome.error.about == package or outcome.error.about == served.address(one).partition("@")[0]
    host = served.address(one).partition("://")[2].partition("/")[0] or served.address(one).partition("/")[0]
    assert host in str(outcome.error) or one.name in ("for-another-python", "other-version")
    assert outcome.error.hint


def test_the_table_names_a_public_source_for_each() -> None:
    assert len(BEHAVIOURS) >= 40
    assert len({one.name for one in BEHAVIOURS}) == len(BEHAVIOURS)
    assert all(one.source.startswith("https://") for one in BEHAVIOURS)


def test_two_indexes_of_which_one_says_403(served: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD divides its packages among several indexes, and each says 403 for those of the others."""
    urls = {"rocm-core": f"http://127.0.0.1:{served.port}/page-403/simple",
            "rocm-pytorch": f"http://127.0.0.1:{served.port}/html/simple"}  # fmt: skip
    monkeypatch.setattr(Indexes, "of_host", lambda: Indexes(index_urls=()))
    monkeypatch.setattr(traffic, "PATIENCE", QUICK)
    request = Request(target="mi300x", channel="amd", python="3.12", sdists={"rocm": "10.0.0"}, indexes=urls,
                      indexed=frozenset({"rocm"}))  # fmt: skip
    (file,) = relock.resolve(request, previous=None, progress=QuietProgress()).files
    assert file.index == "rocm-pytorch"


@pytest.mark.parametrize("words", ["unauthorized: authentication required", "authentication required", "access denied"])
def test_every_skopeo_says_that_a_login_is_missing_in_words_of_its_own(words: str) -> None:
    said = f'level=fatal msg="Error parsing image name: reading manifest x in IMAGE: {words}"'
    assert registry._reason(said) == "it wants credentials"
