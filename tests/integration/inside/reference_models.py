"""The reference's models against transformers: the same weights give the same logits. Prints family and largest gap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM

from primus.recipes.resolve import resolve
from primus.recipes.setting import Asked
from primus.training.finetune.models import config_of
from primus.training.reference.model import Model, shapes
from primus.training.reference.names import to_canonical


def main() -> None:
    torch.manual_seed(0)
    for name in ("llama2-7b", "llama3.1-8b", "mistral-7b", "qwen2.5-7b", "mixtral-8x7b"):
        sizes = resolve(name, [], Asked(gpu="cpu", proxy=True)).architecture
        if sizes.family == "mistral":
            sizes = replace(sizes, window=7)
        model = AutoModelForCausalLM.from_config(config_of(sizes, "eager"))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
        weights = to_canonical("finetune", sizes, {f"model.{name}": value for name, value in model.named_parameters()})
        assert {key: tuple(value.shape) for key, value in weights.items()} == shapes(sizes), name
        tokens = torch.randint(0, sizes.vocab_size, (2, 33))
        with torch.no_grad():
            ours, _ = Model(sizes).logits({key: value.double() for key, value in weights.items()}, tokens)
            theirs = model(tokens).logits
        print(name, f"{float((ours - theirs).abs().max() / theirs.abs().max()):.1e}", flush=True)
        for wrong in _wrong(sizes):
            other, _ = Model(wrong).logits({key: value.double() for key, value in weights.items()}, tokens)
            assert float((other.detach() - theirs).abs().max() / theirs.abs().max()) > 1e-4, (name, wrong)


def _wrong(sizes: object) -> Iterator[object]:
    """The same sizes with one thing changed: what tells nothing apart would agree with these, too."""
    yield replace(sizes, rope_theta=sizes.rope_theta * 0.9)  # type: ignore[type-var, attr-defined]
    yield replace(sizes, norm_eps=1e-2)  # type: ignore[type-var]
    yield replace(sizes, window=5)  # type: ignore[type-var]


main()
