"""Simulated machines: each fault is named, with its remedy, and a sound machine has none."""

import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from primus_images.cli.main import main
from primus_images.system import fabric
from primus_images.system.fabric import variables
from primus_images.system.host import Host
from primus_images.system.preflight import CHECKS, preflight
from stand_in_machine import FILES, make_machine, write_all

GIB = 2**30
LIBRARIES = "usr/lib/x86_64-linux-gnu"
NICS = Path(fabric.__file__).with_name("nics.yaml")


class Machine:
    """A sound host of eight MI300X with two RoCE ports; a fault changes its files.

    ``space`` has total and free bytes of /dev/shm and of all other folders, ``closed`` the files
    that cannot be opened.
    """

    space: dict[str, tuple[int, int]]
    closed: set[Path]

    def __init__(self, root: Path, gpus: int = 8) -> None:
        self.root = root
        self.environment: dict[str, str] = {}
        Machine.space, Machine.closed = (
            {"shm": (64 * GIB, 60 * GIB), "disk": (900 * GIB, 800 * GIB)},
            set(),
        )
        make_machine(root, gpus=gpus)
        for number in range(2):
            device = f"sys/class/infiniband/mlx5_{number}"
            self.write(f"{device}/fw_ver", "28.39")
            self.write(f"{device}/board_id", "MT_1")
            self.write(f"dev/infiniband/uverbs{number}", "")
            self.write_all(f"{device}/ports/1", FILES["port"])
            self.bind(number, "mlx5_core")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def write_all(self, folder: str, files: dict[str, str]) -> None:
        write_all(self.root / folder, files)

    def bind(self, number: int, driver: str) -> None:
        """Show a kernel driver of an RDMA device, as sysfs does."""
        self.write(f"sys/bus/pci/drivers/{driver}/bind", "")
        link = self.root / f"sys/class/infiniband/mlx5_{number}/device/driver"
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(self.root / "sys/bus/pci/drivers" / driver)

    def remove(self, name: str) -> None:
        path = self.root / name
        for child in sorted(path.rglob("*"), reverse=True) if path.is_dir() else []:
            child.rmdir() if child.is_dir() else child.unlink()
        path.rmdir() if path.is_dir() else path.unlink()

    def findings(self) -> list[tuple[str, str, str, str]]:
        host = Host(root=self.root, environment=self.environment, output=Path("/runs"))
        return [(one.check, one.level, one.message, one.remedy) for one in preflight(host)]


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


FAULTS: dict[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parents[2] / "fixtures/preflight_faults.yaml").read_text(encoding="utf-8")
)


def spoil(machine: Machine, fault: dict[str, Any]) -> None:
    for name in fault.get("remove", ()):
        machine.remove(name)
    for name, text in fault.get("write", {}).items():
        machine.write(name, text)
    for number, driver in fault.get("bind", {}).items():
        machine.bind(number, driver)
    machine.closed.update(machine.root / name for name in fault.get("closed", ()))
    machine.environment.update(fault.get("environment", {}))
    machine.space.update(fault.get("space", {}))


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


def test_the_command_reports_and_fails_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(tmp_path)
    machine.write("proc/sys/kernel/numa_balancing", "1")
    started = time.monotonic()
    assert main(["preflight", "--quick", "--json", "--root", str(tmp_path), "--output", "/"]) == 1
    assert time.monotonic() - started < 20
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is False
    assert len(found["gpus"]) == 8
    numa = next(one for one in found["findings"] if one["check"] == "NUMA balancing")
    assert "echo 0" in numa["remedy"]
    assert main(["preflight", "--root", str(tmp_path / "nothing")]) == 2


def test_a_job_on_gpus_is_not_started_on_an_unfit_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from primus_images.gpus.detect import detect
    from primus_images.system import host
    from primus_images.training.backends.protocol import Backend

    machine = Machine(tmp_path / "host")
    machine.write("proc/self/limits", "Max processes 100 100 processes\n")
    monkeypatch.setattr("primus_images.cli.image.train.detect", lambda: detect(machine.root))
    monkeypatch.setattr("primus_images.cli.image.train.machine.check", lambda recipe, **_: None)
    monkeypatch.setattr("primus_images.cli.image.train.start.check_backend", lambda job: None)
    monkeypatch.setattr(
        "primus_images.cli.image.train.backend_of", lambda _: Backend(check_data=lambda _: None)
    )
    plain = host.Host

    def elsewhere(**options: Any) -> Host:
        return plain(**{**options, "root": machine.root})

    monkeypatch.setattr(host, "Host", elsewhere)
    words = ["train", "llama3.1-8b", "--gpu", "mi300x", "--output", str(tmp_path / "run")]
    assert main(words) == 3
    told = capsys.readouterr().err
    assert "only 100 processes are allowed" in told
    assert "--no-preflight" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("gpus", "change", "words", "said"),
    [
        (8, None, [], ""),
        (8, None, ["--expect", "8", "--gpu", "mi300x", "--expect-nics", "2"], ""),
        (8, "one lost", ["--expect", "8"], "7 of 8 can be used"),
        (8, "no driver", ["--expect", "8"], "8 of 8 GPUs on the PCI bus have no driver"),
        (8, None, ["--gpu", "mi325x"], "MI300X (gfx942), not mi325x"),
        (8, None, ["--expect-nics", "3"], "2 of 3 devices have a driver: mlx5_0, mlx5_1"),
        (0, None, [], "no GPU on this machine, or its driver does not run"),
        (0, None, ["--expect", "8"], "0 of 8 can be used"),
        (0, None, ["--expect", "0"], ""),
    ],
)
def test_ready_needs_proof(
    gpus: int,
    change: str | None,
    words: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(tmp_path, gpus)
    if change:
        spoil(machine, FAULTS[change])
    plain = Host
    monkeypatch.setattr(
        "primus_images.cli.image.preflight.Host", lambda **of: plain(**of, environment={})
    )
    page = tmp_path / "page.html"
    code = main(
        [
            "preflight",
            "--quick",
            "--root",
            str(tmp_path),
            "--output",
            "/runs",
            "--html",
            str(page),
            *words,
        ]
    )
    out = capsys.readouterr().out
    assert code == bool(said), out
    assert said in " ".join(out.split())
    assert ("the node is ready" in page.read_text()) == (not said)


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
