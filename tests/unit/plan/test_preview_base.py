"""A base of Debian's ROCm: what it leaves out, and components that it brings itself."""

import fnmatch
import hashlib
import io
import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_files import bundle, compressed, elf, pages
from primus_images.engine.kinds.debs import kernel_files, unlisted, without_empty_merged
from primus_images.errors import CheckFailed, HostError, InputError
from primus_images.gates.contents import code_in
from primus_images.gpucode import FORMAT
from primus_images.oci.tar import Entry
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve, with_lock
from primus_images.plan.skeleton import TRIM
from primus_images.versions.lock import Lock, LockedFile
from project_kit import plan_over
from tables import text_of

LIBRARY = "usr/lib/x86_64-linux-gnu/rocblas/5/library/"
PATTERN = "/usr/lib/*/rocblas/*/library/*gfx*"


def deb(folder: Path, files: Mapping[str, bytes], links: Mapping[str, str] | None = None) -> Path:
    """A Debian package with these files."""
    tree = folder / "tree"
    for path, data in {**files, "DEBIAN/control": CONTROL}.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(data)
    for path, to in (links or {}).items():
        (tree / path).symlink_to(to)
    subprocess.run(["dpkg-deb", "--build", tree, folder / "a.deb"], check=True, capture_output=True)
    return folder / "a.deb"


CONTROL = (
    b"Package: librocblas5\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b>\nDescription: x\n"
)
FILES = {
    LIBRARY + "a_gfx942.hsaco": b"this",
    LIBRARY + "a_gfx950.hsaco": b"another",
    LIBRARY + "a_gfx1100.dat": b"third one",
    LIBRARY + "a_fallback.dat": b"for all",
    "usr/lib/x86_64-linux-gnu/librocblas.so.5": b"host",
}


def test_an_empty_folder_of_a_merged_usr_is_left_out_with_its_link() -> None:
    links = [Entry(path=name, kind="symlink", link=f"usr/{name}") for name in ("lib", "libx32")]
    folders = [Entry(path=path, kind="dir") for path in ("usr/lib", "usr/libx32", "usr/src")]
    kept = without_empty_merged([*links, *folders, Entry(path="usr/lib/file")])
    assert [entry.path for entry in kept] == ["lib", "usr/lib", "usr/src", "usr/lib/file"]


def test_a_layer_holds_the_kernel_files_of_one_gpu(tmp_path: Path) -> None:
    package = deb(tmp_path, FILES)
    (entry,) = kernel_files("gfx942", package, [PATTERN], tmp_path / "out")
    assert (entry.path, entry.mode, b"".join(entry.chunks())) == (
        LIBRARY + "a_gfx942.hsaco",
        0o644,
        b"this",
    )
    assert kernel_files("gfx95", package, [PATTERN], tmp_path / "none") == []
    every = kernel_files(None, package, ["/usr/lib/*"], tmp_path / "every")
    assert sorted(e.path for e in every) == sorted(FILES)


LIBRARIES = "usr/lib/x86_64-linux-gnu/"


def test_a_library_comes_with_the_code_of_one_gpu_and_the_links_to_it(tmp_path: Path) -> None:
    fat = elf(
        {
            ".text": b"host",
            ".hip_fatbin": pages(compressed(bundle(["gfx942", "gfx950", "gfx1100"]))),
        }
    )
    alone = bundle(["gfx942", "gfx1100"])
    files = {
        LIBRARIES + "librccl.so.1.0": fat,
        LIBRARIES + "other.so": b"",
        LIBRARIES + "transform.hsaco": alone,
    }
    package = deb(tmp_path, files, {LIBRARIES + "librccl.so.1": "librccl.so.1.0"})
    found = kernel_files(
        "gfx950", package, ["/usr/lib/*/librccl.so.*", "/usr/lib/*.hsaco"], tmp_path / "out"
    )
    entries = {e.path.removeprefix(LIBRARIES): e for e in found}
    assert set(entries) == {"librccl.so.1", "librccl.so.1.0", "transform.hsaco"}
    assert (entries["librccl.so.1"].kind, entries["librccl.so.1"].link) == (
        "symlink",
        "librccl.so.1.0",
    )
    for name, targets in (("librccl.so.1.0", ("gfx950",)), ("transform.hsaco", ())):
        data = b"".join(entries[name].chunks())
        code = code_in(name, io.BytesIO(data), len(data))
        assert code is not None and code.targets == targets


