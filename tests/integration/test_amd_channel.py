"""Channel amd from pins to checked images: an index, a registry and repositories on 127.0.0.1, the
real pins.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from amd_channel import TARGETS, Channel, amd_channel
from host_tools import needs
from project_kit import Kit
from tables import table_of

pytestmark = [pytest.mark.integration, needs("busybox", "docker-registry", "git", "skopeo")]

# What carries ROCm's version, or is built with what carries it.
TRAIN = {
    "aiter",
    "apex",
    "hip-python",
    "primus-turbo",
    "pytorch",
    "pytorch-device",
    "rocm",
    "rocm-sdk-core",
    "rocm-sdk-device",
    "rocm-sdk-libraries",
    "torchaudio",
    "torchvision",
    "torchvision-device",
    "transformer-engine",
    "transformer-engine-core",
    "transformer-engine-torch",
    "triton",
}
LOCK = "images/locks/amd/mi355x.json"
DEVICE = {
    "rocm-sdk-device",
    "pytorch-device",
    "torchvision-device",
    "rocm",
    "aiter",
    "primus-turbo",
}


# Another architecture takes the same steps once more.
@pytest.fixture(
    scope="module", params=[TARGETS[1:], pytest.param(TARGETS, marks=pytest.mark.slow)], ids=len
)
def targets(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return tuple(request.param)


@pytest.fixture(scope="module")
def channel(
    targets: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Channel]:
    with amd_channel(tmp_path_factory.mktemp("amd")) as served:
        names = [name for name in targets if name != "mi350x"]
        locked = served.kit.primus("lock", *names, "--channel", "amd", timeout=600)
        assert locked.code == 0, locked.err
        # GPUs of one architecture have the same files.
        lock = (served.kit.root / LOCK).read_text()
        served.kit.write(
            LOCK.replace("mi355x", "mi350x"),
            lock.replace('"target": "mi355x"', '"target": "mi350x"'),
        )
        yield served


@pytest.fixture(scope="module")
def images(channel: Channel, targets: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Target → what its build says, all built without naming a channel."""
    result = json.loads(channel.kit.build(*targets, "--json").out)
    return {image["target"]: image for image in result["images"]}


def layers(image: dict[str, Any]) -> dict[str, tuple[str, int]]:
    return {line["name"]: (line["digest"], line["size"]) for line in image["layers"]}


@contextmanager
def kept(kit: Kit, *names: str) -> Iterator[None]:
    """Give files their content back."""
    before = {name: (kit.root / name).read_bytes() for name in names}
    try:
        yield
    finally:
        for name, content in before.items():
            kit.write(name, content)


def test_all_pass_every_gate_as_releases(
    channel: Channel, images: dict[str, dict[str, Any]]
) -> None:
    assert {name: image["ref"] for name, image in images.items()} == {
        name: f"v26.11-{name}" for name in images
    }
    result = channel.kit.primus("check", *images, "--json", timeout=600)
    outcomes = {o["target"]: o for o in json.loads(result.out)["images"]}
    assert result.code == 0, result.out
    for name in images:
        summaries = {gate["gate"]: gate["summary"] for gate in outcomes[name]["gates"]}
        arch = "gfx942" if name == "mi300x" else "gfx950"
        assert "newest 10.0.0" in summaries["coherence"]
        assert summaries["coverage"].endswith(f"GPU libraries cover {arch}")
        assert not summaries["coverage"].startswith("0 ")
    store = channel.kit.root / ".primus/store/blobs/sha256"
    manifest = json.loads((store / images["mi355x"]["digest"][7:]).read_text())
    assert manifest["annotations"]["io.primus.channel"] == "amd"
    assert "io.primus.preview" not in manifest["annotations"]


def test_the_lock_names_files_and_their_index(channel: Channel) -> None:
    lock = json.loads((channel.kit.root / LOCK).read_text())
    files = {(f["kind"], f["name"]): f for f in lock["files"] if "build" not in f.get("base", "")}
    torch = files["wheel", "torch"]
    assert torch["file"].startswith("torch-2.12.0+rocm10.0.0-cp311")
    assert (torch["index"], files["sdist", "rocm"]["index"]) == ("rocm-core", "rocm-core")
    assert torch["size"] == (channel.amd / torch["file"]).stat().st_size
    assert "index" not in files["wheel", "filelock"], "a dependency from pip's own index"
    assert ("wheel", "amd-torch-device-gfx950") in files
    assert ("wheel", "amd-torch-device-gfx942") not in files
    assert ("wheel", "rocm-sdk-devel") not in files, "a tool of builds must stay out of the image"
    devel = next(f for f in lock["files"] if f["name"] == "rocm-sdk-devel")
    assert (devel["index"], devel["base"]) == ("rocm-core", "amd-aiter build")
    assert "127.0.0.1" not in json.dumps(lock["files"])


def test_rdma_user_space_is_locked_and_built_over_the_image(
    channel: Channel, images: dict[str, dict[str, Any]]
) -> None:
    lock = json.loads((channel.kit.root / LOCK).read_text())
    extra = {row["name"] for row in lock["files"] if row.get("base") == "ubuntu-24.04 rdma"}
    assert {"libibverbs1", "ibverbs-providers", "ibverbs-utils"} <= extra
    assert not extra & {row["name"] for row in lock["files"] if row.get("base") == "ubuntu-24.04"}
    assert len({layers(image)["extra rdma"] for image in images.values()}) == 1


