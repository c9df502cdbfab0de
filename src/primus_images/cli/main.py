"""The entry point of ``primus``: imports the module of one verb, and turns errors into messages and
exit codes.
"""

import os
import signal

# Ctrl-C during the imports below, before `main` can say what it means. Without this, Python would
# show a traceback.
_handler = signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import contextlib
import errno
import gc
import io
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from primus_images import __version__
from primus_images.cli.verb import TEXTS, VERBS, Verb, parser_of, run
from primus_images.errors import HostError, InputError, PrimusError, nearest
from primus_images.files import ownership
from primus_images.terminal import Screen

GROUPS = {"on the build host": "host.", "on the build host and in an image": "image."}

signal.signal(signal.SIGINT, _handler)


def installed_verbs() -> dict[str, Verb]:
    """Return the verbs of this installation by name."""
    has_host = (Path(__file__).parent / "host").is_dir()
    return {
        name: verb for name, verb in VERBS.items() if has_host or not verb.call.startswith("host.")
    }


def _usage(*, short: bool) -> str:
    installed = installed_verbs()
    lines = ["usage: primus VERB [options]"]
    screen = Screen.of()
    groups = {
        head: [name for name in installed if VERBS[name].call.startswith(room)]
        for head, room in GROUPS.items()
    }
    if short:
        groups = {"used most": [name for name in TEXTS["used most"] if name in installed][:5]}
    for heading, names in groups.items():
        rows = [(f"{name:<10}", installed[name].summary) for name in names]
        lines += ["", f"{heading}:", *screen.table(rows, indent="  ")] if names else []
    lines += [
        "",
        *["`primus --help` lists all verbs."] * short,
        "Run `primus VERB --help` for options and an example.",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code.

    0 success, 1 a check or job failed, 2 invalid input, 3 the machine lacks something, 130
    interrupted.
    """
    if argv is None and sys.getfilesystemencoding() != "utf-8":
        # Paths in images are UTF-8, whatever the locale of this machine.
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    args = list(sys.argv[1:] if argv is None else argv)
    name = " ".join(["primus", *args[:1]])
    # A short command ends before a collection of cycles frees anything.
    gc.set_threshold(100_000)
    try:
        _streams()
        code = _main(args)
        sys.stdout.flush()
    except PrimusError as error:
        _report(f"{name}: {error}")
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        return _interrupted(name, str(interrupt))
    except OSError as error:
        return _failed(name, error)
    except ModuleNotFoundError as error:
        if (error.name or "primus_images").partition(".")[0] == "primus_images":
            raise
        _report(
            f"{name}: the Python package {error.name} is missing\n  → pip install '.[images]' "
            "in a checkout"
        )
        return HostError.exit_code
    except Exception as error:
        # Python 3.11 wraps an interrupt that arrives while a class is made.
        if isinstance(error.__cause__, KeyboardInterrupt):
            return _interrupted(name)
        # pathlib before Python 3.13 wraps the error of a link that leads to itself.
        if isinstance(error.__context__, OSError) and error.__context__.errno == errno.ELOOP:
            return _failed(name, error.__context__)
        # Libraries have errors of their own for what the machine does not give.
        if re.search("MemoryError|not enough memory|can't start new thread", repr(error)):
            return _failed(name, OSError(errno.ENOMEM, ""))
        raise
    return code


def _streams() -> None:
    """Open closed standard streams as /dev/null, and write UTF-8 in every locale, because JSON must
    be UTF-8.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Gets the lowest free number, which is this one. Output must not be lost: writing it is
            # an error.
            os.open(os.devnull, os.O_RDONLY if number == 1 else os.O_RDWR)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _report(text: str) -> None:
    """Print a message to standard error. If that is not possible, the exit code alone tells what
    happened.
    """
    # A server or a file may have sent parts of it, whose control characters would move the cursor
    # or hide text.
    text = re.sub(r"(?<=://)[^\s/@]*@", "…@", text)  # a login in an address that was typed
    text = re.sub(r"[\0-\x09\x0b-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", text)
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the flush at exit would fail again


def _interrupted(name: str, remedy: str = "") -> int:
    with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C changes nothing
        _report(
            f"{name}: interrupted; "
            f"{remedy or 'finished work is kept, run the command again to continue'}"
        )
    return 130


def _failed(name: str, error: OSError) -> int:
    if isinstance(error, BrokenPipeError):
        # The reader (`| head`) closed the pipe. Without this, Python reports the error again when
        # it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141  # what a shell reports for a process ended by SIGPIPE
    code = errno.errorcode.get(error.errno or 0, "")
    reason = TEXTS["reasons"].get(code)
    advice = TEXTS["errors"].get(code, "")
    advice = advice.format(ownership=ownership(Path(os.fsdecode(error.filename or "/"))))
    where = ""
    if error.filename:
        where = f" ({str(error.filename)[:200]})"
    hint = ""
    if advice and (where or reason):
        hint = f"\n  → {advice}"
    _report(f"{name}: {reason or (error.strerror or str(error)).lower()}{where}{hint}")
    if (
        reason and not where
    ):  # it may be about standard output, and the flush at exit would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR):
        return 2
    return 3


def _main(args: list[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    if args[:1] == ["help"] and args[1:]:
        args = [args[1], "--help"]
    if not args or args[0] in ("-h", "--help", "help"):
        print(_usage(short=not args))
        return 0
    if args[0] == "--version":
        print(__version__)
        return 0
    try:
        folder = str(Path.cwd())
    except FileNotFoundError:
        raise HostError(
            "the current folder no longer exists", hint="change to another folder"
        ) from None
    try:
        time.time()
    except OverflowError:  # Python's own modules cannot be imported at such a time
        raise HostError(
            "this machine's clock is past the year 2262", hint="set it: date --set TIME"
        ) from None
    verb, *words = args
    installed = installed_verbs()
    if verb not in installed and verb in VERBS:
        raise InputError(
            f"`{verb}` manages images from outside; this installation only has what ships "
            "inside an image",
            hint="run it on the host, in a checkout of the project",
        )
    if verb not in installed:
        near = TEXTS["other names"].get(verb)
        if near in installed:
            also = f"; did you mean {near!r}?"
        else:
            also = nearest(verb, installed)
        raise InputError(
            f"no verb {verb!r}{also}",
            hint="primus --help lists the verbs; options come after the verb",
        )
    for number, word in enumerate([folder, *words]):
        if re.search("[\ud800-\udfff]", word):
            what = "the current folder"
            if number:
                what = f"argument {number}"
            word_text = word[:80]
            raise InputError(
                f"{what} is not UTF-8 text: {word_text!a}",
                hint="write it in UTF-8, or rename the file",
            )
    return run(verb, parser_of(verb).parse_args(words))


def _complete() -> None:
    """Print tab completions for the shell (argcomplete's protocol) and exit."""
    # Seam "completion".
    import argcomplete

    parser = argparse.ArgumentParser(prog="primus")
    parsers = parser.add_subparsers()
    typed = os.environ.get("COMP_LINE", "").split()[1:2]
    for name, verb in installed_verbs().items():
        parsers.add_parser(
            name,
            help=verb.summary,
            parents=[parser_of(name)] if name in typed else [],
            add_help=False,
        )
    argcomplete.autocomplete(parser)


if __name__ == "__main__":
    sys.exit(main())
