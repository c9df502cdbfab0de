"""Why an image is as large as it is: layer → folder, unpacked bytes, largest first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from primus.images.outline import bytes_text

__all__ = ["Branch", "size_text", "size_tree"]

# Below this share of the image a folder explains nothing; the rest is summed up.
_SHARE = 0.005


@dataclass(frozen=True, kw_only=True)
class Branch:
    """A layer or folder with all that is below it; ``path`` is relative to the branch above."""

    path: str
    size: int
    files: int
    branches: tuple[Branch, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "path": self.path,
            "bytes": self.size,
            "files": self.files,
            "below": [branch.as_json() for branch in self.branches],
        }


def size_tree(name: str, layers: Iterable[tuple[str, Mapping[str, tuple[int, int]]]], depth: int = 3) -> Branch:
    """The image as a tree; ``layers`` map a folder to bytes and number of the files directly in it.

    ``depth`` counts levels below a layer; a folder with nothing in it but one other folder is no level.
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
        while len(below.below) == 1 and (only := next(iter(below.below.items())))[1].files == below.files:
            label, below = f"{label}/{only[0]}", only[1]
        branches.append(_branch(label, below, depth - 1))
    return Branch(path=path, size=node.size, files=node.files, branches=_ordered(branches))


def _ordered(branches: Iterable[Branch]) -> tuple[Branch, ...]:
    return tuple(sorted(branches, key=lambda b: (-b.size, b.path)))


def size_text(tree: Branch) -> str:
    """The tree as text; folders below half a percent of the image are summed up."""
    lines: list[str] = []
    least = tree.size * _SHARE

    def draw(branch: Branch, indent: int) -> None:
        share = f"{100 * branch.size / tree.size:5.1f} %" if tree.size else ""
        lines.append(f"{bytes_text(branch.size):>9} {share}  {'  ' * indent}{branch.path}".rstrip())
        shown = [b for b in branch.branches if b.size >= least and b.size]
        rest = [b for b in branch.branches if b not in shown]
        for below in shown:
            draw(below, indent + 1)
        if rest and shown:
            total = sum(b.size for b in rest)
            lines.append(f"{bytes_text(total):>9}          {'  ' * (indent + 1)}({len(rest)} smaller)")

    draw(tree, 0)
    return "\n".join(lines)
