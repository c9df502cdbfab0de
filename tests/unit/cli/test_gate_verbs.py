"""`primus check`, `primus why-size` and the gates of `build` and `verify`, through the command
line.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpu_files import bundle, elf
from primus_images.cli.host.why_size import largest
from project_kit import Kit, make_project

PLACEHOLDER = "hf_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZ12345678"[:34]


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return make_project(tmp_path / "project")


def preview(kit: Kit) -> None:
    """Make demo an image that may fail a gate and get its name all the same."""
    kit.edit(
        "images/demo.yaml",
        "channels: [local]",
        "channels: [local]\npreviews: {local: it is a test}",
    )


def names(kit: Kit) -> list[str]:
    index = json.loads((kit.root / ".primus/store/index.json").read_bytes())
    return [m["annotations"]["org.opencontainers.image.ref.name"] for m in index["manifests"]]


def gates(kit: Kit, *words: str, code: int = 0) -> dict[str, Any]:
    result = kit.primus("check", "demo", "--json", *words)
    assert result.code == code, result.out + result.err
    (image,) = json.loads(result.out)["images"]
    return {gate["gate"]: gate for gate in image["gates"]}


def test_a_clean_image_passes_and_says_what_was_looked_at(kit: Kit) -> None:
    digest = kit.build().digest
    result = kit.primus("check", "demo")
    assert result.code == 0, result.err
    assert result.out.splitlines()[0] == f"v26.11-demo {digest}"
    for gate, summary in {
        "coherence": "no package of the ROCm train",
        "coverage": "no GPU architecture to cover",
        "litter": "secrets, logins, caches, build paths",
    }.items():
        assert re.search(rf"✓ {gate} +{summary}", result.out)
    assert kit.primus("check", "--all").code == 2, "other is not built"


def test_an_image_that_is_not_built_or_out_of_date_is_bad_input(kit: Kit) -> None:
    result = kit.primus("check", "demo")
    assert (result.code, result.out) == (2, "")
    assert "v26.11-demo is not built from the current versions.yaml and lock" in result.err
    kit.build()
    kit.write("parts/alpha/blob", "new")
    assert kit.primus("check", "demo").code == 2


def test_a_library_for_another_gpu_fails_the_image(kit: Kit) -> None:
    preview(kit)
    kit.edit("images/demo.yaml", "channels:", "gpu: mi355x\nchannels:")
    kit.write("parts/alpha/lib/librocblas.so", elf({".hip_fatbin": bundle(["gfx942"])}))
    kit.write("parts/alpha/lib/x_gfx942.dat", b"123")
    kit.build()
    found = gates(kit, code=1)
    assert not found["coverage"]["passed"]
    assert [(f["layer"], f["path"]) for f in found["coverage"]["findings"]] == [
        ("alpha", "opt/alpha/lib/"),
        ("alpha", "opt/alpha/lib/librocblas.so"),
    ]
    assert found["pruning"]["findings"][0]["message"] == "1 kernel files, 3 B, are not for gfx950"
    text = kit.primus("check", "demo").out
    assert (
        "✗ alpha /opt/alpha/lib/librocblas.so: no code for gfx950: it has gfx942 (fat binary)"
        in text
    )
    libraries = json.loads(kit.primus("check", "demo", "--json").out)["images"][0]["libraries"]
    assert [row["targets"] for row in libraries] == [["gfx942"], ["gfx942"]]


def test_secrets_in_files_and_in_settings(kit: Kit) -> None:
    preview(kit)
    kit.write("parts/beta/env", f"HF_TOKEN={PLACEHOLDER}\n")
    kit.edit("images/demo.yaml", "value: red", f"value: {PLACEHOLDER}")
    kit.build()
    found = gates(kit, code=1)["litter"]["findings"]
    assert [(f["layer"], f["path"]) for f in found] == [("beta", "opt/beta/env"), ("", "config")]
    assert PLACEHOLDER not in json.dumps(found)


def test_a_second_check_reads_no_layer(kit: Kit) -> None:
    kit.build()
    first = gates(kit)
    index = json.loads((kit.root / ".primus/store/index.json").read_bytes())
    digest = index["manifests"][0]["digest"].removeprefix("sha256:")
    blobs = kit.root / ".primus/store/blobs/sha256"
    manifest = json.loads((blobs / digest).read_bytes())
    for layer in manifest["layers"]:
        path = blobs / layer["digest"].removeprefix("sha256:")
        path.write_bytes(b"\0" * path.stat().st_size)
    assert gates(kit) == first
    # Nothing was done, so there is no progress to show.
    assert [kit.primus(*words).err for words in (("check", "demo"), ("why-size", "demo"))] == [
        "",
        "",
    ]
    (kit.root / ".primus/cache/gates").rename(kit.root / "gone")
    result = kit.primus("check", "demo")
    assert (result.code, result.out) == (3, "")
    assert "damaged" in result.err


def test_why_size(kit: Kit) -> None:
    kit.write("parts/alpha/deep/er/file", b"x" * 50_000)
    kit.build()
    rows = json.loads(kit.primus("why-size", "demo", "--json").out)["largest"]
    assert [tuple(row.values()) for row in rows[:3]] == [
        ("alpha", "", 51_010),
        ("alpha", "opt/alpha", 51_010),
        ("alpha", "opt/alpha/deep/er", 50_000),
    ]
    lines = kit.primus("why-size", "demo").out.splitlines()
    assert [line.split()[-1] for line in lines[:3]] == ["v26.11-demo", "alpha", "opt/alpha"]


def test_small_folders_are_left_out_of_the_largest() -> None:
    layers = {"one": {"opt/large": 10_000_000, "opt/small": 10}, "two": {}}
    rows = [(layer, folder) for layer, folder, _ in largest(layers)]
    assert ("one", "opt/large") in rows
    assert ("one", "opt/small") not in rows
    assert rows[-1] == ("two", "")


def test_a_release_that_fails_a_gate_is_no_image(kit: Kit) -> None:
    good = kit.build().digest
    kit.write("parts/beta/env", f"HF_TOKEN={PLACEHOLDER}\n")
    result = kit.primus("build", "demo")
    assert (result.code, result.out) == (1, "")
    assert "v26.11-demo fails a gate, so there is no such image" in result.err
    assert "✗ beta /opt/beta/env: secret: a Hugging Face token" in result.err
    assert good in (kit.root / ".primus/store/index.json").read_text(), (
        "the name points to the last good image"
    )
    assert kit.primus("verify", "demo").code == 1
    assert kit.primus("check", "demo").code == 2
    (kit.root / "parts/beta/env").unlink()
    assert kit.build().digest == good


def test_a_preview_that_fails_a_gate_is_built_and_says_so(kit: Kit) -> None:
    preview(kit)
    kit.write(
        "images/demo.yaml", (kit.root / "images/demo.yaml").read_text() + "budget_gb: 0.0000001\n"
    )
    kit.write("parts/beta/env", f"HF_TOKEN={PLACEHOLDER}\n")
    lines = [
        "  ✗ litter: secrets, logins, caches, build paths; opt/beta/env: secret: a "
        "Hugging Face token",
        "  ✗ budget: ",
    ]
    built = kit.build()
    assert all(line in built.err for line in lines), built.err
    # The second answer comes from the plan, the third from the note.
    for words in (("demo", "--engine", "auto"), ("demo",)):
        (line,) = kit.build(*words).err.splitlines()
        assert line.startswith(
            "v26.11-demo-preview (fails budget, litter; see primus check demo): nothing to do, "
        )
    assert names(kit) == ["v26.11-demo-preview"]
    (image,) = json.loads(kit.build("demo", "--json").out)["images"]
    assert [sentence.partition(":")[0] for sentence in image["failed"]] == ["budget", "litter"]
    assert kit.primus("check", "demo").code == 1
    assert kit.primus("verify", "demo").code == 1


def test_verify_runs_the_gates(kit: Kit) -> None:
    preview(kit)
    kit.build()
    passed = kit.primus("verify", "demo")
    assert passed.code == 0, passed.err
    assert "both builds are identical" in passed.out
    assert "✓ coverage" in passed.out
    kit.write("parts/beta/env", f"HF_TOKEN={PLACEHOLDER}\n")
    failed = kit.primus("verify", "demo", "--json")
    assert failed.code == 1, failed.err
    result = json.loads(failed.out)
    assert not result["passed"]
    assert result["images"][0]["difference"] is None
    assert [g["gate"] for g in result["images"][0]["gates"] if not g["passed"]] == ["litter"]
