"""What a build prints: the channel of each image, then a table of its layers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from primus.engine.image import Built
from primus.engine.unchanged import say_unchanged
from primus.terminal import Screen, Styled, bytes_text, counted

if TYPE_CHECKING:
    from primus.plan.channel import Choice


def full_name(image: Built) -> str:
    """Return the image's name for a line of output, with the gates that a preview failed."""
    gates = ", ".join(sentence.partition(":")[0] for sentence in image.failed)
    return image.ref + (f" (fails {gates}; see primus check {image.target})" if gates else "")


def say_channel(target: str, choice: Choice, channels: int) -> None:
    """Print which channel builds a target, and why, if the target has several."""
    if channels > 1:
        print(f"{target}: channel {choice.channel}, {choice.reason}", file=sys.stderr)


def summarize(images: Sequence[tuple[Built, Choice]], seconds: float) -> None:
    """Print a table for each image, or that there was nothing to do. The last lines are the digests."""
    if not any(image.changed for image, _ in images):
        say_unchanged([(full_name(image), image.digest) for image, _ in images], seconds)
        return
    screen = Screen.of(sys.stderr)
    for image, choice in images:
        print(_table(image, choice, screen), file=sys.stderr)
    layers = [line for image, _ in images for line in image.layers]
    made = sum(line.built for line in layers)
    print(f"{counted(made, 'layer')} built, {len(layers) - made} reused, {seconds:.2f} s", file=sys.stderr)
    for image, _ in images:
        print(image.digest)


def _table(image: Built, choice: Choice, screen: Screen) -> str:
    lines = screen.wrap(f"{image.ref}  (channel {choice.channel}: {choice.reason})", hanging="  ")
    if choice.preview:
        lines += screen.wrap(Styled(f"PREVIEW, no release: {choice.preview}", "yellow"), "  ", "    ")
    rows = []
    for line in image.layers:
        state, seconds = (Styled("built", "green"), f"{line.seconds:.1f}") if line.built else ("cached", "")
        rows.append((line.name, bytes_text(line.size), state, seconds, line.digest[7:19]))
    rows.append(("", bytes_text(image.size), counted(len(image.layers), "layer"), "", ""))
    lines += screen.table(rows, head=("layer", "size", "state", "seconds", "digest"), right=(1, 3), indent="  ")
    for line in image.layers:
        if text := line.left_out.text():
            lines += screen.wrap(Styled(f"{line.name}, for other GPUs: {text} unpacked", "dim"), "  ", "    ")
    for sentence in image.failed:
        lines += screen.wrap(sentence, f"  {screen.paint('✗', 'red')} ", "    ")
    if image.failed:
        lines += screen.wrap("gates failed: primus check and primus validate will fail for this image", "  ")
    return "\n".join(lines)
