"""`primus prove` from the pins to the page, on loopback: stand-in wheels, a stand-in machine, and
planted faults of the sources.

`slow`, because the channel is locked and built once more; tests/unit/release/test_prove.py has the
machines, interruptions and the folder, and test_amd_channel.py lock and build of the same sources.
"""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from amd_channel import REPOSITORY, Channel, amd_channel
from host_tools import needs
from loopback import Faults, make_wheel
from primus_images.files import below
from primus_images.release.prove.run import Outcome, run_all
from primus_images.release.prove.steps import Setting, steps_of
from stand_in_machine import make_machine

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    needs("busybox", "cosign", "docker-registry", "git", "skopeo"),
]
# A page that a step of the stand-in image ends in: it has no PyTorch.
LACKS = "PyTorch|torch|No module|GPU"


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Channel]:
    with amd_channel(tmp_path_factory.mktemp("amd")) as served:
        published = "docs/site/published.yaml"
        served.kit.write(published, (REPOSITORY / published).read_text())
        yield served


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_machine(tmp_path_factory.mktemp("machine"), "mi300x")


def wheel_of(channel: Channel, name: str) -> Path:
    (path,) = channel.amd.glob(f"{name}-[0-9]*.whl")
    return path


def missing(channel: Channel) -> None:
    wheel_of(channel, "triton").unlink()


def other_local_version(channel: Channel) -> None:
    path = wheel_of(channel, "triton")
    version = path.name.split("-")[1]
    path.unlink()
    make_wheel(channel.amd, "triton", version.replace("rocm10.0.0", "rocm10.0.1"))


def forbidden(channel: Channel) -> None:
    channel.indexes.faults.status["/simple/triton/"] = [403] * 50


def unavailable(channel: Channel) -> None:
    channel.indexes.faults.status["/simple/triton/"] = [503] * 50


def login(channel: Channel) -> None:
    channel.indexes.faults.login = ("somebody", "secret")


def wrong_bytes(channel: Channel) -> None:
    channel.indexes.faults.wrong.add(f"/files/{wheel_of(channel, 'triton').name}")


def other_python(channel: Channel) -> None:
    path = wheel_of(channel, "torch")
    path.rename(path.with_name(path.name.replace("cp311-cp311", "cp39-cp39")))


def other_platform(channel: Channel) -> None:
    path = wheel_of(channel, "torch")
    path.rename(path.with_name(path.name.replace("manylinux_2_28_x86_64", "win_amd64")))


def moved_index(channel: Channel) -> None:
    text = (channel.kit.root / "versions.yaml").read_text()
    channel.kit.write("versions.yaml", text.replace("/simple}", "/elsewhere}"))


def closed_index(channel: Channel) -> None:
    text = (channel.kit.root / "versions.yaml").read_text()
    port = str(channel.indexes.port)
    channel.kit.write("versions.yaml", text.replace(f"127.0.0.1:{port}", "127.0.0.1:9"))


def other_base(channel: Channel) -> None:
    text = (channel.kit.root / "versions.yaml").read_text()
    channel.kit.write("versions.yaml", text.replace(channel.base[-12:], "0" * 12))


def lost_commit(channel: Channel) -> None:
    text = (channel.kit.root / "versions.yaml").read_text()
    (commit,) = re.findall(r"Primus-Turbo\n +commit: ([0-9a-f]{40})", text)
    channel.kit.write("versions.yaml", text.replace(commit, "1" * 40))


FAULTS: dict[Callable[[Channel], None], str] = {
    missing: "triton",
    other_local_version: "triton",
    # uv takes a forbidden page for one that does not exist.
    forbidden: "triton was not found",
    unavailable: "503",
    login: "401",
    wrong_bytes: "triton",
    other_python: "torch",
    other_platform: "torch",
    moved_index: "rocm",
    closed_index: "rocm|refused",
    other_base: "ubuntu",
    lost_commit: "1111111",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_the_sources_is_named_and_the_rest_goes_on(
    channel: Channel,
    machine: Path,
    tmp_path: Path,
    fault: Callable[[Channel], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in channel.kit.env.items():
        monkeypatch.setenv(name, value)
    versions = (channel.kit.root / "versions.yaml").read_bytes()
    fault(channel)
    try:
        done = locked(channel, machine, tmp_path)
    finally:
        channel.indexes.faults.__dict__.update(vars(Faults()))
        channel.kit.write("versions.yaml", versions)
        for path in channel.amd.glob("*.whl"):
            path.unlink()
        channel.offer()
    assert not done["lock"].passed
    assert re.search(FAULTS[fault], done["lock"].reason), done["lock"].reason
    assert done["machine"].passed, done["machine"].reason


def locked(channel: Channel, machine: Path, folder: Path) -> dict[str, Outcome]:
    """The outcomes of the first two steps."""
    setting = Setting(
        project=channel.kit.root,
        target="mi300x",
        gpu="mi300x",
        channel="amd",
        locked=False,
        gpus=8,
        here=False,
        root=machine,
        work=folder / "work",
    )
    steps = [step for step in steps_of(setting) if step.name in ("machine", "lock")]
    *_, last = run_all(steps, setting, 60, lambda _: None)
    return last


@pytest.mark.timeout(3600)
def test_from_the_pins_to_the_signed_folder(
    channel: Channel, machine: Path, tmp_path: Path
) -> None:
    kit = channel.kit
    subprocess.run(
        ["cosign", "generate-key-pair", "--output-key-prefix", str(tmp_path / "key")],
        env={**kit.env, "COSIGN_PASSWORD": ""},
        check=True,
        capture_output=True,
    )
    kit.variables["COSIGN_PASSWORD"] = ""  # type: ignore[index]
    # The suite, whose jobs cannot run in the stand-in image, takes longer than what is left.
    words = ["prove", "mi300x", "--minutes", "17", "--root", str(machine)]
    words += ["--output", str(tmp_path / "out")]
    done = kit.primus(*words, "--key", str(tmp_path / "key.key"), "--json", timeout=1500)
    content = json.loads(done.out)
    rows = {row["name"]: row for row in content["steps"]}
    for name in ("machine", "lock", "build", "gates"):
        assert rows[name]["state"] == "passed", rows[name]["reason"]
    assert rows["build"]["document"]["images"][0]["ref"] == "v26.11-mi300x"
    record = tmp_path / "out/record"
    for name, row in rows.items():
        print(name, row["state"], row["seconds"], row["reason"])
        if row["state"] in ("failed", "lacking"):
            assert row["reason"]
            assert (record / f"{name}.html").is_file()
    everything = "".join(path.read_text() for path in below(record))
    assert str(tmp_path) not in everything and "127.0.0.1" not in everything
    assert sum(path.stat().st_size for path in below(record)) < 10_000_000
    read = kit.primus("prove", "--read", str(record), "--key", str(tmp_path / "key.pub"))
    assert read.code == 0, read.err
    assert "8 × AMD Instinct MI300X" in read.out and "unchanged" in read.out
    (record / "result.json").write_text("{}")
    read = kit.primus("prove", "--read", str(record), "--key", str(tmp_path / "key.pub"))
    assert read.code == 1 and "is not the file that was signed" in read.err
    again = kit.primus(*words, "--json", timeout=1500)
    kept = {row["name"]: row["made"] for row in json.loads(again.out)["steps"]}
    for name in ("machine", "build", "gates"):
        assert kept[name] == rows[name]["made"], "not run again"
