"""GPU code in files: every form, every way it can be there or not."""

import contextlib
import io
import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from gpu_files import (
    bundle,
    code_object,
    compressed,
    elf,
    image_with,
    kernel_pack,
    pack_host,
    pages,
)
from primus_images.gates import rules
from primus_images.gates.contents import Code, code_in, library_of
from primus_images.gates.examined import GateReport, LayerFacts
from primus_images.gates.rules import coverage, pruning
from primus_images.gpucode.elf import in_entry_id, in_path, of_flags, runs_on

SOURCE = Path(rules.__file__).parents[2]
GFX942, GFX950 = 0x4C, 0x4F


def look(path: str, data: bytes) -> Code | None:
    return code_in(path, io.BytesIO(data), len(data))


def need(path: str, data: bytes) -> Code:
    code = look(path, data)
    assert code is not None
    return code


# Names


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("TensileLibrary_Type_HH_gfx942.co", ["gfx942"]),
        ("hsa/gfx950/fmha_v3_bwd/x.co", ["gfx950"]),
        ("miopen/db/gfx942130.HIP.fdb.txt", ["gfx942"]),
        ("miopen/db/gfx90a6e.kdb", ["gfx90a"]),
        ("miopen/db/gfx103036.db", ["gfx1030"]),
        (".kpack/blas_lib_gfx94X.kpack", ["gfx942"]),
        ("lib/gfx12-generic/x.co", ["gfx12-generic"]),
        ("lib/librocblas.so", []),
    ],
)
def test_architectures_in_a_path(path: str, names: list[str]) -> None:
    assert in_path(path) == tuple(names)


@pytest.mark.parametrize(
    ("entry", "target"),
    [
        ("hipv4-amdgcn-amd-amdhsa--gfx942:sramecc+:xnack-", "gfx942:sramecc+:xnack-"),
        ("hip-amdgcn-amd-amdhsa-gfx906", "gfx906"),
        ("hipv4-amdgcn-amd-amdhsa--gfx9-4-generic", "gfx9-4-generic"),
        ("hip-spirv64-amd-amdhsa-unknown-amdgcnspirv", "amdgcnspirv"),
        ("host-x86_64-unknown-linux-gnu-", None),
        ("host-x86_64-unknown-linux-gnu-gfx942", None),
        ("openmp-nvptx64-nvidia-cuda-sm_70", None),
    ],
)
def test_target_of_a_bundle_entry(entry: str, target: str | None) -> None:
    assert in_entry_id(entry) == target


@pytest.mark.parametrize(
    ("targets", "arch", "runs"),
    [
        (["gfx942"], "gfx942", True),
        (["gfx942:sramecc+:xnack-"], "gfx942", True),
        (["gfx942:xnack+"], "gfx942", False),
        (["gfx942:sramecc-"], "gfx942", False),
        (["gfx9-4-generic"], "gfx950", True),
        (["gfx9-generic"], "gfx942", False),
        (["gfx12-5-generic"], "gfx1250", True),
        (["gfx950"], "gfx942", False),
        (["amdgcnspirv"], "gfx950", True),
        ([], "gfx942", False),
    ],
)
def test_what_runs_where(targets: list[str], arch: str, runs: bool) -> None:
    assert runs_on(targets, arch) is runs


def test_flags_of_code_objects() -> None:
    assert of_flags(GFX942, 3) == "gfx942"
    assert of_flags(GFX950 | 0x300 | 0x400, 3) == "gfx950:xnack+"
    assert of_flags(GFX942 | 0xC00 | 0x200, 2) == "gfx942:sramecc+:xnack-"
    assert of_flags(0xEE, 3) == "unknown mach 0xee"


# Files


def test_code_object_by_its_flags() -> None:
    assert need("kernel.co", code_object(GFX950)).targets == ("gfx950",)
    assert need("kernel.co", code_object(GFX942)).form == "code object"
    assert look("lib/libc.so.6", elf({".text": b"x"})) is None
    assert look("lib/libfoo.so", b"no ELF at all") is None


