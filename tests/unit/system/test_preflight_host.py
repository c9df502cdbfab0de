"""Simulated machines: each fault is named, with its remedy, and a sound machine has none."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from primus_images.system import fabric
from primus_images.system.fabric import variables
from primus_images.system.host import Host
from primus_images.system.preflight import CHECKS, preflight
from sound_host import FAULTS, Machine, spoil

LIBRARIES = "usr/lib/x86_64-linux-gnu"
NICS = Path(fabric.__file__).with_name("nics.yaml")


@pytest.fixture(autouse=True)
def answers_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for the machine that was made last."""

    def disk_usage(path: Path) -> SimpleNamespace:
        total, free = Machine.space["shm" if path.name == "shm" else "disk"]
        return SimpleNamespace(total=total, free=free)

    access = os.access
    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    monkeypatch.setattr(
        os, "access", lambda path, mode: path not in Machine.closed and access(path, mode)
    )


def test_a_sound_machine_has_no_finding_and_the_interface_is_recommended(tmp_path: Path) -> None:
    found = Machine(tmp_path).findings()
    assert [one for one in found if one[1] in ("failed", "slow")] == []
    assert any("NCCL_SOCKET_IFNAME=eth1" in said for _, _, said, _ in found)
    assert any("NCCL_IB_GID_INDEX=3" in said for _, _, said, _ in found)
    assert any("8 × AMD Instinct MI300X" in said for _, _, said, _ in found)


