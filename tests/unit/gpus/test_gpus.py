"""The table of GPU generations: complete, strict, and silent about what it does not know."""

from dataclasses import replace
from pathlib import Path

import pytest
from docs.site.models import gpu_page

from primus_images.errors import InputError
from primus_images.gpucode.elf import MACH
from primus_images.gpus import detect, table
from primus_images.gpus.table import Arch, Generation, Peak, Statement, Table, Variable, plain_name
from primus_images.schema import build
from primus_images.yamlfile import parse

TEXT = table.TABLE_FILE.read_text(encoding="utf-8")
# Long enough to stand once, also when another GPU has the same figures.
H200_TITLE = "    title: NVIDIA H200\n    arch: "
H200_IDS = "NVIDIA H200 SXM5, H200]\n    device_ids: []"
H200_UNITS = f"{H200_IDS}\n    compute_units"

# All products of an architecture, of which a machine that tells nothing else has one.
GFX942 = " or ".join(
    row.title.rpartition(" ")[2] for row in table.load_table().generations if row.arch == "gfx942"
)


def read(text: str) -> Table:
    return build(Table, parse(text, "g.yaml"))


def test_gates_know_the_code_of_every_amd_architecture() -> None:
    unknown = {one.arch for one in table.load_table().archs if one.vendor == "amd"} - set(
        MACH.values()
    )
    assert not unknown, "add them to src/primus_images/gpucode/archs.yaml"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            f"{H200_UNITS}: 132",
            f"{H200_UNITS.removesuffix('s')}: 132",
            "unknown key 'compute_unit'",
        ),
        (f"{H200_UNITS}: 132", H200_IDS, "'compute_units' is missing"),
        ("  - name: mi325x\n", "  - name: mi300x\n", "generation 'mi300x' is a duplicate"),
        ("  - name: mi325x\n", "  - name: MI325X\n", "name must be like mi300x"),
        ('["0x74a5"', '["0x74a1"', "device id '0x74a1' is a duplicate"),
        ('["0x74a5"', '["74a5"', "device_ids must be like 0x74a1"),
        (
            "NVIDIA H200 SXM5, H200]",
            "NVIDIA H200 SXM5, mi300x]",
            "product name 'mi300x' is a duplicate",
        ),
        (
            f"{H200_TITLE}sm_90",
            f"{H200_TITLE}sm_91",
            "h200: there is no architecture 'sm_91'",
        ),
        (
            f"{H200_TITLE}sm_90",
            f"{H200_TITLE}gfx950",
            "h200 needs one peak for each of bf16, fp8, mx",
        ),
        ("fp8: e4m3fnuz", "fp8: e5m2fnuz", "fp8 must be one of e4m3fnuz, e4m3fn"),
        (
            "    mx: []\n    mx_source: Prim",
            "    mx: [mxfp8]\n    mx_source: Prim",
            "mi300x needs one peak for each",
        ),
        (
            "  - arch: sm_90\n    vendor: nvidia",
            "  - arch: sm_90\n    vendor: amd",
            "sm_90 is not an architecture of amd",
        ),
        (
            'tflops: 1979, source: "NVIDIA H200',
            'tflops: about 2000, source: "NVIDIA H200',
            "tflops must be a number",
        ),
        (
            'dtype: fp8, tflops: 1979, source: "NVIDIA H200',
            'dtype: bf16, tflops: 1979, source: "NVIDIA H200',
            "h200 needs one peak for each of bf16, fp8, not",
        ),
        (
            "    for: [gfx942, mi350x",
            "    for: [gfx942, gfx950",
            "GPU_MAX_HW_QUEUES' is a duplicate",
        ),
        (
            "    for: [gfx942, mi350x",
            "    for: [gfx942, mi305x",
            "is for 'mi305x', which is neither",
        ),
        (
            "    for: [gfx942, mi350x, mi350p",
            "    for: [gfx942, mi350p",
            "mi350x has no entry for the environment variables GPU_MAX_HW_QUEUES (",
        ),
    ],
)
def test_a_slip_is_refused_with_its_place(old: str, new: str, message: str) -> None:
    assert TEXT.count(old) == 1
    with pytest.raises(InputError) as caught:
        read(TEXT.replace(old, new))
    assert message in caught.value.message
    assert caught.value.where
    assert caught.value.where.startswith("g.yaml:")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("AMD Instinct™ MI300X", "mi300x"),
        ("AMD Instinct(TM)  MI325X\n", "mi325x"),
        ("AMD Instinct MI325X VF", "mi325x"),
        ("mi350x", "mi350x"),
    ],
)
def test_names_as_tools_print_them(text: str, name: str) -> None:
    found = table.by_product_name(text)
    assert found is not None
    assert found.name == name


