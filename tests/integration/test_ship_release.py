"""Shipping a release: compare it with what is in the store, in git and in a registry."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.sbom import write_layout
from test_statements import record as record_of

import gits
from amd_channel import registry
from host_tools import needs
from primus_images.errors import CheckFailed
from primus_images.oci.store import digest_of
from primus_images.plan.layers import plan_image
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve
from primus_images.progress import Progress
from primus_images.release import publish as publishing
from primus_images.release.artifact import Document
from primus_images.release.documents import GATES
from primus_images.release.policy import Policy
from primus_images.release.publish import Needs, Ready, prepare, publish
from primus_images.release.registry import Repository
from primus_images.release.statement import Signer
from primus_images.versions.lock import Lock, dumps
from project_kit import SOURCE, Kit, make_project

pytestmark = [pytest.mark.integration, needs("docker-registry", "skopeo", "git")]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registry(tmp_path_factory.mktemp("registry") / "own") as port:
        yield f"127.0.0.1:{port}/rocm/primus"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, repository: str) -> tuple[Kit, Ready, Ready]:
    """A project whose v26.11 is committed, built and published, and whose v26.12 is built and not
    committed.
    """
    kit = make_project(tmp_path_factory.mktemp("ship") / "project")
    kit.write(".gitignore", ".primus\n")
    gits.git(kit.root, "init", "-q")
    gits.git(kit.root, "add", ".")
    gits.git(kit.root, "commit", "-q", "-m", "v26.11")
    old = ready(kit)
    publish(old, Project(kit.root).workspace.store, repository, Progress())
    kit.edit("versions.yaml", "release: v26.11", "release: v26.12  # the next one")
    kit.write("parts/alpha/new.txt", "new")
    return kit, old, ready(kit)


@pytest.fixture(scope="module")
def kit(world: tuple[Kit, Ready, Ready]) -> Kit:
    return world[0]


def ready(kit: Kit, target: str = "demo") -> Ready:
    kit.build(target)
    project = Project(kit.root)
    plan = plan_image(resolve(project, target), project.workspace.stats)
    needs = Needs(records=kit.root / "none", preview=False, policy=Policy())
    checked = prepare(plan, project.workspace, needs, Progress())
    return replace(checked, objections=())


@pytest.mark.parametrize(
    "old", ["v26.11-demo", "HEAD", "v26.11", "REPOSITORY:v26.11-demo", "REPOSITORY@DIGEST"]
)
@pytest.mark.parametrize("new", ["v26.12-demo", "versions.yaml"])
def test_every_kind_of_side_is_compared_with_every_other(
    kit: Kit, repository: str, old: str, new: str
) -> None:
    digest = str(Project(kit.root).workspace.store.images()["v26.11-demo"]["digest"])
    word = old.replace("REPOSITORY", repository).replace("DIGEST", digest)
    result = kit.primus("diff", word, new, "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert ("v26.11" in found["old"] or digest in found["old"]) and "v26.12" in found["new"]
    changed = {s["name"]: {c["what"]: c["kind"] for c in s["changes"]} for s in found["sections"]}
    assert changed["environment"] == {}
    assert changed.get("gates", {}) == {}, "all pass on both sides"
    if new == "v26.12-demo" and old not in ("HEAD", "v26.11"):
        assert changed["layers"].keys() == {"alpha"}
    if (old, new) == ("v26.11", "versions.yaml"):
        assert "- The pins of commit" in kit.primus("releases", old).out, (
            "the past release is not forgotten"
        )
        assert re.search(
            r"primus:v26\.11 \(commit [0-9a-f]{12}\)  2026-11-20", kit.primus("releases").out
        )
    if (old, new) == ("v26.11-demo", "v26.12-demo"):
        assert changed["files"]["opt/alpha/new.txt"] == "added"


def test_release_notes_are_markdown_and_text_fits_80_columns(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = kit.primus("diff", "v26.11-demo", "v26.12-demo", "--markdown").out
    assert notes.startswith(
        "# rocm/primus:v26.11-demo (image of the store) → rocm/primus:v26.12-demo"
    )
    assert (
        "<details><summary>Files: 1 difference</summary>\n\n| name | old | new |\n|---|---|---|\n"
        "| opt/alpha/new.txt | – | 3 bytes" in notes
    )
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, kit.primus("diff", "v26.11-demo", "v26.12-demo").out.splitlines())) <= 80


def test_releases_of_other_branches_are_known(tmp_path: Path) -> None:
    kit = make_project(tmp_path / "project")
    gits.commit(kit.root, {".gitignore": ".primus\n"})
    first = gits.head(kit.root)

    def begin(release: str, place: str) -> str:
        gits.git(kit.root, "switch", "-q", *place.split())
        text = (kit.root / "versions.yaml").read_text()
        kit.write("versions.yaml", re.sub("(?m)^release: .*$", f"release: {release}", text))
        gits.git(kit.root, "commit", "-qam", release)
        kit.write("parts/alpha/fix", release)
        gits.git(kit.root, "add", "parts")
        gits.git(kit.root, "commit", "-qm", f"a fix for {release}")
        return gits.head(kit.root)

    ends = {"v26.11": first, "v26.12": begin("v26.12", "main")}
    ends["v26.11.1"] = begin("v26.11.1", f"-c v26.11.x {first}")
    ends["v26.11.2"] = begin("v26.11.2", "v26.11.x")
    for branch in ("main", "v26.11.x", f"--detach {first}"):
        gits.git(kit.root, "switch", "-q", *branch.split())
        listed = kit.primus("releases").out
        current = re.search("release: (v[0-9.]+)", (kit.root / "versions.yaml").read_text())
        assert current
        for release, commit in ends.items():
            assert f"primus:{release} " in listed, (branch, release)
            if release == current[1]:
                continue
            shown = kit.primus("diff", release, "versions.yaml")
            assert shown.code == 0, f"{branch}, {release}: {shown.err}"
            assert f"pins of commit {commit[:12]}" in shown.out, (branch, release)


def test_a_scanner_gets_one_of_several_images(kit: Kit, tmp_path: Path) -> None:
    store = Project(kit.root).workspace.store
    assert len(store.images()) > 1
    write_layout(store.root, "v26.11-demo", tmp_path / "image")
    done = subprocess.run(
        ["skopeo", "inspect", "--raw", f"oci:{tmp_path / 'image'}"], check=True, capture_output=True
    )
    assert digest_of(done.stdout) == store.images()["v26.11-demo"]["digest"]


def test_an_unknown_name_is_one_sentence_with_what_exists(kit: Kit, repository: str) -> None:
    result = kit.primus("diff", "v26.13-demo", "v26.12-demo")
    assert result.code == 2
    for part in (
        "'v26.13-demo'",
        "pins v26.12",
        "v26.11-demo, v26.12-demo",
        "v24.12 to v26.9",
        "did you mean",
    ):
        assert part in result.err
    broken = kit.primus("diff", "127.0.0.1:1/rocm/primus:v26.11-demo", "v26.12-demo")
    assert broken.code == 3 and "does not answer" in broken.err
    absent = kit.primus("diff", f"{repository}:v26.10-demo", "v26.12-demo")
    assert (
        absent.code == 2
        and "has no image v26.10-demo\n  → did you mean 'v26.11-demo'" in absent.err
    )
    near = kit.primus("diff", f"{repository}:v26.11-demo-preview", "v26.12-demo")
    assert "did you mean 'v26.11-demo'" in near.err
    assert ".by-" not in near.err


def test_the_tag_of_a_release_is_never_replaced(
    world: tuple[Kit, Ready, Ready], repository: str
) -> None:
    kit, old, new = world
    publish(new, Project(kit.root).workspace.store, repository, Progress())
    with pytest.raises(CheckFailed, match="a release is never replaced"):
        publish(
            replace(old, tag=new.tag), Project(kit.root).workspace.store, repository, Progress()
        )
    for tag in ("v26.11-demo", f"sha256-{old.image.digest[7:]}"):
        refused = kit.primus("tag", tag, "v26.12-demo", "--to", repository)
        assert refused.code == 2 and "never moves" in refused.err
    nobody = kit.primus("tag", "latest-demo", "v26.11-demo", "--to", repository)
    assert nobody.code == 2 and "who must have signed it?" in nobody.err


@pytest.mark.parametrize("name", ["a:b", "a b@c", "cü#d"])
def test_a_checkout_of_any_name_is_published(repository: str, tmp_path: Path, name: str) -> None:
    """skopeo takes a colon in a path for the end of it."""
    kit = make_project(tmp_path / name / "project")
    store = Project(kit.root).workspace.store
    there = f"{repository}-named"
    image = replace(ready(kit), tag=f"v26.11-{len(name.encode())}")
    assert publish(image, store, there, Progress())["digest"] == Repository(there).digest(image.tag)


def test_of_two_publishers_of_one_tag_one_says_that_it_lost(
    world: tuple[Kit, Ready, Ready], repository: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit, *both = world
    monkeypatch.setattr(publishing, "_PATIENCE", 0.3)
    store = Project(kit.root).workspace.store

    def attempt(one: Ready) -> str:
        try:
            return str(publish(one, store, repository, Progress())["digest"])
        except CheckFailed as error:
            return error.message

    for number in range(8):
        tag = f"v30.{number}-demo"
        with ThreadPoolExecutor(2) as pool:
            said = list(pool.map(attempt, [replace(one, tag=tag) for one in both]))
        digest = Repository(repository).digest(tag)
        assert said.count(str(digest)) == 1, said
        assert sum(f"{tag} is" in one and str(digest) in one for one in said) == 1, said


# What these lines do is tested where an index, or a real image, is: test_lock_verb.py and
# test_cpu_image.py.
ELSEWHERE = ("primus bump transformers", "primus validate cpu")


@needs("cosign")
@pytest.mark.parametrize("page", ["release.md", "statements.md"])
def test_a_page_runs_as_written(
    page: str, tmp_path: Path, repository: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = make_project(tmp_path / "project")
    kit.write(
        "recipes/llama3-proxy.yaml", (SOURCE.parent / "recipes/llama3-proxy.yaml").read_bytes()
    )
    kit.write(
        "images/cpu.yaml", (kit.root / "images/demo.yaml").read_text() + "recipes: [llama3-proxy]\n"
    )
    kit.write(
        "images/locks/local/cpu.json", dumps(Lock(target="cpu", channel="local", pins={}, files=()))
    )
    kit.write(
        ".gitignore",
        ".primus\nout\n/cosign.*\n/to-sign\n/osv\n/*.json\n/*.yaml\n!/versions.yaml\n"
        "!/withdrawn.yaml\n",
    )
    gits.commit(kit.root, {})
    for name, value in (("name", "t"), ("email", "t@example.invalid")):
        gits.git(kit.root, "config", f"user.{name}", value)
    repository += f"-{page[:-3]}"
    monkeypatch.setenv("COSIGN_PASSWORD", "secret")
    subprocess.run(["cosign", "generate-key-pair"], cwd=kit.root, check=True, capture_output=True)
    signer = Signer(key=str(kit.root / "cosign.key"))
    store = Project(kit.root).workspace.store
    publish(ready(kit, "cpu"), store, repository, Progress(), signing=signer)
    gits.git(kit.root, "tag", "v26.11")
    record(kit)
    kit.write("osv/none.json", "[]")
    kit.write("accepted.yaml", "accepted: []\n")
    kit.write("cpu.spdx.json", kit.primus("sbom", "cpu", "--json").out)
    text = (Path(__file__).parents[2] / "docs" / page).read_text().replace("\\\n", "")
    text = text.replace("registry.example.com/rocm/cache", f"{repository}-cache")
    if page == "statements.md":
        before, sign, after = text.partition("## Sign")
        text = sign + after + before  # what the first lines verify is signed by later ones
    empty = Kit(tmp_path / "empty")
    empty.write("cosign.pub", (kit.root / "cosign.pub").read_bytes())
    lines = [
        line for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.splitlines()
    ]
    assert len(lines) > 7
    for line in lines:
        if line == "primus validate cpu":
            record(kit)
        if not line.startswith(ELSEWHERE):
            program, *words = shlex.split(
                line.replace("registry.example.com/rocm/primus", repository)
            )
            if program == "primus":
                # What is published is verified on a machine that has the public key and nothing
                # else.
                result = (empty if "--image" in words else kit).primus(*words)
                withdrawn = "withdrawn on" in result.out and "--image" in words
                assert result.code == int(withdrawn), f"{line}\n{result.out}{result.err}"
            elif program in ("cosign", "git"):
                subprocess.run([program, *words], cwd=kit.root, check=True, capture_output=True)
    if page == "statements.md":
        return
    there = Repository(repository)
    digests = {tag: there.digest(tag) for tag in ("v26.11-cpu", "v26.11.1-cpu", "v26.12-cpu")}
    assert len({*digests.values(), None}) == 4
    assert there.digest("latest-cpu") == there.digest("v26.11") == digests["v26.11.1-cpu"]
    told = kit.primus("releases", "v26.11.1").out
    assert re.search(r"supported until +\d{4}-", told) or "not stated" in told
    gits.git(kit.root, "switch", "-q", "v26.11.x")
    there.attach(
        [Document(media_type=GATES, name="gates.json", data=b"[]")], ready(kit, "cpu").subject
    )
    result = kit.primus("diff", f"{repository}:v26.11.1-cpu", "HEAD")
    assert (
        result.code == 2
        and "gates.json" in result.err
        and "was not written by primus" in result.err
    )


def record(kit: Kit) -> None:
    """Write what a validation of the built image would leave."""
    image = ready(kit, "cpu").image
    content = digest_of(image.config)
    validation = record_of(content, image.digest)
    folder = f"out/validation/cpu/{image.plan.ref}-{content[7:19]}/llama3-proxy"
    kit.write(f"{folder}/record.json", validation.data)
