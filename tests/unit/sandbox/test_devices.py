"""GPUs of a machine, and devices by name, from CDI specifications and device nodes."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from primus_images.errors import HostError, InputError
from primus_images.sandbox import container as devices

NVIDIA = """
cdiVersion: "0.5.0"
kind: nvidia.com/gpu
devices: [{name: "0"}, {name: "1"}, {name: "10"}, {name: "0:1"}, {name: all}]
"""


def amd(**device: Any) -> str:
    spec = {
        "cdiVersion": "0.6.0",
        "kind": "amd.com/gpu",
        "devices": [{"name": "0", "containerEdits": {}, **device}],
    }
    return json.dumps(spec, indent="\t")


def place(tmp_path: Path, **files: str) -> list[Path]:
    """Folders ``etc`` and ``run`` with files ``etc_NAME_SUFFIX``."""
    folders = [tmp_path / "etc", tmp_path / "run"]
    for name, text in files.items():
        folder, base, suffix = name.split("_")
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{base}.{suffix}").write_text(text)
    return folders


def test_names_of_all_specifications(tmp_path):
    folders = place(
        tmp_path,
        etc_a_json=amd(),
        run_a_json=amd(),
        run_b_yaml=NVIDIA,
        run_c_txt="no specification",
    )
    numbers = ("0", "0:1", "1", "10", "all")
    assert devices.cdi_names(folders) == [
        "amd.com/gpu=0",
        *(f"nvidia.com/gpu={number}" for number in numbers),
    ]
    assert devices.cdi_names([tmp_path / "nowhere"]) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "{devices: [{name: a}]}",
        "{kind: amd.com/gpu, devices: [{}]}",
        "{kind: x, devices: 1}",
    ],
)
def test_a_bad_specification_is_a_sentence_with_its_place(tmp_path, text):
    with pytest.raises(InputError) as error:
        devices.cdi_names(place(tmp_path, etc_a_yaml=text))
    assert f"{tmp_path}/etc/a.yaml" in str(error.value)


@pytest.mark.parametrize(
    ("asked", "names"),
    [("none", []), ("1", ["0"]), ("2", ["0", "1"]), ("3", ["0", "1", "10"]), ("all", ["all"])],
)
def test_gpus_by_number(tmp_path, asked, names):
    found = devices.gpus(asked, root=tmp_path, folders=place(tmp_path, etc_nvidia_yaml=NVIDIA))
    assert list(found.names) == [f"nvidia.com/gpu={name}" for name in names]


def test_all_gpus_where_no_device_is_called_all(tmp_path):
    found = devices.gpus("all", root=tmp_path, folders=place(tmp_path, etc_a_json=amd()))
    assert found.names == ("amd.com/gpu=0",)


@pytest.mark.parametrize("asked", ["", "0", "-1", "1.5", "both", "all ", "²"])
def test_bad_numbers_of_gpus(tmp_path, asked):
    with pytest.raises(InputError, match="is not a number of GPUs"):
        devices.gpus(asked, root=tmp_path, folders=[])


def test_too_few_gpus(tmp_path):
    with pytest.raises(HostError, match="--gpus 4: this machine has 3 GPUs"):
        devices.gpus("4", root=tmp_path, folders=place(tmp_path, etc_nvidia_yaml=NVIDIA))
    with pytest.raises(HostError, match="no GPU was found on this machine"):
        devices.gpus("all", root=tmp_path, folders=[])


def machine(root: Path, cards: int) -> None:
    """A machine with a CPU and AMD GPUs in KFD's topology; its nodes are links to those of this
    machine.
    """
    (root / "dev/dri").mkdir(parents=True)
    (root / "dev/kfd").symlink_to("/dev/null")
    for number in range(cards + 1):
        node = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        text = (
            f"simd_count {1216 if number else 0}\ndrm_render_minor "
            f"{127 + number}\ngfx_target_version 90402\n"
        )
        (node / "properties").write_text(text)
        if number:
            (root / f"sys/class/drm/renderD{127 + number}/device/drm/card{number}").mkdir(
                parents=True
            )
            (root / f"dev/dri/renderD{127 + number}").symlink_to("/dev/zero")
            (root / f"dev/dri/card{number}").symlink_to("/dev/full")


@pytest.mark.parametrize(("asked", "cards"), [("1", 1), ("2", 2), ("all", 3)])
def test_plain_nodes_of_amd(tmp_path, asked, cards):
    machine(tmp_path, 3)
    part = devices.gpus(asked, root=tmp_path, folders=[])
    wanted = ["/dev/kfd"]
    for number in range(1, cards + 1):
        wanted += [f"/dev/dri/renderD{127 + number}", f"/dev/dri/card{number}"]
    assert list(part.names) == wanted
    with pytest.raises(HostError, match="--gpus 4: this machine has 3 GPUs"):
        devices.gpus("4", root=tmp_path, folders=[])


def test_plain_nodes_that_are_missing(tmp_path):
    machine(tmp_path, 1)
    (tmp_path / "dev/kfd").unlink()
    for path in (tmp_path / "dev/dri").iterdir():
        path.unlink()
    with pytest.raises(HostError, match="/dev/kfd is missing"):
        devices.gpus("all", root=tmp_path, folders=[])


def test_nvidia_needs_a_specification(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").symlink_to("/dev/null")
    with pytest.raises(HostError, match="no CDI specification") as error:
        devices.gpus("2", root=tmp_path, folders=[])
    assert "nvidia-ctk cdi generate" in str(error.value.hint)


def test_listed_devices():
    items = ["/dev/null", "/dev/zero", "/dev/null", "amd.com/gpu=0"]
    assert devices.devices_named(items).names == ("/dev/null", "/dev/zero", "amd.com/gpu=0")


@pytest.mark.skipif(os.geteuid() != 0, reason="making a device needs root")
def test_the_groups_that_may_open_a_device(tmp_path):
    node = tmp_path / "node"
    os.mknod(node, 0o660 | stat.S_IFCHR, os.makedev(1, 3))
    os.chown(node, 0, 4321)
    assert devices._groups([node, Path("/dev/null")]) == (4321,)


@pytest.mark.parametrize(
    "item", ["/etc/passwd", "/dev/../etc", "/dev/shm/..", "dev/null", "", "gpu=0"]
)
def test_what_is_no_device(item):
    with pytest.raises(InputError, match="neither a path below /dev nor a CDI device"):
        devices.devices_named([item])