def test_what_cannot_be_taken_apart_is_said(tmp_path: Path) -> None:
    fat = bundle(["gfx942", "gfx950"])
    package = deb(
        tmp_path, {"a.so": elf({".text": b"x"}), "b.so": elf({".hip_fatbin": fat[:-4096]})}
    )
    (tmp_path / "tree/x_gfx942").hardlink_to(tmp_path / "tree/a.so")
    subprocess.run(
        ["dpkg-deb", "--build", tmp_path / "tree", package], check=True, capture_output=True
    )
    with pytest.raises(CheckFailed, match="/x_gfx942 is neither a file nor a symbolic link"):
        kernel_files("gfx942", package, ["/*gfx*"], tmp_path / "out")
    with pytest.raises(CheckFailed, match=r"/a\.so holds no GPU code and names no architecture"):
        kernel_files("gfx942", package, ["/a.so"], tmp_path / "a")
    with pytest.raises(CheckFailed, match=r"/b\.so: an offload bundle reaches beyond its place"):
        kernel_files("gfx942", package, ["/b.so"], tmp_path / "b")
    broken = tmp_path / "b.deb"
    broken.write_bytes(b"no package")
    with pytest.raises(HostError, match=r"b\.deb is not a Debian package"):
        kernel_files("gfx942", broken, [PATTERN], tmp_path / "again")


def test_kernel_files_of_a_package_that_is_not_named_are_not_lost() -> None:
    def listing(name: str, *paths: str) -> Entry:
        data = "".join(f"/{path}\n" for path in paths).encode()
        return Entry(path=f"var/lib/dpkg/info/{name}.list", size=len(data), source=data)

    entries = [
        listing("librocblas5", *FILES),
        listing("librocblas6:amd64", *FILES),
        listing("other", LIBRARY + "a_fallback.dat", "usr/share/gfx942"),
        Entry(path="usr/bin/x", source=b""),
    ]
    assert unlisted(entries, {"librocblas5": (PATTERN,)}) == ["librocblas6"]
    library = "/usr/lib/*/librocblas.so.*"
    assert unlisted(entries, {"librocblas5": ("/x", library)}) == ["librocblas6"], (
        "a library has no gfx in its name"
    )


VERSIONS = text_of("versions/preview_base.yaml")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a.py").touch()
    (tmp_path / "images").mkdir()
    (tmp_path / "versions.yaml").write_text(VERSIONS)
    (tmp_path / "images/one.yaml").write_text(
        "description: x\nchannels: [debian]\nbase: debs\ncomponents: [pytorch, primus]\n"
    )
    return Project(tmp_path)


def _lock(version: str) -> Lock:
    sha256 = hashlib.sha256(b"").hexdigest()
    file = LockedFile(
        kind="deb",
        name="python3-torch",
        version=version,
        file="a.deb",
        size=1,
        sha256=sha256,
        base="debs",
    )
    return Lock(target="one", channel="debian", pins={}, files=(file,))


def test_what_the_base_brings_is_no_layer_and_is_seen_from_the_environment(
    project: Project,
) -> None:
    plan = plan_over(project.root, "one", _lock("2.14.1+dfsg-1"))
    layers = {a.name: a for a in plan.layers}
    assert set(layers) == {"base debs", "environment", "primus", "facts"}
    assert "include-system-site-packages = true" in str(layers["environment"].spec)
    assert layers["primus"].spec["to"] == "opt/venv/lib/python3.14/site-packages/primus_images"
    assert '"PyTorch": "2.14.1"' in str(layers["facts"].spec)
    assert resolve(project, "one").request.provided == {"torch": "2.14.1+debian"}


def test_a_base_that_brings_another_version_or_none_is_named(project: Project) -> None:
    with pytest.raises(
        InputError, match=r"python3-torch 2\.14\.1 is pinned, but base debs has 2\.15\.0"
    ) as caught:
        plan_over(project.root, "one", _lock("2.15.0-1"))
    assert (caught.value.where or "").startswith("versions.yaml:12:")
    with pytest.raises(InputError, match=r"has no packages|does not contain python3-torch"):
        plan_over(project.root, "one", replace(_lock("2.14.1-1"), files=()))


def test_a_stale_lock_names_the_line_of_the_pin(project: Project) -> None:
    resolved = replace(resolve(project, "one"), lock=_lock("2.14.1-1"))
    with pytest.raises(InputError, match="the lock of one is stale") as caught:
        with_lock(resolved)
    assert (caught.value.where or "").startswith("versions.yaml:")


@pytest.mark.parametrize(
    ("path", "left_out"),
    [
        (
            "usr/lib/python3/dist-packages/_distutils_hack/__pycache__/__init__.cpython-314.pyc",
            True,
        ),
        ("usr/share/python3/debpython/__pycache__/version.cpython-314.pyc", True),
        ("usr/lib/python3/dist-packages/torch/__pycache__/__init__.cpython-314.pyc", False),
    ],
)
def test_bytecode_that_imports_leave_behind_stays_out(path: str, left_out: bool) -> None:
    assert any(fnmatch.fnmatchcase(path, pattern) for pattern in TRIM["left_out"]) is left_out


