"""`primus why-size`: what makes an image large."""

from collections import Counter
from collections.abc import Mapping
from pathlib import PurePosixPath

from primus_images.cli.host.common import SingleOptions
from primus_images.cli.host.examined import examined_target
from primus_images.cli.verb import answer
from primus_images.terminal import Screen, Styled, bytes_text

# Folders below this fraction of the image are left out.
_SHARE = 0.005
# A folder that contains this fraction of its parent is shown in its place.
_NEARLY_ALL = 0.99

Row = tuple[str, str, int]
"""Layer, folder and bytes. The folder of a whole layer is empty."""


def why_size(options: SingleOptions) -> int:
    """Show what makes an image large: unpacked bytes per layer and folder, largest first."""
    resolved, examined = examined_target(options)
    rows = largest({layer: facts.folders for layer, facts in examined.facts.items()})
    total = sum(size for _, folder, size in rows if not folder)
    entries = []
    table: list[tuple[str, str, str]] = [(bytes_text(total), "", resolved.ref)]
    for layer, folder, size in rows:
        entries.append({"layer": layer, "folder": folder, "bytes": size})
        name = f"  {folder}" if folder else Styled(layer, "bold")
        table.append((bytes_text(size), f"{100 * size / max(total, 1):.1f} %", name))
    document = {"image": resolved.ref, "largest": entries}
    return answer(options, document, Screen.of().table(table, right=(0, 1)))


def largest(layers: Mapping[str, Mapping[str, int]]) -> list[Row]:
    """Return a row for each layer and each large folder, largest first.

    ``layers`` map each folder to the bytes of its own files; the result includes those below it.
    """
    total = sum(sum(folders.values()) for folders in layers.values())
    least = max(1, _SHARE * total)
    blocks = [_rows_of(layer, folders, least) for layer, folders in layers.items()]
    blocks.sort(key=lambda block: -block[0][2])
    return [row for block in blocks for row in block]


def _rows_of(layer: str, folders: Mapping[str, int], least: float) -> list[Row]:
    """Return the rows of one layer, without folders with nearly everything in one subfolder."""
    sums = Counter[str]()
    for name, size in folders.items():
        path = PurePosixPath(name)
        for folder in {path, *path.parents}:
            sums[str(folder)] += size
    parents = {name: str(PurePosixPath(name).parent) for name in sums if name != "."}
    with_one_child = set()
    for name, parent in parents.items():
        if sums[name] >= _NEARLY_ALL * sums[parent]:
            with_one_child.add(parent)
    rows = []
    for name in parents:
        if sums[name] >= least and name not in with_one_child:
            rows.append((layer, name, sums[name]))
    rows.sort(key=lambda row: (-row[2], row[1]))
    return [(layer, "", sums["."]), *rows]
