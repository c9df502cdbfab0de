"""Two commands at once on one project: random pairs, in some of which one command is killed.

``--pairs 200`` runs 200 pairs, with ``--pair-seed``. Option ``-s`` prints a line of JSON for each:
the rows of benchmarks/results/pairs.json.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from docker_engine import private_dockerd
from sandbox_kit import APPLETS, BUSYBOX, needs_busybox

from host_tools import needs
from project_kit import Kit, add_shell, make_project, until

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    needs_busybox,
    needs("podman", "dockerd"),
    pytest.mark.skipif(os.geteuid() != 0, reason="a private Docker engine needs root"),
]

LIMIT_S = 240
# A container that outlived its command is gone this long after the next one.
ORPHAN_S = 10
# What a command says that cannot do its work beside the other one.
BUSY = "another command uses"
GONE = "is not built"
# Reads files of every layer again and again, and says so at its end.
READER = (
    "i=0; while [ $i -lt {rounds} ]; do cat /opt/alpha/blob /opt/beta/blob > /dev/null || exit 99; "
    "busybox true || exit 98; sleep 0.1; i=$((i+1)); done; echo {token}; exit 7"
)


@dataclass(kw_only=True)
class Started:
    """One command of a pair, and what it may end with: exit codes, and a pattern of its output for
    each.
    """

    name: str
    words: list[str]
    endings: dict[int, str]
    killed: str = ""
    process: "subprocess.Popen[str] | None" = None
    out: str = ""

    def wrong(self) -> list[str]:
        """What the command should not have done."""
        assert self.process is not None
        code, faults = self.process.returncode, []
        if "Traceback" in self.out:
            faults.append("a traceback")
        if not self.killed and (
            code not in self.endings or not re.search(self.endings[code], self.out)
        ):
            faults.append(f"exit code {code}")
        return [f"{self.name}: {fault}: {self.out[-700:]}" for fault in faults]


@dataclass(kw_only=True)
class Pairs:
    """The project, its engine, and the chance of a run."""

    kit: Kit
    env: dict[str, str]
    digest: str
    chance: random.Random
    row: dict[str, Any] = field(default_factory=dict)

    def command(self, token: str) -> Started:
        """A random command."""
        name = self.chance.choice(("run", "run", "build", "clean", "load", "validate"))
        made: Started = getattr(self, f"_{name}")(token)
        return made

    def _run(self, token: str) -> Started:
        engine = self.chance.choice(("podman", "podman", "docker"))
        script = READER.format(rounds=self.chance.randint(1, 25), token=token)
        words = ["run", "--engine", engine, "demo", "--", "sh", "-c", script]
        return Started(name=f"run by {engine}", words=words, endings={7: token, 2: GONE})

    def _build(self, _: str) -> Started:
        words = ["build", self.chance.choice(("demo", "other"))]
        if self.chance.random() < 0.3:
            words.append("--rehash")
        return Started(
            name=" ".join(words), words=words, endings={0: r"sha256:[0-9a-f]{64}", 3: BUSY}
        )

    def _clean(self, _: str) -> Started:
        options = self.chance.choice(
            ([], ["--caches"], ["--validations"], ["--image", "v26.11-demo"])
        )
        words = ["clean", *options]
        endings = {0: "freed|nothing to remove", 3: BUSY}
        if "--image" in words:
            endings[2] = "the store has no image called"
        return Started(name=" ".join(words), words=words, endings=endings)

    def _load(self, _: str) -> Started:
        return Started(name="load", words=["load", "demo"], endings={0: "sha256:", 2: GONE})

    def _validate(self, _: str) -> Started:
        words = ["validate", "demo", "--suite", "quick", "--recipe", "llama3-proxy", "--again"]
        # The image has no primus, and the verdict says so.
        endings = {1: r"(?s)did not start \(exit code \d+\).*FAILED: ", 3: BUSY}
        return Started(name="validate", words=words, endings=endings)

    def start(self, command: Started) -> None:
        """Start it as a shell does: in a process group of its own."""
        command.process = subprocess.Popen(
            self.kit.command(*command.words),
            cwd=self.kit.root,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def kill(self, command: Started) -> None:
        """End it at a random moment, as a terminal, a scheduler or the kernel does."""
        assert command.process is not None
        time.sleep(self.chance.uniform(0, 4))
        how = self.chance.choice(("SIGINT", "SIGTERM", "SIGKILL", "SIGKILL to its group"))
        number = signal.Signals[how.split()[0]]
        if command.process.poll() is None:
            command.killed = how
            with contextlib.suppress(ProcessLookupError):
                if "group" in how:
                    os.killpg(command.process.pid, number)
                else:
                    command.process.send_signal(number)

    def left(self, tokens: list[str]) -> list[str]:
        """Processes and containers of the pair that still exist."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_text(errors="replace").replace("\0", " ")
                if any(token in words for token in tokens):
                    found.append(words[:120])
        found += [path.name for path in (self.kit.root / ".primus/unpacked").glob("*/containers/*")]
        listed = subprocess.run(
            ["docker", "ps", "--all", "--quiet"],
            env=self.env,
            capture_output=True,
            text=True,
            check=True,
        )
        return found + listed.stdout.split()

    def pair(self, number: int) -> list[str]:
        """Run one pair. Returns what was wrong."""
        built = self.kit.primus("build", "demo", "other")
        wrong = [] if built.code == 0 else [f"build before: {built.err[-500:]}"]
        tokens = [f"pair-{number}-{side}-{self.chance.randrange(10**9)}" for side in "ab"]
        commands = [self.command(token) for token in tokens]
        self.start(commands[0])
        later = self.chance.choice((0, 0, self.chance.uniform(0, 4)))
        time.sleep(later)
        self.start(commands[1])
        if self.chance.random() < 0.4:
            self.kill(self.chance.choice(commands))
        for command in commands:
            assert command.process is not None
            try:
                command.out = command.process.communicate(timeout=LIMIT_S)[0]
            except subprocess.TimeoutExpired:
                os.killpg(command.process.pid, signal.SIGKILL)
                command.out = command.process.communicate()[0]
                wrong.append(f"{command.name}: no end after {LIMIT_S} s")
            wrong += command.wrong()
        wrong += self._after(commands, tokens)
        self.row = {
            "pair": number,
            "first": commands[0].name,
            "second": commands[1].name,
            "later_s": round(later, 1),
            "killed": "".join(f"{one.name}: {one.killed}" for one in commands if one.killed),
            "endings": [one.process.returncode for one in commands if one.process],
            "wrong": wrong,
        }
        return wrong

    def _after(self, commands: list[Started], tokens: list[str]) -> list[str]:
        """The next commands work, and nothing of the pair stays."""
        wrong = []
        built = self.kit.primus("build", "demo")
        if built.code or built.digest != self.digest:
            wrong.append(f"the next build: {built.code} {built.out[-200:]} {built.err[-500:]}")
        for engine in ("podman", "docker"):
            if engine == "podman" or any("docker" in one.name for one in commands):
                script = "cat /opt/alpha/blob >/dev/null && exit 7"
                ran = self.kit.primus("run", "--engine", engine, "demo", "--", "sh", "-c", script)
                if ran.code != 7:
                    wrong.append(f"the next run by {engine}: {ran.code} {ran.err[-500:]}")
        if not until(lambda: not self.left(tokens), ORPHAN_S):
            wrong.append(f"left after {ORPHAN_S} s: {self.left(tokens)}")
        return wrong


@pytest.fixture
def pairs(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pairs]:
    kit = make_project(tmp_path / "project")
    shutil.copytree(ROOT / "recipes", kit.root / "recipes", dirs_exist_ok=True)
    add_shell(kit, BUSYBOX, APPLETS, "demo", "other")
    with private_dockerd(tmp_path / "docker") as host:
        monkeypatch.setenv("DOCKER_HOST", host)
        yield Pairs(
            kit=kit,
            env={**kit.env, "DOCKER_HOST": host},
            digest=kit.build("demo").digest,
            chance=random.Random(int(request.config.getoption("--pair-seed"))),
        )


@pytest.mark.timeout(4 * 3600)  # with --pairs 200
def test_two_commands_at_once_lose_nothing(pairs: Pairs, request: pytest.FixtureRequest) -> None:
    wrong = []
    for number in range(int(request.config.getoption("--pairs"))):
        faults = pairs.pair(number)
        print(json.dumps(pairs.row), flush=True)
        wrong += [f"pair {number}: {fault}" for fault in faults]
    assert not wrong, "\n".join(wrong)
