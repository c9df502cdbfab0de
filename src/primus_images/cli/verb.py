"""The verbs of the command line and their options, as ``verbs.yaml`` declares them.

The options of a verb are a frozen dataclass, a subclass of :class:`Options`, and the only parameter
of the verb's function is annotated with it. :func:`run` fills it from argparse's namespace, so its
fields are the names (``dest``) of the verb's options in ``verbs.yaml``, which a test compares.
Options that several verbs share are a base class, and a verb that needs other values makes another
object with ``dataclasses.replace``.
"""

import argparse
import importlib
import inspect
import json
import math
import os
import re
import shlex
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from primus_images.errors import InputError, nearest
from primus_images.terminal import harmless, say
from primus_images.yamlfile import read_values


class Verb(NamedTuple):
    """One verb of ``verbs.yaml``, where the fields are explained."""

    call: str
    summary: str
    example: str
    options: Sequence[Any] = ()
    usage: str | None = None
    rest: str = ""
    more: str = ""


_SYSTEM_FOLDERS = r"/|/(proc|sys|dev(?!/shm/)|etc|boot|s?bin|lib|lib64)(/.*)?"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DATA = read_values(Path(__file__).with_name("verbs.yaml")).data
TEXTS: Mapping[str, Mapping[str, Any]] = _DATA["texts"]
# Words of AMD's own `primus` by the verb that they follow; `commands` stand in the verb's place.
AMDS: Mapping[str, frozenset[str]] = {name: frozenset(row) for name, row in _DATA["amd"].items()}
VERBS: dict[str, Verb] = {name: Verb(**row) for name, row in _DATA["verbs"].items()}


def installed_verbs() -> dict[str, Verb]:
    """Return the verbs of this installation by name. An image has none of the host's."""
    if (Path(__file__).parent / "host").is_dir():
        return VERBS
    return {name: verb for name, verb in VERBS.items() if not verb.call.startswith("host.")}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The option that almost every verb has."""

    json: bool


VerbOptions = TypeVar("VerbOptions", bound=Options)


class _Help(argparse.HelpFormatter):
    """Help whose paragraphs are wrapped at the width of the terminal, or at 80 columns in a pipe.

    Lists stay lists. An example that is too long continues after a backslash, so that it can be
    copied.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("example: "):
            return _continued(text, width)
        lines = []
        for paragraph in text.split("\n\n"):
            for block in re.split(r"\n(?=\s|- )", paragraph):
                shape = re.match(r"\s*(?:- )?", block)
                first = shape[0] if shape else ""
                lines += textwrap.wrap(
                    " ".join(block.split()).removeprefix("- "),
                    width,
                    initial_indent=indent + first,
                    subsequent_indent=indent + " " * len(first),
                    break_on_hyphens=False,
                    break_long_words=False,
                )
            lines.append("")
        return "\n".join(lines).rstrip()


def _continued(command: str, width: int) -> str:
    """Return a command in lines of at most ``width``; one with quotes stays as it is."""
    if any(sign in command for sign in "'\"\\"):
        return command
    # An option stays with its value.
    glued = re.sub(r"(?<= )(--?[\w-]+) (?!-)", "\\1\0", command)
    lines = textwrap.wrap(
        glued,
        width - len(" \\"),
        subsequent_indent="    ",
        break_on_hyphens=False,
        break_long_words=False,
    )
    return " \\\n".join(lines).replace("\0", " ")


def run(verb: str, namespace: argparse.Namespace) -> int:
    """Run a verb and return its exit code. Raises PrimusError."""
    function: Callable[[Options], int] = _named(f"cli.{VERBS[verb].call}")
    options = options_of(function, namespace)
    return function(options)


def options_of(
    function: Callable[[VerbOptions], int], namespace: argparse.Namespace
) -> VerbOptions:
    """Return the namespace as the dataclass that ``function``, which runs a verb, takes."""
    (parameter,) = inspect.signature(function).parameters.values()
    options: VerbOptions = parameter.annotation(**vars(namespace))
    return options


