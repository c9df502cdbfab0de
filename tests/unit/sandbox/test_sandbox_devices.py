"""CDI specifications, GPUs of a machine, and the configuration an OCI runtime gets: all without root."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from primus.errors import HostError, InputError
from primus.sandbox import cdi, devices, spec
from primus.sandbox.container import Command, DeviceNode, Devices, Hook, Limits, Mount, RootFs, image_env, merged

NVIDIA = """
cdiVersion: "0.5.0"
kind: nvidia.com/gpu
containerEdits:
  env: [NVIDIA_VISIBLE_DEVICES=void, "EMPTY="]
  deviceNodes:
    - path: /dev/nvidiactl
      hostPath: /dev/null
    - {path: /dev/nvidia-uvm, hostPath: /dev/zero, permissions: rw, fileMode: 0o660, uid: 5, gid: 6}
  hooks:
    - hookName: createContainer
      path: /usr/bin/nvidia-cdi-hook
      args: [nvidia-cdi-hook, update-ldcache, --folder, /usr/lib/x86_64-linux-gnu]
      timeout: 7
  mounts:
    - {hostPath: /tmp, containerPath: /usr/lib/gpu, options: [ro, nosuid, nodev, bind]}
devices:
  - name: "0"
    containerEdits:
      deviceNodes: [{path: /dev/nvidia0, hostPath: /dev/full}]
  - name: "1"
    containerEdits: {}
  - name: "10"
    containerEdits: {}
  - name: "0:1"
  - name: all
    containerEdits:
      deviceNodes: [{path: /dev/nvidia0, hostPath: /dev/full}]