def test_kernel_files_are_a_layer_per_gpu_over_one_base(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (project.root / "versions.yaml").read_text()
    kernels = (
        "    packages: [python3-torch, librocblas5]\n    kernels: {librocblas5: [/usr/lib/*gfx*]}\n"
    )
    (project.root / "versions.yaml").write_text(
        text.replace("    packages: [python3-torch]\n", kernels)
    )
    lock = _lock("2.14.1-1")
    rocblas = replace(lock.files[0], name="librocblas5", version="7.2.4-1")
    lock = replace(lock, files=(*lock.files, rocblas))
    image = (project.root / "images/one.yaml").read_text()
    plans = []
    for gpu in ("mi300x", "mi325x", "mi355x", None):
        (project.root / "images/one.yaml").write_text(image + (f"gpu: {gpu}\n" if gpu else ""))
        if gpu is None:
            with pytest.raises(
                InputError, match="has separate kernel files per GPU, but one has no GPU"
            ):
                plan_over(project.root, "one", lock)
        else:
            plans.append({a.name: a for a in plan_over(project.root, "one", lock).layers})
    mi300x, mi325x, mi355x = plans
    assert mi300x["base debs"].key == mi355x["base debs"].key
    assert (
        mi300x["kernels gfx942"].key == mi325x["kernels gfx942"].key != mi355x["kernels gfx950"].key
    )
    assert [f.name for f in mi300x["kernels gfx942"].files] == ["librocblas5"]
    monkeypatch.setattr("primus_images.plan.layers.FORMAT", FORMAT + 1)
    (project.root / "images/one.yaml").write_text(image + "gpu: mi355x\n")
    again = {a.name: a for a in plan_over(project.root, "one", lock).layers}
    assert again["kernels gfx950"].key != mi355x["kernels gfx950"].key, (
        "how libraries are written decides bytes, too"
    )


@pytest.mark.parametrize(
    ("kernels", "sentence"),
    [
        (
            "{librocblas5: [/usr/lib/*gfx*]}",
            "librocblas5 is listed under `kernels` but not under `packages`",
        ),
        (
            "{python3-torch: [usr/*gfx*]}",
            "'usr/*gfx*' is not an absolute pattern that ends in a file name",
        ),
        (
            "{python3-torch: [/usr/*]}",
            "'/usr/*' is not an absolute pattern that ends in a file name",
        ),
    ],
)
def test_patterns_that_cannot_be_meant(project: Project, kernels: str, sentence: str) -> None:
    text = (project.root / "versions.yaml").read_text()
    (project.root / "versions.yaml").write_text(
        text.replace(
            "packages: [python3-torch]\n", f"packages: [python3-torch]\n    kernels: {kernels}\n"
        )
    )
    with pytest.raises(InputError, match=re.escape(sentence)):
        _ = project.versions


def test_pip_in_the_image_keeps_what_is_held_and_labels_name_what_is_inside(
    project: Project,
) -> None:
    versions = project.root / "versions.yaml"
    text = versions.read_text().replace(
        "    name: PyTorch\n", "    name: PyTorch\n    held: true\n", 1
    )
    inside = (
        "  rccl:\n    name: RCCL\n    pins:\n      - {inside: python3-torch, version: "
        "2.27.7, channel: debian}\n"
    )
    versions.write_text(text.replace("components:\n", f"components:\n{inside}", 1))
    image = project.root / "images/one.yaml"
    image.write_text(
        image.read_text().replace(
            "channels: [debian]", "channels: [debian]\npreviews: {debian: no GPU}"
        )
    )
    plan = plan_over(project.root, "one", _lock("2.14.1+dfsg-1"))
    facts = next(a for a in plan.layers if a.name == "facts").spec["inline"]
    held = facts["etc/primus/constraints.txt"]["text"]
    assert held.splitlines()[1:] == ["torch==2.14.1"]
    config = plan.config["config"]
    assert "PIP_CONSTRAINT=/etc/primus/constraints.txt" in config["Env"]
    assert config["Labels"]["io.primus.pins.rccl"] == "2.27.7"
    assert config["Labels"]["io.primus.pins.pytorch"] == "2.14.1"
    assert config["Labels"]["io.primus.preview"] == "no GPU"
    assert '"RCCL": "2.27.7"' in facts["etc/primus/image.json"]["text"]
    assert not [a for a in plan.layers if a.name == "rccl"], "it has no files of its own"
    request = resolve(Project(project.root), "one").request
    assert "rccl" not in str(request), "no source is asked for it"


def test_every_instinct_image_names_the_libraries_that_decide_its_speed() -> None:
    """By component, in both channels, whatever wheel or package holds them."""
    root = Path(__file__).parents[3]
    for target in ("mi300x", "mi325x", "mi350x", "mi355x"):
        for channel, more in (
            ("amd", {"aiter", "miopen", "transformer-engine", "primus-turbo"}),
            ("debian", set()),
        ):
            resolved = resolve(Project(root, channel=channel), target)
            named = {*resolved.pins, *resolved.inside}
            wanted = {
                "rocm",
                "pytorch",
                "flash-attention",
                "hipblaslt",
                "triton",
                "rccl",
                "rocblas",
            } | more
            assert wanted <= named, (target, channel, wanted - named)
            assert all(resolved.inside[one].version for one in resolved.inside)
