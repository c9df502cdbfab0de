"""The sides of `primus diff`: an image of a registry or the store, pins, and a git revision."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from test_verification import bundle

import gits
from primus_images.errors import InputError
from primus_images.oci.store import canonical_json
from primus_images.plan.project import Project
from primus_images.release.artifact import WITHDRAWAL, Document
from primus_images.release.documents import CYCLONEDX, GATES, LOCK, SPDX, VALIDATION, statement
from primus_images.release.registry import Repository
from primus_images.release.sides import Side, files, past_releases, side, target_of
from primus_images.versions.lock import Lock, LockedFile, dumps
from project_kit import Kit, make_project
from records import record

DIGEST = "sha256:" + "d" * 64
CONTENT = "sha256:" + "c" * 64
NAME = "registry.example/rocm/primus"
CONFIG: dict[str, Any] = {
    "created": "2026-11-20T00:00:00Z",
    "config": {
        "Labels": {"io.primus.pins.rocm-core": "7.0", "io.primus.extras": "rdma"},
        "Env": ["A=1", "B=x=y"],
    },
    "history": [
        {"created_by": "primus debs base"},
        {"created_by": "nothing", "empty_layer": True},
        {"created_by": "primus wheels python large"},
    ],
}
LAYERS = [
    {"digest": "sha256:" + "1" * 64, "size": 1_500_000},
    {"digest": "sha256:" + "2" * 64, "size": "500000"},
]


def document(kind: str, content: object, name: str = "a.json") -> Document:
    return Document(media_type=kind, name=name, data=canonical_json(content))


def locked(*rows: tuple[str, Any, str | None]) -> Document:
    files = [
        LockedFile(kind=kind, name=name, version="1", file=name, size=1, sha256="a" * 64, base=base)
        for name, kind, base in rows
    ]
    lock = Lock(target="demo", channel="pypi", pins={}, files=tuple(files))
    return Document(media_type=LOCK, name="lock.json", data=dumps(lock).encode())


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Side]:
    """The side of an image in a registry with these documents and this config."""

    def found(*documents: Document, config: Mapping[str, Any] = CONFIG, word: str = "") -> Side:
        class Registry:
            def digest(self, tag: str) -> str | None:
                return None if tag == "absent" else DIGEST

            def lacks(self, tag: str) -> InputError:
                return InputError(f"{NAME} has no image {tag}")

            def image(self, digest: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
                assert digest == DIGEST
                return {"layers": LAYERS, "config": {"digest": CONTENT}}, config

            def documents(self, digest: str) -> tuple[Document, ...]:
                return documents

        monkeypatch.setattr(Repository, "to_read", lambda name: Registry())
        return side(word or f"{NAME}:v26.11-demo", None)

    return found


def test_an_image_of_a_registry_states_its_layers_pins_and_environment(
    published: Callable[..., Side],
) -> None:
    found = published()
    release = found.release
    assert (release.image, release.tag, release.digest) == (NAME, "v26.11-demo", DIGEST)
    assert (release.date, release.content_size_bytes) == ("2026-11-20", 2_000_000)
    assert release.components == {"rocm_core": "7.0"}
    assert release.origin == "image of the registry"
    assert found.parts == {
        "layers": {"base": "1.5 MB", "python large": "500 kB"},
        "environment": {"A": "1", "B": "x=y"},
    }
    assert (found.curves, found.withdrawn, found.records) == (None, "", [])


@pytest.mark.parametrize(
    "history", [None, [{"created_by": "RUN make"}] * 2, [{"created_by": "primus debs base"}]]
)
def test_layers_of_other_builders_are_called_by_their_digests(
    published: Callable[..., Side], history: object
) -> None:
    found = published(config={"history": history, "config": None})
    assert dict(found.parts["layers"]) == {"1" * 12: "1.5 MB", "2" * 12: "500 kB"}
    assert found.parts["environment"] == {}
    assert (found.release.date, found.release.components) == (None, {})


def test_documents_state_packages_gates_and_licences(published: Callable[..., Side]) -> None:
    error = {"severity": "error", "path": "lib/x.so", "message": "no code for gfx942"}
    note = {"severity": "note", "path": "lib/y.so", "message": "unused"}
    gates = [
        {"gate": "versions", "passed": True, "summary": "2 wheels", "findings": [note]},
        {"gate": "codeobjects", "passed": False, "summary": "1 file", "findings": [error]},
    ]
    whole = {"checksums": [{"checksumValue": "d" * 64}], "name": "demo", "licenseDeclared": "x"}
    small = {"name": "small", "licenseDeclared": "MIT", "externalRefs": []}
    validation = record(image=record().image)
    content = json.loads(json.dumps(validation.as_json()))
    content["image"]["content"] = CONTENT
    found = published(
        locked(
            ("torch", "wheel", None),
            ("libc6", "deb", "small"),
            ("cmake", "deb", "small build"),
            ("base", "layer", "small"),
        ),
        document(GATES, {"digest": DIGEST, "gates": gates}),
        document(SPDX, {"packages": [whole, small]}),
        document(CYCLONEDX, {}),
        document(VALIDATION, content),
    )
    assert found.parts["packages"] == {"torch": "1", "libc6": "1"}
    # Only what fails, as of an image in the store.
    assert found.parts["gates"] == {"codeobjects": "1 file; lib/x.so: no code for gfx942"}
    assert found.parts["licences"] == {"small": "MIT"}
    assert [one.recipe.name for one in found.records] == ["one"]


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (GATES, {"digest": "sha256:0", "gates": []}),
        (SPDX, {"packages": [{"checksums": [{"checksumValue": "0"}]}]}),
        (VALIDATION, {"image": {"content": "sha256:0"}}),
    ],
)
def test_a_document_about_another_image_is_left_out(
    published: Callable[..., Side],
    kind: str,
    content: object,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = published(document(kind, content, "x.json"))
    assert list(found.parts) == ["layers", "environment"]
    said = f"! x.json of {NAME}@{DIGEST} is about another image, and is left out\n"
    assert capsys.readouterr().err == said


def test_a_damaged_document_is_named(published: Callable[..., Side]) -> None:
    with pytest.raises(InputError) as caught:
        published(document(GATES, {"gates": []}, "gates.json"))
    assert caught.value.message == (
        f"gates.json of {NAME}@{DIGEST} was not written by primus: 'digest' is missing in it"
    )


def test_a_withdrawal_is_said_and_not_verified(published: Callable[..., Side]) -> None:
    why = {"reason": "wrong", "date": "2026-11-29"}
    found = published(
        bundle(statement("v", DIGEST, WITHDRAWAL, why)), bundle(statement("v", DIGEST, "other", {}))
    )
    assert found.withdrawn == (
        "withdrawn on 2026-11-29: wrong (its signature is not verified here)"
    )


def test_an_image_that_is_not_there_is_named(published: Callable[..., Side]) -> None:
    with pytest.raises(InputError, match=f"{NAME} has no image absent"):
        published(word=f"{NAME}:absent")
    assert published(word=f"{NAME}@{DIGEST}").release.digest == DIGEST


@pytest.mark.parametrize(
    ("word", "target"),
    [
        ("v26.11-cpu", "cpu"),
        ("v26.11-cpu-preview", "cpu"),
        ("localhost/rocm/primus:v26.11.1-mi300x", "mi300x"),
        ("v26.11", ""),
        ("latest-cpu", ""),
        ("v26.11-a/b", ""),
    ],
)
def test_the_name_of_an_image_has_its_target(word: str, target: str) -> None:
    assert target_of(word) == target


RECIPE = """\
family: llama3
sizes: {layers: 2, heads: [1, 2]}
cases:
  - {when: {gpu: [mi300x, cpu], proxy: true}, because: small, tuned: {x: 1}, sizes: {layers: 1}}