OTHERS = [
    "",
    "AMD Instinct MI300X HF",
    "AMD Instinct MI999X",
    "MI300",
    "AMD Radeon RX 7900 XTX",
    "NVIDIA H200 NVL",
    "NVIDIA H200 MIG 1g.18gb",
    "NVIDIA GH200 480GB",
    "NVIDIA H20",
    "NVIDIA H100 80GB HBM3",
    "NVIDIA B200",
    "gfx942",
]


@pytest.mark.parametrize("text", OTHERS)
def test_other_gpus_are_unknown_and_get_no_mfu(text: str) -> None:
    assert table.by_product_name(text) is None
    with pytest.raises(table.UnknownPeak) as caught:
        table.peak_for_mfu(text, "bf16")
    assert caught.value.message == f"no MFU: the peak of {text!r} is unknown"


def test_a_peak_is_that_of_the_dtype() -> None:
    assert [table.peak_for_mfu("AMD Instinct MI355X", dtype)[1] for dtype in ("bf16", "fp8")] == [
        2500,
        5000,
    ]


@pytest.mark.parametrize(
    ("name", "dtype", "sentence"),
    [
        ("mi300x", "mxfp8", "no MFU: AMD Instinct MI300X does not compute mxfp8"),
        ("h200", "mxfp4", "no MFU: NVIDIA H200 does not compute mxfp4"),
        ("mi455x", "mxfp4", "no MFU: no source states the mxfp4 peak of AMD Instinct MI455X"),
    ],
)
def test_mfu_without_a_peak_is_refused(name: str, dtype: str, sentence: str) -> None:
    gpu = table.generation(name)
    assert table.peak(gpu, dtype) is None  # type: ignore[arg-type]
    with pytest.raises(table.UnknownPeak) as caught:
        table.peak_for_mfu(gpu.title, dtype)  # type: ignore[arg-type]
    assert caught.value.message == sentence


def test_a_variable_is_written_once_with_its_sources_and_a_reason_where_they_disagree() -> None:
    variables = table.load_table().environment
    assert len({(variable.name, variable.value) for variable in variables}) == len(variables)
    for variable in variables:
        assert variable.stated, variable.name
        assert bool(variable.choice) == any(
            row.value != variable.value for row in variable.stated
        ), variable.name


def test_products_outside_of_the_table_are_named_once_and_have_no_row() -> None:
    known = table.load_table()
    others = [plain_name(name) for arch in known.archs for name in arch.others]
    rows = {
        plain_name(name) for gpu in known.generations for name in (gpu.name, gpu.title, *gpu.names)
    }
    assert len(set(others)) == len(others)
    assert not rows & set(others)


def small() -> Table:
    arch = Arch(
        arch="gfx1", vendor="amd", fp8="e4m3fn", fp8_source="s", mx=(), mx_source="s", others=()
    )
    real = table.generation("h200")
    peaks = (
        Peak(dtype="bf16", tflops=None, source="nobody"),
        Peak(dtype="fp8", tflops=1234.5, source="a page"),
    )
    gpu: Generation = replace(
        real, name="one", title="One|Two", arch="gfx1", device_ids=(), peaks=peaks
    )
    seven = (Statement(by="y", value="7"),)
    variables = (
        Variable(
            name="A", value=None, for_=("one",), why="reason of A", stated=seven, choice="no 7"
        ),
    )
    return Table(archs=(arch,), generations=(gpu,), environment=variables)