"""


def amd(**device: Any) -> str:
    spec = {"cdiVersion": "0.6.0", "kind": "amd.com/gpu", "devices": [{"name": "0", "containerEdits": {}, **device}]}
    return json.dumps(spec, indent="\t")


def place(tmp_path: Path, **files: str) -> list[Path]:
    """Folders ``etc`` and ``run`` with files ``etc_NAME_SUFFIX``."""
    folders = [tmp_path / "etc", tmp_path / "run"]
    for name, text in files.items():
        folder, base, suffix = name.split("_")
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{base}.{suffix}").write_text(text)
    return folders


def test_a_specification(tmp_path):
    registry = cdi.read(place(tmp_path, etc_nvidia_yaml=NVIDIA))
    assert registry.names("nvidia.com/gpu") == ("0", "0:1", "1", "10", "all")
    (part,) = registry.find(["nvidia.com/gpu=0"])
    assert part.cdi == "nvidia.com/gpu=0"
    assert part.nodes == (
        DeviceNode(source=Path("/dev/null"), target="/dev/nvidiactl"),
        DeviceNode(source=Path("/dev/zero"), target="/dev/nvidia-uvm", permissions="rw", mode=0o660, uid=5, gid=6),
        DeviceNode(source=Path("/dev/full"), target="/dev/nvidia0"),
    )
    assert part.mounts == (
        Mount(source=Path("/tmp"), target="/usr/lib/gpu", options=("ro", "nosuid", "nodev", "bind")),
    )
    assert part.env == {"NVIDIA_VISIBLE_DEVICES": "void", "EMPTY": ""}
    assert part.hooks == (
        Hook(
            name="createContainer",
            path="/usr/bin/nvidia-cdi-hook",
            args=("nvidia-cdi-hook", "update-ldcache", "--folder", "/usr/lib/x86_64-linux-gnu"),
            timeout=7,
        ),
    )


def test_what_devices_share_comes_once(tmp_path):
    registry = cdi.read(place(tmp_path, etc_nvidia_yaml=NVIDIA))
    both = merged(registry.find(["nvidia.com/gpu=0", "nvidia.com/gpu=1"]))
    assert len(both.hooks) == len(both.mounts) == 1
    assert len(both.nodes) == 3


def test_the_later_folder_wins(tmp_path):
    folders = place(
        tmp_path,
        etc_a_json=amd(containerEdits={"env": ["FROM=etc"]}),
        run_b_json=amd(containerEdits={"env": ["FROM=run"]}),
        run_c_txt="no specification",
    )
    (part,) = cdi.read(folders).find(["amd.com/gpu=0"])
    assert part.env == {"FROM": "run"}


def test_two_files_of_one_folder_contradict(tmp_path):
    with pytest.raises(InputError, match=r"amd.com/gpu=0 is described here and in .*a\.json"):
        cdi.read(place(tmp_path, etc_a_json=amd(), etc_b_json=amd()))


def test_no_folder_is_no_device(tmp_path):
    registry = cdi.read([tmp_path / "nowhere"])
    assert dict(registry.devices) == {}
    with pytest.raises(InputError, match="no CDI specification describes the device amd"):
        registry.find(["amd.com/gpu=7"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a mapping with"),
        ("[]", "a mapping with"),
        ("{", "not YAML"),
        (amd().replace("0.6.0", "9.0.0"), "CDI version 9.0.0 is not supported"),
        (amd().replace("amd.com/gpu", "gpu"), "kind must be vendor.com/class"),
        (amd(name="a b"), "name must be a device name"),
        (amd(containerEdits={"netDevices": []}), "unknown key 'netDevices'"),
        (amd(containerEdits={"deviceNodes": [{"path": "dev/x"}]}), "path must be an absolute path"),
        (amd(containerEdits={"deviceNodes": [{}]}), "'path' is missing"),
        (amd(containerEdits={"deviceNodes": [{"path": "/dev/x", "permissions": "rx"}]}), "permissions must be letters"),
        (amd(containerEdits={"env": ["NOVALUE"]}), "env must be a list of NAME=value"),
        (amd(containerEdits={"hooks": [{"hookName": "never", "path": "/x"}]}), "hookName must be one of prestart"),
        (amd(containerEdits={"mounts": [{"hostPath": "/x"}]}), "'containerPath' is missing"),
        (amd().replace("[\n", "[], \"x\": [\n", 1), "unknown key 'x'"),
        (json.dumps({"cdiVersion": "0.6.0", "kind": "amd.com/gpu", "devices": []}), "must describe a device"),
    ],
)  # fmt: skip
def test_a_bad_specification_is_a_sentence_with_its_place(tmp_path, text, said):
    with pytest.raises(InputError) as error:
        cdi.read(place(tmp_path, etc_a_json=text))
    assert said in error.value.message
    assert (error.value.where or "").startswith(f"{tmp_path}/etc/a.json:")


def test_a_duplicate_device_is_refused(tmp_path):
    data = json.loads(amd())
    data["devices"] *= 2
    with pytest.raises(InputError, match="duplicate device '0'"):
        cdi.read(place(tmp_path, etc_a_json=json.dumps(data)))


@pytest.mark.parametrize("name", ["amd.com/gpu=0", "nvidia.com/gpu=all", "vendor.io/net-0=a:b_c.d", "v/c=GPU-1-2"])
def test_qualified_names(name):
    assert cdi.qualified(name)


@pytest.mark.parametrize("name", ["/dev/kfd", "amd.com/gpu", "gpu=0", "amd.com/gpu=", "amd.com/gpu=a b", "a/b/c=d", ""])
def test_other_names(name):
    assert not cdi.qualified(name)


@pytest.mark.parametrize(
    ("asked", "names"), [("none", []), ("1", ["0"]), ("2", ["0", "1"]), ("3", ["0", "1", "10"]), ("all", ["all"])]
)
def test_gpus_by_number(tmp_path, asked, names):
    found = devices.gpus(asked, root=tmp_path, folders=place(tmp_path, etc_nvidia_yaml=NVIDIA))
    assert [part.cdi for part in found] == [f"nvidia.com/gpu={name}" for name in names]


def test_all_gpus_where_no_device_is_called_all(tmp_path):
    found = devices.gpus("all", root=tmp_path, folders=place(tmp_path, etc_a_json=amd()))
    assert [part.cdi for part in found] == ["amd.com/gpu=0"]


@pytest.mark.parametrize("asked", ["", "0", "-1", "1.5", "both", "all ", "²"])
def test_bad_numbers_of_gpus(tmp_path, asked):
    with pytest.raises(InputError, match="is not a number of GPUs"):
        devices.gpus(asked, root=tmp_path, folders=[])


def test_too_few_gpus(tmp_path):
    with pytest.raises(HostError, match="--gpus 4: this machine has 3 GPUs"):
        devices.gpus("4", root=tmp_path, folders=place(tmp_path, etc_nvidia_yaml=NVIDIA))
    with pytest.raises(HostError, match="no GPU was found on this machine"):
        devices.gpus("all", root=tmp_path, folders=[])


def test_two_makers_without_a_gpu_to_tell(tmp_path):
    with pytest.raises(InputError, match=r"for amd\.com/gpu and nvidia\.com/gpu"):
        devices.gpus("all", root=tmp_path, folders=place(tmp_path, etc_a_json=amd(), etc_b_yaml=NVIDIA))


def machine(root: Path, cards: int) -> None:
    """A machine with a CPU and AMD GPUs in KFD's topology; its nodes are links to those of this machine."""
    (root / "dev/dri").mkdir(parents=True)
    (root / "dev/kfd").symlink_to("/dev/null")
    for number in range(cards + 1):
        node = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
        node.mkdir(parents=True)
        text = f"simd_count {1216 if number else 0}\ndrm_render_minor {127 + number}\ngfx_target_version 90402\n"
        (node / "properties").write_text(text)
        if number:
            (root / f"sys/class/drm/renderD{127 + number}/device/drm/card{number}").mkdir(parents=True)
            (root / f"dev/dri/renderD{127 + number}").symlink_to("/dev/zero")
            (root / f"dev/dri/card{number}").symlink_to("/dev/full")