class Parser(argparse.ArgumentParser):
    """A parser of words whose faults are InputErrors.

    argparse itself prints the usage before a fault, and exits. ``rest`` names what the words after
    ``--`` are stored as; if it is empty, they are arguments as any.
    """

    rest = ""

    def parse_args(self, words: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        """Parse the words of a command. Raises InputError."""
        # argparse would look for its own options after --, leaves a second positional argument
        # empty if options stand between it and the first, and refuses key=value after an option
        # unless they are intermixed, which ignores --.
        before = list(words)
        after: list[str] = []
        if "--" in before:
            cut = before.index("--")
            after = before[cut + 1 :]
            before = before[:cut]
        self._refuse_empty(before)
        if self.rest:
            namespace = super().parse_args(before)
            setattr(namespace, self.rest, after)
            return namespace
        if not self._takes_settings():
            return super().parse_args(words)
        return self.parse_intermixed_args(before + [re.sub("^-", "./-", word) for word in after])

    def _refuse_empty(self, words: Sequence[str]) -> None:
        # An empty value, as of a shell's variable that is not set, would count as the default.
        for option, action in self._option_string_actions.items():
            is_empty = f"{option}=" in words or (option, "") in pairwise(words)
            if action.default == "" and is_empty:
                self.error(f"argument {option}: must not be empty")

    def error(self, message: str) -> NoReturn:
        """Raise InputError, with what to write instead of an option that is not one."""
        verb = " ".join(self.prog.split()[:2])
        hint = f"`{verb} --help` lists the options"
        unknown = re.match(r"unrecognized arguments: ((?:--)?([^\s=]+))(?:[\s=]+(\S+))?", message)
        if unknown is None:
            raise InputError(message, hint=hint)
        word, name, value = unknown.groups()
        setting = self._setting_for(name, value)
        if setting:
            hint = setting
        elif self.rest and not word.startswith("-"):
            hint = f"write the {self.rest} after --: -- {word} …"
        else:
            message += nearest(word, self._option_string_actions)
        raise InputError(message, hint=hint)

    def _setting_for(self, name: str, value: str | None) -> str:
        """Return what to write instead of an option of other trainers; "" if nothing is known."""
        from primus_images.recipes.overrides import is_setting

        if not self._takes_settings():
            return ""
        key = name.replace("-", "_")
        if is_setting(key):
            return f"{name} is a setting: write {key}={value or 'VALUE'}"
        other = TEXTS["other options"].get(name.replace("_", "-"))
        if other:
            return f"write {other}"
        return ""

    def _takes_settings(self) -> bool:
        return any(action.dest == "overrides" for action in self._actions)


def parser_of(name: str, prog: str = "") -> Parser:
    """Return the parser of a verb.

    ``prog`` is its name in messages (default: ``primus`` and the verb).
    """
    verb = VERBS[name]
    description = inspect.getdoc(_named(f"cli.{verb.call}")) or ""
    if verb.more:
        description += f"\n\n{verb.more}"
    parser = Parser(
        prog=prog or f"primus {name}",
        usage=verb.usage,
        description=description,
        epilog=f"example: {verb.example}",
        formatter_class=_Help,
    )
    parser.rest = verb.rest
    _add(parser, verb.options)
    return parser


def parser_of_shared(name: str, prog: str = "") -> Parser:
    """Return a parser of the options that ``verbs.yaml`` shares under ``name``.

    It takes no abbreviations of them. ``prog`` is the command that has them among its own (default:
    ``name``, which then has ``--help``, too).
    """
    parser = Parser(prog=prog or name, add_help=not prog, allow_abbrev=False)
    _add(parser, _DATA["shared"][name])
    return parser


def _add(parser: "argparse._ActionsContainer", options: Sequence[Any]) -> None:
    for entry in options:
        if isinstance(entry, list):
            _add(parser, entry)
            continue
        for names, settings in entry.items():
            if isinstance(settings, list):
                _add(parser.add_argument_group(names), settings)
            else:
                _add_option(parser, names.split(), dict(settings))


def _add_option(
    parser: "argparse._ActionsContainer", names: Sequence[str], settings: dict[str, Any]
) -> None:
    complete = settings.pop("complete", None)
    limits = {key: settings.pop(key) for key in ("least", "most", "suffix") if key in settings}
    if "type" in settings:
        settings["type"] = partial(TYPES[settings["type"]], **limits)
    if "choices" in settings:
        settings["choices"] = _named(settings["choices"])
    action = parser.add_argument(*names, **settings)
    if complete:
        action.completer = partial(_begun, complete)  # type: ignore[attr-defined]


def _named(entry: Any) -> Any:
    """Return what the dotted name ``entry`` below ``primus`` means; anything else means itself."""
    if not isinstance(entry, str):
        return entry
    module, _, name = entry.rpartition(".")
    return getattr(importlib.import_module(f"primus_images.{module}"), name)


def _begun(complete: Any, prefix: str, **_: object) -> list[str]:
    """Return the values to offer for what is typed.

    They are of a list, or of a function, whose arguments follow its name.
    """
    values = complete
    if isinstance(complete, str):
        name, *words = complete.split()
        values = _named(name)
        if callable(values):
            values = values(*words)
    return [value for value in values if value.startswith(prefix)]


def refuse_others(options: object, verb: str, chosen: str, headings: Iterable[str]) -> None:
    """Raise InputError for an option under a heading of a verb other than the ``chosen`` one."""
    for heading in parser_of(verb)._action_groups:
        title = heading.title or ""
        if title == chosen or title not in headings:
            continue
        for action in heading._group_actions:
            if getattr(options, action.dest) != action.default:
                raise InputError(
                    f"{action.option_strings[-1]} cannot be used with primus {verb} {chosen}"
                )


def answer(
    options: Options,
    document: object,
    lines: Iterable[str],
    *,
    passed: bool = True,
) -> int:
    """Print ``document`` with ``--json``, and ``lines`` otherwise; return the exit code.

    It is 0, or 1 if not ``passed``.
    """
    if options.json:
        # JSON's own escapes spare the characters from U+007F on.
        print(harmless(json.dumps(document, indent=2, ensure_ascii=False)))
    else:
        for line in lines:
            print(harmless(line))
    if passed:
        return 0
    return 1


def note(options: Options, *lines: str) -> None:
    """Print lines to standard error, unless ``--json`` asks for one document instead of text."""
    if not options.json:
        say("\n".join(lines))


def _command(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} is not a command: {str(error).lower()}"
        ) from None
    if not words or words[0].startswith("-"):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} does not begin with a program")
    return words


