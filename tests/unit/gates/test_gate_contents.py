"""What a layer holds besides GPU code: versions, library names, litter, sizes; and that it is read
once.
"""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpu_files import bundle, elf, image_with, member
from primus_images.cli.host.why_size import largest
from primus_images.errors import HostError
from primus_images.gates import examined
from primus_images.gates.contents import Stated, Trace, stated_in, stated_in_library
from primus_images.gates.examined import GateReport, LayerFacts, examine_layer, observe
from primus_images.gates.rules import budget, litter, overlap, versions
from primus_images.gates.rules.versions import versions_inside
from primus_images.oci.layer import walk, write_layer
from primus_images.oci.store import Layer, Store
from primus_images.oci.tar import Entry, Member
from primus_images.plan.project import Workspace
from primus_images.progress import Progress
from primus_images.sandbox.container import LayerRef
from tables import text_of

SITE = "opt/venv/lib/python3.11/site-packages"
# Put together here, so that no scanner takes this file for a leak.
TOKEN = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ12345678"[:34]
KEY = "-----BEGIN " + "PRIVATE KEY-----\n" + "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQ\n"


def traces(path: str, data: bytes | str) -> list[tuple[str, str]]:
    return [(t.rule, t.seen) for t in observe([member(path, data)], [b"/srv/build/tree"]).traces]


# Versions


def test_versions_stated_by_metadata_dpkg_and_headers() -> None:
    metadata = "Metadata-Version: 2.1\nName: Foo_Bar\nVersion: 1.2\n\nName: other\nVersion: 9\n"
    files = [
        member(f"{SITE}/Foo_Bar-1.2.dist-info/METADATA", metadata),
        member(f"{SITE}/setuptools/_vendor/zipp-1.dist-info/METADATA", "Name: zipp\nVersion: 1\n"),
        member("usr/lib/python3/dist-packages/six-1.dist-info/METADATA", "Name: six\nVersion: 1\n"),
        member("var/lib/dpkg/status", text_of("dpkg_status")),
        member(
            "opt/rocm/include/rccl/rccl.h",
            "#define NCCL_MAJOR 2\n#define NCCL_MINOR 30\n#define NCCL_PATCH 4\n",
        ),
        member("opt/rocm/include/rccl.h", "#include <rccl/rccl.h>\n"),
    ]
    assert [(s.kind, s.name, s.version) for s in observe(files).stated] == [
        ("wheel", "foo-bar", "1.2"),
        ("vendored", "zipp", "1"),
        ("deb", "libc6", "2.36-9+deb12u13"),
        ("header", "rccl", "2.30.4"),
    ]
    assert stated_in("etc/hosts", "Name: x\nVersion: 1\n") == []
    # What names no version, or nothing, states none.
    metadata = "opt/venv/lib/python3.12/site-packages/foo-1.dist-info/METADATA"
    for text in ("", "Name: foo\n", "Version: 1\n"):
        assert stated_in(metadata, text) == [], text


@pytest.mark.parametrize(
    "row",
    [
        ("License", "MIT"),
        ("License-Expression", "Apache-2.0"),
        ("Classifier", "License :: OSI Approved :: MIT License"),
    ],
)
def test_each_row_of_a_wheel_about_its_licence_is_stated(row: tuple[str, str]) -> None:
    metadata = "opt/venv/lib/python3.12/site-packages/foo-1.dist-info/METADATA"
    text = f"Name: foo\nVersion: 1\nClassifier: Topic :: Software\n{row[0]}: {row[1]}\n\nText"
    (wheel,) = stated_in(metadata, text)
    assert wheel.licence == (row,)


@pytest.mark.parametrize(("most", "names"), [(26, ["foo"]), (25, [])])
def test_a_file_too_large_for_text_is_not_read_as_one(
    most: int, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examined, "_TEXT_SIZE", most)
    text = "Name: foo\nVersion: 1.2.3\n\n"
    assert len(text) == 26
    file = member("opt/venv/lib/python3.12/site-packages/foo-1.dist-info/METADATA", text)
    assert [item.name for item in observe([file]).stated] == names


def stated(kind: str, name: str, version: str) -> Stated:
    return Stated(kind=kind, name=name, version=version, path=f"p/{name}")  # type: ignore[arg-type]


