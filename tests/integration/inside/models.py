"""Run by Python with torch. Our Llama computes what Hugging Face's does; every recipe's model has
its sizes.
"""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from primus_images.recipes import load
from primus_images.recipes.architecture import (
    Architecture,
    DiffusionTransformer,
    MixtureOfExperts,
    RopeScaling,
    architecture,
    shapes,
    size,
)
from primus_images.recipes.family import described, families_of, family
from primus_images.training.backends.finetune import initial, models
from primus_images.training.backends.finetune.backend import LoraConfig
from primus_images.training.backends.flux.entry import flow_matching, transformer
from primus_images.training.backends.fsdp.llama import Llama
from primus_images.training.backends.loop import weights
from primus_images.training.judge.reference.names import to_canonical
from primus_images.training.judge.reference.parameters import without_bias

SMALL = Architecture(
    family="llama3",
    layers=2,
    hidden_size=64,
    heads=4,
    kv_heads=2,
    ffn_size=96,
    vocab_size=128,
    max_seq_len=256,
    rope_theta=500000.0,
)
STRETCHED = RopeScaling(
    kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64
)
SAME = {
    "llama3.1": replace(SMALL, rope_scaling=STRETCHED),
    "llama2": replace(SMALL, family="llama2", kv_heads=4, rope_theta=10000.0),
    "mistral": replace(SMALL, family="mistral", window=16, head_dim=32),
    "qwen2": replace(SMALL, family="qwen2", qkv_bias=True, tied_embeddings=True),
    "qwen3": replace(SMALL, family="qwen3", qk_norm=True, head_dim=32),
}
MIXED = replace(SMALL, family="mixtral", moe=MixtureOfExperts(experts=4, top_k=2, ffn_size=32))


@torch.no_grad()
def check_same_logits_and_loss(name: str, model: Architecture) -> None:
    hub = AutoModelForCausalLM.from_config(models.config_of(model, "sdpa"))
    for parameter in hub.parameters():
        parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    own = Llama(model, 64, 1024)
    given = dict(hub.named_parameters())
    for own_name, parameter in own.named_parameters():
        parameter.copy_(given.pop(*to_canonical("fsdp", model, {own_name: parameter})))
    assert not given, f"{name}: {sorted(given)} have no counterpart"
    tokens = torch.randint(model.vocab_size, (2, 64))
    labels = tokens.roll(-1, 1)
    logits = hub(tokens).logits
    assert logits.std() > 0.5, f"{name}: the logits say nothing"
    torch.testing.assert_close(own.head(own.hidden(tokens)[0]), logits, rtol=1e-4, atol=1e-4)
    whole = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(own(tokens, labels), whole, rtol=1e-5, atol=0.0)
    in_chunks = models.FineTuned(hub, 24)
    torch.testing.assert_close(in_chunks(tokens, labels), whole, rtol=1e-5, atol=0.0)


def check_a_default_of_dropout_is_not_trained() -> None:
    with patch.object(
        AutoConfig, "for_model", lambda *_, **_settings: LlamaConfig(attention_dropout=0.1)
    ):
        assert models.config_of(SMALL, "sdpa").attention_dropout == 0.0


def check_tied_weights_stay_one() -> None:
    tied = replace(SMALL, tied_embeddings=True)
    with weights.empty():
        own = Llama(tied, 64, 1024)
    hub = models.causal_model(tied, "sdpa")
    assert own.output.weight is own.embedding.weight
    assert hub.lm_head.weight is hub.model.embed_tokens.weight


def check_mixtrals_files_are_read() -> None:
    """Its files name and cut the experts otherwise than transformers' model does."""
    hub = AutoModelForCausalLM.from_config(models.config_of(MIXED, "sdpa"))
    with TemporaryDirectory() as folder:
        hub.save_pretrained(folder)
        files = weights.Files(Path(folder))
        assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in files, (
            "the files are not as Mixtral's"
        )
        again = models.FineTuned(
            AutoModelForCausalLM.from_config(models.config_of(MIXED, "sdpa")), 64
        )
        initial.init(again, 1, files)
    for (name, mine), saved in zip(again.model.named_parameters(), hub.parameters(), strict=True):
        assert torch.equal(mine, saved), name


def check_balance_is_trained_on_and_not_reported() -> None:
    losses, gates = [], []
    for balance in (0.5, 0.0):
        torch.manual_seed(1)
        moe = replace(MIXED.moe, auxiliary_loss=balance)
        hub = AutoModelForCausalLM.from_config(models.config_of(replace(MIXED, moe=moe), "sdpa"))
        model = models.FineTuned(hub, 1024).train()
        tokens = torch.randint(128, (2, 32))
        loss = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        losses.append(loss.item())
        gates.append(hub.model.layers[0].mlp.gate.weight.grad.norm().item())
    assert losses[0] == losses[1], losses
    assert gates[0] != gates[1], gates


