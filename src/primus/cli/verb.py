"""A verb of the command line: a function with its options, and the types of options that several verbs share.

The types are for argparse's ``type=``. They reject invalid values with a message that names the option.
"""

import argparse
import inspect
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from primus.errors import InputError

Option: TypeAlias = Callable[[argparse.ArgumentParser], object]


class Verb(NamedTuple):
    """One verb. Calling it with the parsed arguments runs it and returns its exit code."""

    call: Callable[[argparse.Namespace], int]
    options: tuple[Option, ...]
    example: str

    def __call__(self, args: argparse.Namespace) -> int:
        """Run the verb and return its exit code. Raises PrimusError."""
        return self.call(args)

    def parser(self, name: str) -> argparse.ArgumentParser:
        """Return the parser of the verb ``name``. Its description is the docstring of the verb's function."""
        parser = argparse.ArgumentParser(
            prog=f"primus {name}",
            description=inspect.getdoc(self.call),
            epilog=f"example: {self.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for declare in self.options:
            declare(parser)
        return parser


def verb(*options: Option, example: str) -> Callable[[Callable[[argparse.Namespace], int]], Verb]:
    """Decorate a function: make it a verb with ``options``. Its docstring is shown by ``--help``."""
    return lambda call: Verb(call, options, example)


def option(*names: str, complete: Callable[..., Iterable[str]] | None = None, **settings: Any) -> Option:
    """Return an option or argument with argparse's ``settings``. ``complete`` returns the values for tab completion."""

    def declare(parser: argparse.ArgumentParser) -> None:
        action = parser.add_argument(*names, **settings)
        if complete is not None:
            action.completer = complete  # type: ignore[attr-defined]

    return declare


def flag(name: str, meaning: str, **settings: Any) -> Option:
    """Return an option without a value."""
    return option(name, action="store_true", help=meaning, **settings)


def count(name: str, meaning: str, metavar: str = "N", *, least: int | None = 0, default: int | None = None) -> Option:
    """Return an option with a whole number of at least ``least``. Its help states the ``default``."""
    shown = meaning if default is None else f"{meaning} (default: {default})"
    return option(name, type=_whole(least), default=default, metavar=metavar, help=shown)


def several(name: str, meaning: str, metavar: str, *, short: str = "", **settings: Any) -> Option:
    """Return an option that can be given several times. Its value is the list of all."""
    names = (short, name) if short else (name,)
    return option(*names, action="append", default=[], metavar=metavar, help=f"{meaning}; repeatable", **settings)


def rest(name: str, usage: str) -> Option:
    """Put the words after ``--`` into the attribute ``name``; ``usage`` is the verb's own. They are not options of it.

    argparse would look for its own options there, and leaves a second positional argument empty if options stand
    between it and the first.
    """

    def declare(parser: argparse.ArgumentParser) -> None:
        parser.usage = usage
        plain = parser.parse_args

        def parse_args(words: list[str]) -> argparse.Namespace:
            cut = words.index("--") if "--" in words else len(words)
            options = plain(words[:cut])
            setattr(options, name, words[cut + 1 :])
            return options

        parser.parse_args = parse_args  # type: ignore[method-assign, assignment]

    return declare


def group(heading: str, *options: Option) -> Option:
    """Return ``options`` as one, under a heading of the help."""

    def declare(parser: argparse.ArgumentParser) -> None:
        below = parser.add_argument_group(heading)
        for declare_below in options:
            declare_below(below)  # type: ignore[arg-type]  # it has add_argument, too

    return declare


def refuse_others(
    options: argparse.Namespace, parser: argparse.ArgumentParser, chosen: str, headings: Iterable[str]
) -> None:
    """Raise InputError for an option under one of the ``headings`` of ``parser`` that is not the ``chosen`` one."""
    for heading in parser._action_groups:
        for action in heading._group_actions if heading.title in set(headings) - {chosen} else ():
            if getattr(options, action.dest) != action.default:
                raise InputError(f"{action.option_strings[-1]} cannot be used with {parser.prog} {chosen}")


def matching(names: Callable[[], Iterable[str]]) -> Callable[..., list[str]]:
    """Return a completer that offers those of ``names()`` that begin with what is typed."""
    return lambda prefix, **_: [name for name in names() if name.startswith(prefix)]


def _command(text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a command: {str(error).lower()}") from None
    if not words or words[0].startswith("-"):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} does not begin with a program")
    return words


WRAP = option(
    "--wrap",
    type=_command,
    default=(),
    metavar="COMMAND",
    help="put this before the Python of each rank: a sanitizer, a profiler, a simulator of GPUs",
)
JSON = flag("--json", "print one JSON document instead of text")


def answer(options: argparse.Namespace, document: object, lines: Iterable[str]) -> None:
    """Print ``document`` with ``--json``, and ``lines`` otherwise."""
    for line in [json.dumps(document, indent=2, ensure_ascii=False)] if options.json else lines:
        print(line)


def _whole(least: int | None) -> Callable[[str], int]:

    def read(text: str) -> int:
        # int() also accepts "1_0", " 2", digits of other scripts and numbers of any length; YAML does not.
        number = int(text) if re.fullmatch(r"-?[0-9]{1,64}", text) else None
        if number is None or (least is not None and number < least):
            limit = "" if least is None else f" of at least {least}"
            raise argparse.ArgumentTypeError(f"must be a whole number{limit}, not {text[:40]!r}")
        return number

    return read


def path(text: str) -> Path:
    """Parse a path, which must not be empty or contain control characters."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    if re.search(r"[\x00-\x1f\x7f-\x9f]", text):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} must not contain control characters")
    # The shell leaves ~ as it is after =, as in --output=~/runs.
    with suppress(RuntimeError):  # the user has no home
        return Path(text).expanduser()
    return Path(text)


def folder(text: str) -> Path:
    """Parse the path of a folder that exists or can be created, outside of the folders of the system."""
    target = path(text)
    nearest = next(part for part in (target, *target.parents) if os.path.lexists(part))
    if not nearest.is_dir():
        raise argparse.ArgumentTypeError(f"{nearest} is not a folder")
    if re.fullmatch(r"/|/(proc|sys|dev(?!/shm/)|etc|boot|s?bin|lib|lib64)(/.*)?", os.path.normpath(target.absolute())):
        raise argparse.ArgumentTypeError(f"{target} belongs to the system")
    return target


def new_file(suffix: str = "") -> Callable[[str], Path]:
    """Return a parser for the path of a file that does not exist, in a folder that does. It ends with ``suffix``."""

    def read(text: str) -> Path:
        target = path(text)
        if os.path.lexists(target):
            raise argparse.ArgumentTypeError(f"{target} already exists")
        if not folder(str(target.parent)).exists():
            command = f"mkdir -p {shlex.quote(str(target.parent))}"
            raise argparse.ArgumentTypeError(f"{target.parent} does not exist; create it: {command}")
        if not target.name.endswith(suffix):
            raise argparse.ArgumentTypeError(f"{target.name} does not end with {suffix}")
        return target

    return read
