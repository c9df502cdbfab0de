"""Channel amd on 127.0.0.1: an index with a small wheel for every pin of versions.yaml, a registry,
repositories.

The project is the repository's own: its versions.yaml and its target files, with other addresses,
and Debian's Python instead of Ubuntu's. Names, versions, metadata and the division into host and
device wheels are the real ones.
"""

import gzip
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from sandbox_kit import BUSYBOX, Entry, add_layer, directory, sha, tar

import gits
from gpu_files import bundle, code_object, elf, kernel_pack, pack_host, pages
from loopback import Server, make_wheel, serve
from primus_images.versions.components import Pin
from project_kit import SOURCE, Kit, free_port

REPOSITORY = Path(__file__).parents[1]
# One of gfx942 and both of gfx950, which share everything.
TARGETS = ("mi300x", "mi350x", "mi355x")
MACHS = {"gfx942": 0x4C, "gfx950": 0x4F}
REPOSITORIES = {"aiter": "amd-aiter", "Primus-Turbo": "primus-turbo"}
# What the real ones require, Primus Turbo at the public commit that is nearest to the pinned one.
NEEDS = {
    "amd-aiter": ["pybind11>=3.0.1", "ninja", "pandas", "einops", "psutil", "packaging"],
    "primus-turbo": ["scipy", "triton>=3.7.0", "flydsl==0.2.4"],
}
# Real ones: these build.
BUILD_TOOLS = ("pip", "setuptools", "wheel", "packaging")
# What the loopback index of PyPI has beside the pins, so that torch, Flash Attention and builds
# find what they need.
OTHERS = {
    "numpy": "2.5.5",
    "pybind11": "3.0.4",
    "filelock": "3.20.0",
    "einops": "0.8.2",
    "ninja": "1.11.1.3",
    "setuptools-scm": "10.3.4",
    "pandas": "3.0.3",
    "psutil": "7.2.2",
    "scipy": "1.17.0",
    "jinja2": "3.1.6",
}
LOCAL = ("src/primus_images", "recipes", "images/workspace")
LIBRARIES = "_rocm_sdk_libraries"


def channel_versions(
    indexes: Mapping[str, str], image: str, commits: Mapping[str, tuple[str, str]]
) -> str:
    """The repository's versions.yaml with these indexes, this base image and these commits."""
    text = (REPOSITORY / "versions.yaml").read_text()
    for name, url in indexes.items():
        text = re.sub(rf"(  {name}: {{channel: amd, url: )[^}}]+", rf"\g<1>{url}", text)
    head, rest = text.split("\n  bookworm:\n", 1)
    head = re.sub(r"image: \S+@\S+", f"image: {image}", head)
    head = head.replace("suite: noble", "suite: bookworm")
    head = re.sub(r"python: 3\.12\.3", "python: 3.11.2", head).replace("3.12", "3.11")
    # Nothing is compiled here; busybox, whose shell prefers itself to what lies on PATH, unpacks no
    # compressed archive.
    head = head.replace(
        "      - libpython3.11-stdlib\n",
        "      - dash\n      - gzip\n      - libpython3.11-stdlib\n",
    )
    head = head.replace(
        "      - python3.11-minimal\n", "      - python3.11-minimal\n      - tar\n", 1
    )
    text = f"{head}\n  bookworm:\n{rest}".replace(
        "debs: [g++, libpython3.12-dev, make]", "debs: [make]"
    )
    text = text.replace("debs: [g++, libpython3-dev]", "debs: [make]")
    # The gate "compilation" asks for a C compiler and the headers of Python.
    text = text.replace("compiler: [g++, libpython3.11-dev]", "compiler: [gcc, libpython3.11-dev]")
    for name, (url, commit) in commits.items():
        found = re.search(rf"git: https://\S+/{name}\n +commit: ([0-9a-f]{{40}})", text)
        assert found is not None
        text = text.replace(
            found[0], found[0].replace(found[1], commit).replace(found[0].split()[1], url)
        )
    return text


