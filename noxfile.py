"""Nox sessions. Each session runs a command of the project.

nox may come from the project's own environment, pipx or Debian. If nox's interpreter has this
checkout installed, the sessions use that interpreter. Otherwise they share one environment under
`.nox`, which the first session creates.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import nox

HERE = Path(__file__).resolve().parent
TARGETS = sorted(path.stem for path in HERE.glob("images/*.yaml"))
OLDEST = (3, 11)
# Each set of dependencies includes the previous one. The modules listed show whether an interpreter
# has the set.
NEEDS = {
    "images": ("msgpack", "rich", "uv", "zstandard"),
    "dev": ("pytest", "mypy", "hypothesis", "kubernetes_validate", "furo"),
}
MEANING = {
    1: "a check failed",
    2: "the input is wrong",
    3: "the machine lacks something",
}

# All sessions share one environment, so nox must not create one per session.
nox.options.default_venv_backend = "none"
# Newer versions of nox look for uv before every run and print a message if it is missing.
logging.getLogger("nox").addFilter(lambda record: "uv binary not found" not in record.getMessage())
nox.options.sessions = ["lint", "tests"]


def interpreter(session: nox.Session, extra: str = "images") -> str:
    """Return the Python that has the project and its dependencies ``extra``: this one or that of
    the shared environment.
    """
    if _holds(extra):
        return sys.executable
    folder, base = _base(session)
    try:
        folder.parent.mkdir(exist_ok=True)
        with Path(f"{folder}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # Another nox may be creating the environment.
            _make(session, folder, base, extra)
    except OSError as error:
        session.error(f"no environment can be made in {folder.parent}: {error.strerror}")
    return str(folder / "bin/python")


def _holds(extra: str) -> bool:
    """Whether this interpreter has the checkout in editable mode, with its dependencies."""
    spec = importlib.util.find_spec("primus_images")
    if spec is None or spec.origin is None or not Path(spec.origin).resolve().is_relative_to(HERE):
        return False
    needed = NEEDS["images"] + (NEEDS["dev"] if extra == "dev" else ())
    return all(importlib.util.find_spec(module) for module in needed)


def _base(session: nox.Session) -> tuple[Path, str]:
    """Return the folder of the shared environment and the Python to create it with: nox's own, or a
    newer one on PATH.
    """
    version, base = tuple(sys.version_info[:2]), sys.executable
    for minor in range(14, OLDEST[1] - 1, -1):
        if version >= OLDEST:
            break
        name = f"python3.{minor}"
        # pyenv puts commands for unselected versions on PATH; those commands fail.
        if (
            shutil.which(name)
            and subprocess.run([name, "-V"], capture_output=True, check=False).returncode == 0
        ):
            version, base = (3, minor), name
    if version < OLDEST:
        session.error(
            f"the project needs Python {'.'.join(map(str, OLDEST))} or newer, and PATH has none"
        )
    return HERE / ".nox" / f"primus-{version[0]}.{version[1]}", base


def _make(session: nox.Session, folder: Path, base: str, extra: str) -> None:
    """Create or update the shared environment, unless its stamp matches pyproject.toml."""
    stamp_file, python = folder / "made-from", folder / "bin/python"
    project = hashlib.sha256((HERE / "pyproject.toml").read_bytes()).hexdigest()
    stamps = {name: f"{HERE} {project} {name}\n" for name in NEEDS}
    stamp = stamp_file.read_text() if stamp_file.is_file() and python.exists() else ""
    if stamp in (stamps[extra], stamps["dev"]):
        return
    if stamp == stamps["images"]:
        session.log(f"Adding the tools of development to {folder.relative_to(HERE)}")
    else:
        session.log(f"Installing the project into {folder.relative_to(HERE)}, once")
        shutil.rmtree(folder, ignore_errors=True)
        # virtualenv is installed with nox and brings pip. Debian's venv has no pip until
        # python3-venv is installed.
        _install(
            session,
            sys.executable,
            "virtualenv",
            "--quiet",
            "--no-periodic-update",
            "-p",
            base,
            str(folder),
        )
    stamp_file.unlink(missing_ok=True)
    pip = ("pip", "install", "-q", "--disable-pip-version-check")
    _install(session, str(python), *pip, "-e", f"{HERE}[{extra}]")
    stamp_file.write_text(stamps[extra])


def _install(session: nox.Session, python: str, *words: str) -> None:
    if _run([python, "-m", *words]):
        session.error(
            f"{words[0]} could not install the project; its message is above. Run the session "
            "again."
        )


def _run(command: Iterable[str]) -> int:
    """Run a command that shares this terminal, and return its exit code."""
    with subprocess.Popen(list(command)) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                # A terminal sends Ctrl-C to the command, too. A signal for nox alone must be
                # forwarded. In both cases, wait until the command has cleaned up.
                if not _in_foreground():
                    process.send_signal(signal.SIGINT)


def _in_foreground() -> bool:
    try:
        with Path("/dev/tty").open("rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def primus(session: nox.Session, *words: str, fine: tuple[int, ...] = (0,)) -> None:
    """Run one `primus` command. An exit code that is not in ``fine`` fails the session with the
    meaning of the code.
    """
    code = _run([interpreter(session), "-m", "primus_images.cli.main", *words, *session.posargs])
    if code in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    if code not in fine:
        session.error(f"primus {words[0]}: {MEANING.get(code, f'exit code {code}')}")


def python(session: nox.Session, *words: str) -> None:
    """Run a module in the development environment, whether or not that environment is activated."""
    _tool(session, words[0], interpreter(session, "dev"), "-u", "-m", *words)


def _tool(session: nox.Session, name: str, *command: str) -> None:
    session.log(shlex.join(command))
    code = _run(command)
    if code in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    if code:
        session.error(f"{name}: exit code {code}")


# Sessions that run a command of primus: its words, and the session's line in `nox -l`.
COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "plan": (
        ("plan",),
        "Show what a build would do, layer by layer, for every target or for one (`-- cpu`).",
    ),
    "explain": (
        ("explain",),
        "List the inputs that changed since the last build, of every target or of one (`-- cpu`).",
    ),
    "lock": (("lock",), "Resolve versions.yaml into exact files (`-- --check`: only compare)."),
    "clean": (
        ("clean",),
        "Free disk space: remove what no image, lock or last build needs (`-- --dry-run`: list "
        "it).",
    ),
}
for _target in TARGETS:
    COMMANDS |= {
        f"build-{_target}": (("build", _target), f"Build the {_target} image."),
        f"validate-{_target}": (
            ("validate", _target),
            f"Build the {_target} image, train in it and check the results.",
        ),
        f"publish-{_target}": (
            ("publish", _target),
            f"Push the {_target} image with its evidence (`-- --to HOST/PATH`).",
        ),
    }
GPU_TARGETS = [name for name in TARGETS if name != "cpu"]
for _target in GPU_TARGETS:
    COMMANDS[f"prove-{_target}"] = (
        ("prove", _target),
        f"Show in an hour what works on this machine's {_target} (`-- --minutes 60`).",
    )
BENCHMARKS = {
    "bench": ("engine", "Compare the engine with BuildKit (`-- --quick`: a smoke test)."),
    "bench-finetune": (
        "finetune",
        "Compare `primus finetune` with TRL on this machine's GPU (`-- OUT.json`).",
    ),
    "bench-gpu": (
        "speed",
        "Compare `primus train` with `--turbo off` on this machine's GPUs (`-- OUT.json CASE …`).",
    ),
}


def _command_session(name: str, words: tuple[str, ...], line: str) -> None:
    def run(session: nox.Session) -> None:
        # Without an argument, these two are about every target. `explain` fails if a build would do
        # something.
        every = ("--all",) if name in ("plan", "explain") and not session.posargs else ()
        primus(session, *words, *every, fine=(0, 1) if name == "explain" else (0,))

    run.__doc__ = line
    nox.session(name=name)(run)


def _benchmark_session(name: str, module: str, line: str) -> None:
    def run(session: nox.Session) -> None:
        # In its own process: a child's peak memory starts at that of its parent.
        python(session, f"benchmarks.{module}", *session.posargs)

    run.__doc__ = line
    nox.session(name=name)(run)


for _name, (_words, _line) in COMMANDS.items():
    _command_session(_name, _words, _line)
for _name, (_module, _line) in BENCHMARKS.items():
    _benchmark_session(_name, _module, _line)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, types and import contracts."""
    python(session, "ruff", "check", ".")
    python(session, "ruff", "format", "--check", ".")
    python(session, "mypy", "src", "benchmarks", "docs", "noxfile.py")
    _tool(session, "lint-imports", str(Path(interpreter(session, "dev")).with_name("lint-imports")))


@nox.session
def docs(session: nox.Session) -> None:
    """Regenerate all generated files (`-- --check`: fail if one differs)."""
    python(session, "docs.generated", *session.posargs)


@nox.session(name="docs-site")
def docs_site(session: nox.Session) -> None:
    """Build the site in out/site/html (`-- FOLDER`: elsewhere; `-- --versions SITE`: also beside
    other releases; `-- --links`: follow the links to other sites).
    """
    python(session, "docs.site", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests, including those that need root file systems, engines and registries (`--
    --slow`: also long training).
    """
    # A run without integration tests starts none of these programs.
    if "not integration" not in session.posargs:
        _tool(session, "tests/host_tools.py", interpreter(session, "dev"), "tests/host_tools.py")
    # One worker would leave a third of two cores idle. Tests of one file share fixtures, so a file
    # stays with one worker. The names of the longest files sort first.
    python(
        session,
        "pytest",
        "--numprocesses=2",
        "--dist=loadfile",
        "--no-loadscope-reorder",
        "--durations=30",
        *session.posargs,
    )
