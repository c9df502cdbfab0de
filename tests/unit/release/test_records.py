"""Evidence on disk: kept by the image that it judged, and never of another one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from primus_images.cli.host.clean import CleanOptions, _validations
from primus_images.plan.project import Project
from primus_images.recipes.digest import digest_of_recipe
from primus_images.release import golden
from primus_images.release.golden import Curve, Curves
from primus_images.release.records import (
    all_records,
    image_folder,
    make_room,
    orphans,
    records_of,
    summary,
)
from primus_images.training.judge.record import Record, RecordedImage
from primus_images.versions.lock import LockedFile
from project_kit import make_project
from records import jobs, recipe, record

OLD = RecordedImage(ref="v26.11-cpu", content=f"sha256:{'1' * 64}")
NEW = RecordedImage(ref="v26.12-cpu", content=f"sha256:{'2' * 64}")


def whole(**changes: Any) -> Record:
    """A record whose recipe is as its hash says."""
    settings = {
        "name": "one",
        "backend": "megatron",
        "mode": "pretrain",
        "precision": "fp32",
        "gpu": "cpu",
    }
    made = recipe(settings=settings)
    made = replace(made, sha256=digest_of_recipe(settings, made.assets))
    return record(**{"recipe": made, "image": OLD, **changes})


def keep(output: Path, made: Record, cell: str = "one") -> Path:
    """Write a record as a validation does."""
    folder = image_folder(output / "cpu", made.image) / cell
    make_room(folder)
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps(made.as_json()))
    return folder


def test_the_next_release_leaves_the_evidence_of_the_last_one(tmp_path: Path) -> None:
    keep(tmp_path, whole())
    keep(tmp_path, whole(image=NEW, passed=False))
    (old,) = records_of(tmp_path / "cpu", OLD.content)
    (new,) = records_of(tmp_path / "cpu", NEW.content)
    assert (old.image, old.passed, new.image, new.passed) == (OLD, True, NEW, False)
    records = list(all_records(tmp_path))
    assert summary(records, "v26.11") == "v26.11-cpu (111111111111): 1 of 1 passed on CPU"
    assert summary(records, "v26.12-cpu") == "v26.12-cpu (222222222222): 0 of 1 passed on CPU"
    assert summary(records, "v26.1") is None


@pytest.mark.parametrize(
    ("later", "counts"),
    [
        ({"made": "2026-11-21T20:00:00Z", "passed": False}, 1),
        ({"gpu": "mi300x"}, 2),
        ({"wrap": "nsys"}, 2),
        ({"jobs": jobs("base")}, 2),
        ({"image": replace(OLD, content=f"sha256:{'3' * 64}")}, 1),
    ],
)
def test_a_later_validation_replaces_none(
    tmp_path: Path, later: dict[str, Any], counts: int
) -> None:
    first = whole()
    second = whole(**later)
    keep(tmp_path, first)
    keep(tmp_path, second)
    assert len(list(tmp_path.rglob("record.json"))) == 2
    newest = records_of(tmp_path / "cpu", OLD.content)
    assert len(newest) == counts
    if second.image == OLD:
        assert second in newest


def test_an_earlier_validation_is_put_aside_each_time(tmp_path: Path) -> None:
    for _ in range(3):
        keep(tmp_path, whole())
    (folder,) = (tmp_path / "cpu").iterdir()
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["one", "one.20261120T200000Z", "one.20261120T200000Z.2"]


def test_records_of_earlier_versions_count(tmp_path: Path) -> None:
    folder = tmp_path / "cpu/one"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps(whole().as_json()))
    assert records_of(tmp_path / "cpu", OLD.content) == [whole()]
    assert list(all_records(tmp_path)) == [whole()]


def test_a_damaged_record_of_another_image_is_no_fault_of_this_one(tmp_path: Path) -> None:
    keep(tmp_path, whole())
    (keep(tmp_path, whole(image=NEW)) / "record.json").write_text("{")
    assert records_of(tmp_path / "cpu", OLD.content) == [whole()]
    assert list(all_records(tmp_path)) == [whole()]


def test_only_what_is_asked_for_goes(tmp_path: Path) -> None:
    old = keep(tmp_path, whole())
    keep(tmp_path, whole(image=NEW))
    assert orphans(tmp_path, {NEW.content}) == [old]
    assert orphans(tmp_path, {NEW.content, OLD.content}) == []
    options = CleanOptions(
        image=[],
        caches=False,
        validations=False,
        dry_run=True,
        project=tmp_path,
        store=None,
        channel=None,
        json=False,
    )
    assert _validations(Project(tmp_path), options) == {}


def test_validations_of_images_that_are_gone_go_when_asked_for(tmp_path: Path) -> None:
    kit = make_project(tmp_path / "project")
    kit.build("demo")
    store = Project(kit.root).workspace.store
    (entry,) = store.images().values()
    config = json.loads(store.read(str(entry["digest"])))["config"]["digest"]
    for name, content in (("here", config), ("gone", f"sha256:{'0' * 64}")):
        made = whole(image=RecordedImage(content=content))
        kit.write(f"out/validation/demo/{name}/record.json", json.dumps(made.as_json()))

    def validations(*words: str) -> int:
        waste = json.loads(kit.primus("clean", "--json", "--dry-run", *words).out)["waste"]
        return sum(row["number"] for row in waste if row["kind"].startswith("validations"))

    assert validations() == 0
    assert validations("--validations") == 1
    # Those of an image that goes, too.
    assert validations("--validations", "--image", "v26.11-demo") == 2
    assert kit.primus("clean", "--validations").code == 0
    assert [path.name for path in (kit.root / "out/validation/demo").iterdir()] == ["here"]


def curves(release: str, **versions: str) -> Curves:
    curve = Curve(recipe="abc", cpu="A", loss=(6.0, 5.0), grad_norm=(1.0, 1.0))
    return Curves(release=release, image="sha256:1", versions=versions, curves={"one": curve})


@pytest.mark.parametrize(
    ("release", "locked", "has"),
    [
        ("v26.11-cpu", "2.13.0", True),
        ("v26.12-cpu", "2.13.0", False),
        ("v26.11-cpu", "2.14.0", False),
        ("v26.11.1-cpu", "2.13.0", False),
        ("v26.11-h200", "2.13.0", False),
    ],
)
def test_pins_have_the_curves_that_they_computed(
    tmp_path: Path, release: str, locked: str, has: bool
) -> None:
    golden.save(tmp_path, curves("v26.11-cpu", torch="2.13.0"))
    wheel = LockedFile(
        kind="wheel", name="torch", version=locked, file="torch.whl", size=1, sha256="0" * 64
    )
    of_pins = golden.of_pins(tmp_path, release, [wheel])
    assert (of_pins is not None) is has


def test_only_wheels_of_the_image_decide_whether_curves_are_of_the_pins(tmp_path: Path) -> None:
    """The versions of a curve also name packages that its image has from Debian."""
    release = "v26.11-cpu"
    golden.save(tmp_path, curves(release, torch="2.13.0", pyyaml="6.0"))
    torch = LockedFile(
        kind="wheel", name="torch", version="2.13.0", file="torch.whl", size=1, sha256="0" * 64
    )
    of_a_build = replace(torch, version="2.12.0", base="aiter build")
    assert golden.of_pins(tmp_path, release, [torch, of_a_build]) is not None