@pytest.mark.parametrize(("asked", "cards"), [("1", 1), ("2", 2), ("all", 3)])
def test_plain_nodes_of_amd(tmp_path, asked, cards):
    machine(tmp_path, 3)
    (part,) = devices.gpus(asked, root=tmp_path, folders=[])
    wanted = ["/dev/kfd"]
    for number in range(1, cards + 1):
        wanted += [f"/dev/dri/renderD{127 + number}", f"/dev/dri/card{number}"]
    assert [node.target for node in part.nodes] == wanted
    assert part.cdi == ""
    with pytest.raises(HostError, match="--gpus 4: this machine has 3 GPUs"):
        devices.gpus("4", root=tmp_path, folders=[])


def test_plain_nodes_that_are_missing(tmp_path):
    machine(tmp_path, 1)
    (tmp_path / "dev/kfd").unlink()
    for path in (tmp_path / "dev/dri").iterdir():
        path.unlink()
    with pytest.raises(HostError, match="/dev/kfd is missing"):
        devices.gpus("all", root=tmp_path, folders=[])


def test_plain_nodes_of_nvidia(tmp_path, monkeypatch):
    library = tmp_path / "lib/libcuda.so.550.1"
    (tmp_path / "dev").mkdir()
    library.parent.mkdir()
    library.touch()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1", "nvidia10"):
        (tmp_path / "dev" / name).symlink_to("/dev/null")
    cache = (
        f"\tlibcuda.so.1 (libc6,x86-64) => {library}\n\tlibcuda.so.1 (libc6) => /lib32/libcuda.so.1\n"
        f"\tlibcudart.so.12 (libc6,x86-64) => {library}\n\tlibnvidia-ml.so.1 (libc6,x86-64) => /gone\n"
    )
    monkeypatch.setattr(devices, "_linker_cache", lambda: cache)
    (part,) = devices.gpus("2", root=tmp_path, folders=[])
    assert [node.target for node in part.nodes] == [
        *("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia1"),
    ]
    assert [(mount.source, mount.target) for mount in part.mounts] == [
        (library, f"/usr/lib/{os.uname().machine}-linux-gnu/libcuda.so.1")
    ]


def test_listed_devices():
    null, both = devices.listed(["/dev/null"]), devices.listed(["/dev/null", "/dev/zero"])
    assert [node.target for part in both for node in part.nodes] == ["/dev/null", "/dev/zero"]
    assert null[0].nodes[0].mode == 0o666


