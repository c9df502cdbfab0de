"""The properties of a GPU that compiling for it needs. This module does not need PyTorch; only :attr:`Gpu.target` needs
Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget


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
            # CDNA 1 to 4 (gfx9) run wavefronts of 64 threads; later architectures run 32.
            return GPUTarget("hip", self.arch, 64 if self.capability[0] == 9 else 32)
        return GPUTarget("cuda", int(self.arch.removeprefix("sm_")), 32)

    @property
    def capability(self) -> tuple[int, int]:
        """The result of ``torch.cuda.get_device_capability``: ``gfx942`` → (9, 4), ``gfx1250`` → (12, 5)."""
        # The last digit of an AMD name is a stepping, and has no counterpart in NVIDIA's names.
        digits = self.arch.removeprefix("gfx")[:-1] if self.amd else self.arch.removeprefix("sm_")
        return int(digits[:-1]), int(digits[-1])

    @property
    def gcnArchName(self) -> str:
        """The architecture, as in PyTorch's device properties."""
        return self.arch

    @property
    def multi_processor_count(self) -> int:
        """The number of units, as in PyTorch's device properties."""
        return self.units