def make_channel_wheels(amd: Path, pypi: Path, pins: Mapping[str, Pin], arch: str) -> None:
    """A wheel for every wheel pin of a target, and the selector package's source."""
    rocm = next(pin.version for pin in pins.values() if pin.sdist == "rocm")
    for component, pin in pins.items():
        folder = amd if pin.channel == "amd" else pypi
        if pin.wheel is None or pin.wheel in BUILD_TOOLS:
            continue
        needs, files = _inside(component, rocm or "", arch)
        if component == "pytorch":
            triton = next(one.version for name, one in pins.items() if name == "triton")
            needs = (
                f"rocm[libraries]=={rocm}",
                f"triton=={triton}",
                "filelock",
                "jinja2",
                "setuptools",
            )
        tag = "cp311-cp311-manylinux_2_28_x86_64" if component == "pytorch" else "py3-none-any"
        padding = (
            3_000_000 if component in ("pytorch", "rocm-sdk-libraries", "rocm-sdk-device") else 0
        )
        make_wheel(
            folder, pin.wheel, pin.version or "", needs=needs, files=files, tag=tag, padding=padding
        )
    for name, version in OTHERS.items():
        make_wheel(pypi, name, version)
    # The one that AITER is built with; the image has another.
    make_wheel(pypi, "flydsl", "0.1.7")
    make_wheel(amd, "rocm-sdk-devel", rocm or "")
    _selector(amd, rocm or "")
    for name in ("flash-attn", "megatron-core"):
        version = next(pin.version for pin in pins.values() if pin.sdist == name) or ""
        module = name.replace("-", "_")
        setup = (
            f"from setuptools import setup\nsetup(name='{name}', version='{version}', "
            f"py_modules=['{module}'])\n"
        )
        _source(pypi, module, version, setup)


def _inside(component: str, rocm: str, arch: str) -> tuple[tuple[str, ...], dict[str, bytes]]:
    code = code_object(MACHS[arch])
    if component == "rocm-sdk-libraries":
        return (), {
            f"{LIBRARIES}/lib/librocblas.so.5": pack_host(
                "librocblas", "../.kpack/blas_@GFXARCH@.kpack"
            )
        }
    if component == "rocm-sdk-device":
        return (f"rocm-sdk-libraries=={rocm}",), {
            f"{LIBRARIES}/.kpack/blas_{arch}.kpack": kernel_pack({"librocblas": [arch]}),
            f"{LIBRARIES}/lib/rocblas/library/Kernels.so-000-{arch}.hsaco": code,
        }
    if component == "pytorch":
        return (), {
            "torch/lib/libtorch_hip.so": pack_host(
                "libtorch_hip", "../.kpack/torch_@GFXARCH@.kpack"
            )
        }
    if component == "pytorch-device":
        return (), {f"torch/.kpack/torch_{arch}.kpack": kernel_pack({"libtorch_hip": [arch]})}
    if component == "transformer-engine-core":
        both = pages(bundle(list(MACHS)))
        return (), {"transformer_engine/libtransformer_engine.so": elf({".hip_fatbin": both})}
    if component == "pyyaml":
        # The image's entry point reads a table. The package works without its compiled part.
        return (), {
            f"yaml/{path.name}": path.read_bytes()
            for path in Path(yaml.__file__).parent.glob("*.py")
        }
    return (), {}


def _selector(folder: Path, version: str) -> None:
    """The source of the ``rocm`` package: it picks a GPU as it is built, from the environment."""
    setup = (
        "import os, pathlib\nfrom setuptools import setup\n"
        "family = os.environ['ROCM_SDK_TARGET_FAMILY']\n"
        "pathlib.Path('rocm_sdk.py').write_text(f'FAMILY = {family!r}\\ndef main():\\n    "
        "print(FAMILY)\\n')\n"
        f"setup(name='rocm', version='{version}', py_modules=['rocm_sdk'],\n"
        "      entry_points={'console_scripts': ['rocm-sdk = rocm_sdk:main']})\n"
    )
    _source(folder, "rocm", version, setup)


