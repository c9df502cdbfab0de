"""The RDMA layer for real: Debian's packages over a base, in an image that runs."""

import json
from collections.abc import Iterator

import pytest
import yaml

from host_tools import needs
from project_kit import SOURCE, Kit, lock
from tables import text_of

pytestmark = [pytest.mark.integration, pytest.mark.slow, needs("mmdebstrap")]

TARGET = text_of("images/extra.yaml")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    """The base `bookworm` of the repository with its extra, and no component."""
    kit = Kit(tmp_path_factory.mktemp("extras"))
    versions = yaml.safe_load((SOURCE.parent / "versions.yaml").read_text())
    base = versions["bases"]["bookworm"]
    base["packages"] = ["libpython3.11-stdlib", "python3.11-minimal"]
    kept = {
        "release": versions["release"],
        "created": str(versions["created"]),
        "bases": {"bookworm": base},
    }
    kit.write("versions.yaml", yaml.safe_dump({**kept, "components": {}}))
    kit.write("images/demo.yaml", TARGET)
    lock(kit)
    kit.build()
    yield kit


def test_ibv_devices_runs_and_every_provider_loads(built: Kit) -> None:
    code = (
        "import ctypes, glob; "
        "found = glob.glob('/usr/lib/*-linux-gnu/libibverbs/*.so'); "
        "[ctypes.CDLL(path) for path in found]; "
        "print(*sorted(path.rpartition('/lib')[2].partition('-rdmav')[0] for path in found))"
    )
    assert {"bnxt_re", "mlx5", "irdma"} <= set(
        built.primus("run", "demo", "--", "python3", "-c", code).out.split()
    )
    said = built.primus("run", "demo", "--", "ibv_devices")
    # With no RDMA device in the kernel, libibverbs gives this answer and ends with 1.
    assert "node GUID" in said.out or "Failed to get IB devices list" in said.err


def test_what_only_maintainer_scripts_call_is_not_in_the_layer(built: Kit) -> None:
    code = "cat /etc/libibverbs.d/*; ls /usr/sbin/adduser /usr/bin/passwd"
    said = built.primus("run", "demo", "--", "sh", "-c", code)
    assert "driver mlx5" in said.out
    assert "/usr/bin/passwd" not in said.out


def test_the_gates_and_the_bill_know_the_packages(built: Kit) -> None:
    (image,) = json.loads(built.primus("check", "demo", "--json").out)["images"]
    assert [gate["gate"] for gate in image["gates"] if not gate["passed"]] == []
    rows = [line.split() for line in built.primus("sbom", "demo").out.splitlines()]
    assert [row[2] for row in rows if row[0] == "libibverbs1"] == ["inside"]


def test_only_the_extra_is_locked_and_built_beside_the_base(built: Kit) -> None:
    lock = json.loads((built.root / "images/locks/pypi/demo.json").read_text())
    base = {row["name"] for row in lock["files"] if row["base"] == "bookworm"}
    extra = {row["name"] for row in lock["files"] if row["base"] == "bookworm rdma"}
    assert {"ibverbs-providers", "ibverbs-utils", "libibverbs1"} <= extra
    assert not base & extra
    built.edit("images/demo.yaml", "extras: {pypi: [rdma]}\n", "")
    assert built.primus("lock").code == 0
    assert {name for name, made in built.layers().items() if made} == {"facts"}
