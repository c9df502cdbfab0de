"""A GPU as those who compile for it see it. Needs neither PyTorch nor, but for Triton's own name of it, Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

__all__ = ["Gpu"]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What libraries ask of a GPU: ``arch`` as compilers name it, ``units`` its compute units or multiprocessors."""

    arch: str
    units: int

    @property
    def amd(self) -> bool:
        """Whether it is programmed through HIP."""
        return self.arch.startswith("gfx")

    @property
    def vendor(self) -> str:
        """Who makes it, as the catalogue says it."""
        return "amd" if self.amd else "nvidia"

    @property
    def target(self) -> GPUTarget:
        """Triton's name for it."""
        from triton.backends.compiler import GPUTarget

        if self.amd:
            return GPUTarget("hip", self.arch, 64)
        return GPUTarget("cuda", int(self.arch.removeprefix("sm_")), 32)

    @property
    def capability(self) -> tuple[int, int]:
        """As ``torch.cuda.get_device_capability`` says it; ROCm's PyTorch splits the architecture's digits."""
        digits = self.arch.removeprefix("gfx") if self.amd else self.arch.removeprefix("sm_")
        return int(digits[0]), int(digits[1])

    @property
    def gcnArchName(self) -> str:
        """The name in PyTorch's device properties."""
        return self.arch

    @property
    def multi_processor_count(self) -> int:
        """The name in PyTorch's device properties."""
        return self.units