def _source(folder: Path, name: str, version: str, setup: str) -> None:
    files = {"setup.py": setup.encode(), f"{name}.py": b""}
    plain = tar(Entry(name=f"{name}-{version}/{file}", data=data) for file, data in files.items())
    # The same source must have the same bytes each time it is offered.
    (folder / f"{name}-{version}.tar.gz").write_bytes(gzip.compress(plain, mtime=0))


def fetch_build_tools(folder: Path, kit: Kit) -> None:
    """The real pip, setuptools and wheel in every pinned version, from where this host's pip takes
    them.
    """
    pins = kit_pins(kit, "mi300x").values()
    wanted = {f"{pin.wheel}=={pin.version}" for pin in pins if pin.wheel in BUILD_TOOLS}
    built = {
        word
        for pin in pins
        if pin.build
        for word in pin.build.wheels
        if word.partition("==")[0] in BUILD_TOOLS
    }
    words = sorted({*wanted, *(word for word in built if "==" in word), "packaging"})
    # pip downloads one version of a project at a time.
    downloads = []
    while words:
        once = list({word.partition("==")[0]: word for word in words}.values())
        words = [word for word in words if word not in once]
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "-d",
            str(folder),
            *once,
        ]
        downloads.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    assert {download.wait() for download in downloads} == {0}


def kit_pins(kit: Kit, target: str) -> dict[str, Pin]:
    """Every pin that the target's lock on channel amd answers."""
    from primus_images.plan.project import Project
    from primus_images.plan.resolve import resolve

    return dict(resolve(Project(kit.root, channel="amd"), target).pins)


# Repositories


def make_repository(root: Path, name: str, package: str) -> str:
    """A repository whose setup.py makes ``package`` with code for the GPU it is told; returns its
    commit.

    One file of it lies in a submodule, as parts of the real ones do. As in AITER's, metadata can be
    asked for only once the pin has prepared the source.
    """
    part, main = root / f"{name}-part", root / name
    gits.commit(part, {"arch.txt": "of the submodule\n"})
    module = package.replace("-", "_")
    setup = f"""\
import os, pathlib, subprocess, sys
from setuptools import setup
import rocm_sdk, torch
PREBUILD_KERNELS = int(os.environ.get("PREBUILD_KERNELS", 0))
def _is_metadata_only():
    return sys.argv[1] in ("dist_info", "egg_info")
if not _is_metadata_only():
    core = pathlib
if PREBUILD_KERNELS != 0:
    core.Path("kernels")
arch = os.environ["GPU_ARCHS"]
assert rocm_sdk.FAMILY == arch
assert pathlib.Path("3rdparty/part/arch.txt").read_text() == "of the submodule\\n"
assert pathlib.Path("run.sh").stat().st_mode & 0o111 and os.readlink("link") == "run.sh"
flags = {MACHS!r}[arch]
code = bytes.fromhex("{code_object(0).hex()}")
code = code[:48] + flags.to_bytes(4, "little") + code[52:]
pathlib.Path("{module}/lib").mkdir(parents=True, exist_ok=True)
pathlib.Path("{module}/lib/kernels.hsaco").write_bytes(code)
pathlib.Path("{module}/__init__.py").write_text(f"ARCH = {{arch!r}}\\n")
FLYDSL_VERSION = "flydsl==0.1.7"
needs = {NEEDS[package]!r} + [FLYDSL_VERSION] * ("{package}" == "amd-aiter")
setup(name="{package}", version=os.environ["SETUPTOOLS_SCM_PRETEND_VERSION"], packages=["{module}"],
      package_data={{"{module}": ["lib/*"]}}, install_requires=needs)
"""
    submodule = f'[submodule "part"]\n\tpath = 3rdparty/part\n\turl = ../{name}-part\n'
    # What the pin of Primus Turbo prepares lies in this folder.
    main.mkdir(parents=True)
    (main / "run.sh").write_text("#!/bin/sh\n")
    (main / "run.sh").chmod(0o755)
    (main / "link").symlink_to("run.sh")
    files = {"setup.py": setup, ".gitmodules": submodule, "primus_turbo/keep": ""}
    return gits.commit(main, files, part=("3rdparty/part", gits.head(part)))


