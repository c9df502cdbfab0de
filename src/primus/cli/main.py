"""The entry point of ``primus``: imports the module of one verb, and turns errors into messages and exit codes."""

from __future__ import annotations

import atexit
import errno
import gc
import importlib
import io
import os
import sys

from primus import __version__
from primus.errors import HostError, InputError, PrimusError, nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# verb → (module, one line). Only the module of the requested verb is imported, which keeps start-up fast. Host verbs
# that are slow to import declare their options in `cli.options`, which is all that `--help` needs.
IMAGE_VERBS = {
    "list": ("image.list_recipes", "list the recipes with their backends, modes, precisions and GPUs"),
    "show": ("image.show_recipe", "show every setting of a recipe, its source and its reason"),
    "fit": ("image.fit", "predict a recipe's memory and its largest micro batch"),
    "train": ("image.train", "run a recipe on this machine"),
    "preflight": ("image.preflight", "check this machine before a job"),
    "tune": ("image.tune", "find the fastest settings of a recipe, or the fastest GEMM solutions"),
    "import-exp": ("image.import_exp", "convert a Primus experiment file to a recipe"),
    "compat": ("image.compat", "run a command of older documents, such as run_pretrain.sh"),
    "report": ("image.report", "compare runs: perf.csv, MAD's CSV and an HTML page"),
    "turbo": ("image.turbo", "list the optimizations of a training run"),
}

# The verbs of `cli.host`, which an image does not contain. A test compares the two.
HOST_VERBS = (
    "plan", "build", "explain", "lock", "run", "launch", "load", "validate", "check", "verify", "publish", "sbom",
    "why-size", "releases", "diff", "clean", "docs",
)  # fmt: skip


def verbs() -> dict[str, tuple[str, str]]:
    """Return verb → (module, one line) for all installed verbs."""
    # The image does not contain the host's verbs, so its bytes do not change with them.
    try:
        from primus.cli.host import VERBS
    except ModuleNotFoundError:
        return IMAGE_VERBS
    return {**VERBS, **IMAGE_VERBS}


def _usage() -> str:
    here = verbs()
    width = max(map(len, here))
    lines = [f"  {verb:<{width}}  {line}" for verb, (_, line) in here.items()]
    return "\n".join(
        ["usage: primus VERB [options]", "", *lines, "", "Run `primus VERB --help` for options and an example."]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code.

    0 success, 1 a check or job failed, 2 invalid input, 3 the machine lacks something, 130 interrupted.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    name = f"primus {args[0]}" if args else "primus"
    # Imports and parsed files stay alive. Collecting cycles among them takes a tenth of the time of `primus show`.
    gc.set_threshold(50_000)
    # So does collecting them at exit, in a short command. Everything that must be closed is closed before.
    atexit.register(gc.freeze)
    try:
        _streams()
        code = _main(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _interrupted(name)
    except RuntimeError as error:
        # Python 3.11 wraps an interrupt that arrives while a class is made.
        if isinstance(error.__cause__, KeyboardInterrupt):
            return _interrupted(name)
        # pathlib before Python 3.13 wraps the error of a link that leads to itself.
        if isinstance(error.__context__, OSError) and error.__context__.errno == errno.ELOOP:
            return _failed(name, error.__context__)
        raise
    except OSError as error:
        return _failed(name, error)
    return code


def _streams() -> None:
    """Open closed standard streams as /dev/null, and write UTF-8 in every locale, because JSON must be UTF-8."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _report(text: str) -> None:
    """Print a message to standard error. If that is not possible, the exit code alone tells what happened."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the flush at exit would fail again


def _interrupted(name: str) -> int:
    try:  # noqa: SIM105 - contextlib costs start-up time
        _report(f"{name}: interrupted; finished work is kept, run the command again to continue")
    except KeyboardInterrupt:
        pass  # a second Ctrl-C changes nothing
    return 130


def _failed(name: str, error: OSError) -> int:
    """Report an error of the operating system and return the exit code."""
    if isinstance(error, BrokenPipeError):
        # The reader (`| head`) closed the pipe. Without this, Python reports the error again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141  # what a shell reports for a process ended by SIGPIPE
    where = f" ({str(error.filename)[:200]})" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        _report(f"{name}: the disk is full{where}\n  → free some space and run it again")
        if not where:  # the full disk may be that of standard output, and the flush at exit would fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 3
    hint = "\n  → check its owner and permissions" if error.errno in (errno.EACCES, errno.EPERM) else ""
    hint = "\n  → choose a folder on a file system that can be written to" if error.errno == errno.EROFS else hint
    _report(f"{name}: {(error.strerror or str(error)).lower()}{where}{hint if where else ''}")
    return 2 if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR) else 3


def _main(args: list[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    if not args or args[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if args else 2
    if args[0] == "--version":
        print(__version__)
        return 0
    verb = args[0]
    here = verbs()
    try:
        os.getcwd()  # noqa: PTH109 - pathlib costs start-up time
    except FileNotFoundError:
        _report(f"primus {verb}: the current folder no longer exists\n  → change to another folder")
        return HostError.exit_code
    if verb not in here and verb in HOST_VERBS:
        _report(
            f"primus: `{verb}` manages images from outside; this installation only has what ships inside an image\n"
            "  → run it on the host, in a checkout of the project"
        )
        return 2
    if verb not in here:
        _report(f"primus: no verb {verb!r}{nearest(verb, here)}\n  → primus --help lists the verbs")
        return 2
    return _run(verb, here[verb][0], args[1:])


def _complete() -> None:
    """Print tab completions for the shell (argcomplete's protocol) and exit."""
    # Seam "completion".
    import argparse

    import argcomplete

    parser = argparse.ArgumentParser(prog="primus")
    parsers = parser.add_subparsers()
    for verb, (module, line) in verbs().items():
        _options(module).add_arguments(parsers.add_parser(verb, help=line))
    argcomplete.autocomplete(parser)


def _options(name: str) -> Any:
    """Return the module with a verb's options: one of ``primus.cli.options``, or the verb's own module."""
    apart = f"primus.cli.{name.replace('host.', 'options.')}"
    try:
        return importlib.import_module(apart)
    except ModuleNotFoundError as error:
        if error.name not in (apart, "primus.cli.options"):
            raise
        return importlib.import_module(f"primus.cli.{name}")


def _run(verb: str, name: str, words: Sequence[str]) -> int:
    # Seam "options": `primus --help` needs no argparse.
    import argparse

    options = _options(name)
    parser = argparse.ArgumentParser(
        prog=f"primus {verb}",
        description=options.__doc__,
        epilog=f"example: {options.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_arguments(parser)
    try:
        _utf8_only(words)
        args = parser.parse_args(words)
        code: int = importlib.import_module(f"primus.cli.{name}").run(args)
    except PrimusError as error:
        _report(f"primus {verb}: {error}")
        return error.exit_code
    return code


def _utf8_only(words: Sequence[str]) -> None:
    """Raise InputError for an argument that is not UTF-8, because the files of a run could not contain it."""
    for number, word in enumerate(words, 1):
        try:
            word.encode()
        except UnicodeEncodeError:
            shown = ascii(word[:80])
            names = os.path.exists(word.partition("=")[2] or word)  # noqa: PTH110 - pathlib costs start-up time
            hint = "rename the file" if names else "write it in UTF-8"
            raise InputError(f"argument {number} is not UTF-8 text: {shown}", hint=hint) from None


if __name__ == "__main__":
    sys.exit(main())
