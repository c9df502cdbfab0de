"""Show what makes an image large: unpacked bytes per layer and folder, largest first."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from primus.cli.arguments import whole
from primus.cli.host.common import add_project_options, add_target, resolved_target
from primus.gates.examined import examine
from primus.plan.layers import plan_image
from primus.progress import choose_progress
from primus.terminal import PLAIN, Screen, bytes_text

EXAMPLE = "primus why-size cpu --depth 4"
# Folders below this fraction of the image are summed up.
_SHARE = 0.005
# A folder that contains this fraction of its parent is not shown as a level.
_NEARLY_ALL = 0.99


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``primus why-size``."""
    add_target(parser)
    parser.add_argument(
        "--depth", type=whole(least=0), default=2, metavar="N", help="depth of folders to show (default: 2)"
    )
    add_project_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the tree of layers and folders by size."""
    resolved, workspace = resolved_target(args)
    with choose_progress(args.json) as progress:
        examined = examine(plan_image(resolved, workspace.stats), workspace, progress)
    layers = [(layer, facts.folders) for layer, facts in examined.facts.items()]
    tree = size_tree(examined.image.plan.ref, layers, args.depth)
    print(json.dumps(tree.as_json()) if args.json else size_text(tree, Screen.of()))
    return 0


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A layer or folder with everything below it; ``path`` is relative to the parent branch."""

    path: str
    size: int
    files: int
    branches: tuple[Branch, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the branch as JSON data."""
        return {
            "path": self.path,
            "bytes": self.size,
            "files": self.files,
            "below": [branch.as_json() for branch in self.branches],
        }


def size_tree(name: str, layers: Iterable[tuple[str, Mapping[str, tuple[int, int]]]], depth: int = 3) -> Branch:
    """Return the image as a tree; ``layers`` map each folder to the bytes and number of its files.

    ``depth`` counts levels below a layer. A folder with nearly everything in one subfolder is not a level: the
    branch gets the inner folder's path and the size of both.
    """
    tops = tuple(_branch(layer, _nested(folders), depth) for layer, folders in layers)
    return Branch(
        path=name,
        size=sum(t.size for t in tops),
        files=sum(t.files for t in tops),
        branches=_ordered(tops),
    )


class _Node:
    def __init__(self) -> None:
        self.size = 0
        self.files = 0
        self.below: dict[str, _Node] = {}


def _nested(folders: Mapping[str, tuple[int, int]]) -> _Node:
    root = _Node()
    for path, (size, files) in folders.items():
        node = root
        node.size, node.files = node.size + size, node.files + files
        for part in filter(None, path.split("/")):
            node = node.below.setdefault(part, _Node())
            node.size, node.files = node.size + size, node.files + files
    return root


def _branch(path: str, node: _Node, depth: int) -> Branch:
    branches = []
    for name, child in node.below.items() if depth > 0 else ():
        below, label = child, name
        while largest := max(below.below.items(), key=lambda item: item[1].size, default=None):
            if largest[1].size < _NEARLY_ALL * below.size:
                break
            label, below = f"{label}/{largest[0]}", largest[1]
        inner = _branch(label, below, depth - 1)
        branches.append(replace(inner, size=child.size, files=child.files))
    return Branch(path=path, size=node.size, files=node.files, branches=_ordered(branches))


def _ordered(branches: Iterable[Branch]) -> tuple[Branch, ...]:
    return tuple(sorted(branches, key=lambda b: (-b.size, b.path)))


def size_text(tree: Branch, screen: Screen = PLAIN) -> str:
    """Return the tree as text. Folders below half a percent of the image are summed up."""
    lines: list[str] = []
    least = tree.size * _SHARE

    def draw(branch: Branch, indent: int) -> None:
        share = f"{100 * branch.size / tree.size:5.1f} %" if tree.size else ""
        head = f"{bytes_text(branch.size):>9} {share}  {'  ' * indent}"
        lines.extend(screen.wrap(branch.path, head, " " * (len(head) + 2)))
        shown = [b for b in branch.branches if b.size >= least and b.size]
        for below in shown:
            draw(below, indent + 1)
        rest = branch.size - sum(b.size for b in shown)
        if rest and shown:
            lines.append(f"{bytes_text(rest):>9}          {'  ' * (indent + 1)}(smaller)")

    draw(tree, 0)
    return "\n".join(lines)
