"""Find the attention implementations that give finite gradients for FLUX on this GPU.

``python -m benchmarks.flux_attention`` prints one line per implementation, after one step in bfloat16 with two blocks
of each kind at full width and noise as data.
"""

from __future__ import annotations

import contextlib
import json

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from primus.recipes.resolve import resolve
from primus.recipes.setting import Choices
from primus.training.flux import entry

WAYS = {
    "PyTorch's choice": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    # Last, because it can end in an illegal address, after which the process can no longer use the GPU.
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
}
_IMAGES = 4
_PIXELS_PER_TOKEN = 16


def main() -> None:
    """Print loss and gradients of each implementation."""
    words = ["ranks=1", "model.dit.double_layers=2", "model.dit.single_layers=2"]
    model_of = resolve("flux.1-dev", words, Choices(backend="flux", mode="pretrain", precision="bf16")).architecture
    sizes, side = model_of.dit, model_of.dit.image_size // _PIXELS_PER_TOKEN
    for name, backend in WAYS.items():
        generator = torch.Generator("cuda").manual_seed(0)

        def noise(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(_IMAGES, *shape, device="cuda", dtype=torch.bfloat16, generator=generator)

        model = entry.transformer(model_of).to_empty(device="cuda")
        with torch.no_grad():
            entry.draw(model, 42)
        model.to(torch.bfloat16)
        batch = {
            "latents": noise(side * side, sizes.in_channels), "noise": noise(side * side, sizes.in_channels),
            "time": noise().sigmoid(), "text": noise(sizes.text_tokens, sizes.text_dim),
            "pooled": noise(sizes.pooled_dim),
        }  # fmt: skip
        found: dict[str, object] = {"attention": name}
        try:
            with contextlib.nullcontext() if backend is None else sdpa_kernel([backend]):
                loss = entry.flow_matching(model, batch, side, 3.5)
                loss.backward()
            gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
            bad = [key for key, gradient in gradients.items() if not gradient.isfinite().all()]
            found |= {"loss": loss.item(), "gradients": len(gradients), "not_finite": len(bad), "first": bad[:1]}
        except RuntimeError as error:
            found["error"] = str(error).splitlines()[0]
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
