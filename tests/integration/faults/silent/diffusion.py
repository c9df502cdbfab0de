"""FLUX: blocks, times, noise and conditions."""

from __future__ import annotations

from typing import Any

from silent.registry import (
    BF16,
    CONSTANTS,
    EMBEDDINGS,
    FIRST,
    FLUX,
    GRADIENTS,
    LOSS,
    TRANSFORMER,
    WEIGHTS,
    WHOLE,
    silent,
    wrap,
)


@silent("model", "flux", WEIGHTS, FIRST, words=FLUX)
def one_weight_drawn_from_the_next_seed(module: Any) -> None:
    def normal(run: Any, name: str, parameter: Any, seed: int, std: float) -> Any:
        return run(name, parameter, seed + name.startswith("transformer_blocks.1.attn.to_q"), std)

    wrap(module, "normal", normal)


@silent("constants", "flux", TRANSFORMER, CONSTANTS, words=(*FLUX, *BF16))
def epsilon_of_queries_and_keys(module: Any) -> None:
    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        import torch

        original(self, *args, **kwargs)
        for part in self.modules():
            if "Norm" in type(part).__name__ and isinstance(getattr(part, "eps", None), float):
                part.eps = 2e-3
        assert any(isinstance(part, torch.nn.Module) and getattr(part, "eps", 0) == 2e-3 for part in self.modules())

    wrap(module.FluxTransformer2DModel, "__init__", init)


@silent("model", "flux", EMBEDDINGS, LOSS, GRADIENTS, words=FLUX)
def guidance_embedded_as_the_time(module: Any) -> None:
    """Both go through the layers of the time; those of the guidance are never trained."""

    def forward(_run: Any, self: Any, time: Any, guidance: Any, pooled: Any) -> Any:
        one, other = (self.timestep_embedder(self.time_proj(part).to(pooled.dtype)) for part in (time, guidance))
        return one + other + self.text_embedder(pooled)

    wrap(module.CombinedTimestepGuidanceTextProjEmbeddings, "forward", forward)


@silent("backward", "flux", TRANSFORMER, GRADIENTS, words=(*FLUX, *BF16, *WHOLE))
def gate_of_the_last_block_not_trained(module: Any) -> None:
    def init(run: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        run(self, *args, **kwargs)
        norm = self.single_transformer_blocks[-1].norm
        norm.register_forward_hook(lambda _part, _given, output: (output[0], output[1].detach()))

    wrap(module.FluxTransformer2DModel, "__init__", init)


@silent("model", "flux", TRANSFORMER, GRADIENTS, words=(*FLUX, *BF16))
def places_of_the_image_counted_from_its_middle(module: Any) -> None:
    """As in a later model, rows and columns go from −2 to 1, so that the text is in the middle, not the corner."""

    def forward(run: Any, self: Any, **kwargs: Any) -> Any:
        ids = kwargs["img_ids"].clone()
        ids[:, 1:] -= (ids[:, 1:].max() + 1) // 2
        return run(self, **kwargs | {"img_ids": ids})

    wrap(module.FluxTransformer2DModel, "forward", forward)
