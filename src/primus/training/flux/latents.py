"""Image data: samples of latents, text embeddings and noise, accessed by number, from a cache or synthetic."""

from __future__ import annotations

from pathlib import Path

import torch
from typing_extensions import override

from primus.recipes.architecture import DiffusionTransformer
from primus.recipes.recipe import MOCK
from primus.training.flux.backend import KEYS, FluxConfig
from primus.training.loop.config import RankJob
from primus.training.loop.data import generator_of, place_of
from primus.training.loop.session import Batch, Data

# One latent of the VAE is 8 × 8 pixels, and one token of the transformer is 2 × 2 latents.
_PIXELS_PER_TOKEN = 16
_MOCK_PROMPTS = 16


def image_tokens(model: DiffusionTransformer) -> int:
    """Return the number of tokens of one square image."""
    return (model.image_size // _PIXELS_PER_TOKEN) ** 2


def packed(latents: torch.Tensor) -> torch.Tensor:
    """Convert latents [channels, height, width] to tokens [height/2 · width/2, channels · 4]."""
    channels, height, width = latents.shape
    split = latents.reshape(channels, height // 2, 2, width // 2, 2)
    return split.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1)


class Images(Data):
    """Samples of latents, text and pooled text. The noise of a sample and its level depend on the sample's number."""

    def __init__(self, job: RankJob, config: FluxConfig) -> None:
        self._seed = job.training.seed
        self._times = config.times
        self.tokens_per_sample = tokens = image_tokens(job.model.dit) + job.model.dit.text_tokens
        self.images_per_sample = 1
        if job.training.seq_len != tokens:
            raise SystemExit(f"seq_len is {job.training.seq_len}, but image and text have {tokens} tokens")

    def sample(self, number: int) -> dict[str, torch.Tensor]:
        """Return ``latents`` [tokens, channels], ``text`` and ``pooled`` of one image, float32."""
        raise NotImplementedError

    @override
    def batch(self, first: int, count: int) -> Batch:
        samples = []
        for number in range(first, first + count):
            # seed + 1, so that it differs from the generators of the samples themselves.
            generator = generator_of(self._seed + 1, number)
            sample = self.sample(number)
            noise = torch.randn(sample["latents"].shape, generator=generator)
            uniform = self._times == "uniform"
            time = torch.rand((), generator=generator) if uniform else torch.randn((), generator=generator).sigmoid()
            samples.append({**sample, "noise": noise, "time": time})
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    @override
    def terms(self, batch: Batch) -> int:
        return len(batch["latents"])


class _Mock(Images):
    """Synthetic prompts, each with one picture. The images of a prompt are small variations of its picture."""

    def __init__(self, job: RankJob, config: FluxConfig) -> None:
        super().__init__(job, config)
        model = job.model.dit
        generator = generator_of(self._seed, -1)
        common = torch.randn(model.in_channels, generator=generator)
        shape = (_MOCK_PROMPTS, image_tokens(model), model.in_channels)
        self._pictures = common + 0.3 * torch.randn(shape, generator=generator)
        self._text = torch.randn(_MOCK_PROMPTS, model.text_tokens, model.text_dim, generator=generator)
        self._pooled = torch.randn(_MOCK_PROMPTS, model.pooled_dim, generator=generator)

    @override
    def sample(self, number: int) -> dict[str, torch.Tensor]:
        generator = generator_of(self._seed, number)
        prompt = int(torch.randint(_MOCK_PROMPTS, (), generator=generator))
        picture = self._pictures[prompt]
        varied = picture + 0.1 * torch.randn(picture.shape, generator=generator)
        return {"latents": varied, "text": self._text[prompt], "pooled": self._pooled[prompt]}


class Cached(Images):
    """The images of the cache in ``folder``. Raises SystemExit if it contains none."""

    def __init__(self, job: RankJob, config: FluxConfig, folder: Path) -> None:
        from safetensors import safe_open

        super().__init__(job, config)
        self._places = []
        for file in sorted(folder.glob("*.safetensors")):
            handle = safe_open(file, framework="pt")
            slices = [handle.get_slice(key) for key in KEYS]
            self._places += [(slices, row) for row in range(slices[0].get_shape()[0])]
        if not self._places:
            raise SystemExit(f"{folder} contains no cached latents")

    @override
    def sample(self, number: int) -> dict[str, torch.Tensor]:
        slices, row = self._places[place_of(number, len(self._places), self._seed)]
        latents, text, pooled = (part[row : row + 1][0].float() for part in slices)
        return {"latents": packed(latents), "text": text, "pooled": pooled}


def images(job: RankJob, config: FluxConfig) -> Images:
    """Return the data that the job's assets name."""
    corpus = job.assets["corpus"]
    return _Mock(job, config) if corpus == MOCK else Cached(job, config, Path(corpus))
