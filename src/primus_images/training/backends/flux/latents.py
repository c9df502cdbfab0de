"""Image data: samples of latents, text embeddings and noise by number, cached or synthetic."""

from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pixel_unshuffle
from typing_extensions import override

from primus_images.recipes.architecture import DiffusionTransformer
from primus_images.recipes.recipe import MOCK
from primus_images.training.backends.flux.backend import KEYS
from primus_images.training.backends.loop.config import RankJob
from primus_images.training.backends.loop.data import generator_of, place_of
from primus_images.training.backends.loop.session import Batch, Data

_MOCK_PROMPTS = 16


def packed(latents: torch.Tensor) -> torch.Tensor:
    """Convert latents [channels, height, width] to tokens [height/2 · width/2, channels · 4]."""
    return pixel_unshuffle(latents, 2).flatten(1).T


class Images(Data):
    """The cached images that the job's assets name, or synthetic ones.

    Each of 16 synthetic prompts has a picture, of which its images are small variations. The noise
    of a sample and its level depend on the sample's number.
    """

    def __init__(self, job: RankJob) -> None:
        from safetensors import safe_open

        dit = job.model.dit
        corpus = job.assets["corpus"]
        self._seed = job.training.seed
        tokens = dit.image_tokens + dit.text_tokens
        if job.training.seq_len != tokens:
            raise SystemExit(
                f"seq_len is {job.training.seq_len}, but image and text have {tokens} tokens"
            )
        self._places: list[tuple[list[Any], int]] = []
        if corpus == MOCK:
            self._draw(dit)
            return
        for file in sorted(Path(corpus).glob("*.safetensors")):
            handle = safe_open(file, framework="pt")
            slices = [handle.get_slice(key) for key in KEYS]
            images = slices[0].get_shape()[0]
            self._places += [(slices, row) for row in range(images)]

    def _draw(self, dit: DiffusionTransformer) -> None:
        generator = generator_of(self._seed, -1)
        common = torch.randn(dit.in_channels, generator=generator)
        shape = (_MOCK_PROMPTS, dit.image_tokens, dit.in_channels)
        self._pictures = common + 0.3 * torch.randn(shape, generator=generator)
        shape = (_MOCK_PROMPTS, dit.text_tokens, dit.text_dim)
        self._text = torch.randn(shape, generator=generator)
        self._pooled = torch.randn(_MOCK_PROMPTS, dit.pooled_dim, generator=generator)

    def _sample(self, number: int) -> dict[str, torch.Tensor]:
        if self._places:
            place = place_of(number, len(self._places), self._seed)
            slices, row = self._places[place]
            latents, text, pooled = (part[row : row + 1][0].float() for part in slices)
            return {"latents": packed(latents), "text": text, "pooled": pooled}
        generator = generator_of(self._seed, number)
        prompt = int(torch.randint(_MOCK_PROMPTS, (), generator=generator))
        picture = self._pictures[prompt]
        varied = picture + 0.1 * torch.randn(picture.shape, generator=generator)
        return {"latents": varied, "text": self._text[prompt], "pooled": self._pooled[prompt]}

    @override
    def batch(self, first: int, count: int) -> Batch:
        samples = []
        for number in range(first, first + count):
            # seed + 1, so that it differs from the generators of the samples themselves.
            generator = generator_of(self._seed + 1, number)
            sample = self._sample(number)
            sample["noise"] = torch.randn(sample["latents"].shape, generator=generator)
            sample["time"] = torch.randn((), generator=generator).sigmoid()
            samples.append(sample)
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
