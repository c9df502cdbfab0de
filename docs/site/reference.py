"""Pages of the reference, made from the parsers of the command line, the schemas of the files and
the pins.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.json_schema import json_schema
from primus_images.cli.main import GROUPS
from primus_images.cli.verb import VERBS, parser_of
from primus_images.plan.project import Project
from primus_images.plan.resolve import resolve
from primus_images.plan.target import Target
from primus_images.release.diff import diff, notes, table
from primus_images.release.history import AMDS, PINS, load_history, newest_first
from primus_images.release.sides import side
from primus_images.system.issues import issues
from primus_images.versions.components import Pin, Versions


def reference(root: Path) -> dict[str, str]:
    """Return path in the site → Markdown."""
    return {
        "reference/commands.md": "\n".join(commands()),
        "reference/files.md": "\n".join(_files()),
        "reference/images.md": images(root),
    }


def commands() -> Iterator[str]:
    """Yield the parts of the page of commands."""
    yield "# Commands\n\n`primus VERB --help` prints the same in a terminal."
    yield "[Using primus](../using.md) has the exit codes.\n"
    for heading, room in GROUPS.items():
        yield f"## {heading.capitalize()}\n"
        for name, verb in VERBS.items():
            if verb.call.startswith(room):
                yield from _parser(parser_of(name), 3)


def _parser(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    yield f"{'#' * level} {parser.prog}\n\n{_prose(parser.description)}\n"
    below: dict[str, argparse.ArgumentParser] = {}
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = action.choices
        elif action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction):
            rows.append(
                (_name(action), _prose((action.help or "") % {**vars(action), "prog": parser.prog}))
            )
    if rows:
        yield "\n".join(table(("option", "meaning"), rows)) + "\n"
    if parser.epilog:
        yield f"```sh\n{parser.epilog.removeprefix('example: ')}\n```\n"
    for one in below.values():
        yield from _parser(one, level + 1)


def _name(action: argparse.Action) -> str:
    choices = "|".join(map(str, action.choices)) if action.choices else ""
    value = "" if action.nargs == 0 else str(action.metavar or choices or action.dest.upper())
    if not action.option_strings:
        return f"`{value}`"
    return ", ".join(f"`{name} {value}`".replace(" `", "`") for name in action.option_strings)


def _prose(text: str | None) -> str:
    return (text or "").replace("<", "\\<").replace("*", "\\*").replace("--", "\\--")


def _files() -> Iterator[str]:
    yield (
        "# Files of a project\n\nEditors check these files with the JSON Schemas in docs/schemas.\n"
    )
    for cls, title in ((Versions, "versions.yaml"), (Target, "images/<target>.yaml")):
        schema = json_schema(cls, title=title)
        yield f"## `{title}`\n"
        for name, part in schema.get("$defs", {}).items():
            yield f"### {name}\n\n{_prose(part.get('description'))}\n"
            yield from _object(part)


def _object(schema: dict[str, Any]) -> Iterator[str]:
    required = schema.get("required", ())
    rows = [
        (
            f"`{key}`",
            _kind(value),
            "required" if key in required else "",
            _prose(value.get("description")),
        )
        for key, value in schema.get("properties", {}).items()
    ]
    if rows:
        yield "\n".join(table(("key", "value", "", "meaning"), rows)) + "\n"


def _kind(value: dict[str, Any]) -> str:
    if "$ref" in value:
        return str(value["$ref"]).rpartition("/")[2]
    if "anyOf" in value:
        return " or ".join(_kind(one) for one in value["anyOf"])
    if "enum" in value:
        return ", ".join(f"`{one}`" for one in value["enum"])
    if isinstance(value.get("type"), list):
        return _one_of(value["type"])
    return _kind_of_type(value)


def _one_of(words: list[str]) -> str:
    return " or ".join(word for word in words if word != "number" or "string" not in words)


def _kind_of_type(value: dict[str, Any]) -> str:
    if value.get("type") == "array":
        return f"list of {_kind(value.get('items', {}))}"
    if value.get("type") == "object" and isinstance(value.get("additionalProperties"), dict):
        return f"map to {_kind(value['additionalProperties'])}"
    return str(value.get("type", "any"))


def images(root: Path) -> str:
    """Return the page of the release: README's table, support, how to verify, components, and
    notes.
    """
    project = Project(root)
    targets = [resolve(project, name) for name in project.target_names()]
    components = dict.fromkeys(
        name for target in targets for name in (*target.pins, *target.inside)
    )
    rows = [
        (name, *(_version({**target.inside, **target.pins}.get(name)) for target in targets))
        for name in components
    ]
    head = ("component", *(f"`{target.ref}`" for target in targets))
    readme = (
        (root / "README.md")
        .read_text("utf-8")
        .partition("<!-- targets -->\n")[2]
        .partition("<!-- end -->")[0]
    )
    pins = side(PINS, project)
    last = next(
        release
        for release in newest_first(load_history().releases)
        if release.image == AMDS and release.components
    )
    changes = notes(
        diff(
            side(last.name, project), pins, issues(pins.release.components, pins.release.gpus or ())
        )
    )
    return "\n".join(
        [
            f"# Images of {project.versions.release}",
            "",
            "One row for each target and channel. [Releases published by AMD](../releases.md) "
            "has those of AMD.",
            "",
            readme,
            "## Support",
            "",
            f"Until {pins.release.supported_until}, with the drivers {pins.release.drivers} "
            "([policy](../release.md#support)). `primus releases "
            f"{project.versions.release}` prints the same.",
            "",
            "## Verify",
            "",
            "| to | run |",
            "|---|---|",
            "| list every file of an image, with its licence | `primus sbom TARGET` |",
            "| build an image again and compare the digests | `primus verify TARGET` |",
            "| check a published image and its [statements](../statements.md) | "
            "`primus verify --image IMAGE --key KEY` |",
            "| see what makes an image large | `primus why-size TARGET` |",
            "",
            "## Components",
            "",
            *table(head, rows),
            "",
            f"## Changes since {last.name}",
            "",
            f"As `primus diff {last.name} {PINS}` prints them.",
            changes.partition("\n")[2].replace("\n## ", "\n### "),
            "",
        ]
    )


def _version(pin: Pin | None) -> str:
    return "–" if pin is None else pin.version or "this repository"
