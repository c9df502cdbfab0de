import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from primus_images.errors import InputError
from primus_images.versions.lock import (
    BaseRequest,
    Commit,
    Lock,
    LockedFile,
    Request,
    drift,
    dumps,
    load,
    loads,
)

words = st.text(min_size=1, max_size=12)
# Names, versions and file names become parts of paths.
names = st.from_regex(r"[A-Za-z0-9é+_-][A-Za-z0-9.+_-]{0,11}", fullmatch=True)
files = st.builds(
    LockedFile,
    kind=st.sampled_from(["wheel", "sdist", "deb"]),
    name=names,
    version=names,
    file=names,
    size=st.integers(min_value=0, max_value=2**40),
    sha256=st.text("0123456789abcdef", min_size=64, max_size=64),
    base=st.none() | words,
)
# (kind, base, name) tells the files of one lock apart.
locks = st.builds(
    Lock,
    target=words,
    channel=words,
    pins=st.dictionaries(words, words, max_size=5),
    files=st.lists(files, max_size=6, unique_by=lambda f: (f.kind, f.base or "", f.name)).map(
        tuple
    ),
)


@given(locks)
def test_round_trip(lock: Lock) -> None:
    text = dumps(lock)
    again = loads(text, "lock")
    assert sorted(again.files, key=repr) == sorted(lock.files, key=repr)
    assert dataclasses.replace(again, files=()) == dataclasses.replace(lock, files=())
    assert dumps(again) == text


@given(locks, st.randoms())
def test_text_does_not_depend_on_order(lock: Lock, rng: object) -> None:
    shuffled = list(lock.files)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    pins = dict(reversed(list(lock.pins.items())))
    assert dumps(dataclasses.replace(lock, files=tuple(shuffled), pins=pins)) == dumps(lock)


@given(locks)
def test_one_entry_per_line(lock: Lock) -> None:
    entries = [line for line in dumps(lock).split("\n") if line.startswith("    ")]
    assert len(entries) == len(lock.pins) + len(lock.files)


def request(**changes: object) -> Request:
    base = BaseRequest(suite="bookworm", python="3.11.2", packages=("b", "a"))
    values: dict[str, object] = {
        "target": "cpu",
        "channel": "pypi",
        "python": "3.11",
        "bases": {"bookworm": base},
        "wheels": {"torch": "2.13.0+cpu"},
    }
    return Request(**{**values, **changes})  # type: ignore[arg-type]


def lock_of(version: str = "2.13.0+cpu") -> Lock:
    file = LockedFile(
        kind="wheel", name="torch", version=version, file="torch.whl", size=1, sha256="0" * 64
    )
    files = (dataclasses.replace(file, kind="deb", name="a", base="bookworm"), file)
    return Lock(target="cpu", channel="pypi", pins=request().flat(), files=files)


def test_drift_names_what_differs() -> None:
    lock = lock_of()
    assert drift(lock, request()) == ()
    (changed,) = drift(lock, request(wheels={"torch": "2.14.0+cpu"}))
    assert str(changed) == "wheel torch: locked 2.13.0+cpu, wanted 2.14.0+cpu"
    gone, new = drift(lock, request(wheels={"triton": "3.9.0"}))
    assert str(gone) == "wheel torch: locked 2.13.0+cpu, wanted nothing"
    assert str(new) == "wheel triton: locked nothing, wanted 3.9.0"
    (other,) = drift(lock_of("2.12"), request())
    assert str(other) == "wheel torch: locked torch.whl, wanted 2.13.0+cpu"
    (copied,) = drift(dataclasses.replace(lock, target="h200"), request())
    assert str(copied) == "target: locked h200, wanted cpu"
    texts = [str(drift) for drift in drift(dataclasses.replace(lock, files=()), request())]
    assert [text.partition(", ")[0][-19:] for text in texts] == [
        "no file of bookworm",
        "ed no file of torch",
    ]


def test_package_order_is_no_drift() -> None:
    base = BaseRequest(suite="bookworm", python="3.11.2", packages=("a", "b"))
    assert drift(lock_of(), request(bases={"bookworm": base})) == ()


def test_python_packages_that_are_built_here_have_a_local_version() -> None:
    commit = Commit(url="https://a", commit="0" * 40, version="3.1")
    asked = request(sdists={"one": "1.0", "two": "2.0+cpu"}, gits={"three": commit})
    assert asked.provided == {"one": "1.0+built", "two": "2.0+cpu", "three": "3.1+built"}


def test_python_packages_of_the_base_are_what_pip_calls_them() -> None:
    asked = request(debs={"python3-torch": "2.14.1", "rocminfo": "7.2.4"})
    assert asked.provided == {"torch": "2.14.1+debian"}
    assert asked.flat()["deb rocminfo"] == "7.2.4"


def good() -> dict[str, object]:
    return dict(json.loads(dumps(Lock(target="cpu", channel="pypi", pins={}, files=()))))


WHEEL = {
    "kind": "wheel",
    "name": "torch",
    "version": "1",
    "file": "torch.whl",
    "size": 1,
    "sha256": "0" * 64,
}
TWICE = [WHEEL, {**WHEEL, "version": "2"}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "lock.json:1:2: not a lock: not JSON"),
        ("[]", "not a lock"),
        ("{}", "not a lock"),
        (json.dumps({**good(), "format": 2}), "its format 2 is not 1"),
        (json.dumps({**good(), "files": [{"kind": "wheel"}]}), "not a lock"),
        (json.dumps({**good(), "files": [3]}), "not a lock"),
        (
            '{\n<<<<<<< HEAD\n"a": 1\n',
            "lock.json:2:1: not a lock: a merge conflict is not resolved",
        ),
        (json.dumps({**good(), "files": TWICE}), "the wheel torch is listed twice"),
    ],
)
def test_what_is_no_lock(text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        loads(text, "lock.json")
    assert words in str(caught.value)
    assert "primus lock" in (caught.value.hint or "")


def test_load(tmp_path: Path) -> None:
    assert load(tmp_path / "absent.json") is None
    lock = Lock(target="cpu", channel="pypi", pins={"a": "1"}, files=())
    (tmp_path / "lock.json").write_text(dumps(lock), encoding="utf-8")
    assert load(tmp_path / "lock.json") == lock


def test_another_commit_of_the_same_version_is_drift() -> None:
    pinned = Commit(url="https://a", commit="1" * 40, version="1.0")
    wanted = Request(target="cpu", channel="pypi", python="", gits={"turbo": pinned})
    file = LockedFile(
        kind="git",
        name="turbo",
        version="1.0",
        file=f"turbo-{'1' * 40}.tar",
        size=1,
        sha256="0" * 64,
    )
    lock = Lock(target="cpu", channel="pypi", pins=wanted.flat(), files=(file,))
    assert drift(lock, wanted) == ()
    # A merge took the file of one side and the pin of the other.
    merged = dataclasses.replace(file, file=f"turbo-{'2' * 40}.tar")
    (changed,) = drift(dataclasses.replace(lock, files=(merged,)), wanted)
    assert changed.locked == merged.file


def test_an_extra_of_which_the_base_has_everything_needs_no_file() -> None:
    base = BaseRequest(suite="bookworm", python="3.11.2", packages=("a",))
    wanted = request(bases={"bookworm": base, "bookworm rdma": base._replace(over="bookworm")})
    lock = dataclasses.replace(lock_of(), pins=wanted.flat())
    assert drift(lock, wanted) == ()