@pytest.mark.parametrize("form", ["plain", "zstd 2", "zstd 3", "zlib 2"])
def test_fat_binary_of_several_bundles(form: str) -> None:
    bundles = [bundle(["gfx90a:xnack-", "gfx942"]), bundle(["gfx942", "gfx950"], empty=["gfx950"])]
    if form != "plain":
        name, version = form.split()
        bundles = [
            compressed(b, version=int(version), method=1 if name == "zstd" else 0) for b in bundles
        ]
    code = need("lib/librocblas.so.5", elf({".text": b"x" * 99, ".hip_fatbin": pages(*bundles)}))
    assert code.form == "fat binary"
    assert code.targets == ("gfx90a:xnack-", "gfx942"), "an entry without bytes does not count"


def test_a_magic_inside_code_begins_no_bundle_and_bundles_far_apart_do() -> None:
    inner = bundle(["gfx950"])
    assert need("a.hsaco", bundle(["gfx942"], payload=inner)).targets == ("gfx942",)
    assert need("a.so", elf({".hip_fatbin": b"xxCCOBzz" * 9})).targets == ()
    data = bundle(["gfx942"]) + b"\0" * (3 << 20) + bundle(["gfx950"])
    assert need("a.hsaco", data).targets == ("gfx942", "gfx950")


@pytest.mark.parametrize(
    "data",
    [
        bundle(["gfx942"])[:50],
        compressed(b"something else"),
        compressed(bundle(["gfx942"]))[:30] + b"\0" * 99,
        compressed(bundle(["gfx942"]), method=0).replace(
            b"\x02\x00\x00\x00", b"\x02\x00\x07\x00", 1
        ),
        elf({".text": b"x"})[:70],
        b"KPAK\1\0\0\0",
        b"KPAK" + b"\xff" * 40,
        elf({".rocm_kpack_ref": b"\xc1"}),
        *(
            struct.pack("<4sIQ", b"KPAK", 1, 16) + table
            for table in (
                b"\xc1",
                b"\xdb\xff\xff\xff\xff",
                b"\xdd\xff\xff\xff\xff",
                b"\x81\x90\x01",
                b"\x91" * 5000,
            )
        ),
    ],
)
def test_damaged_files_are_errors_and_no_silence(data: bytes) -> None:
    with pytest.raises(ValueError):
        look("x.co", data)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (elf({".rocm_kpack_ref": b"\x80"}), "its .rocm_kpack_ref names no kernel packs"),
        (elf({".rocm_kpack_ref": b"\x90"}), "its .rocm_kpack_ref names no kernel packs"),
        (struct.pack("<4sIQ", b"KPAK", 1, 15) + b"\x80", "has its table outside the file"),
        (struct.pack("<4sIQ", b"KPAK", 1, 17) + b"\x80", "has its table outside the file"),
        (struct.pack("<4sIQ", b"KPAK", 1, 16) + b"\x80", "a kernel pack has no table"),
        (struct.pack("<4sIQ", b"KPAK", 1, 16) + b"\x90", "a kernel pack has no table"),
    ],
)
def test_what_a_kernel_pack_lacks_is_said(data: bytes, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        look("x.co", data)


@pytest.mark.parametrize("before", [0, 1, 48])
def test_a_kernel_packs_table_may_begin_right_after_its_head(before: int) -> None:
    whole = kernel_pack({"lib/x.so": ["gfx942"]})
    _, _, start = struct.unpack("<4sIQ", whole[:16])
    pack = struct.pack("<4sIQ", b"KPAK", 1, 16 + before) + bytes(before) + whole[start:]
    assert need("x.kpack", pack).kernels == need("x.kpack", whole).kernels != {}


WHOLE = (
    elf(
        {".hip_fatbin": pages(bundle(["gfx942"]), compressed(bundle(["gfx950"])))},
        soname="libx.so.1",
    ),
    pack_host("lib/x.so", "../x_@GFXARCH@.kpack"),
    kernel_pack({"lib/x.so": ["gfx942"]}),
    bundle(["gfx942"]),
    compressed(bundle(["gfx942"]), version=3, method=0),
    code_object(GFX942),
)


@given(
    st.sampled_from(WHOLE),
    st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=8)), max_size=4),
    st.floats(0, 1),
)
def test_whatever_a_file_holds_it_is_read_or_refused(
    whole: bytes, changes: list[tuple[float, bytes]], keep: float
) -> None:
    data = bytearray(whole)
    for place, value in changes:
        at = int(place * len(data))
        data[at : at + len(value)] = value
    cut = bytes(data[: int(len(data) * (0.3 + keep))])
    for read in (
        lambda: look("lib/x.co", cut),
        lambda: library_of("lib/libx.so", io.BytesIO(cut), len(cut)),
    ):
        with contextlib.suppress(ValueError):
            read()