"""


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    kit = make_project(tmp_path / "project")
    kit.write("recipes/small.yaml", RECIPE)
    return kit


def test_pins_state_recipes_with_their_cases_and_the_environment(kit: Kit) -> None:
    project = Project(kit.root)
    kit.edit("images/other.yaml", "value: red", "value: blue")
    found = side("v26.11-demo", project)
    assert found.release.origin == "pins of versions.yaml"
    assert found.release.components == {"alpha": "local", "beta": "local", "recipes": "local"}
    assert found.parts["environment"] == {"COLOR": "red"}
    rows = {key: value for key, value in found.parts["recipes"].items() if "small:" in key}
    assert rows == {
        "small: family": "llama3",
        "small: sizes.layers": "2",
        "small: sizes.heads": "1/2",
        "small: sizes.layers (gpu mi300x/cpu, proxy true)": "1",
    }
    # Without a target, those of all; with one, those that are asked for.
    both = side("v26.11", Project(kit.root)).parts["environment"]
    assert both == {"COLOR": "red (demo), blue (other)"}
    assert side("v26.11", Project(kit.root), "other").parts["environment"] == {"COLOR": "blue"}
    assert side("versions.yaml", Project(kit.root), "demo").parts["packages"] == {}


def test_an_unknown_name_says_what_there_is(kit: Kit) -> None:
    with pytest.raises(InputError) as caught:
        side("v26.11-dmo", Project(kit.root))
    assert caught.value.message.startswith(
        "no release, image or git revision is called 'v26.11-dmo': versions.yaml pins v26.11, the "
        "store has no image, and v"
    )
    assert "v26.11-demo" in str(caught.value.hint)


def test_a_name_of_the_projects_own_withdrawals_says_so(kit: Kit) -> None:
    kit.write("withdrawn.yaml", "v26.11-demo: {reason: wrong, date: '2026-11-29'}\n")
    project = Project(kit.root)
    said = "withdrawn on 2026-11-29: wrong"
    assert side("v26.11-demo", project).withdrawn == said
    assert side("v26.11", project, "demo").withdrawn == said
    assert side("v26.11-other", project).withdrawn == ""
    assert side("v26.11", project).withdrawn == ""


def test_the_name_of_a_withdrawn_image_elsewhere_is_of_its_digest(
    kit: Kit, published: Callable[..., Side]
) -> None:
    published()
    for digest, said in ((DIGEST, True), ("sha256:0", False)):
        row = f"{{reason: wrong, date: '2026-11-29', digest: '{digest}'}}"
        kit.write("withdrawn.yaml", f"v26.11-demo: {row}\n")
        found = side(f"{NAME}:v26.11-demo", Project(kit.root))
        assert bool(found.withdrawn) is said


def test_an_image_of_the_store_states_its_files(kit: Kit) -> None:
    kit.build()
    project = Project(kit.root)
    found = side("v26.11-demo", project)
    assert found.release.origin == "image of the store"
    assert found.release.digest == project.workspace.store.images()["v26.11-demo"]["digest"]
    assert found.parts["environment"]["COLOR"] == "red"
    assert found.parts["recipes"]["small: family"] == "llama3"
    assert (found.parts["packages"], found.parts["gates"]) == ({}, {})
    assert side("rocm/primus:v26.11-demo", project).release.digest == found.release.digest
    store = project.workspace.store
    every = files(found, Side(release=found.release), store)
    assert every["opt/alpha/sub/run"].startswith("10 bytes, ")
    assert files(found, found, store) == {}


def test_a_revision_has_the_pins_of_its_last_commit(kit: Kit) -> None:
    gits.git(kit.root, "init", "-q", "-b", "main")
    gits.commit(kit.root, {"recipes/old.yaml": "a: 1\n"})
    first = gits.head(kit.root)
    gits.commit(kit.root, {"recipes/old.yaml": "a: 2\n"})
    last = gits.head(kit.root)
    kit.edit("versions.yaml", "release: v26.11", "release: v26.12")
    gits.commit(kit.root, {})
    project = Project(kit.root)
    for word, commit, value in (
        (first, first, "1"),
        ("v26.11", last, "2"),
        ("v26.11-demo", last, "2"),
        ("v26.11-demo-preview", last, "2"),
    ):
        found = side(word, project)
        assert found.release.origin == f"pins of commit {commit[:12]}", word
        assert found.parts["recipes"]["old: a"] == value
    assert [release.tag for release in past_releases(project)] == ["v26.11"]
    kit.edit("versions.yaml", "release: v26.12", "release: v27.1")
    kit.write("images/demo.yaml", "channels: 1\n")
    gits.commit(kit.root, {})
    with pytest.raises(InputError) as caught:
        side("HEAD", Project(kit.root), "demo")
    head = gits.head(kit.root)[:12]
    assert str(caught.value.where).startswith(f"{head}:images/demo.yaml:1:")
    assert caught.value.hint is not None
    with pytest.raises(InputError, match="no release, image or git revision"):
        side("v26.10", Project(kit.root))