def check_adapters_alone_are_trained() -> None:
    adapted = models.adapted(
        models.causal_model(SMALL, "sdpa"), LoraConfig(rank=2, targets=["q_proj"])
    )
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * SMALL.layers, trained
    assert all(".lora_" in name for name in trained), trained
    everywhere = models.adapted(models.causal_model(MIXED, "sdpa"), LoraConfig())
    beside = {
        name.split(".lora_A")[0].rpartition(".")[2]
        for name, _ in everywhere.named_parameters()
        if "lora_A" in name
    }
    assert beside == {"q_proj", "k_proj", "v_proj", "o_proj"}, beside
    try:
        models.adapted(models.causal_model(SMALL, "sdpa"), LoraConfig(targets=["c_attn"]))
    except SystemExit as told:
        assert "c_attn" in str(told), told
    else:
        raise AssertionError("a target that names no layer was taken")


def check_published_models() -> None:
    """What publishers say is transformers' model: the same names, shapes and number of parameters,
    without memory.
    """
    files = sorted((load.folder() / "published").glob("*.json"))
    assert len(files) > 20
    for file in files:
        facts = json.loads(file.read_text())
        parameters = facts.pop("parameters")
        if "model_type" not in facts:
            continue
        known = family(families_of(facts["model_type"])[0])
        fixed = {key: only[0] for key, only in known.values.items()}
        told = {key: value for key, _, value in described(known, facts, file)}
        model = architecture({"family": known.name, **fixed, **told})
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**facts))
        kept = {f"model.{name}": value for name, value in made.state_dict().items()}
        canonical = to_canonical("finetune", model, kept)
        assert {
            name: tuple(value.shape) for name, value in without_bias(canonical).items()
        } == shapes(model), file.stem
        assert (
            sum(value.numel() for value in canonical.values()) == size(model).total == parameters
        ), file.stem


def check_fluxs_blocks_differ_in_their_gradients_layout() -> None:
    """Why FLUX trains without cuDNN's attention. With one layout of the gradients the entry may
    allow it again.
    """
    model = _small_flux()
    attend, inputs, gradients = functional.scaled_dot_product_attention, set(), set()

    def noting(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: object
    ) -> torch.Tensor:
        inputs.add((query.shape, query.stride(), key.stride(), value.stride()))
        output = attend(query, key, value, **given)
        output.register_hook(lambda gradient: gradients.add(gradient.stride()))
        return output

    functional.scaled_dot_product_attention = noting
    try:
        flow_matching(model, _images(2), 4, 1.0).backward()
    finally:
        functional.scaled_dot_product_attention = attend
    assert len(inputs) == 1, inputs
    assert len(gradients) == 2, gradients


def check_flux_begins_with_its_last_layers_gradient_alone() -> None:
    """Memory that nobody set is NaN here, and times are at both ends: all gradients exist, are
    finite, and mostly 0.
    """
    model = _small_flux()
    batch = _images(2) | {"time": torch.tensor([0.0, 1.0])}
    loss = flow_matching(model, batch, 4, 1.0)
    loss.backward()
    assert loss.item() == (batch["noise"] - batch["latents"]).square().mean((1, 2)).sum().item()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.any()) == name.startswith("proj_out."), name
        assert parameter.grad.isfinite().all(), name


def _small_flux() -> nn.Module:
    dit = DiffusionTransformer(
        double_layers=2,
        single_layers=2,
        in_channels=16,
        text_dim=32,
        pooled_dim=32,
        image_size=64,
        text_tokens=8,
        guidance=True,
    )
    model = transformer(Architecture(family="flux", hidden_size=64, heads=4, head_dim=16, dit=dit))
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(float("nan"))
    weights.draw_all(model, 1, zero=("proj_out.weight", "proj_out.bias"))
    return model


def _images(count: int) -> dict[str, torch.Tensor]:
    shapes = {"latents": (16, 16), "noise": (16, 16), "text": (8, 32), "pooled": (32,)}
    return {name: torch.randn(count, *shape) for name, shape in shapes.items()} | {
        "time": torch.rand(count)
    }


torch.manual_seed(0)
for label, small in SAME.items():
    check_same_logits_and_loss(label, small)
check_a_default_of_dropout_is_not_trained()
check_tied_weights_stay_one()
check_mixtrals_files_are_read()
check_balance_is_trained_on_and_not_reported()
check_adapters_alone_are_trained()
check_published_models()
check_fluxs_blocks_differ_in_their_gradients_layout()
check_flux_begins_with_its_last_layers_gradient_alone()