# The registry


def make_base(folder: Path) -> str:
    """An OCI layout with an index of two platforms; the image for amd64 is busybox in two layers,
    the upper one with a whiteout. Returns the digest of the index.
    """
    blobs, oci = folder / "blobs/sha256", "application/vnd.oci.image"

    def blob(content: object, kind: str) -> dict[str, Any]:
        data = json.dumps(content).encode()
        (blobs / sha(data)[7:]).write_bytes(data)
        return {"mediaType": f"{oci}.{kind}.v1+json", "digest": sha(data), "size": len(data)}

    tools = ("mkdir", "cat", "sed", "printf", "rm", "ls", "env", "true")
    lower = [
        *(
            directory(name)
            for name in ("etc", "usr", "usr/bin", "usr/lib", "usr/lib64", "proc", "dev", "sys")
        ),
        directory("tmp", 0o1777),
        *(Entry(name=name, link=f"usr/{name}") for name in ("bin", "lib", "lib64")),
        Entry(name="usr/bin/busybox", data=Path(BUSYBOX).read_bytes(), mode=0o755),
        *(Entry(name=f"usr/bin/{tool}", link="busybox") for tool in tools),
        Entry(name="etc/passwd", data=b"root:x:0:0:root:/root:/bin/sh\n"),
    ]
    upper = [directory("etc"), Entry(name="etc/passwd", data=b"root:x:0:0::/:/bin/sh\n")]
    made = [add_layer(blobs, tar(entries), "tar+gzip") for entries in (lower, upper)]
    layers = [
        {"mediaType": layer.media_type, "digest": layer.digest, "size": layer.size}
        for layer in made
    ]
    platforms = []
    for architecture in ("arm64", "amd64"):
        platform = {"os": "linux", "architecture": architecture}
        rootfs = {"type": "layers", "diff_ids": [layer.diff_id for layer in made]}
        about = blob({**platform, "rootfs": rootfs}, "config")
        # Of the other platform nothing but its name is needed.
        own = layers if architecture == "amd64" else layers[:1]
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{oci}.manifest.v1+json",
            "config": about,
            "layers": own,
        }
        platforms.append({**blob(manifest, "manifest"), "platform": platform})
    top = blob(
        {"schemaVersion": 2, "mediaType": f"{oci}.index.v1+json", "manifests": platforms}, "index"
    )
    annotated = {**top, "annotations": {"org.opencontainers.image.ref.name": "24.04"}}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [annotated]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return str(top["digest"])


@contextmanager
def registry(folder: Path, logins: str = "", certificate: Path | None = None) -> Iterator[int]:
    """Debian's docker-registry on 127.0.0.1; yields its port. With ``logins`` (htpasswd's lines) it
    wants one. With a ``certificate`` and its key in one file it speaks TLS.
    """
    port = free_port()
    folder.mkdir(parents=True)
    config = folder / "config.yml"
    tls = ""
    if certificate:
        tls = f", tls: {{certificate: {certificate}, key: {certificate}}}"
    config.write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: "
        f"{{filesystem: {{rootdirectory: {folder / 'data'}}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'{tls}}}\n"
    )
    if logins:
        (folder / "htpasswd").write_text(logins)
        with config.open("a") as more:
            more.write(f"auth: {{htpasswd: {{realm: tests, path: {folder / 'htpasswd'}}}}}\n")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["docker-registry", "serve", str(config)], stdout=log, stderr=log
        )
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def restore(root: Path) -> None:
    """Give the registry in ``root`` the data of ``whole`` again, in C: it is hundreds of files."""
    subprocess.run(["rm", "-rf", root / "registry/data"], check=True)
    subprocess.run(["cp", "-a", root / "whole", root / "registry/data"], check=True)


