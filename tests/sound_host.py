"""A sound machine with GPUs and network, whose files a fault changes."""

from pathlib import Path
from typing import Any

import yaml

from primus_images.system import nodes
from primus_images.system.host import Finding, Host
from primus_images.system.nodes import Measurement
from primus_images.system.preflight import preflight
from stand_in_machine import FILES, make_machine, write_all

GIB = 2**30
FAULTS: dict[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "fixtures/preflight_faults.yaml").read_text(encoding="utf-8")
)


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


def gemm(*figures: float, least: float | None = 500, most: float | None = 1307.4) -> Measurement:
    return Measurement(
        what="gemm bf16", unit="TFLOP/s", figures=figures, least=least, most=most, source="a guide"
    )


def node(name: str, *findings: Finding, tflops: float = 600, driver: str = "6.16.6") -> nodes.Node:
    gpus = ("AMD Instinct MI300X",) * 8
    return nodes.Node(
        name=name,
        gpus=gpus,
        driver=driver,
        findings=findings or (Finding("ok", "disk", "fine"),),
        measurements=(gemm(*[tflops] * 8),),
    )