@pytest.mark.parametrize("item", ["/dev/no-such", "/etc/passwd", "/dev/../etc", "/dev/shm/..", "dev/null", "", "gpu=0"])
def test_what_is_no_device(item):
    with pytest.raises(InputError, match="neither a device node below /dev nor a CDI device"):
        devices.listed([item])


def config(command: Command, **options: Any) -> dict[str, Any]:
    root = RootFs(layers=(), config={"config": {"Env": ["A=1"]}}, blob=Path, cache=Path("c"), name="x")
    settings = {"terminal": None, "user_namespace": False, **options}
    return spec.configuration(root, command, **settings)


def test_the_configuration_is_plain_data():
    found = config(Command(argv=("true",)))
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(found))
    assert found["process"]["args"] == ["true"]
    assert [entry["type"] for entry in found["linux"]["namespaces"]] == ["mount", "ipc", "uts", "cgroup", "network"]
    kinds = [entry["type"] for entry in config(Command(argv=("x",), network=True))["linux"]["namespaces"]]
    assert "network" not in kinds


def test_the_terminal_has_its_size_before_the_command_starts():
    assert "consoleSize" not in config(Command(argv=("true",)))["process"]
    process = config(Command(argv=("true",)), terminal=(33, 99))["process"]
    assert process["terminal"]
    assert process["consoleSize"] == {"height": 33, "width": 99}


def test_devices_in_the_configuration():
    part = Devices(
        nodes=(DeviceNode(source=Path("/dev/null"), target="/dev/kfd", permissions="rw", mode=0o660, gid=44),),
        env={"A": "2", "B": "3"},
        hooks=(Hook(name="createRuntime", path="/bin/true", timeout=3),),
    )
    command = Command(argv=("x",), devices=(part,), env={"B": "4"})
    found = config(command)
    assert found["linux"]["devices"] == [
        {"path": "/dev/kfd", "type": "c", "major": 1, "minor": 3, "fileMode": 0o660, "uid": 0, "gid": 44}
    ]
    allowed = {"allow": True, "type": "c", "major": 1, "minor": 3, "access": "rw"}
    assert found["linux"]["resources"]["devices"] == [{"allow": False, "access": "rwm"}, allowed]
    assert found["hooks"] == {"createRuntime": [{"path": "/bin/true", "args": [], "env": [], "timeout": 3}]}
    assert "A=2" in found["process"]["env"]
    assert "B=4" in found["process"]["env"]
    inside = config(command, user_namespace=True)
    assert inside["linux"]["devices"] == []
    assert inside["mounts"][-1]["source"] == "/dev/null"
    assert inside["mounts"][-1]["destination"] == "/dev/kfd"


def test_a_device_that_is_gone():
    part = Devices(nodes=(DeviceNode(source=Path("/dev/no-such-gpu"), target="/dev/x"),))
    with pytest.raises(HostError, match="/dev/no-such-gpu cannot be used"):
        config(Command(argv=("x",), devices=(part,)))


def test_limits_in_the_configuration():
    found = config(Command(argv=("x",), limits=Limits(memory_bytes=1 << 30, cpus=1.5)))["linux"]["resources"]
    assert found["memory"]["limit"] == 1 << 30
    assert found["cpu"] == {"quota": 150_000, "period": 100_000}


def test_the_filter_of_system_calls():
    rules = spec.seccomp()
    named = {name: rule for rule in rules["syscalls"] for name in rule["names"]}
    assert rules["defaultAction"] == "SCMP_ACT_ERRNO"
    assert {"openat", "mmap", "clone", "mbind", "socket"} <= set(named)
    for forbidden in ("mount", "unshare", "setns", "bpf", "keyctl", "io_uring_setup", "init_module", "perf_event_open"):
        assert forbidden not in named
    assert named["clone"]["args"][0] == {
        "index": 0, "value": 0x7E020000, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ",
    }  # fmt: skip
    assert named["clone3"]["errnoRet"] == 38


def test_the_commands_own_environment_wins():
    root = RootFs(layers=(), config={}, blob=Path, cache=Path("c"), name="x")
    part = Devices(env={"A": "device"})
    assert image_env(root, Command(devices=(part,)))["A"] == "device"
    assert image_env(root, Command(devices=(part,), env={"A": "mine"}))["A"] == "mine"