def test_versions_that_equal_the_lock_pass() -> None:
    layer = (
        "l",
        [
            stated("wheel", "a", "1.0"),
            stated("deb", "libc6", "2.36-9"),
            stated("header", "rccl", "2.30.4"),
        ],
    )
    report = versions_inside(
        [layer], wheels={"a": "1.0"}, debs={"libc6": "2.36-9"}, components={"rccl": "2.30.4+abc"}
    )
    assert report.findings == []
    assert report.summary == "1 wheel, 1 deb, 1 header"


def test_a_difference_names_both_versions() -> None:
    versions = [
        stated("wheel", "a", "1.1"),
        stated("wheel", "twice", "3"),
        stated("wheel", "twice", "3"),
        stated("wheel", "extra", "3"),
        stated("deb", "libc6", "2.36-8"),
        stated("header", "rccl", "2.29.1"),
        stated("header", "hipblaslt", "1.2.2"),
    ]
    wheels = {"a": "1.0", "b": "2.0", "twice": "3"}
    report = versions_inside(
        [("l", versions)], wheels=wheels, debs={"libc6": "2.36-9"}, components={"rccl": "2.30.4"}
    )
    assert [(f.severity, f.message) for f in report.findings] == [
        ("error", "a is 1.1 in the image, 1.0 in the lock"),
        ("error", "twice is in the image twice, as 3 and 3"),
        ("error", "extra 3 is in the image, the lock has no such wheel"),
        ("error", "libc6 is 2.36-8 in the image, 2.36-9 in the lock"),
        ("error", "rccl is 2.29.1 in the image, 2.30.4 in versions.yaml"),
        ("note", "hipblaslt 1.2.2 by its header; no pin says which it must be"),
        ("error", "b 2.0 is in the lock, the image has no such wheel"),
    ]


@pytest.mark.parametrize(
    ("path", "text", "name", "version"),
    [
        (
            "usr/lib/librccl.so.1.0",
            b"RCCL version 2.27.7 compiled with\0RCCL version : 2.27.7\0",
            "rccl",
            "2.27.7",
        ),
        (
            "site/lib/librccl.so.1",
            b"x" * (8 << 20) + b"RCCL version : 2.30.4+abc\0",
            "rccl",
            "2.30.4",
        ),
        ("site/lib/librocblas.so.5", b"\x005.2.0.2a1b3c4d\0", "rocblas", "5.2.0"),
        ("usr/lib/libhipblaslt.so.1.2", b"", "hipblaslt", "1.2"),
        ("usr/lib/libMIOpen.so.1.0.70204", b"", "miopen", "1.0"),
        ("usr/lib/librccl.so.1", b"NCCL version detected : rank %d version %d", "", ""),
        ("usr/lib/librccl.so.1", b"RCCL version 2.27.7\0RCCL version 2.28.1\0", "", ""),
        ("usr/lib/libother.so.1.2.3", b"RCCL version 2.27.7\0", "", ""),
        ("usr/lib/libhipblaslt.so.1", b"", "", ""),
    ],
)
def test_a_library_states_its_version(path: str, text: bytes, name: str, version: str) -> None:
    versions = [(item.name, item.version) for item in stated_in_library(path, text)]
    assert versions == ([(name, version)] if name else [])


def test_a_library_states_the_version_of_a_component() -> None:
    layer = ("l", [stated("library", "rccl", "2.29.1"), stated("library", "hipblaslt", "1.2")])
    pins = {"rccl": "2.30.4", "hipblaslt": "1.2.2", "miopen": "3.5"}
    report = versions_inside([layer], wheels={}, debs={}, components=pins)
    assert [(f.severity, f.message) for f in report.findings] == [
        ("error", "rccl is 2.29.1 in the image, 2.30.4 in versions.yaml"),
    ]


# Library names


def names(*files: tuple[str, str, bytes]) -> list[str]:
    layers: dict[str, list[object]] = {}
    for layer, path, data in files:
        layers.setdefault(layer, []).append(member(path, data))
    report = overlap.judge(image_with({n: observe(m) for n, m in layers.items()}))  # type: ignore[arg-type]
    assert report.passed, "a shared name is a warning"
    return [f"{f.layer} /{f.path}: {f.message.partition(':')[0]}" for f in report.findings]


