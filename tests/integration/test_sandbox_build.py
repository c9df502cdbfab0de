"""Isolated builds, loading, and the verbs run and load."""

import json
import os
import threading
from pathlib import Path

import pytest
from docker_engine import private_dockerd
from sandbox_kit import Entry, image, needs_busybox, sha

from primus_images import programs as processes
from primus_images.cli.main import main
from primus_images.engine.workshop import Task, log_tail, run_isolated
from primus_images.errors import HostError
from primus_images.oci.store import MANIFEST_TYPE
from primus_images.sandbox import podman
from primus_images.sandbox.container import Command, RootFs
from primus_images.sandbox.docker import docker, load_image
from primus_images.sandbox.engines import choose
from project_kit import Kit

pytestmark = [pytest.mark.integration, needs_busybox]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> RootFs:
    return image(tmp_path_factory.mktemp("tiny"))


def test_a_build_sees_its_inputs_and_nothing_else(tiny, tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src/f").write_text("input")
    os.environ["SECRET_OF_THE_HOST"] = "x"
    try:
        script = (
            "cat /in/f > /out/copy; env | sort > /out/env; ip -o link | wc -l > /out/links; "
            "touch /in/f 2>/dev/null || echo read-only > /out/ro; umask > /out/umask; touch "
            "/tmp/gone; "
            "read x || echo no-stdin > /out/stdin; "
            "cat /proc/1/environ /proc/1/cmdline > /out/proc 2>/dev/null; true"
        )
        task = Task(
            argv=["sh", "-c", script],
            inputs={"/in": tmp_path / "src"},
            outputs=tmp_path / "out",
            env={"MAX_JOBS": "2"},
        )
        code = run_isolated(choose(), tiny, task, tmp_path / "build.log")
    finally:
        del os.environ["SECRET_OF_THE_HOST"]
    out = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert code == 0
    assert out["copy"] == "input"
    assert [out[name] for name in ("links", "ro", "umask", "stdin")] == [
        "1\n",
        "read-only\n",
        "0022\n",
        "no-stdin\n",
    ]
    assert [line for line in out["env"].splitlines() if not line.startswith("SHLVL=")] == [
        "FROM_IMAGE=yes",
        "HOME=/tmp/home",
        "HOSTNAME=build",
        "LC_ALL=C.UTF-8",
        "MAX_JOBS=2",
        "PATH=/bin:/usr/bin",
        "PWD=/",
        "PYTHONHASHSEED=0",
        "SOURCE_DATE_EPOCH=315532800",
        "TZ=UTC",
    ]
    assert "SECRET" not in out["proc"]
    assert str(tmp_path) not in out["proc"]


def test_a_failed_build_shows_its_end(tiny, tmp_path):
    log = tmp_path / "log"
    script = "i=0; while [ $i -lt 100 ]; do echo line $i; i=$((i+1)); done; echo oops >&2; exit 4"
    task = Task(argv=["sh", "-c", script], inputs={}, outputs=tmp_path)
    code = run_isolated(choose(), tiny, task, log)
    assert code == 4
    assert log_tail(log).splitlines()[-3:] == ["line 99", "oops", f"full log: {log}"]
    assert len(log_tail(log).splitlines()) == 31


def test_builds_run_side_by_side_and_stop(tiny, tmp_path):
    codes = {}

    def work(number: int, script: str) -> None:
        place = tmp_path / str(number)
        task = Task(argv=["sh", "-c", script], inputs={}, outputs=place)
        codes[number] = run_isolated(choose(), tiny, task, place / "log")

    def all_of(script: str) -> list[threading.Thread]:
        threads = [threading.Thread(target=work, args=(n, script)) for n in range(4)]
        for thread in threads:
            thread.start()
        return threads

    for thread in all_of("echo hi > /out/f"):
        thread.join()
    assert codes == dict.fromkeys(range(4), 0)
    threads = all_of("touch /out/started; sleep 100")
    while not all((tmp_path / str(n) / "started").exists() for n in range(4)):
        threads[0].join(0.05)
    processes.stop_all()
    for thread in threads:
        thread.join(20)
    assert codes == dict.fromkeys(range(4), 137)


def test_a_hundred_layers(tmp_path):
    # The first of them once more.
    root = image(tmp_path, *([Entry(name=f"l{n % 100}", data=b"x")] for n in range(101)))
    out = tmp_path / "out"
    with out.open("wb") as o:
        assert (
            choose("podman").run(
                root, Command(argv=("sh", "-c", "ls -d /l* /bin | wc -l")), stdout=o
            )
            == 0
        )
    assert out.read_text() == "101\n"


@pytest.mark.parametrize("file_system", ["overlay", "copy"])
def test_every_file_system_ends_with_its_container(tmp_path, monkeypatch, capfd, file_system):
    monkeypatch.setattr(podman, "FILE_SYSTEMS", (file_system,))
    root = image(tmp_path, [Entry(name="etc/group", data=b"upper\n"), Entry(name="a", link="/etc")])
    argv = (
        "sh",
        "-c",
        "cat /a/group; echo changed > /a/group; cat /a/group; rm -r /home; ls /home 2>&1",
    )
    for _ in range(2):
        assert choose("podman").run(root, Command(argv=argv)) == 1
        assert capfd.readouterr().out == "upper\nchanged\nls: /home: No such file or directory\n"
    assert list(tmp_path.glob("unpacked/*/containers/*")) == []


@pytest.mark.parametrize("apart", [False, True])
def test_no_layer_writes_through_a_link(tmp_path, apart):
    (tmp_path / "outside").mkdir()
    link, file = Entry(name="a", link=str(tmp_path / "outside")), Entry(name="a/f", data=b"x")
    root = image(tmp_path / "image", *([[link], [file]] if apart else [[link, file]]))
    if apart:
        # The folder of the upper layer hides the link.
        assert choose("podman").run(root, Command(argv=("cat", "/a/f"))) == 0
    else:
        with pytest.raises(HostError, match="a layer of tiny cannot be unpacked: tar: a/f: "):
            choose("podman").run(root, Command(argv=("true",)))
    assert list((tmp_path / "outside").iterdir()) == []


def layout(tmp_path: Path) -> RootFs:
    store = tmp_path / ".primus" / "store"
    root = image(store, Cmd=["echo", "hello"])
    digest = sha(root.manifest)
    (store / "blobs/sha256" / digest.partition(":")[2]).write_bytes(root.manifest)
    entry = {"mediaType": MANIFEST_TYPE, "digest": digest, "size": len(root.manifest)}
    entry["annotations"] = {"org.opencontainers.image.ref.name": "v26.11-cpu"}
    (store / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    Kit(tmp_path).write(
        "versions.yaml", "release: v26.11\ncreated: 2026-11-20\nbases: {}\ncomponents: {}\n"
    )
    for target in ("cpu", "h200"):
        Kit(tmp_path).write(
            f"images/{target}.yaml", "description: x\nchannels: [local]\ncomponents: []\n"
        )
    return root


def test_the_verb_run(tmp_path, monkeypatch, capfd):
    layout(tmp_path)
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    monkeypatch.setenv("MINE", "mine")
    assert main(["run", "cpu"]) == 0
    assert capfd.readouterr().out == "hello\n"
    words = ["-e", "MINE", "-e", "A=b=c", "-e", "NOT_SET", "-v", f"{tmp_path}:/there:ro"]
    script = "cd /there; ls; echo $MINE $A ${NOT_SET-unset}; exit 3"
    assert main(["run", "cpu", *words, "--", "sh", "-c", script]) == 3
    printed = capfd.readouterr()
    assert printed.out == "deep\nimages\nversions.yaml\nmine b=c unset\n"
    assert "-e NOT_SET: your environment has no such variable" in printed.err
    assert main(["run", "h200"]) == 2
    err = capfd.readouterr().err
    assert "v26.11-h200 is not built; the store has v26.11-cpu" in err
    assert "primus build h200" in err
    assert main(["run", "cpu", "-v", "/nowhere-at-all:/x", "--", "true"]) == 2
    assert main(["run", "cpu", "--user", "nobody-here", "--", "true"]) == 2
    assert "no user 'nobody-here'" in capfd.readouterr().err
    monkeypatch.chdir("/")
    assert main(["run", "cpu"]) == 2
    assert "versions.yaml" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("kind", "damage"),
    [("tar", "flip"), ("tar+gzip", "flip"), ("tar+zstd", "cut"), ("tar+zstd", "gone")],
)
def test_a_damaged_blob_does_not_run(tmp_path, kind, damage):
    root = image(tmp_path, kind=kind)
    path = tmp_path / "blobs/sha256" / root.layers[0].digest.removeprefix("sha256:")
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data if damage == "flip" else data[:-10])
    if damage == "gone":
        path.unlink()
    with pytest.raises(
        HostError, match=f"blob {root.layers[0].digest} (is damaged|of the image cannot be read): "
    ):
        choose("podman").run(root, Command(argv=("true",)))


