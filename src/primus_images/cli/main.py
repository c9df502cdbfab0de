"""The entry point of ``primus``.

It imports the module of one verb, and turns errors into messages and exit codes.
"""

import os
import signal

# Ctrl-C while this module is made, before `main` can say what it means. Without this, Python would
# show a traceback.
_handler = signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse
import contextlib
import errno
import gc
import io
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from primus_images.cli.verb import AMDS, VERBS, installed_verbs, parser_of, run
from primus_images.errors import HostError, InputError, PrimusError, nearest
from primus_images.files import ownership
from primus_images.terminal import Screen, harmless

GROUPS = {"on the build host": "host.", "on the build host and in an image": "image."}
# What `primus` alone lists, if it is installed. The first two are those of the host.
_USED_MOST = ("build", "list", "train", "finetune", "launch", "fit", "report")
_SHORT_LIST = 5
_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk is full",
    errno.ENOMEM: "the machine gives no more memory or threads",
}
# A login that was typed, in an address or in the name of an image, which may end with a digest.
_LOGIN = re.compile(
    r"(?<=://)[^\s/@]*@|(?<![^\s'\"`(=])[^\s/@:='\"`(]+:[^\s/@]+@(?!sha256:)(?=[\w.-]+[:/])"
)
_BAD_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)


def _usage(*, short: bool) -> str:
    installed = installed_verbs()
    groups = {}
    if short:
        names = [name for name in _USED_MOST if name in installed]
        groups["used most"] = names[:_SHORT_LIST]
    else:
        for heading, room in GROUPS.items():
            groups[heading] = [name for name in installed if VERBS[name].call.startswith(room)]
    screen = Screen.of()
    if screen.width is None:
        screen = Screen(width=80)
    lines = ["usage: primus VERB [options]", ""]
    for heading, names in groups.items():
        if names:
            rows = [(f"{name:<10}", installed[name].summary) for name in names]
            lines += [f"{heading}:", *screen.table(rows, indent="  "), ""]
    if short:
        lines.append("`primus --help` lists all verbs.")
    lines.append("Run `primus VERB --help` for options and an example.")
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
        _open_streams()
        _write_utf8()
        code = _main(args)
        sys.stdout.flush()
        return code
    except PrimusError as error:
        _report(f"{name}: {error}")
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        remedy = str(interrupt) or "finished work is kept, run the command again to continue"
        with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C changes nothing
            _report(f"{name}: interrupted; {remedy}")
        return 130
    except OSError as error:
        return _failed(name, error)
    except MemoryError:
        return _failed(name, OSError(errno.ENOMEM, ""))
    except ModuleNotFoundError as error:
        missing = error.name or "primus_images"
        if missing.partition(".")[0] == "primus_images":
            raise
        _report(
            f"{name}: the Python package {missing} is missing\n"
            "  → pip install '.[images]' in a checkout"
        )
        return HostError.exit_code


def primus_cli() -> int:
    """Run AMD's ``primus-cli`` with the words of this process, translated."""
    return main(["compat", "primus-cli", *sys.argv[1:]])


def _open_streams() -> None:
    """Open closed standard streams as /dev/null.

    Otherwise the next file gets their numbers, and programs that this one starts write into it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def _write_utf8() -> None:
    """Write UTF-8 in every locale, because JSON must be UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def _report(text: str) -> None:
    """Print a message to standard error.

    If that is not possible, the exit code alone tells what happened.
    """
    text = _LOGIN.sub("…@", text)
    text = harmless(text.replace("\t", " "), colors=False)
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _discard(2)


def _discard(stream: int) -> None:
    """Write no more to a standard stream: the flush at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def _failed(name: str, error: OSError) -> int:
    if isinstance(error, BrokenPipeError):
        # The reader (`| head`) closed the pipe.
        _discard(1)
        return 141  # what a shell reports for a process ended by SIGPIPE
    reason = _REASONS.get(error.errno or 0)
    message = reason or (error.strerror or str(error)).lower()
    if error.filename:
        message += f" ({str(error.filename)[:200]})"
    advice = _advice(error)
    if advice:
        message += f"\n  → {advice}"
    _report(f"{name}: {message}")
    if reason and not error.filename:
        _discard(1)
    if error.errno in _BAD_PATHS:
        return 2
    return 3


def _advice(error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM) and error.filename:
        owner = ownership(Path(os.fsdecode(error.filename)))
        return f"{owner}: run this as its owner, or change its permissions"
    if error.errno == errno.EROFS:
        return "choose a folder on a file system that can be written to"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space and run it again"
    if error.errno == errno.ENOMEM:
        return "free some, or raise the limits that `ulimit -a` shows"
    return ""


def _main(args: list[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    if args[:1] == ["help"] and args[1:]:
        args = [args[1], "--help"]
    if not args or args[0] in ("-h", "--help", "help"):
        print(_usage(short=not args))
        return 0
    if args[0] == "--version":
        from primus_images.cli.version import version_text

        print(version_text())
        return 0
    verb, *words = args
    _require_utf8(words)
    if _is_amds(verb, words):
        verb, words = "compat", ["primus-cli", "direct", "--", *args]
    _require_installed(verb)
    return run(verb, parser_of(verb).parse_args(words))


def _is_amds(verb: str, words: Sequence[str]) -> bool:
    """Whether this is a command of AMD's own ``primus``, or a mode of its ``primus-cli``."""
    if verb == "train":
        return bool(words) and words[0] in AMDS["train"]
    if verb == "preflight":
        # primus has --gpu NAME, too.
        flags = [word for word, after in pairwise([*words, "-"]) if after.startswith("-")]
        return "--gpu" in flags or not AMDS["preflight"].isdisjoint(words)
    return verb in AMDS["commands"]


def _require_installed(verb: str) -> None:
    installed = installed_verbs()
    if verb in installed:
        return
    if verb in VERBS:
        raise InputError(
            f"`{verb}` manages images from outside; this installation only has what ships "
            "inside an image",
            hint="run it on the host, in a checkout of the project",
        )
    raise InputError(
        f"no verb {verb!r}{nearest(verb, installed)}",
        hint="primus --help lists the verbs; options come after the verb",
    )


def _require_utf8(words: Sequence[str]) -> None:
    try:
        folder = str(Path.cwd())
    except FileNotFoundError:
        message = "the current folder no longer exists"
        raise HostError(message, hint="change to another folder") from None
    for number, word in enumerate([folder, *words]):
        if re.search("[\ud800-\udfff]", word):
            place = f"argument {number}" if number else "the current folder"
            raise InputError(
                f"{place} is not UTF-8 text: {word[:80]!a}",
                hint="write it in UTF-8, or rename the file",
            )


def _complete() -> None:
    """Print tab completions for the shell (argcomplete's protocol) and exit."""
    # Seam "completion".
    import argcomplete

    parser = argparse.ArgumentParser(prog="primus")
    parsers = parser.add_subparsers()
    typed = os.environ.get("COMP_LINE", "").split()[1:2]
    for name, verb in installed_verbs().items():
        # Only the options of the verb that is typed are needed.
        parents = [parser_of(name)] if name in typed else []
        parsers.add_parser(name, help=verb.summary, parents=parents, add_help=False)
    argcomplete.autocomplete(parser)


signal.signal(signal.SIGINT, _handler)

if __name__ == "__main__":
    sys.exit(main())