def test_two_owners_of_one_library_name() -> None:
    found = names(
        ("te", f"{SITE}/transformer_engine/lib/libmha_bwd.so", elf()),
        ("aiter", f"{SITE}/aiter/jit/libmha_bwd.so", elf()),
        ("aiter", f"{SITE}/aiter/other/libmha_bwd.so", elf()),
    )
    assert found == [
        f"te /{SITE}/transformer_engine/lib/libmha_bwd.so: libmha_bwd.so is also in aiter as "
        f"/{SITE}/aiter/jit/libmha_bwd.so"
    ]


def test_two_owners_of_one_soname_under_other_file_names() -> None:
    found = names(
        ("a", "opt/a/_C.so", elf(soname="libx.so.1")),
        ("b", "opt/b/libx.so.1.2", elf(soname="libx.so.1")),
    )
    assert found == ["a /opt/a/_C.so: libx.so.1 is also in b as /opt/b/libx.so.1.2"]
    # Two packages of one layer are two owners, too.
    assert names(("python", f"{SITE}/a/libx.so", elf()), ("python", f"{SITE}/b/libx.so", elf()))


def test_programs_modules_and_own_copies_share_no_name() -> None:
    assert not names(
        ("a", "usr/bin/tool", elf(kind=2)),
        ("b", "opt/bin/tool", elf(kind=2)),
        ("a", f"{SITE}/a/_C.so", elf()),
        ("b", f"{SITE}/b/_C.so", elf()),
        ("a", f"{SITE}/a/lib.cpython-311-x86_64-linux-gnu.so", elf()),
        ("b", f"{SITE}/b/lib.cpython-311-x86_64-linux-gnu.so", elf(soname="lib.abi3.so")),
        ("c", f"{SITE}/c/one/libc.so", elf()),
        ("c", f"{SITE}/c/two/libc.so", elf()),
    )


# Litter


@pytest.mark.parametrize(
    ("path", "text", "rule"),
    [
        ("etc/pip.conf", "[global]\nindex-url = https://user:secret@host/simple\n", "credentials"),
        ("root/.netrc", "machine h login u password p\n", "credentials"),
        ("etc/apt/auth.conf.d/x.conf", "machine h login u password p\n", "credentials"),
        ("opt/x.py", "# /tmp/pip-req-build-8x3k/src\n", "build path"),
        ("opt/x.py", "# /srv/build/tree/file\n", "build path"),
        ("var/lib/apt/lists/host_dists", "x", "cache"),
        ("root/.cache/pip/http/a", "x", "cache"),
        ("home/u/.cache/uv/a", "x", "cache"),
        ("tmp/left", "x", "cache"),
        ("opt/x.env", f"TOKEN={TOKEN}\n", "secret"),
    ],
)
def test_litter_is_found(path: str, text: str, rule: str) -> None:
    assert [found for found, _ in traces(path, text)] == [rule]
    report = judged(layer=("files", observe([member(path, text)], [b"/srv/build/tree"]).traces))
    assert not report.passed
    assert (report.findings[0].layer, report.findings[0].path) == ("layer", path)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("etc/pip.conf", "[global]\nindex-url = https://host/simple\n"),
        ("opt/x.py", "open('/home/user/data') # /tmp/x, /tmp/pipeline\n"),
        ("var/lib/apt/lists/lock", ""),
        ("usr/share/doc/pip/copyright", "x"),
        (
            "opt/x.py",
            "hf_"
            + "x" * 34
            + " "
            + "AKIA"
            + "IOSFODNN7EXAMPLE hf_hub_download_from_the_repository\n",
        ),
        ("opt/x.py", 'if text.startswith("-----BEGIN ' + 'PRIVATE KEY-----"):\n'),
    ],
)
def test_what_only_looks_like_litter(path: str, text: str) -> None:
    assert traces(path, text) == []


def test_build_paths_in_compiled_files() -> None:
    data = elf(
        {".debug_str": b"\0/home/runner/build/x/a.cpp\0/tmp/pip-req-build-1/a.c\0/home/runner/b\0"}
    )
    assert traces("lib/libx.so", data) == [
        ("build path", "/home/runner/build/x/a.cpp"),
        ("build path", "/tmp/pip-req-build-1/a.c"),
    ]


@pytest.mark.parametrize("before", [(1 << 20) - 10, (1 << 20) - 36, 1 << 20, (17 << 20) - 1])
def test_a_secret_is_found_wherever_it_is_and_not_shown(before: int) -> None:
    data = b"\n" * before + TOKEN.encode() + b"\n" * 100
    ((rule, seen),) = traces("opt/large", data)
    assert rule == "secret"
    assert seen == "a Hugging Face token"
    assert TOKEN[3:7] not in seen


