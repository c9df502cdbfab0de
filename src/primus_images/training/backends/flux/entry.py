"""One rank of FLUX: ``python -m primus_images.training.backends.flux.entry OUTPUT_FOLDER``."""

import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from primus_images.recipes.architecture import Architecture
from primus_images.training.backends.flux import latents
from primus_images.training.backends.flux.backend import FluxConfig, config_of
from primus_images.training.backends.loop import process, train, weights
from primus_images.training.backends.loop.config import RankJob
from primus_images.training.backends.loop.session import Batch, Sharded, shard
from primus_images.turbo.attention import attend_in_diffusers


def main(job: RankJob, device: torch.device) -> None:
    """Train the transformer."""
    config = job.section(FluxConfig)
    # With cuDNN's attention on an H200 (torch 2.11, cuDNN 9), gradients were not finite, or the GPU
    # reported an illegal address; the other three implementations were correct. cuDNN seems to
    # prepare its backward pass once for all calls with the same layout of query, key and value,
    # with the gradient layout of the first call. FLUX's two kinds of blocks share the former but
    # not the latter.
    torch.backends.cuda.enable_cudnn_sdp(False)
    data = latents.Images(job)
    model = transformer(job.model)
    if "flash-attention-4" in job.turbo:
        attend_in_diffusers()
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    shard(model, blocks, job, device, wide=_is_wide)
    if config.weights == "random":
        # The prediction starts at 0, as is usual for diffusion transformers.
        weights.draw_all(model, job.training.seed, zero=("proj_out.weight", "proj_out.bias"))
    else:
        files = weights.Files(Path(config.weights))
        for name, parameter in model.named_parameters():
            weights.fill(parameter, files.rows_of(name))
    guidance = None
    if job.model.dit.guidance:
        guidance = config.guidance
    side = math.isqrt(job.model.dit.image_tokens)
    loss = partial(flow_matching, side=side, guidance=guidance)
    train.run(job, device, Sharded(model, job, device, loss), data)


def _is_wide(layer: str) -> bool:
    return "transformer_blocks" not in layer or "norm" in layer


def transformer(model: Architecture) -> Any:
    """Return diffusers' transformer with these sizes and parameters without memory."""
    from diffusers import FluxTransformer2DModel

    with weights.empty():
        return FluxTransformer2DModel(
            **config_of(model), axes_dims_rope=rotary_axes(model.head_size)
        )


def rotary_axes(size: int) -> tuple[int, int, int]:
    """Return how many elements of a head encode index, row and column.

    FLUX.1 has 16, 56 and 56 of 128.
    """
    index = max(2, size // 8)
    index += (size - index) % 4
    half = (size - index) // 2
    return index, half, half


def flow_matching(
    model: nn.Module, batch: Batch, side: int, guidance: float | None
) -> torch.Tensor:
    """Return the sum over the images of the mean squared error of the velocity, noise − latents.

    A model that predicts 0 has a loss of 1 plus the mean square of the latents.
    """
    clean = batch["latents"]
    noise = batch["noise"]
    time = batch["time"]
    level = time[:, None, None]
    guidance_of_samples = None
    if guidance is not None:
        guidance_of_samples = torch.full_like(time, guidance)
    ids = torch.zeros(side, side, 3, device=clean.device)
    ids[..., 1] += torch.arange(side, device=clean.device)[:, None]
    ids[..., 2] += torch.arange(side, device=clean.device)[None, :]
    velocity = model(
        hidden_states=(1 - level) * clean + level * noise,
        encoder_hidden_states=batch["text"],
        pooled_projections=batch["pooled"],
        timestep=time,
        img_ids=ids.flatten(0, 1),
        txt_ids=torch.zeros(batch["text"].shape[1], 3, device=clean.device),
        guidance=guidance_of_samples,
        return_dict=False,
    )[0]
    return (velocity.float() - (noise - clean)).square().mean((1, 2)).sum()


if __name__ == "__main__":
    process.main(sys.argv[1], main)
