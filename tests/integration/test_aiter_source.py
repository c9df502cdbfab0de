"""AITER's real source through the pin of versions.yaml. Only the compilers for GPU code are
replaced.

``PRIMUS_TEST_SOURCES`` is a folder that holds ``aiter.git``, a bare clone with the pinned commit.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

import gits
import upstream
from host_tools import needs
from project_kit import Kit, lock

pytestmark = [pytest.mark.integration, pytest.mark.slow, needs("git", "mmdebstrap")]

PROJECT = Path(__file__).parents[2]
# setup.py imports torch, its own modules and FlyDSL as on an Instinct host. What would compile
# kernels is only written down, in a file of the package.
WITHOUT_COMPILERS = r"""
mkdir -p rocm/bin
printf '#!/bin/sh\necho 7.2.53211\n' > rocm/bin/hipconfig
chmod +x rocm/bin/hipconfig
export ROCM_HOME="$PWD/rocm"
note='open("aiter/compiled.txt", "a").write'
named='(lambda **module: '"$note"'(module["md_name"] + "\\n"))'
sed -i 's#^\( *\)core\.build_module($#\1'"$named"'(#' setup.py
sed -i 's#^\( *\)pool, futures = start_aot(.*#\1'"$note"'(start_aot.__name__ + "\\n")#' setup.py
sed -i '/^            wait_aot(pool, futures)/d' setup.py
grep -q 'start_aot.__name__' setup.py && grep -q 'module\["md_name"\]' setup.py
"""


def pinned() -> dict[str, Any]:
    (pin,) = yaml.safe_load((PROJECT / "versions.yaml").read_text())["components"]["aiter"]["pins"]
    assert isinstance(pin, dict)
    return pin


def make_kit(folder: Path, pin: dict[str, Any], prepare: str) -> Kit:
    """A project with AITER alone: on Debian, with PyTorch for CPU in the place of ROCm's."""
    clone = upstream.repository("aiter")
    if not upstream.has_commit(clone, pin["commit"]):
        pytest.skip(f"aiter.git has no commit {pin['commit']}")
    kit = Kit(folder)
    source = kit.root / "source"
    upstream.take(clone, pin["commit"], [], source)
    (source / ".gitmodules").unlink()
    # The submodule's files are only copied here.
    kit.write("source/3rdparty/composable_kernel/LICENSE", "MIT\n")
    build = pin["build"]
    wheels = [
        word
        for word in build["wheels"]
        if not word.startswith(("rocm-", "torch", "pip", "packaging"))
    ]
    base = {
        "suite": "bookworm",
        "python": "3.11.2",
        "packages": ["libpython3.11-stdlib", "libstdc++6", "python3.11-minimal"],
    }
    own = {
        "git": f"file://{source}",
        "commit": gits.commit(source, {}),
        "package": pin["package"],
        "version": pin["version"],
        "channel": "pypi",
        "build": {
            "debs": ["g++", "libpython3.11-dev", "make"],
            "wheels": [*wheels, "pip==26.3", "packaging==26.3", "torch==2.13.0+cpu"],
            "environment": {**build["environment"], "GPU_ARCHS": "gfx950", "BUILD_TARGET": "rocm"},
            "prepare": prepare,
        },
    }
    versions = {
        "release": "v26.11",
        "created": "2026-11-20",
        "bases": {"bookworm": base},
        "components": {"aiter": {"name": "AITER", "pins": [own]}},
    }
    kit.write("versions.yaml", yaml.safe_dump(versions, sort_keys=False))
    kit.write(
        "images/demo.yaml",
        "description: AITER\nbase: bookworm\nchannels: [pypi]\npreviews: {pypi: it lacks what "
        "AITER runs with}\n"
        "components: [aiter]\ncommand: [sh]\n",
    )
    lock(kit)
    return kit


def test_the_pin_builds_the_real_source(tmp_path: Path) -> None:
    pin = pinned()
    prepare = "".join(
        line for line in pin["build"]["prepare"].splitlines(keepends=True) if "rocm-sdk" not in line
    )
    kit = make_kit(tmp_path / "aiter", pin, prepare + WITHOUT_COMPILERS)
    kit.build("demo")
    code = (
        "import importlib.metadata as m; d = m.distribution('amd-aiter');"
        "print(d.version, sum(str(f).startswith('aiter_meta/hsa/gfx950/') for f in d.files) > 100,"
        " 'flydsl==0.2.4' in d.requires, *d.locate_file('aiter/compiled.txt').read_text().split())"
    )
    version, kernels, flydsl, *compiled = kit.primus(
        "run", "demo", "--", "python3", "-c", code
    ).out.split()
    assert (version, kernels, flydsl) == (pin["version"], "True", "True")
    assert {
        "start_aot",
        "module_fmha_v3_fwd",
        "module_fmha_v3_bwd",
        "module_fmha_v3_varlen_fwd",
    } <= set(compiled)


def test_without_the_pins_change_metadata_fails(tmp_path: Path) -> None:
    """What the pin's ``prepare`` is for.

    When a newer AITER builds without it, this test says so.
    """
    kit = make_kit(tmp_path / "aiter", pinned(), "true\n" + WITHOUT_COMPILERS)
    result = kit.primus("build", "demo", timeout=1500)
    assert result.code == 1
    assert "No module named 'jit'" in result.err