def test_a_key_with_long_headers_is_found() -> None:
    begin, newline, rest = KEY.partition("\n")
    text = begin + newline + "Comment: " + "c" * 2000 + "\n" + rest
    assert [
        rule for rule, _ in traces("opt/key.pem", b"\n" * ((1 << 20) - 100) + text.encode())
    ] == ["secret"]


def test_of_two_paths_of_this_machine_the_longer_is_told() -> None:
    found = observe(
        [member("a", "/srv/build/tree/x and /opt/own")],
        [b"/srv/build", b"/srv/build/tree", b"/opt/own"],
    )
    assert sorted(t.seen for t in found.traces) == ["/opt/own", "/srv/build/tree"]


def test_every_kind_of_secret_is_found() -> None:
    secrets = [TOKEN, KEY, "AKIA" + "Q3EGRUZ7TW5NLPXB", "glpat-" + "aB3dE5gH7jK9mN1pQ3sT"]
    secrets += [f"gh{kind}_" + "0123456789abcdefghijABCDEFGHIJ012345" for kind in "pousr"]
    secrets.append(
        "github_pat_" + "0123456789abcdefghijAB" + "_" + ("0123456789abcdefghijABCDEFGHIJ" * 2)[:59]
    )
    for secret in secrets:
        assert [rule for rule, _ in traces("opt/x", f"\n{secret}\n")] == ["secret"], secret[:8]


def judged(**layers: tuple[str, Sequence[Trace]]) -> GateReport:
    """Layer → kind of its action and its traces. A layer called "built" comes from a source."""
    actions = [
        SimpleNamespace(name=name, kind=kind, needs=("build",) if name == "built" else ())
        for name, (kind, _) in layers.items()
    ]
    folder = Path("/home/me/project/.primus")
    image = SimpleNamespace(
        image=SimpleNamespace(plan=SimpleNamespace(layers=actions), config=b"{}"),
        facts={name: LayerFacts(traces=list(seen)) for name, (_, seen) in layers.items()},
        workspace=SimpleNamespace(folder=folder, store=SimpleNamespace(root=folder / "store")),
    )
    return litter.judge(image)  # type: ignore[arg-type]


def test_published_packages_warn_where_our_own_files_fail() -> None:
    seen = observe(
        [
            member("a/key.pem", KEY),
            member("a/libx.so", elf({".debug_str": b"\0/home/runner/x/y\0"})),
            member("a/liby.so", elf({".debug_str": b"\0/home/runner/x/z\0"})),
        ]
    ).traces
    report = judged(torch=("wheels", seen))
    assert [(f.severity, f.path) for f in report.findings] == [("warning", "a/key.pem")]
    assert [f.severity for f in judged(primus=("files", seen)).findings] == ["error"] * 3


@pytest.mark.parametrize(
    ("layer", "kind", "seen", "fails"),
    [
        # compiled in the source that was built
        ("built", "wheels", "/home/maker/dk/kernel", False),
        # of this machine
        ("built", "wheels", "/home/me/project/parts/x.cpp", True),
        # of the build
        ("built", "wheels", "/root/x.cpp", True),
        ("primus", "files", "/home/maker/dk/kernel", True),
        ("torch", "wheels", "/home/maker/dk/kernel", False),
    ],
)
def test_a_source_may_bring_compiled_files_of_its_maker(
    layer: str, kind: str, seen: str, fails: bool
) -> None:
    report = judged(**{layer: (kind, [Trace(rule="build path", path="x.co", seen=seen)])})
    assert bool(report.findings) is fails is not report.passed


# Sizes


def test_sizes_are_ordered_and_lone_folders_are_left_out() -> None:
    layers = {
        "small": {"etc": 10},
        "large": {"opt/venv/lib/a": 600, "opt/venv/lib/b/c": 300, "opt/venv/lib": 1, "": 0},
    }
    assert largest(layers) == [
        ("large", "", 901),
        ("large", "opt/venv/lib", 901),
        ("large", "opt/venv/lib/a", 600),
        ("large", "opt/venv/lib/b/c", 300),
        ("small", "", 10),
        ("small", "etc", 10),
    ]
    assert largest({"l": {"opt/x": 9950, "opt/y": 30}})[1:] == [("l", "opt/x", 9950)]
    assert largest({"empty": {}}) == [("empty", "", 0)]


