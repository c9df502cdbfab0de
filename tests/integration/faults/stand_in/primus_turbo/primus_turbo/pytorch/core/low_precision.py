"""How values are scaled."""

from dataclasses import dataclass
from enum import Enum, auto


class Format(Enum):
    """Number formats."""

    E4M3 = auto()
    E5M2 = auto()
    HYBRID = auto()


class ScalingGranularity(Enum):
    """How many values share a scale."""

    TENSORWISE = auto()
    ROWWISE = auto()
    BLOCKWISE = auto()
    MX_BLOCKWISE = auto()


@dataclass
class Float8QuantConfig:
    """How a product is computed in FP8."""

    format: Format = Format.E4M3
    granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.granularity == ScalingGranularity.BLOCKWISE:
            assert self.block_size is not None
