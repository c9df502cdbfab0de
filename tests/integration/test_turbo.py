"""Kernels compiled without a GPU, for real: found again by a run's own key, refused by name, right by value."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from project_kit import Kit

pytestmark = pytest.mark.integration

BROKEN = """\
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.language import core

from primus.errors import CheckFailed
from primus.aot.bake import bake
from primus.aot.catalogue import Case, Kernel, Shape
from primus.aot.gpu import Gpu
from primus.aot.workloads import WORKLOADS, Workload


@triton.jit
def adds_apples_to_pears(x, n: tl.constexpr):
    tl.store(x, tl.arange(0, n) + tl.arange(0, 2 * n))


@triton.jit
def adds_one(x, n: tl.constexpr):
    places = x + tl.arange(0, n)
    tl.store(places, tl.load(places) + 1)


@core.extern
def root(value, _semantic=None):
    types = {(core.dtype("fp32"),): ("__mine_root_f32", core.dtype("fp32"))}
    return core.extern_elementwise("", "", [value], types, is_pure=True, _semantic=_semantic)


@triton.jit
def takes_a_root(x, n: tl.constexpr):
    places = x + tl.arange(0, n)
    tl.store(places, root(tl.load(places)))


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        adds_one[(1,)](x, 16)
        takes_a_root[(1,)](x, 16, extern_libs={"mine": "/nowhere.bc"})
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        adds_apples_to_pears[(1,)](gradient, 16)
        return gradient


sys.modules["broken"] = sys.modules["__main__"]
WORKLOADS["broken"] = Workload(
    inputs=lambda case, device: (torch.zeros(16, device=device, requires_grad=True),),
    fused=lambda entry, x: entry.apply(x),
    reference=lambda x: x + 1,
)
kernel = Kernel(
    name="my-kernel", title="", component="", entry="broken:Broken", dtypes=("float32",), needs="", excludes="",
    test="broken",
)
shape = Shape(name="any", hidden=1, ffn=1, heads=1, kv_heads=1, head_dim=1, vocab=1)
case = Case(kernel=kernel, shape=shape, batch=1, sequence=1, dtype="float32")
try:
    bake([case], Gpu(arch=sys.argv[1], units=8), Path("/tmp/out"), "/opt/x")
except CheckFailed as error:
    print(error.message)
"""


def inside(kit: Kit, *words: str, options: tuple[str, ...] = (), code: int = 0) -> str:
    result = kit.primus("run", "cpu", "--no-entrypoint", *options, "--", *words)
    assert result.code == code, result.out + result.err
    return result.out


@pytest.fixture(scope="module")
def baked(cpu_image: Kit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SwiGLU compiled for both architectures."""
    folder = tmp_path_factory.mktemp("baked")
    for gpu in ("mi300x", "mi355x"):
        words = ("primus", "turbo", "compile", "--gpu", gpu, "--kernel", "liger-swiglu", "--out", "/baked", "--json")
        found = json.loads(inside(cpu_image, *words, options=("-v", f"{folder}:/baked")))
        assert found["kernels"] >= 12
    return folder


def check(kit: Kit, baked: Path, gpu: str, *words: str, code: int = 0) -> dict[str, object]:
    options = ("-v", f"{baked}:/opt/primus/triton:ro")
    options += ("-e", "TRITON_CACHE_MANAGER=primus.aot.cache:BakedCacheManager")
    command = ("primus", "turbo", "check", "--gpu", gpu, "--pretend", "--json", *words)
    answer: dict[str, object] = json.loads(inside(kit, *command, options=options, code=code))
    return answer


@pytest.mark.parametrize(("gpu", "arch"), [("mi300x", "gfx942"), ("mi325x", "gfx942"), ("mi355x", "gfx950")])
def test_a_run_finds_every_kernel(cpu_image: Kit, baked: Path, gpu: str, arch: str) -> None:
    answer = check(cpu_image, baked, gpu)
    assert (answer["arch"], answer["missing"], answer["failures"], answer["passed"]) == (arch, [], [], True)


def test_the_code_is_for_the_architecture_and_the_bytes_do_not_depend_on_the_run(
    cpu_image: Kit, baked: Path, tmp_path: Path
) -> None:
    words = ("primus", "turbo", "compile", "--gpu", "mi325x", "--kernel", "liger-swiglu", "--out", "/baked")
    inside(cpu_image, *words, options=("-v", f"{tmp_path}:/baked"))
    first = {p.relative_to(baked): p.read_bytes() for p in baked.rglob("*") if p.is_file() and "gfx942" in p.parts}
    assert {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == first
    objects = [data for path, data in first.items() if path.suffix == ".hsaco"]
    assert objects
    assert all(b"amdgcn-amd-amdhsa--gfx942" in data for data in objects)


def test_a_kernel_that_is_not_there_is_named(cpu_image: Kit, baked: Path, tmp_path: Path) -> None:
    shutil.copytree(baked, tmp_path / "baked")
    gone = next(p for p in (tmp_path / "baked").rglob("_swiglu_backward_kernel.hsaco") if "gfx950" in p.parts)
    shutil.rmtree(gone.parent)
    answer = check(cpu_image, tmp_path / "baked", "mi350x", code=1)
    (missing,) = answer["missing"]  # type: ignore[misc]
    assert (missing["kernel"], missing["function"]) == ("liger-swiglu", "_swiglu_backward_kernel")


def test_without_the_cache_manager_everything_is_compiled(cpu_image: Kit, baked: Path) -> None:
    command = ("primus", "turbo", "check", "--gpu", "mi300x", "--pretend", "--json")
    options = ("-v", f"{baked}:/opt/primus/triton:ro")
    answer = json.loads(inside(cpu_image, *command, options=options, code=1))
    assert len(answer["missing"]) == answer["kernels"] > 0


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_a_kernel_that_does_not_compile_is_named_with_the_architecture(
    cpu_image: Kit, tmp_path: Path, arch: str
) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    out = inside(cpu_image, "python3", "/broken.py", arch, options=("-v", f"{script}:/broken.py:ro"))
    # One is refused when its source is read, the other when its code is made.
    assert out.startswith(f"my-kernel does not compile for {arch}: adds_apples_to_pears: CompilationError"), out
    assert f"\nmy-kernel does not compile for {arch}: takes_a_root: ValueError: Failed to parse library" in out
    assert out.count("does not compile") == 2


ALONE = """\
import sys
from pathlib import Path

from primus.aot.bake import bake
from primus.aot.catalogue import load_catalogue
from primus.aot.gpu import Gpu

catalogue = load_catalogue()
(kernel,) = (k for k in catalogue.kernels if k.name == "liger-swiglu")
print(len(bake([next(catalogue.cases([kernel]))], Gpu(arch="gfx950", units=256), Path("/tmp/out"), "/opt/x")))
print("triton" in sys.modules, "torch" in sys.modules)
"""


def test_the_process_that_compiles_never_loads_pytorch(cpu_image: Kit, tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    out = inside(cpu_image, "python3", "/alone.py", options=("-v", f"{script}:/alone.py:ro"))
    assert out == "2\nTrue False\n"


def test_liger_computes_what_plain_pytorch_computes(cpu_image: Kit) -> None:
    words = [f"--kernel=liger-{name}" for name in ("rms-norm", "rope", "swiglu", "fused-linear-cross-entropy")]
    answer = json.loads(inside(cpu_image, "primus", "turbo", "interpret", "--json", *words))
    assert answer["passed"], answer
    assert len(answer["cases"]) == 7