def mirrored_home(home: Path, port: int) -> Path:
    """A home whose containers-registries.conf names a mirror for Docker Hub's images."""
    conf = home / ".config/containers/registries.conf"
    conf.parent.mkdir(parents=True)
    conf.write_text(
        f'[[registry]]\nprefix = "docker.io"\nlocation = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    return home


@dataclass(frozen=True)
class Loopback(Kit):
    """A kit whose commands know the sources on loopback alone."""

    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        bytecode = {"PYTHONPYCACHEPREFIX": os.environ["PYTHONPYCACHEPREFIX"]}
        return {**bytecode, **self.variables, "PYTHONPATH": str(SOURCE)}


@dataclass(frozen=True)
class Channel:
    """The project on loopback, the folders of AMD's and PyPI's files, the server of AMD's, and the
    digest of the base image.
    """

    kit: Kit
    amd: Path
    pypi: Path
    base: str
    indexes: Server

    def repin(self, *pairs: tuple[str, str]) -> None:
        """Replace text in versions.yaml, and offer wheels of what is pinned now."""
        path = self.kit.root / "versions.yaml"
        text = path.read_text()
        for old, new in pairs:
            assert old in text
            text = text.replace(old, new)
        path.write_text(text)
        self.offer()

    def offer(self) -> None:
        """Make the wheels of the pins of all targets."""
        for target, arch in (("mi300x", "gfx942"), ("mi355x", "gfx950")):
            make_channel_wheels(self.amd, self.pypi, kit_pins(self.kit, target), arch)


def copy_project(kit: Kit) -> None:
    """The repository's targets and what they take from it."""
    for name in TARGETS:
        kit.write(f"images/{name}.yaml", (REPOSITORY / f"images/{name}.yaml").read_text())
    for name in LOCAL:
        shutil.copytree(
            REPOSITORY / name, kit.root / name, ignore=shutil.ignore_patterns("__pycache__")
        )


def loopback_environment(pypi: str, home: Path) -> dict[str, str]:
    """Variables under which pip and skopeo know loopback alone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return kept | {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": pypi,
        "NO_PROXY": "127.0.0.1",
        "HOME": str(home),
    }


@contextmanager
def amd_channel(root: Path) -> Iterator[Channel]:
    """The whole channel, served as long as the context lasts."""
    amd, pypi, gits = root / "amd/files", root / "pypi/files", root / "git"
    for folder in (amd, pypi):
        folder.mkdir(parents=True)
    commits = {
        n: (f"file://{gits / n}", make_repository(gits, n, package))
        for n, package in REPOSITORIES.items()
    }
    with (
        serve(root / "amd") as indexes,
        serve(root / "pypi") as plain,
        registry(root / "registry") as port,
    ):
        base = make_base(root / "base")
        push = [
            "skopeo",
            "copy",
            "-q",
            "--all",
            "--dest-tls-verify=false",
            f"oci:{root / 'base'}:24.04",
        ]
        subprocess.run([*push, f"docker://127.0.0.1:{port}/library/ubuntu:24.04"], check=True)
        home = mirrored_home(root / "home", port)
        kit = Loopback(
            root / "project", variables=loopback_environment(f"{plain.url}/simple", home)
        )
        names = ("rocm-core", "rocm-pytorch", "rocm-transformer-engine", "rocm-frameworks-staging")
        own = dict.fromkeys(names, f"{indexes.url}/simple")
        kit.write("versions.yaml", channel_versions(own, f"ubuntu@{base}", commits))
        copy_project(kit)
        fetch_build_tools(pypi, kit)
        channel = Channel(kit=kit, amd=amd, pypi=pypi, base=base, indexes=indexes)
        channel.offer()
        yield channel
