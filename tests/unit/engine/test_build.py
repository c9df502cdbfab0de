"""The engine through its command line: only what changed, the same bytes, nothing lost."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from primus_images.files import read_sealed
from project_kit import Kit, make_project


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return make_project(tmp_path / "project")


def blobs(kit: Kit, store: str = ".primus/store") -> list[Path]:
    return sorted((kit.root / store / "blobs/sha256").iterdir())


def test_two_stores_two_folders_same_digest(kit: Kit, tmp_path: Path) -> None:
    kit.write("parts/beta/größe", "1")
    digest = kit.build().digest
    copy = Kit(tmp_path / "elsewhere" / "deep")
    shutil.copytree(kit.root, copy.root, symlinks=True, ignore=shutil.ignore_patterns(".primus"))
    for path in copy.root.rglob("*"):
        if not path.is_symlink():
            os.utime(path, (1, 1))
    assert copy.build().digest == digest
    ascii_locale = {**copy.env, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = copy.command("build", "demo", "--store", str(tmp_path / "store"))
    built = subprocess.run(
        command, cwd=copy.root, env=ascii_locale, umask=0o077, check=True, stdout=subprocess.PIPE
    )
    assert built.stdout.decode().split()[-1] == digest


def test_only_the_changed_component_is_built(kit: Kit) -> None:
    first = kit.build().digest
    kit.write("parts/beta/blob", b"new")
    assert kit.layers() == {"alpha": False, "beta": True, "recipes": False}
    kit.write("parts/beta/blob", ("beta" * 251).encode()[:1000])
    again = kit.build()
    assert again.digest == first, "the old input gives the old image"
    assert "0 layers built" in again.err
    kit.edit("images/demo.yaml", "red", "blue")
    assert not any(kit.layers().values())


def test_targets_share_layers(kit: Kit) -> None:
    kit.build("demo")
    before = len(blobs(kit))
    result = json.loads(kit.build("demo", "other", "--json").out)
    assert [line["built"] for line in result["images"][1]["layers"]] == [False] * 3
    assert len(blobs(kit)) == before + 1, "another image with the same settings is one manifest"


def test_overlap_after_a_good_build(kit: Kit) -> None:
    digest = kit.build().digest
    kit.edit("versions.yaml", "/opt/beta", "/opt/alpha")
    assert "/opt/alpha/blob is in both alpha" in kit.primus("build", "demo").err
    assert kit.primus("build", "demo").code == 1, "the refused image must not pass for a judged one"
    assert digest in (kit.root / ".primus/store/index.json").read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["build", "dmo"], "did you mean 'demo'?"),
        (["build"], "name a target"),
        (["plan", "x"], "no target is called 'x'"),
        (["plan", "./demo"], "no target is called './demo'"),
        (["plan", "DEMO"], "did you mean 'demo'?"),
        (["plan", "my cpu"], "images/my cpu.yaml: 'my cpu' cannot be the name of a target"),
        (["plan", "CPU2"], "images/CPU2.yaml: 'CPU2' cannot be the name of a target"),
        (["build", "demo", "--project", "/nonexistent"], "no versions.yaml"),
    ],
)
def test_bad_input_is_a_sentence(kit: Kit, words: list[str], sentence: str) -> None:
    if words[-1] in ("my cpu", "CPU2"):
        kit.write(f"images/{words[-1]}.yaml", (kit.root / "images/demo.yaml").read_text())
    result = kit.primus(*words)
    assert result.code == 2
    assert sentence in result.err


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: path.mkdir(), "this is a directory, not a file"),
        (os.mkfifo, "this is not a regular file"),
        (lambda path: path.symlink_to("nowhere"), "cannot be read: No such file or directory"),
        (
            lambda path: path.symlink_to(path.name),
            "cannot be read: Too many levels of symbolic links",
        ),
    ],
    ids=["folder", "fifo", "dangling", "loop"],
)
def test_a_target_that_is_no_file_is_not_called_unknown(
    kit: Kit, make: Callable[[Path], None], sentence: str
) -> None:
    path = kit.root / "images/demo.yaml"
    path.unlink()
    make(path)
    result = kit.primus("plan", "demo")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert f"images/demo.yaml: {sentence}" in result.err


def test_dry_run_and_plan_build_nothing(kit: Kit) -> None:
    for words in (("build", "demo", "--dry-run"), ("plan", "demo")):
        result = kit.primus(*words)
        assert result.code == 0
        assert "3 to build" in result.out
        assert not (kit.root / ".primus/store").exists()


def test_image_is_a_valid_oci_image_and_the_last_line_its_digest(kit: Kit) -> None:
    result = kit.build()
    assert "3 layers built, 0 reused" in result.err
    (entry,) = json.loads((kit.root / ".primus/store/index.json").read_bytes())["manifests"]
    assert result.digest == entry["digest"]
    assert entry["annotations"]["org.opencontainers.image.ref.name"] == "v26.11-demo"
    store = kit.root / ".primus/store/blobs/sha256"
    manifest = json.loads((store / result.digest.removeprefix("sha256:")).read_bytes())
    config = json.loads((store / manifest["config"]["digest"].removeprefix("sha256:")).read_bytes())
    assert manifest["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    assert (
        len(config["rootfs"]["diff_ids"]) == len(manifest["layers"]) == len(config["history"]) == 3
    )
    assert config["config"]["Env"] == ["COLOR=red"]
    assert config["created"] == "2026-11-20T00:00:00Z"
    for name in ("created", "title", "description", "version", "source"):
        assert f"org.opencontainers.image.{name}" in manifest["annotations"]


def test_run_needs_the_image_and_says_which_there_are(kit: Kit) -> None:
    for words in (("run", "demo", "--", "true"), ("verify", "demo")):
        result = kit.primus(*words)
        assert (result.code, "v26.11-demo is not built; the store has no image" in result.err) == (
            2,
            True,
        )
    kit.build("other")
    result = kit.primus("load", "demo")
    assert result.code == 2
    assert "the store has v26.11-other" in result.err
    assert "primus build demo" in result.err


def test_a_reader_that_stops_early_is_no_traceback(kit: Kit) -> None:
    words = " ".join(kit.command("plan", "demo", "other", "--json"))
    done = subprocess.run(
        ["bash", "-c", f"{words} | true; exit ${{PIPESTATUS[0]}}"],
        cwd=kit.root,
        env=kit.env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode in (0, 141)


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_lost_list_of_paths_is_made_again(kit: Kit, damage: str) -> None:
    first = kit.build().digest
    for record in (kit.root / ".primus/store/actions").iterdir():
        paths = read_sealed(record)["layer"]["paths"].removeprefix("sha256:")
        path = kit.root / ".primus/store/blobs/sha256" / paths
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-3])
    kit.edit("images/demo.yaml", "red", "blue")
    again = kit.build("demo", *(["--rehash"] if damage == "cut" else []))
    assert "3 layers built" in again.err
    kit.edit("images/demo.yaml", "blue", "red")
    assert kit.build().digest == first


def test_a_recipe_that_does_not_load_is_refused_before_anything_is_built(kit: Kit) -> None:
    kit.write("recipes/two.yaml", "a: 1\nb: [1\nc: 2\n")
    kit.write("parts/beta/blob", b"new")
    refused = kit.primus("build", "demo")
    assert refused.code == 2
    assert "recipes/two.yaml:3:2" in refused.err
    assert not (kit.root / ".primus/store/index.json").exists() or not blobs(kit)
    kit.write("recipes/two.yaml", "a: 1\n")
    digest = kit.build().digest
    # A recipe that is as it was is broken by the file that it uses.
    kit.write("recipes/two.yaml", "uses: [shared/three.yaml]\n")
    kit.write("recipes/shared/three.yaml", "c: 1\n")
    kit.build()
    for text in ("c: 1\nc: 2\n", None):
        if text is None:
            (kit.root / "recipes/shared/three.yaml").unlink()
        else:
            kit.write("recipes/shared/three.yaml", text)
        refused = kit.primus("build", "demo")
        assert refused.code == 2
        assert ("recipes/shared/three.yaml:2:1" if text else "recipes/two.yaml:1:8") in refused.err
    kit.write("recipes/two.yaml", "a: 1\n")
    assert kit.build().digest == digest


def test_a_lower_budget_is_judged_although_no_byte_changed(kit: Kit) -> None:
    kit.write("images/demo.yaml", (kit.root / "images/demo.yaml").read_text() + "budget_gb: 1\n")
    kit.build()
    assert "nothing to do" in kit.build().err
    kit.edit("images/demo.yaml", "budget_gb: 1\n", "budget_gb: 0.0000001\n")
    refused = kit.primus("build", "demo")
    assert refused.code == 1
    assert "its budget is 100 B" in refused.err
    kit.edit("images/demo.yaml", "budget_gb: 0.0000001\n", "budget_gb: 2\n")
    kit.build()


def test_hidden_files_of_editors_are_neither_targets_nor_recipes(kit: Kit) -> None:
    (kit.root / "images/.#demo.yaml").symlink_to("user@host.1234:1")
    kit.write("images/.demo.yaml", "half: [writ")
    (kit.root / "recipes/.#one.yaml").symlink_to("user@host.1234:1")
    result = kit.primus("plan", "--all")
    assert result.code == 0, result.err
    assert ".demo" not in result.out
    (kit.root / "recipes/.#one.yaml").unlink()
    kit.write("recipes/.one.yaml", "half: [writ")
    kit.build()