# One pass, kept


def layer_of(tmp_path: Path, files: dict[str, bytes]) -> tuple[Workspace, Layer]:
    workspace = Workspace(Store(tmp_path / "store"), tmp_path)
    workspace.store.prepare()
    entries = [Entry(path=p, size=len(d), source=d) for p, d in files.items()]
    links = [
        Entry(path="l", kind="symlink", link="x"),
        Entry(path="tmp/more", kind="hardlink", link=min(files)),
    ]
    seen = list[LayerFacts]()
    layer = write_layer(
        workspace.store, [*entries, *links], look=lambda members: seen.append(observe(members))
    )
    assert facts_of(workspace, layer) == seen[0], (
        "what is seen while it is written is what the blob has"
    )
    shutil.rmtree(workspace.facts)
    return workspace, layer


def facts_of(workspace: Workspace, layer: Layer) -> LayerFacts:
    return examine_layer(workspace, "layer", layer, Progress())


def blob_of(workspace: Workspace, layer: Layer) -> Path:
    return workspace.store.blob_path(layer.blob.digest)


FILES = {
    "lib/libx.so": elf(
        {".hip_fatbin": bundle(["gfx942"]), ".debug_str": b"/home/me/x/y\0"}, soname="libx.so.1"
    ),
    "lib/y_gfx950.dat": b"x" * (2 << 20),
    "lib/broken.so": elf()[:70],
    f"{SITE}/a-1.dist-info/METADATA": b"Name: a\nVersion: 1\n",
    "a/" + "long" * 60 + "/é.txt": b"text",
}


def test_facts_of_a_layer_are_those_of_its_files(tmp_path: Path) -> None:
    facts = facts_of(*layer_of(tmp_path, FILES))
    assert {c.path: c.targets for c in facts.code} == {
        "lib/libx.so": ("gfx942",),
        "lib/y_gfx950.dat": ("gfx950",),
    }
    assert [lib.soname for lib in facts.libraries] == ["libx.so.1"]
    assert facts.unreadable.keys() == {"lib/broken.so"}
    assert facts.folders["lib"] == sum(len(d) for p, d in FILES.items() if p.startswith("lib/"))
    assert {trace.path for trace in facts.traces} == {"lib/libx.so", "tmp/more"}


def test_a_second_look_reads_no_blob_unless_the_rules_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, layer = layer_of(tmp_path, FILES)
    first = facts_of(workspace, layer)
    (cached,) = workspace.facts.iterdir()
    cached.write_text('{"folders": 1}')
    assert facts_of(workspace, layer) == first, "a damaged file is made again"
    blob = blob_of(workspace, layer)
    data = blob.read_bytes()
    blob.unlink()
    assert facts_of(workspace, layer) == first
    with monkeypatch.context() as changed, pytest.raises(HostError):
        changed.setattr(examined, "rules_hash", lambda: "another")
        facts_of(workspace, layer)
    monkeypatch.setattr(examined, "machine_paths", lambda _: [b"/moved"])
    assert facts_of(workspace, layer) == first
    monkeypatch.setattr(examined, "rules_hash", lambda: "another rule")
    blob.write_bytes(data)
    facts_of(workspace, layer)
    (other,) = workspace.facts.iterdir()
    assert other.name != cached.name


def test_a_damaged_blob_has_no_facts(tmp_path: Path) -> None:
    workspace, layer = layer_of(tmp_path, FILES)
    blob = blob_of(workspace, layer)
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    with pytest.raises(HostError, match="damaged"):
        facts_of(workspace, layer)
    assert not workspace.facts.exists()
    blob.write_bytes(b"no tar" * 999)
    digest = "sha256:" + hashlib.sha256(blob.read_bytes()).hexdigest()
    plain = LayerRef(
        digest=digest, diff_id=digest, size=1, media_type="application/vnd.oci.image.layer.v1.tar"
    )
    with pytest.raises(HostError, match="no tar is in it"):
        list(walk(plain, blob))