def test_the_page_shows_figures_reasons_and_decisions() -> None:
    page = gpu_page(small())
    assert (
        "| `one` | One\\|Two | gfx1 | 132 | 141 GB | 4.8 TB/s | bf16 not known, fp8 1,234.5 | – |"
        in page
    )
    assert "| `A` | unset | one | reason of A | – | `7`: y | no 7 |" in page


def node(root: Path, number: int, *, version: int, device: int, simds: int) -> None:
    folder = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
    folder.mkdir(parents=True)
    lines = (
        f"simd_count {simds}\ngfx_target_version {version}\nvendor_id 4098\ndevice_id {device}\n"
    )
    (folder / "properties").write_text(lines)


@pytest.mark.parametrize(
    ("version", "device", "simds", "name", "generation"),
    [
        (90402, 29857, 1216, "AMD Instinct MI300X (gfx942)", "mi300x"),
        (90402, 29861, 1216, "AMD Instinct MI325X (gfx942)", "mi325x"),
        (90500, 30112, 1024, "AMD Instinct MI350X (gfx950)", "mi350x"),
        (90500, 30115, 1024, "AMD Instinct MI355X (gfx950)", "mi355x"),
        (120501, 0, 1216, "unknown AMD GPU (gfx1251)", ""),
        (90402, 65535, 1216, "unknown AMD GPU (gfx942, device 0xffff)", ""),
        (90500, 29857, 1216, "unknown AMD GPU (gfx950, device 0x74a1)", ""),
        (90402, 29857, 152, "part of AMD Instinct MI300X (gfx942, 38 of 304 compute units)", ""),
        (90402, 0, 1216, f"AMD Instinct {GFX942} (gfx942)", ""),
    ],
)
def test_amd_products_are_told_by_device_id_and_size(
    tmp_path: Path, version: int, device: int, simds: int, name: str, generation: str
) -> None:
    node(tmp_path, 1, version=version, device=device, simds=simds)
    found = detect.detect(tmp_path)
    assert (found.names, found.generation) == ((name,), generation)


def test_a_mixed_machine_has_no_one_generation(tmp_path: Path) -> None:
    assert detect.detect(tmp_path).sentence().startswith("none found")
    node(tmp_path, 0, version=0, device=0, simds=0)  # a CPU
    for number, device in enumerate((0x74A1, 0x74A5, 0x74A1), 1):
        node(tmp_path, number, version=90402, device=device, simds=1216)
    found = detect.detect(tmp_path)
    assert (found.generation, len(found.names)) == ("", 3)
    assert found.sentence() == "2 × AMD Instinct MI300X (gfx942), 1 × AMD Instinct MI325X (gfx942)"


def test_nvidia_gpus_by_name_unless_they_are_split(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert detect.detect(tmp_path).names == ("unknown NVIDIA GPU",)

    def models(*names: str) -> str:
        for bus, name in enumerate(names):
            folder = tmp_path / f"proc/driver/nvidia/gpus/0000:{bus}9:00.0"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "information").write_text(f"Model: \t\t {name}\n")
        return detect.detect(tmp_path).generation

    assert (
        models("NVIDIA H200 NVL", "NVIDIA H200 NVL")
        == models("NVIDIA H200 NVL", "NVIDIA H200")
        == ""
    )
    assert models("NVIDIA H200", "NVIDIA H200") == "h200"
    (tmp_path / "proc/driver/nvidia/capabilities/gpu0/mig/gi1").mkdir(parents=True)
    assert detect.detect(tmp_path).generation == ""


