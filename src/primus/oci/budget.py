"""How much a compressed archive may unpack to. A few kilobytes can stand for more than any disk holds."""

from __future__ import annotations

_FREE = 100 << 20
# Real archives reach about 20: the text of licences, and GPU libraries padded with zeros.
_MOST_RATIO = 100


def require_sane(unpacked: int, packed: int) -> None:
    """Raise ValueError when ``packed`` bytes unpack to implausibly many (``unpacked``, so far or in all)."""
    if unpacked > _FREE + _MOST_RATIO * packed:
        raise ValueError(f"it is a decompression bomb: {packed:,} bytes unpack to {unpacked:,} or more")