CURRENT = os.environ.get("PRIMUS_TEST_DOCKERD")


@pytest.mark.parametrize("binary", ["", *([CURRENT] if CURRENT else [])])
def test_the_verb_load(tmp_path, monkeypatch, capfd, binary):
    root = layout(tmp_path)
    monkeypatch.chdir(tmp_path)
    with private_dockerd(tmp_path / "engine", binary) as host:
        monkeypatch.setenv("DOCKER_HOST", host)
        assert main(["load", "cpu"]) == 0
        shown = capfd.readouterr()
        assert shown.out.splitlines()[-1] == f"sha256:{root.id}"
        assert "sent" in shown.err
        assert main(["load", "cpu", "--json"]) == 0
        told = json.loads(capfd.readouterr().out)
        assert told["bytes_sent"] == 0
        (inspected,) = json.loads(docker("image", "inspect", told["image_id"]).stdout)
        assert inspected["RepoTags"] == ["rocm/primus:v26.11-cpu"]
        # Every kind of layer arrives.
        for kind in ("tar", "tar+gzip"):
            other = image(tmp_path / kind, kind=kind, Cmd=[kind])
            assert load_image(other, f"x:{kind[-3:]}")[0] == f"sha256:{other.id}"
        bad = image(tmp_path / "bad", [Entry(name="x", data=os.urandom(100_000))])
        blob = tmp_path / "bad/blobs/sha256" / bad.layers[1].digest.removeprefix("sha256:")
        blob.write_bytes(blob.read_bytes()[:-10])
        with pytest.raises(HostError, match="damaged"):
            load_image(bad, "x:bad")
    assert main(["load", "cpu"]) == 3
    assert "no Docker engine answers" in capfd.readouterr().err