def test_kernel_files_by_name() -> None:
    assert need("a/TensileLibrary_lazy_gfx950.dat", b"\x93").targets == ("gfx950",)
    assert look("a/TensileLibrary_fallback.dat", b"\x93") is None


# Coverage


def facts(codes: list[Code], unreadable: dict[str, str] | None = None) -> LayerFacts:
    return LayerFacts(code=codes, unreadable=unreadable or {})


def covered(arch: str | None, **layers: list[Code]) -> GateReport:
    return coverage.judge(image_with({name: facts(codes) for name, codes in layers.items()}, arch))


def errors(arch: str | None, **layers: list[Code]) -> list[str]:
    return [f"{f.layer} {f.path}: {f.message}" for f in covered(arch, **layers).errors]


def test_a_library_for_other_gpus_fails_and_is_named() -> None:
    fat = [need("opt/librocblas.so", elf({".hip_fatbin": pages(bundle(["gfx90a", "gfx942"]))}))]
    assert covered("gfx942", rocblas=fat).passed
    assert errors("gfx950", rocblas=fat) == [
        "rocblas opt/librocblas.so: no code for gfx950: it has gfx90a, gfx942 (fat binary)"
    ]
    emptied = [need("opt/librocblas.so", elf({".hip_fatbin": pages(bundle([]))}))]
    assert errors("gfx950", kernels=emptied) == [
        "kernels opt/librocblas.so: no code for gfx950: it has no GPU code (fat binary)"
    ]


def test_a_folder_of_kernel_files_is_one_library() -> None:
    objects = [
        need(f"opt/hsa/{a}/fmha/k.co", code_object(m))
        for a, m in (("gfx942", GFX942), ("gfx950", GFX950))
    ]
    catalogues = [need(f"opt/library/x_{a}.dat", b"") for a in ("gfx942", "gfx90a")]
    layers = {"hipblaslt": catalogues, "aiter": objects}
    assert covered("gfx942", **layers).summary == "2 of 2 GPU libraries cover gfx942"
    assert errors("gfx950", **layers) == [
        "hipblaslt opt/library/: no code for gfx950: it has gfx942, gfx90a (kernel files)"
    ]


def test_files_of_a_folder_belong_together_whether_their_names_have_a_gpu_or_not() -> None:
    catalogue = need("opt/library/x_gfx950.dat", b"")
    code = need("opt/library/kernels.co", code_object(GFX942))
    assert covered("gfx942", blas=[catalogue, code]).summary == "1 of 1 GPU libraries cover gfx942"
    assert errors("gfx950", blas=[catalogue, code]) == [
        "blas opt/library/: no code for gfx950: it has gfx942 (kernel files)"
    ]


def test_a_catalogue_without_code_covers_nothing() -> None:
    catalogue = [need(f"opt/library/x_{a}.dat", b"") for a in ("gfx942", "gfx950")]
    code = [need("opt/library/x_gfx942.co", code_object(GFX942))]
    assert errors("gfx942", blas=catalogue + code) == []
    assert errors("gfx950", blas=catalogue + code) == [
        "blas opt/library/: no code for gfx950: it has gfx942 (kernel files)"
    ]
    assert errors("gfx950", databases=catalogue) == [], "tuning databases have no code anywhere"


