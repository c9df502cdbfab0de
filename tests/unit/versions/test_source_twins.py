"""The lock against twins of registries and git hosts: each behaviour works, or is one sentence with a next step."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from primus.errors import PrimusError
from primus.progress import Progress
from primus.versions import registry, relock, traffic
from primus.versions.lock import BaseRequest, Commit, LockedFile, Request
from primus.versions.registry import copy_image
from primus.versions.traffic import Patience
from source_twins import REPOSITORIES, Behaviour, Twins, make_repositories, twins
from twin_registries import REGISTRIES, image

BEHAVIOURS = (*REGISTRIES, *REPOSITORIES)
QUICK = Patience(connect_s=2.0, read_s=3.0, tries=3, pause_s=0.2, longest_pause_s=2.0)


@dataclass
class Outcome(Progress):
    files: tuple[LockedFile, ...] = ()
    error: PrimusError | None = None
    lines: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    with twins(tmp_path_factory.mktemp("twins"), BEHAVIOURS) as here:
        make_repositories(here)
        here.tops = {one.name: hashlib.sha256(image(one.name)["top"]).hexdigest() for one in REGISTRIES}
        here.tops["other-manifest"] = hashlib.sha256(b"other bytes").hexdigest()
        yield here


@pytest.fixture(scope="module")
def outcomes(served: Twins, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Every behaviour, all at once: most of their time is waiting."""
    home = tmp_path_factory.mktemp("home")
    conf = home / ".config/containers/registries.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text(f'[[registry]]\nlocation = "127.0.0.1:{served.port}"\ninsecure = true\n')
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(12) as pool:
        patch.setattr(traffic, "PATIENCE", QUICK)
        patch.setenv("HOME", str(home))
        patch.delenv("XDG_CONFIG_HOME", raising=False)
        futures = {one.name: pool.submit(_locked, one, served, home) for one in BEHAVIOURS}
        return {name: future.result(90) for name, future in futures.items()}


def _locked(one: Behaviour, here: Twins, home: Path) -> Outcome:
    outcome, address = Outcome(), here.address(one)
    common: dict[str, Any] = {"target": "mi300x", "channel": "amd", "python": "3.12"}
    try:
        if one.way == "image":
            base = BaseRequest(suite="noble", python="3.12.3", packages=(), image=address)
            request = Request(**common, bases={"b": base})
            outcome.files = relock.resolve(request, previous=None, progress=outcome).files
            copy_image(address, "amd64", home / one.name)
        else:
            commit = here.commits["with-pointer" if one.name == "lfs-pointer" else "with-submodule"]
            commit = "1" * 40 if one.name == "commit-of-nobody" else commit
            request = Request(**common, gits={"main": Commit(url=address, commit=commit, version="1.0")})
            outcome.files = relock.resolve(request, previous=None, progress=outcome).files
    except PrimusError as error:
        outcome.error = error
    return outcome


@pytest.mark.parametrize("one", [pytest.param(one, id=one.name) for one in BEHAVIOURS])
def test_each_behaviour_works_or_is_one_sentence(one: Behaviour, served: Twins, outcomes: dict[str, Outcome]) -> None:
    if one.way == "image" and not shutil.which("skopeo"):
        pytest.skip("skopeo is not installed")
    outcome = outcomes[one.name]
    if one.warns:
        assert any(one.warns in line and f"/{one.name}/" in line for line in outcome.lines), outcome
    if one.says is None:
        assert outcome.error is None, outcome.error
        assert outcome.files
        assert one.check(served, outcome)
        return
    assert outcome.error is not None
    assert re.search(one.says, f"{outcome.error.message}\n{outcome.error.hint}"), str(outcome.error)
    assert "\n" not in outcome.error.message
    # The pin, the source and the next step.
    assert (f"{one.name}/x" if one.way == "image" else "main") in outcome.error.message
    assert outcome.error.about in ("main", served.address(one).partition("@")[0])
    assert f"127.0.0.1:{served.port}" in str(outcome.error)
    assert outcome.error.hint


@pytest.mark.parametrize("words", ["unauthorized: authentication required", "authentication required", "access denied"])
def test_every_skopeo_says_that_a_login_is_missing_in_words_of_its_own(words: str) -> None:
    text = f'level=fatal msg="Error parsing image name: reading manifest x in IMAGE: {words}"'
    assert registry._reason(text) == "it wants credentials"
