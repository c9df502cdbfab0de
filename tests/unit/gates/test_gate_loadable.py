import io
from collections.abc import Sequence

import pytest

from gpu_files import elf, image_with
from primus_images.gates.contents import Library, library_of
from primus_images.gates.examined import Finding, LayerFacts
from primus_images.gates.rules.loadable import cuda_versions, judge
from primus_images.terminal import bytes_text

SITE = "opt/venv/lib/python3.11/site-packages"
CUDA13 = (f"{SITE}/nvidia/cu13/lib/libcudart.so.13", elf(soname="libcudart.so.13"))
LIBC = ("lib/libc.so.6", elf(soname="libc.so.6"))


def findings(*files: tuple[str, bytes]) -> Sequence[Finding]:
    libraries: list[Library] = []
    for path, data in files:
        library = library_of(path, io.BytesIO(data), len(data))
        assert library is not None
        libraries.append(library)
    return judge(image_with({"one": LayerFacts(libraries=libraries)})).findings


@pytest.mark.parametrize(
    ("path", "versions"),
    [
        ("a/nvidia_cutlass_dsl/cu12/lib/libx.so", {12}),
        ("a/_cutlass_ir.cu13.cpython-311-x86_64-linux-gnu.so", {13}),
        ("a/libbitsandbytes_cuda118.so", {11}),
        ("usr/local/cuda-12.4/lib/libx.so", {12}),
        ("cu12/cu13/libx.so", {12, 13}),
        ("a/libcudart.so.13", set()),
        ("a/libcusparse.so.12", set()),
        ("a/_C_cutlass_90a.abi3.so", set()),
        ("a/libacu12.so", set()),
    ],
)
def test_a_path_names_its_cuda(path: str, versions: set[int]) -> None:
    assert cuda_versions(path) == versions


@pytest.mark.parametrize(
    "form", ["dsl/{}/lib/libruntime.so", "dsl/_ir.{}.cpython-311.so", "bits/libbits_{}.so"]
)
@pytest.mark.parametrize(
    ("other", "own"), [("cu12", "cu13"), ("cuda118", "cuda130"), ("cuda-12.9", "cuda-13.0")]
)
def test_a_variant_for_another_cuda_beside_the_right_one_is_an_error(
    form: str, other: str, own: str
) -> None:
    wrong, right = (f"{SITE}/{form.format(name)}" for name in (other, own))
    (finding,) = findings(CUDA13, (wrong, elf()), (right, elf()))
    assert (finding.severity, finding.path) == ("error", wrong)
    assert "this image has CUDA 13" in finding.message
    # The only variant there is may be one that works with several.
    assert not findings(CUDA13, (wrong, elf()))
    # Without CUDA in the image none is known to be the right one.
    assert not findings((wrong, elf()), (right, elf()))


def test_several_files_of_one_owner_are_one_finding() -> None:
    files = [
        (f"{SITE}/dsl/{cuda}/lib{name}.so", elf()) for cuda in ("cu12", "cu13") for name in "abc"
    ]
    (finding,) = findings(CUDA13, *files)
    assert "(and 2 more beside it)" in finding.message


def test_a_finding_has_the_size_of_its_file() -> None:
    library = Library(f"{SITE}/dsl/cu12/liba.so", machine=62, size=999)
    beside = Library(f"{SITE}/dsl/cu13/liba.so", machine=62, size=1)
    runtime = Library(CUDA13[0], "libcudart.so.13", machine=62, size=1)
    facts = LayerFacts(libraries=[library, beside, runtime])
    (finding,) = judge(image_with({"one": facts})).findings
    assert finding.message.endswith("; 999 B unpacked")


@pytest.mark.parametrize("largest", ["a", "b", "c"])
def test_a_finding_names_the_largest_file_and_the_size_of_all(largest: str) -> None:
    files = [(f"{SITE}/dsl/cu13/lib{name}.so", elf()) for name in "abc"]
    size = 0
    for name in "abc":
        data = elf()
        if name == largest:
            data += bytes(5000)
        size += len(data)
        files.append((f"{SITE}/dsl/cu12/lib{name}.so", data))
    (finding,) = findings(CUDA13, *files)
    assert finding.path == f"{SITE}/dsl/cu12/lib{largest}.so"
    assert finding.message.endswith(f"; {bytes_text(size)} unpacked")


def test_with_two_cuda_runtimes_no_variant_is_the_wrong_one() -> None:
    older = (f"{SITE}/nvidia/cu12/lib/libcudart.so.12", elf(soname="libcudart.so.12"))
    variants = [(f"{SITE}/dsl/{cuda}/liba.so", elf()) for cuda in ("cu12", "cu13")]
    assert len(findings(CUDA13, *variants)) == 1
    assert not findings(older, CUDA13, *variants)


def test_a_library_of_another_processor_is_a_warning() -> None:
    (finding,) = findings(LIBC, (f"{SITE}/dsl/stubs/libx.so", elf(machine=183)))
    assert (finding.severity, "AArch64" in finding.message) == ("warning", True)


def test_a_library_that_needs_what_is_not_there_is_a_note() -> None:
    needs = elf(needed=["libc.so.6", "libfabric.so.1", "libcuda.so.1", "libnvidia-ml.so.1"])
    (finding,) = findings(LIBC, ("lib/libx.so", needs))
    assert (finding.severity, finding.path) == ("note", "lib/libx.so")
    assert finding.message.startswith("needs libfabric.so.1, which")
    assert not findings(LIBC, ("lib/libx.so", needs), ("lib/libfabric.so.1", elf()))
