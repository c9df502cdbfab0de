"""The properties of a GPU that compiling for it needs. Only :attr:`Gpu.target` needs Triton; nothing needs PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

__all__ = ["Gpu"]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The properties of a GPU that libraries query: ``arch``, and ``units``, its compute units or multiprocessors."""

    arch: str
    units: int

    @property
    def amd(self) -> bool:
        """Whether it is an AMD GPU, which is programmed through HIP."""
        return self.arch.startswith("gfx")

    @property
    def vendor(self) -> str:
        """The vendor, as in the catalogue."""
        return "amd" if self.amd else "nvidia"

    @property
    def target(self) -> GPUTarget:
        """Triton's target for this GPU."""
        from triton.backends.compiler import GPUTarget

        if self.amd:
            return GPUTarget("hip", self.arch, 64)
        return GPUTarget("cuda", int(self.arch.removeprefix("sm_")), 32)

    @property
    def capability(self) -> tuple[int, int]:
        """The result of ``torch.cuda.get_device_capability``. On ROCm, PyTorch uses the architecture's digits."""
        digits = self.arch.removeprefix("gfx") if self.amd else self.arch.removeprefix("sm_")
        return int(digits[0]), int(digits[1])

    @property
    def gcnArchName(self) -> str:
        """The architecture, as in PyTorch's device properties."""
        return self.arch

    @property
    def multi_processor_count(self) -> int:
        """The number of units, as in PyTorch's device properties."""
        return self.units