def test_a_part_pinned_by_the_version_of_its_holder_is_not_compared() -> None:
    def pin(version: str, inside: str | None = None) -> SimpleNamespace:
        return SimpleNamespace(version=version, inside=inside)

    resolved = SimpleNamespace(
        pins={"rocm": pin("7.2.4"), "recipes": pin("")},
        inside={
            "rccl": pin("7.2.4", "rocm"),
            "hipblaslt": pin("1.2", "rocm"),
            "miopen": pin("3.5", "libmiopen1"),
        },
        debs=[SimpleNamespace(name="libmiopen1", version="1:3.5-2")],
    )
    assert versions._pinned(resolved) == {"rocm": "7.2.4", "hipblaslt": "1.2"}  # type: ignore[arg-type]


def judged_size(size: int, sizes: Mapping[str, int]) -> GateReport:
    """Judge an image of ``size`` bytes, of which its layers have ``sizes``, against 1,000."""
    resolved = SimpleNamespace(
        budget_gb=1e-6,
        place=lambda *key: ".".join(key),
        choice=SimpleNamespace(channel="amd"),
        target=SimpleNamespace(budgets_gb={"amd": 1e-6}),
    )
    rows = []
    for name, layer_size in sizes.items():
        blob = SimpleNamespace(size=layer_size)
        rows.append((SimpleNamespace(name=name), SimpleNamespace(blob=blob)))
    plan = SimpleNamespace(resolved=resolved)
    image = SimpleNamespace(size=size, rows=rows, plan=plan)
    return budget.judge(SimpleNamespace(image=image))  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "passes"), [(999, True), (1000, True), (1001, False)])
def test_an_image_may_have_exactly_its_budget(size: int, passes: bool) -> None:
    report = judged_size(size, {})
    assert report.passed is passes
    if not passes:
        assert report.findings[0].path == "budgets_gb.amd"


def test_an_image_above_its_budget_names_the_five_largest_layers() -> None:
    report = judged_size(2100, {"f": 600, "a": 100, "c": 300, "d": 400, "e": 500, "b": 200})
    named = report.findings[0].message.partition(": ")[2]
    assert [words.split()[0] for words in named.split(", ")] == ["f", "e", "d", "c", "b"]


@pytest.mark.parametrize(
    ("path", "target", "copyrights"),
    [
        ("usr/share/doc/libssl3", "openssl", {"libssl3": "openssl"}),
        ("usr/share/doc/libssl3", "../doc/openssl", {"libssl3": "openssl"}),
        ("opt/share/doc/libssl3", "openssl", {}),
        ("usr/share/doc/libssl3/examples", "../openssl", {}),
    ],
)
def test_a_package_may_share_the_folder_of_its_copyright(
    path: str, target: str, copyrights: dict[str, str]
) -> None:
    link = Member(path=path, kind="symlink", size=0, chunks=[], link=target)
    assert observe([link]).copyrights == copyrights


@pytest.mark.parametrize(
    ("path", "package"),
    [
        (f"{SITE}/jinja2-3.1.6.dist-info/licenses/LICENSE.txt", "wheel jinja2"),
        (f"{SITE}/torchao-0.18.0.dist-info/licenses/LICENSE", "wheel torchao"),
        (f"{SITE}/Foo_Bar-1.0+cpu.dist-info/COPYING", "wheel foo-bar"),
        (f"{SITE}/mpmath-1.3.0.dist-info/AUTHORS", None),
        (f"{SITE}/pip/_vendor/LICENSE", None),
    ],
)
def test_the_words_of_a_wheels_licence_are_read(path: str, package: str | None) -> None:
    copyrights = observe([member(path, "Do what you like.")]).copyrights
    assert copyrights == ({package: "Do what you like."} if package else {})


@pytest.mark.parametrize(
    ("path", "owner"),
    [
        (f"{SITE}/setuptools/_vendor/zipp-1.dist-info/METADATA", "setuptools"),
        (f"{SITE}/pkg_resources/_vendor/zipp-1.dist-info/METADATA", "pkg_resources"),
        (f"{SITE}/torch/vendor/deep/zipp-1.dist-info/METADATA", "torch"),
        ("usr/lib/python3/dist-packages/x/_vendor/zipp-1.dist-info/METADATA", None),
        (f"{SITE}/zipp-1.dist-info/METADATA/more", None),
    ],
)
def test_a_package_that_another_brings_along_has_its_owner(path: str, owner: str | None) -> None:
    stated = observe([member(path, "Name: zipp\nVersion: 1\n")]).stated
    assert [(one.kind, one.source) for one in stated] == ([("vendored", owner)] if owner else [])