def _number(
    text: str, *, what: str, pattern: str, least: float = -math.inf, most: float = math.inf
) -> float:
    """Parse a number from ``least`` to ``most`` that is ``what``. An ``int`` has no point."""
    # int() also accepts "1_0", " 2", digits of other scripts and numbers of any length; the
    # patterns do not.
    if not re.fullmatch(pattern, text) or not least <= float(text) <= most:
        raise argparse.ArgumentTypeError(
            f"must be {what.format(least=least, most=most)}, not {text[:40]!r}"
        )
    if text.lstrip("-").isdigit():
        return int(text)
    return float(text)


def _duration(text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]+)?)([smhd])", text)
    seconds = 0.0
    if match:
        seconds = float(match[1]) * _SECONDS[match[2]]
    if not 0 < seconds <= 366 * 86400:
        raise argparse.ArgumentTypeError(
            f"must be a duration such as 90m, 12h or 2d, up to 366d, not {text[:40]!r}"
        )
    return seconds


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def _path(text: str) -> Path:
    """Parse a path, which must not be empty or contain control characters."""
    if re.search(r"[\x00-\x1f\x7f-\x9f]", _text(text)):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} must not contain control characters")
    path = Path(text)
    try:
        # The shell leaves ~ as it is after =, as in --output=~/runs.
        return path.expanduser()
    except RuntimeError:  # there is no such user
        return path


def _folder(text: str) -> Path:
    """Parse the path of a folder that exists or can be created.

    It must not be one of the system.
    """
    target = _path(text)
    if "://" in text:
        raise argparse.ArgumentTypeError(f"must be a folder, not an address: {text[:80]!r}")
    existing = next(part for part in (target, *target.parents) if os.path.lexists(part))
    if not existing.is_dir():
        raise argparse.ArgumentTypeError(f"{existing} is not a folder")
    if re.fullmatch(_SYSTEM_FOLDERS, os.path.normpath(target.absolute())):
        raise argparse.ArgumentTypeError(f"{target} belongs to the system")
    return target


def _new_file(text: str, suffix: str = "") -> Path:
    target = _path(text)
    if os.path.lexists(target):
        raise argparse.ArgumentTypeError(f"{target} already exists")
    if not _folder(str(target.parent)).exists():
        command = f"mkdir -p {shlex.quote(str(target.parent))}"
        raise argparse.ArgumentTypeError(f"{target.parent} does not exist; create it: {command}")
    if not target.name.endswith(suffix):
        raise argparse.ArgumentTypeError(f"{target.name} does not end with {suffix}")
    return target


TYPES: Mapping[str, Callable[..., Any]] = {
    "command": _command,
    "duration": _duration,
    "folder": _folder,
    "new_file": _new_file,
    "path": _path,
    "text": _text,
    **{name: partial(_number, **settings) for name, settings in _DATA["numbers"].items()},
}