def test_host_of_a_pack_needs_the_pack_of_its_gpu() -> None:
    host = pack_host("lib/libtorch_hip.so", "../.kpack/torch_@GFXARCH@.kpack")
    torch = [need("site/torch/lib/libtorch_hip.so", host)]

    def device(path: str, library: str = "lib/libtorch_hip.so") -> list[Code]:
        return [need(path, kernel_pack({library: ["gfx942"]}))]

    good = device("site/torch/.kpack/torch_gfx942.kpack")
    assert errors("gfx942", torch=torch, device=good) == []
    (missing,) = errors("gfx950", torch=torch, device=good)
    assert "its kernel pack /site/torch/.kpack/torch_gfx950.kpack is not in the image" in missing
    (empty,) = errors(
        "gfx942", torch=torch, device=device("site/torch/.kpack/torch_gfx942.kpack", "lib/other.so")
    )
    assert "/site/torch/.kpack/torch_gfx942.kpack has no kernels of lib/libtorch_hip.so" in empty
    (astray,) = errors("gfx942", torch=torch, device=device("elsewhere/torch_gfx942.kpack"))
    assert "its kernel pack /site/torch/.kpack/torch_gfx942.kpack is not in the image" in astray


def test_only_an_image_for_an_amd_gpu_needs_a_library() -> None:
    code = [need("lib/x.so", elf({".hip_fatbin": bundle(["gfx942"])}))]
    assert covered(None).summary == "no GPU architecture to cover"
    assert (
        covered(None, x=code).summary
        == "no GPU architecture to cover; 1 GPU libraries are in it all the same"
    )
    assert covered("sm_90").summary == "code for sm_90 is not judged"
    assert not covered("gfx942", base=[]).passed


def test_what_cannot_be_examined_is_a_warning() -> None:
    code = [need("lib/x.so", elf({".hip_fatbin": bundle(["gfx942"])}))]
    report = coverage.judge(image_with({"l": facts(code, {"a.so": "cut short"})}, "gfx942"))
    assert [(f.severity, f.path) for f in report.findings] == [("warning", "a.so")]


# Pruning


def pruned(arch: str | None, codes: list[Code]) -> GateReport:
    report = pruning.judge(image_with({"blas": facts(codes)}, arch))
    assert report.passed
    return report


def test_kernel_files_of_others_are_counted_per_layer() -> None:
    files = [need(f"lib/x_{a}.dat", b"123") for a in ("gfx942", "gfx950", "gfx90a")]
    (finding,) = pruned("gfx942", files).findings
    assert finding.message == "2 kernel files, 6 B, are not for gfx942"
    assert not pruned(None, files).findings
    assert pruned("gfx942", files[:1]).findings == []


@pytest.mark.parametrize(
    ("path", "code", "idle"),
    [
        ("lib/gfx942/kernel.co", GFX942, False),
        ("lib/kernel.co", GFX950, True),
        ("lib/gfx950/kernel.co", GFX942, True),
        ("lib/gfx942/kernel.co", GFX950, False),
    ],
)
def test_a_kernel_file_is_for_the_gpu_of_its_path_or_else_of_its_code(
    path: str, code: int, idle: bool
) -> None:
    findings = pruned("gfx942", [need(path, code_object(code))]).findings
    assert [finding.path for finding in findings] == [path] * idle


def test_a_library_with_others_code_is_named() -> None:
    mixed = need(
        "lib/librccl.so.1", elf({".hip_fatbin": bundle(["gfx90a", "gfx942", "gfx942:xnack+"])})
    )
    alone = need("lib/librocblas.so.5", elf({".hip_fatbin": bundle(["gfx942"])}))
    report = pruned("gfx942", [mixed, alone])
    assert [(f.severity, f.path, f.message) for f in report.findings] == [
        ("warning", "lib/librccl.so.1", "it also holds code for gfx90a, gfx942:xnack+")
    ]
    assert (
        report.summary == "0 kernel files for other architectures, 0 B; code for them in 1 library"
    )


@pytest.mark.parametrize(
    "name", ["gates/rules/coverage.py", "gates/patterns.yaml", "gpucode/elf.py"]
)
def test_a_changed_reader_of_gpu_code_is_a_changed_rule(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for room in ("gates", "gpucode"):
        shutil.copytree(SOURCE / room, tmp_path / room)
    monkeypatch.setattr(rules, "__file__", str(tmp_path / "gates/rules/__init__.py"))
    before = rules.rules_hash.__wrapped__()
    (tmp_path / name).write_text("changed")
    assert rules.rules_hash.__wrapped__() != before