@pytest.mark.parametrize("name", list(FAULTS))
def test_every_fault_is_named_with_its_remedy(name: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    fault = FAULTS[name]
    spoil(machine, fault)
    bad = [one for one in machine.findings() if one[1] in ("failed", "slow")]
    assert any(
        one[1] == fault["level"] and fault["says"] in one[2] and fault["remedy"] in one[3]
        for one in bad
    ), bad
    # The fault and what follows from it, and nothing else.
    assert len(bad) <= 2, bad


def test_every_skip_says_why_on_a_host_without_gpus(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    host = Host(root=tmp_path, environment={}, output=Path("/runs"))
    found = preflight(host)
    assert not [one for one in found if one.level in ("failed", "slow")]
    skipped = [one for one in found if one.level == "skipped"]
    assert len(skipped) >= 6
    assert all(one.message for one in skipped)
    assert len(CHECKS) >= 12


@pytest.mark.parametrize(
    ("driver", "rocm", "level"),
    [
        ("6.10.5", "6.3.1", "ok"),
        ("6.10.5", "7.1.0", "failed"),
        ("6.14.14", "7.2.0", "ok"),
        ("6.14.14", "7.14.0", "failed"),
        ("6.16.13", "10.0.0", "ok"),
        ("6.16.13", "6.3.4", "ok"),
        ("6.16.13", "6.2.0", "failed"),
        ("6.19.14", "10.0.0", "ok"),
        ("6.16.6", "10.0.0", "failed"),
        ("9.9.9", "7.1.0", "skipped"),
    ],
)
def test_every_driver_of_the_table_is_judged(
    driver: str, rocm: str, level: str, tmp_path: Path
) -> None:
    machine = Machine(tmp_path)
    machine.write("sys/module/amdgpu/version", driver)
    machine.write("opt/rocm/.info/version", rocm)
    (found,) = [one for one in machine.findings() if one[0] == "driver"]
    assert found[1] == level, found
    assert rocm in found[2] or found[2] == "the table has no row for amdgpu 9.9.9"


def test_a_container_that_sees_some_of_the_gpus_is_sound(tmp_path: Path) -> None:
    machine = Machine(tmp_path, gpus=8)
    machine.write(".dockerenv", "")
    for number in range(1, 8):
        machine.remove(f"sys/class/kfd/kfd/topology/nodes/{number + 2}")
        machine.remove(f"dev/dri/renderD{128 + number}")
    machine.remove("sys/class/kfd/kfd/topology/nodes/2/io_links")
    assert [one for one in machine.findings() if one[1] == "failed"] == []


def test_the_ports_that_can_be_used_are_the_jobs(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    both = {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1", "NCCL_IB_GID_INDEX": "3"}
    assert variables(Host(root=tmp_path, environment={})) == both
    assert variables(Host(root=tmp_path, environment={"NCCL_IB_HCA": "mlx5"})) == {
        "NCCL_IB_GID_INDEX": "3"
    }
    machine.write("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    assert variables(Host(root=tmp_path, environment={}))["NCCL_IB_HCA"] == "=mlx5_1:1"
    machine.remove("dev/infiniband")
    assert variables(Host(root=tmp_path, environment={})) == {}


def test_a_gid_with_an_ipv4_address_is_preferred(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    for number in range(2):
        port = f"sys/class/infiniband/mlx5_{number}/ports/1"
        machine.write(f"{port}/gids/1", "fe80:0000:0000:0000:0000:0000:0000:0001")
        machine.write(f"{port}/gid_attrs/types/1", "RoCE v2")
    assert variables(Host(root=tmp_path, environment={}))["NCCL_IB_GID_INDEX"] == "3"


@pytest.mark.parametrize(
    ("index", "advice"),
    [("3", "NCCL_IB_GID_INDEX=3"), ("1", "NCCL_IB_GID_INDEX=1 (older scripts set 3)")],
)
def test_an_index_that_older_scripts_do_not_set_is_pointed_out(
    index: str, advice: str, tmp_path: Path
) -> None:
    machine = Machine(tmp_path)
    for number in range(2):
        port = tmp_path / f"sys/class/infiniband/mlx5_{number}/ports/1"
        (port / "gids/3").rename(port / f"gids/{index}")
        (port / "gid_attrs/types/3").rename(port / f"gid_attrs/types/{index}")
    (message,) = [message for check, _, message, _ in machine.findings() if check == "RDMA"]
    assert message.endswith(f"; {advice}")


def test_the_fastest_interface_is_recommended_where_none_is_the_default(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.write("proc/net/route", "")
    machine.write("sys/class/net/eth9/operstate", "up")
    machine.write("sys/class/net/eth9/speed", "400000")
    machine.write("sys/class/net/docker0/operstate", "up")
    machine.write("sys/class/net/docker0/speed", "900000")
    assert any("NCCL_SOCKET_IFNAME=eth9" in message for _, _, message, _ in machine.findings())


def test_a_short_line_of_the_routes_is_passed_over(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    header, *routes = (tmp_path / "proc/net/route").read_text().splitlines()
    words = routes[0].split()
    for count in range(9):
        short = " ".join(words[:count])
        machine.write("proc/net/route", "\n".join([header, short, *routes]))
        recommended = [message for check, _, message, _ in machine.findings() if check == "network"]
        assert any("NCCL_SOCKET_IFNAME=eth1" in message for message in recommended), count


def test_a_dangling_link_to_a_device_is_none_that_is_closed(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    before = machine.findings()
    device = tmp_path / "dev/infiniband/uverbs1"
    device.unlink()
    device.symlink_to("/nowhere")
    assert machine.findings() == before
    machine.closed.add(tmp_path / "dev/infiniband/uverbs0")
    (closed,) = [result for result in machine.findings() if result[0] == "RDMA rights"]
    assert "/dev/infiniband/uverbs0" in closed[2]


SPOILED = ("", "\0\x1b[2J\n::", "9" * 5000, "ue: N/A\nce: x", "x" * 100_000)


def test_no_content_of_a_file_ends_the_checks_or_reaches_the_terminal_raw(tmp_path: Path) -> None:
    machine = Machine(tmp_path, gpus=1)
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        before = path.read_text()
        for text in SPOILED:
            path.write_text(text)
            for _check, _level, said, remedy in machine.findings():
                assert said.isprintable() and remedy.isprintable() and len(said) < 1100
        path.unlink()
        path.symlink_to("/nowhere")
        machine.findings()
        path.unlink()
        path.write_text(before)


def pollara(root: Path) -> Machine:
    """A sound machine whose network devices are AMD's."""
    machine = Machine(root)
    for number in range(2):
        machine.bind(number, "ionic")
    return machine


FLUSH = ("NCCL_GDR_FLUSH_DISABLE", "RCCL_GDR_FLUSH_GPU_MEM_NO_RELAXED_ORDERING")


def test_amds_network_devices_flush_before_they_read(tmp_path: Path) -> None:
    pollara(tmp_path)
    found = variables(Host(root=tmp_path, environment={}))
    assert {name: found[name] for name in FLUSH} == dict.fromkeys(FLUSH, "0")
    assert "NCCL_IB_TC" not in found
    assert FLUSH[0] not in variables(Host(root=tmp_path, environment={FLUSH[0]: "1"}))


def test_other_network_devices_keep_their_defaults(tmp_path: Path) -> None:
    Machine(tmp_path)
    assert not set(FLUSH) & set(variables(Host(root=tmp_path, environment={})))


@pytest.mark.parametrize("name", FLUSH)
def test_a_setting_with_a_known_fault_is_named_before_the_start(tmp_path: Path, name: str) -> None:
    machine = pollara(tmp_path)
    machine.environment = {name: "1"}
    (row,) = [row for row in machine.findings() if row[0] == "RDMA settings"]
    assert row[1] == "failed"
    assert f"{name}=1: some ranks receive zeros" in row[2]
    assert "rocm-systems#7036" in row[2]
    assert row[3] == f"{name}=0, or leave it unset"
    machine.environment = {name: "0"}
    assert not [row for row in machine.findings() if row[0] == "RDMA settings"]


def test_every_variable_of_a_network_device_has_a_source_and_a_date() -> None:
    table = yaml.safe_load(NICS.read_text(encoding="utf-8"))
    for provider, rows in table["variables"].items():
        assert provider in table["providers"]
        for name, row in rows.items():
            assert row["why"], name
            assert all(source["by"] and source["date"] for source in row["stated"]), name