def test_the_driver_has_its_own_version_or_else_its_kernels(tmp_path: Path) -> None:
    folder = tmp_path / "proc/driver/nvidia/gpus/0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: NVIDIA H200\n")
    assert detect.detect(tmp_path).driver == ""
    (kernel := tmp_path / "proc/sys/kernel/osrelease").parent.mkdir(parents=True)
    kernel.write_text("6.1.0-13-amd64\n")
    assert detect.detect(tmp_path).driver == "nvidia of Linux 6.1.0-13-amd64"
    (version := tmp_path / "sys/module/nvidia/version").parent.mkdir(parents=True)
    version.write_text("580.95.05\n")
    assert detect.detect(tmp_path).driver == "nvidia 580.95.05"


def test_the_firmware_of_nvidia_gpus_is_each_version_once(tmp_path: Path) -> None:
    versions = ("96.00.9F", "96.00.74", "96.00.9F", "")
    for number, version in enumerate(versions):
        folder = tmp_path / f"proc/driver/nvidia/gpus/{number}"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: NVIDIA H200\nVideo BIOS: {version}\n")
    assert detect.detect(tmp_path).firmware == "96.00.74, 96.00.9F"


@pytest.mark.parametrize(
    ("script", "memory"),
    [
        ("printf '81559\\n80000\\n'", 80000 * 2**20),
        ("printf '[N/A]\\n'", None),
        ("exit 9", None),
        (None, None),
    ],
)
def test_the_memory_of_nvidia_gpus_is_known_if_their_driver_tells_it(
    script: str | None, memory: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert detect.memory_bytes(tmp_path) == memory


def test_firmware_is_named_unless_its_version_is_zero(tmp_path: Path) -> None:
    node(tmp_path, 1, version=90402, device=0x74A1, simds=1216)
    device = tmp_path / "sys/class/drm/card0/device"
    (device / "fw_version").mkdir(parents=True)
    (device / "vbios_version").write_text("113-M3000100-102\n")
    (device / "fw_version/smc_fw_version").write_text("0x00557100\n")
    (device / "fw_version/vce_fw_version").write_text("0x00000000\n")
    assert detect.detect(tmp_path).firmware == "smc 0x00557100, vbios 113-M3000100-102"


def test_the_memory_is_that_of_the_smallest_gpu_and_not_of_the_cpu(tmp_path: Path) -> None:
    for number, (heap, size) in enumerate([(0, 1000), (1, 5000), (2, 4000)]):
        bank = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{number}/mem_banks/0"
        bank.mkdir(parents=True)
        (bank / "properties").write_text(f"heap_type {heap}\nsize_in_bytes {size}\n")
    assert detect.memory_bytes(tmp_path) == 4000


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ({}, ("0", "1", "2", "3")),
        ({"HIP_VISIBLE_DEVICES": "2, 3"}, ("2", "3")),
        ({"HIP_VISIBLE_DEVICES": "-1"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "2"}, ("2",)),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, ("0", "1")),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, ("1",)),
    ],
)
def test_a_process_uses_the_devices_that_variables_leave(
    environment: dict[str, str], devices: tuple[str, ...]
) -> None:
    assert detect.visible(4, environment) == devices


def test_a_new_architecture_needs_the_variables_that_several_others_have() -> None:
    known = table.load_table()
    arch = replace(next(row for row in known.archs if row.arch == "gfx950"), arch="gfx9999")
    gpu = replace(
        table.generation("mi355x"), name="new", arch="gfx9999", names=("New",), device_ids=()
    )
    of_several = next(row for row in known.environment if row.name == "HSA_NO_SCRATCH_RECLAIM")
    of_one_alone = replace(of_several, name="OF_ONE_ALONE", for_=("gfx950",))
    with pytest.raises(ValueError, match="new has no entry for the environment variables") as wrong:
        replace(
            known,
            archs=(*known.archs, arch),
            generations=(*known.generations, gpu),
            environment=(*known.environment, of_one_alone),
        )
    assert of_several.name in str(wrong.value)
    assert of_one_alone.name not in str(wrong.value)
    without_image = replace(gpu, no_image="it is planned")
    replace(known, archs=(*known.archs, arch), generations=(*known.generations, without_image))