def test_an_image_has_the_packages_of_its_pins(
    channel: Channel, images: dict[str, dict[str, Any]]
) -> None:
    """No lock names the project's own package, nor those of a base image."""
    shown = channel.kit.primus("diff", "v26.11-mi355x", "versions.yaml", "--json")
    sections = {section["name"]: section for section in json.loads(shown.out)["sections"]}
    assert sections["packages"]["changes"] == []
    assert sections["recipes"]["changes"] == []
    for change in sections["environment"]["changes"]:
        assert change["new"] is None
    assert sections["environment"]["absent"] == ["not there", "not stated"]


def test_base_layers_go_in_as_they_are(channel: Channel, images: dict[str, dict[str, Any]]) -> None:
    lock = json.loads((channel.kit.root / LOCK).read_text())
    given = [
        f["sha256"] for f in lock["files"] if f["kind"] == "layer" and f["base"] == "ubuntu-24.04"
    ]
    assert len(given) == 2
    assert [digest[7:] for digest, _ in list(layers(images["mi355x"]).values())[:2]] == given
    run = channel.kit.primus("run", "mi355x", "--", "/bin/sh", "-c", "ls /etc; cat /etc/passwd")
    assert run.code == 0, run.err
    assert "root:x:0:0::/:/bin/sh" in run.out, "the upper layer replaces"


def test_what_was_built_here_works_for_the_targets_gpu(
    channel: Channel, images: dict[str, dict[str, Any]]
) -> None:
    code = (
        "import importlib.metadata as m, importlib.util as u, primus_turbo, rocm_sdk, torch;"
        "print(primus_turbo.ARCH, rocm_sdk.FAMILY, torch.__version__, m.version('primus-turbo'),"
        " m.version('flash-attn'), *(u.find_spec(f'rocm_sdk_{part}') is not None for part in "
        "('core', 'devel')))"
    )
    for target in images.keys() - {"mi355x"}:
        arch = "gfx942" if target == "mi300x" else "gfx950"
        run = channel.kit.primus("run", target, "--", "python3", "-c", code)
        versions = ["2.12.0+rocm10.0.0", "0.4.1.dev33", "2.8.3.post2"]
        # A tool of builds stays out of the image.
        assert run.out.split() == [arch, arch, *versions, "True", "False"], run.err


def test_targets_share_their_bytes(images: dict[str, dict[str, Any]]) -> None:
    same = {name: layers(image) for name, image in images.items()}
    one, other = same["mi350x"], same["mi355x"]
    shared = sum(size for name, (_, size) in other.items() if one.get(name) == other[name])
    assert shared / sum(size for _, size in other.values()) >= 0.99
    assert {name for name in other if one[name] != other[name]} == {"facts"}
    for far in (same[name] for name in same.keys() - {"mi350x", "mi355x"}):
        differ = {n for n in far if far[n] != other[n]}
        assert differ == DEVICE | {"facts"}, "host wheels are in the store once"


def test_without_its_lock_the_preview_is_chosen_and_the_reason_told(
    channel: Channel, images: dict[str, dict[str, Any]]
) -> None:
    kit = channel.kit
    choice, nothing = kit.build("mi355x").err.splitlines()
    assert choice == "mi355x: channel amd, the best channel with a lock"
    assert "nothing to do" in nothing
    lock = kit.root / LOCK
    aside = lock.rename(lock.with_suffix(".aside"))
    # Stale on purpose: the choice is made, and no gigabyte is fetched.
    empty = {**json.loads(aside.read_text()), "channel": "debian", "pins": {}, "files": []}
    preview = kit.write("images/locks/debian/mi355x.json", json.dumps(empty))
    try:
        said = kit.primus("build", "mi355x").err.splitlines()
        reason = (
            "the best channel with a lock; amd has none here (primus lock mi355x --channel amd)"
        )
        assert said[0] == f"mi355x: channel debian, {reason}"
        assert "the lock of mi355x is stale" in said[1]
    finally:
        preview.unlink()
        aside.rename(lock)
    assert "nothing to do" in kit.build("mi355x").err


def test_a_rocm_bump_rebuilds_what_depends_on_rocm(
    channel: Channel, images: dict[str, dict[str, Any]]
) -> None:
    with kept(channel.kit, "versions.yaml", LOCK):
        before = (channel.kit.root / "versions.yaml").read_text()
        channel.repin(
            ("rocm10.0.0", "rocm10.1.0"),
            ("version: 10.0.0", "version: 10.1.0"),
            ("==10.0.0", "==10.1.0"),
        )
        assert channel.kit.primus("lock", "mi355x", timeout=600).code == 0
        told = channel.kit.primus("explain", "mi355x", timeout=600)
        assert told.code == 1, told.err
        to_build = next(line for line in told.out.splitlines() if line.startswith("  to build: "))
        assert set(to_build.removeprefix("  to build: ").split(", ")) == TRAIN | {"facts"}
        line = next(
            n
            for n, t in enumerate(before.splitlines(), 1)
            if "{wheel: torch, version: 2.12.0+rocm" in t
        )
        assert "pytorch: torch: 2.12.0+rocm10.0.0 sha256:" in told.out
        assert f"(versions.yaml:{line}:" in told.out


@pytest.mark.parametrize(("old", "new", "words"), table_of("amd_channel.what_does_not_belong"))
def test_what_does_not_belong_is_refused_by_name_and_line(
    channel: Channel, images: dict[str, dict[str, Any]], old: str, new: str, words: str
) -> None:
    with kept(channel.kit, "versions.yaml", LOCK):
        channel.repin((old, new))
        lines = (channel.kit.root / "versions.yaml").read_text().splitlines()
        line = next(n for n, text in enumerate(lines, 1) if new.splitlines()[0] in text)
        assert channel.kit.primus("lock", "mi355x", timeout=600).code == 0
        result = channel.kit.primus("build", "mi355x", timeout=600)
        assert result.code == 1, result.err
        assert words in result.err
        assert f"versions.yaml:{line}:" in result.err
