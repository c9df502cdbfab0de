"""The sessions, a thin table: each calls the function that the command line calls, in this process.

No session makes an environment of its own: nox runs from the one that has the project in it.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import nox

HERE = Path(__file__).parent
TARGETS = sorted(path.stem for path in HERE.glob("images/*.yaml"))
BIN = Path(sys.executable).parent
MEANING: dict[int | str | None, str] = {
    1: "a check failed",
    2: "the input is wrong",
    3: "the machine lacks something",
    130: "interrupted",
}

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "tests"]


def primus(session: nox.Session, *words: str) -> None:
    """One `primus` command line, in this process; a non-zero exit code fails the session with its meaning."""
    from primus.cli.main import main

    # nox lets every library log every request it makes.
    for library in ("urllib3", "docker"):
        logging.getLogger(library).setLevel(logging.WARNING)
    try:
        code: int | str | None = main([*words, *session.posargs])
    except SystemExit as stop:  # argparse, on --help or a wrong option
        code = stop.code
    if code:
        session.error(f"primus {words[0]}: {MEANING.get(code, f'exit code {code}')}")


def python(session: nox.Session, *words: str) -> None:
    """A tool of this environment, whether or not the environment is activated."""
    session.run(sys.executable, "-m", *words, external=True, env={"PYTHONUNBUFFERED": "1"})


def _table(verb: str, target: str, line: str) -> None:
    def run(session: nox.Session) -> None:
        primus(session, verb, target)

    run.__doc__ = line
    nox.session(name=f"{verb}-{target}")(run)


for _target in TARGETS:
    _table("build", _target, f"Build the {_target} image.")
    _table("validate", _target, f"Build the {_target} image, train in it and judge the outcome.")
    _table("publish", _target, f"Push the {_target} image with its evidence (`-- --to HOST/PATH`).")


@nox.session
def lint(session: nox.Session) -> None:
    """Style, types and import contracts."""
    python(session, "ruff", "check", ".")
    python(session, "ruff", "format", "--check", ".")
    python(session, "mypy", "src", "benchmarks", "noxfile.py")
    session.run(str(BIN / "lint-imports"), external=True)


@nox.session
def tests(session: nox.Session) -> None:
    """Tests, those with real root file systems, engines and registries too (`-- --slow`: those that train for long)."""
    # One worker leaves a third of two cores idle. A file's tests share what they set up, so it stays with one worker;
    # the longest files come early by name.
    python(session, "pytest", "--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder", *session.posargs)


@nox.session
def plan(session: nox.Session) -> None:
    """Show what a build would do, layer by layer."""
    primus(session, "plan")


@nox.session
def explain(session: nox.Session) -> None:
    """Name the input that changed since the last build."""
    primus(session, "explain")


@nox.session
def lock(session: nox.Session) -> None:
    """Resolve versions.yaml into exact files (`-- --check`: only compare)."""
    primus(session, "lock")


@nox.session
def docs(session: nox.Session) -> None:
    """Write every generated file again (`-- --check`: fail when one differs)."""
    primus(session, "docs")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure the engine against BuildKit (`-- --quick`: only see that it runs)."""
    # A process of its own: the memory of a builder's parent shows up in the builder's own peak.
    python(session, "benchmarks.engine", *session.posargs)
    if not session.posargs:
        python(session, "primus.cli.main", "docs")


@nox.session(name="bench-generations")
def bench_generations(session: nox.Session) -> None:
    """Measure what building the AMD generations costs and shares; their files must be fetched."""
    python(session, "benchmarks.generations", *session.posargs)
    python(session, "primus.cli.main", "docs")


@nox.session(name="bench-assembly")
def bench_assembly(session: nox.Session) -> None:
    """Measure a whole image's assembly against `docker build`: gigabytes and many minutes (`-- cpu --repeats 1`)."""
    python(session, "benchmarks.assembly", *session.posargs)
    python(session, "primus.cli.main", "docs")


@nox.session(name="bench-launcher")
def bench_launcher(session: nox.Session) -> None:
    """Measure how fast `primus train` starts against torchtitan alone, in the cpu image (`-- --repeats 1`: a look)."""
    python(session, "benchmarks.launcher", *session.posargs)
    if not session.posargs:
        python(session, "primus.cli.main", "docs")
