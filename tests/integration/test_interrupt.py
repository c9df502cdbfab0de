"""An interrupt at any moment: the store stays valid, the next run goes on, two builders do not
disturb each other.
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from project_kit import Kit, make_project, until

pytestmark = pytest.mark.integration

SIZE = 30_000_000


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    kit = make_project(tmp_path / "project")
    for part in ("alpha", "beta"):
        kit.write(f"parts/{part}/blob", random.Random(part).randbytes(SIZE))
    return kit


def assert_valid(store: Path) -> None:
    """Every blob hashes to its name, whatever happened."""
    for blob in (store / "blobs/sha256").iterdir():
        with blob.open("rb") as stream:
            assert hashlib.file_digest(stream, "sha256").hexdigest() == blob.name
    json.loads((store / "index.json").read_bytes())


def start(kit: Kit, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        kit.command("build", "demo", *words),
        cwd=kit.root,
        env=kit.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


# Nothing in a build handles SIGTERM, so it is as SIGKILL is.
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_at_any_moment(kit: Kit, how: signal.Signals) -> None:
    begin = time.monotonic()
    want = kit.build("demo", "--store", "clean").digest
    whole = time.monotonic() - begin
    moments = random.Random(how)
    ended_early = 0
    for number in range(24):
        if number >= 5 and ended_early >= 3:
            break
        begin = time.monotonic()
        process = start(kit)
        time.sleep(moments.uniform(0.1, 0.8) * whole)
        process.send_signal(how)
        out, err = process.communicate(timeout=60)
        assert "Traceback" not in err
        assert process.returncode != 130 or not err or "finished work is kept" in err
        if process.returncode == 0:
            assert out.splitlines()[-1] == want
            # The first build may have had to share the processor with another test.
            whole = min(whole, time.monotonic() - begin)
        else:
            ended_early += 1
        if (kit.root / ".primus/store/index.json").exists():
            assert_valid(kit.root / ".primus/store")
        for path in (kit.root / ".primus/store/targets").glob("*"):
            path.unlink()
        for path in (kit.root / ".primus/store/actions").glob("*"):
            path.unlink()
    assert ended_early >= 3, "the interrupts came too late to prove anything"
    assert kit.build().digest == want
    assert_valid(kit.root / ".primus/store")
    assert list((kit.root / ".primus/store/tmp").iterdir()) == []


def test_an_interrupt_during_the_imports_is_quiet(kit: Kit, tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text(
        "import sys, time; print('importing', flush=True); time.sleep(60)\n"
    )
    env = {**kit.env, "PYTHONPATH": f"{tmp_path}:{kit.env['PYTHONPATH']}"}
    words = kit.command("build", "demo")
    with subprocess.Popen(
        words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20)[1] == ""
    assert process.returncode == 130


SLOW_PATTERNS = """
import re, runpy, sys, time
compiled = re.compile
def slow(*words):
    if sys._getframe(1).f_globals["__name__"] == "__main__":
        print("compiling", flush=True)
        time.sleep(60)
    return compiled(*words)
re.compile = slow
sys.argv = ["primus", "--help"]
runpy.run_module("primus_images.cli.main", run_name="__main__")
"""


def test_an_interrupt_after_the_imports_is_quiet(kit: Kit) -> None:
    words = [sys.executable, "-c", SLOW_PATTERNS]
    with subprocess.Popen(
        words, env=kit.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout and process.stdout.readline() == "compiling\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20)[1] == ""
    assert process.returncode == 130


@pytest.mark.skipif(
    os.geteuid() != 0, reason="an ordinary user's mmdebstrap makes its namespaces itself"
)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_builder_that_ends_leaves_no_mmdebstrap_behind(
    cpu_image: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    # dpkg runs in a session of its own, below apt's terminal; so does this one's child.
    seconds = f"{random.randrange(10**6, 10**7)}"
    fake = tmp_path / "bin/mmdebstrap"
    fake.parent.mkdir()
    fake.write_text(f"#!/bin/sh\ntrap '' INT TERM HUP\nsetsid sleep {seconds} &\nwait\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")

    def sleeping() -> bool:
        found = subprocess.run(
            ["pgrep", "-fx", f"sleep {seconds}"], stdout=subprocess.DEVNULL, check=False
        )
        return found.returncode == 0

    words = ("build", "cpu", "--offline", "--store", str(tmp_path / "store"))
    process = subprocess.Popen(
        cpu_image.command(*words),
        cwd=cpu_image.root,
        env=cpu_image.env,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert until(lambda: sleeping() or process.poll() is not None)
    assert process.poll() is None, "it ended before mmdebstrap was there"
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "finished work is kept" in err
    # After SIGKILL nobody waits for what the kernel ends then.
    assert until(lambda: not sleeping(), 20)


def test_two_builders_share_the_work(kit: Kit) -> None:
    builders = [start(kit, "--json") for _ in range(3)]
    results = [json.loads(b.communicate(timeout=120)[0])["images"][0] for b in builders]
    assert len({r["digest"] for r in results}) == 1
    for name in ("alpha", "beta", "recipes"):
        made = [line["built"] for r in results for line in r["layers"] if line["name"] == name]
        assert sum(made) == 1, f"{name} was made {sum(made)} times"
    assert_valid(kit.root / ".primus/store")


def test_memory_does_not_grow_with_the_image(tmp_path: Path) -> None:
    kit = make_project(tmp_path / "project")
    with (kit.root / "parts/alpha/blob").open("wb") as stream:
        stream.truncate(400 << 20)
    # Not wait4's ru_maxrss: it begins with what the forking process, pytest, holds.
    code = (
        "import re, sys; from primus_images.cli.main import main; code = main(['build', 'demo']);"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=kit.root,
        env=kit.env,
        capture_output=True,
        text=True,
        check=True,
    )
    peak = int(done.stdout.splitlines()[-1])
    assert 20_000 < peak < 300_000, f"{peak} KiB for a layer of 400 MiB"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_full_disk_is_a_sentence_and_loses_nothing(kit: Kit, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", disk], check=True)
    try:
        store = str(disk / "store")
        result = kit.primus("build", "demo", "--store", store)
        assert result.code == 3
        assert "is full" in result.err
        assert_valid(disk / "store")
        assert list((disk / "store/tmp").iterdir()) == []
        subprocess.run(["mount", "-o", "remount,size=200m", disk], check=True)
        assert kit.build("demo", "--store", store).digest == kit.build().digest
    finally:
        subprocess.run(["umount", disk], check=True)
