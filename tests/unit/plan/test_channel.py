"""Which channel builds a target: locks decide, not the network, and files of two channels never
mix.
"""

import json
from pathlib import Path

import pytest

from primus_images.errors import InputError
from primus_images.plan.channel import choose
from primus_images.plan.target import Target
from primus_images.versions.lock import Lock, dumps
from project_kit import Kit, copied

TARGET = Target(
    description="x",
    channels=("amd", "debian"),
    components=(),
    base="ubuntu",
    bases={"debian": "sid"},
    previews={"debian": "PyTorch has no GPU support in it"},
)


def test_the_best_channel_with_a_lock_else_the_best() -> None:
    both = choose("mi355x", TARGET, None, lambda c: True)
    assert (both.channel, both.base, both.preview, both.suffix) == ("amd", "ubuntu", None, "")
    one = choose("mi355x", TARGET, None, lambda c: c == "debian")
    assert (one.channel, one.base, one.suffix) == ("debian", "sid", "-preview")
    assert "amd has none here (primus lock mi355x --channel amd)" in one.reason
    assert choose("mi355x", TARGET, None, lambda c: False).channel == "amd"


def test_asked_for_goes_first() -> None:
    assert choose("mi355x", TARGET, "debian", lambda c: True).channel == "debian"
    with pytest.raises(InputError, match="has no channel 'pypi'"):
        choose("mi355x", TARGET, "pypi", lambda c: True)


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return copied(tmp_path / "project", "channels")


def test_preview_is_named_labelled_and_told(kit: Kit) -> None:
    release = kit.build("demo")
    preview = kit.build("demo", "--channel", "debian")
    assert "v26.11-demo-preview  (channel debian: selected by --channel)" in preview.err
    assert "PREVIEW, no release: it lacks a GPU build" in preview.err
    images = json.loads((kit.root / ".primus/store/index.json").read_text())["manifests"]
    names = {m["annotations"]["org.opencontainers.image.ref.name"]: m["digest"] for m in images}
    assert names == {"v26.11-demo": release.digest, "v26.11-demo-preview": preview.digest}
    manifest = json.loads(
        (kit.root / ".primus/store/blobs/sha256" / preview.digest[7:]).read_text()
    )
    assert manifest["annotations"]["io.primus.preview"] == "it lacks a GPU build"
    assert manifest["annotations"]["io.primus.channel"] == "debian"
    for words in (("demo",), ("demo", "--channel", "debian")):
        assert "nothing to do" in kit.build(*words).err


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (
            "images/demo.yaml",
            "[amd, debian]",
            "[]",
            "images/demo.yaml:2:1: channels must name at least one channel",
        ),
        (
            "images/demo.yaml",
            "[amd, debian]",
            "[amd, amd]",
            "images/demo.yaml:2:17: amd is listed twice in channels",
        ),
        (
            "images/demo.yaml",
            "[part]",
            "[part]\nrecipes: [llama4]",
            "images/demo.yaml:5:11: no recipe is called",
        ),
        (
            "images/demo.yaml",
            "[part]",
            "[part, part]",
            "images/demo.yaml:4:20: part is listed twice in components",
        ),
        (
            "images/demo.yaml",
            "[part]",
            "[prt]",
            "images/demo.yaml:4:14: no component is called 'prt'",
        ),
        (
            "images/demo.yaml",
            "[part]",
            "[part]\nrecipes: [llama3, llama3]",
            "llama3 is listed twice in recipes",
        ),
        (
            "versions.yaml",
            "local}",
            "local, targets: [dem]}",
            ": no target is called 'dem'\n  → did you mean 'demo'?",
        ),
    ],
)
def test_a_target_that_cannot_be_meant_is_refused(
    kit: Kit, file: str, old: str, new: str, said: str
) -> None:
    kit.write("recipes/llama3.yaml", "")
    kit.edit(file, old, new)
    result = kit.primus("plan", "demo")
    assert (result.code, said in result.err) == (2, True), result.err


def test_a_pin_may_name_a_gpu_whose_target_is_left_out(kit: Kit) -> None:
    kit.write("images/mi355x.yaml", (kit.root / "images/demo.yaml").read_text())
    kit.edit("versions.yaml", "local}", "local, targets: [demo, mi350x]}")
    assert kit.primus("plan", "demo").code == 0


def test_a_channels_pins_stay_apart(kit: Kit) -> None:
    kit.edit(
        "versions.yaml",
        "channel: local}",
        "channel: local}\n  rocm:\n    name: R\n    pins:\n      - "
        "{deb: rocminfo, version: 7.2.4, channel: debian}",
    )
    kit.edit("images/demo.yaml", "[part]", "[part, rocm]")
    result = kit.primus("plan", "demo", "--channel", "amd")
    assert result.code == 2
    assert "rocm has no pin for demo from amd, pypi, local" in result.err


def test_a_lock_of_a_better_channel_takes_over_from_a_no_op(kit: Kit) -> None:
    def lock(channel: str) -> str:
        return dumps(Lock(target="demo", channel=channel, pins={}, files=()))

    kit.write("images/locks/debian/demo.json", lock("debian"))
    kit.build("demo")
    assert "nothing to do" in kit.build("demo").err
    kit.write("images/locks/amd/demo.json", lock("amd"))
    said = kit.build("demo").err
    assert said.splitlines()[0] == "demo: channel amd, the best channel with a lock"


@pytest.mark.parametrize(
    ("channels", "command"),
    [("[amd, debian]", "primus lock demo --channel amd"), ("[amd]", "primus lock demo")],
)
def test_a_missing_lock_is_made_for_the_channel_that_was_asked_for(
    kit: Kit, channels: str, command: str
) -> None:
    kit.edit(
        "versions.yaml",
        "channel: local}",
        "channel: local}\n  wheel:\n    name: W\n    pins:\n      - "
        "{wheel: einops, version: 0.8.2, channel: amd}",
    )
    kit.edit("images/demo.yaml", "[part]", "[part, wheel]")
    kit.edit(
        "images/demo.yaml",
        "channels: [amd, debian]\npreviews: {debian: it lacks a GPU build}",
        f"channels: {channels}",
    )
    result = kit.primus("build", "demo", "--channel", "amd")
    assert result.code == 2
    assert f"→ {command}, and commit the result" in result.err
