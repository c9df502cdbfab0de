"""The build action with hipcc: kernels of Primus Turbo from its real source, for both Instinct
architectures.

``PRIMUS_TEST_SOURCES`` is a folder that holds ``Primus-Turbo.git``, a bare clone. Debian's hipcc
needs no GPU.
"""

import json
from collections.abc import Iterator

import pytest

import gits
import upstream
from host_tools import needs
from project_kit import Kit, lock
from tables import text_of

pytestmark = [pytest.mark.integration, pytest.mark.slow, needs("git", "mmdebstrap")]

ARCHS = {"mi300x": "gfx942", "mi355x": "gfx950"}
# common.h of Primus Turbo names the status of hipBLASLt, which takes 870 MB; RMSNorm calls nothing
# of it.
STATUS = text_of("hipblas_status.h")
SETUP = """\
import glob, os, subprocess
from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution

class Kernels(build_py):
    def run(self):
        super().run()
        folder = os.path.join(self.build_lib, "turbo_norm")
        arch = f"--offload-arch={os.environ['GPU_ARCHS']}"
        kernels = sorted(glob.glob("csrc/kernels/normalization/*.hip"))
        library = os.path.join(folder, "libturbo_norm.so")
        options = ["-shared", "-fPIC", "-O3", "-std=c++20", arch, "-Icsrc/include", "-Istatus"]
        subprocess.run(["hipcc", *options, *kernels, "-o", library], check=True)

class Binary(Distribution):
    def has_ext_modules(self):
        return True

setup(
    name="turbo-norm",
    version="1.0",
    packages=["turbo_norm"],
    cmdclass={"build_py": Kernels},
    distclass=Binary,
)
"""
VERSIONS = text_of("versions/hipcc.yaml")
TARGET = text_of("images/hipcc.yaml")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    kit = Kit(tmp_path_factory.mktemp("hipcc"))
    source = kit.root / "source"
    # The pinned commit where the clone has it, else the newest.
    clone = upstream.repository("Primus-Turbo")
    pinned = "6d5ff979eb019fbbcd91790ac812024cca05a882"
    commit = pinned if upstream.has_commit(clone, pinned) else "HEAD"
    upstream.take(clone, commit, ["csrc/include", "csrc/kernels/normalization"], source)
    for path in (source / "csrc/kernels/normalization").glob("*.cu"):
        # hipcc takes the language from the suffix.
        path.rename(path.with_suffix(".hip"))
    kit.write("source/status/hipblaslt/hipblaslt.h", STATUS)
    kit.write("source/setup.py", SETUP)
    kit.write("source/turbo_norm/__init__.py", "")
    text = VERSIONS.replace("COMMIT", gits.commit(source, {})).replace("REPOSITORY", str(source))
    kit.write("versions.yaml", text)
    for name in ARCHS:
        kit.write(f"images/{name}.yaml", TARGET.replace("NAME", name))
    lock(kit)
    kit.build(*ARCHS)
    yield kit


@pytest.mark.parametrize("name", ARCHS)
def test_the_gate_finds_code_for_the_targets_gpu(compiled: Kit, name: str) -> None:
    said = compiled.primus("check", name, "--json", timeout=600)
    (image,) = json.loads(said.out)["images"]
    summaries = {gate["gate"]: gate["summary"] for gate in image["gates"]}
    assert summaries["coverage"] == f"1 of 1 GPU libraries cover {ARCHS[name]}", said.out


def test_the_build_refuses_code_for_the_other_gpu(compiled: Kit) -> None:
    """The image of one GPU with the environment of the other: the compiler makes code that cannot
    run there.
    """
    compiled.edit("versions.yaml", 'GPU_ARCHS: "{arch}"', "GPU_ARCHS: gfx942")
    try:
        said = compiled.primus("build", "mi355x", timeout=600)
        assert said.code == 1
        assert "libturbo_norm.so: no code for gfx950: it has gfx942" in said.err
    finally:
        compiled.edit("versions.yaml", "GPU_ARCHS: gfx942", 'GPU_ARCHS: "{arch}"')


def test_the_image_has_the_kernels_and_not_the_compiler(compiled: Kit) -> None:
    code = (
        "import pathlib, shutil, turbo_norm; "
        "library = pathlib.Path(turbo_norm.__file__).with_name('libturbo_norm.so').read_bytes(); "
        "print(b'rmsnorm_fwd_two_scan_kernel' in library, shutil.which('hipcc'), "
        "shutil.which('clang-22'))"
    )
    assert compiled.primus("run", "mi300x", "--", "python3", "-c", code).out.split() == [
        "True",
        "None",
        "None",
    ]
