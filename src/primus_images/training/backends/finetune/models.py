"""Hugging Face's models, from a recipe's sizes or a config.json, and the loss that trains them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from primus_images.recipes import family
from primus_images.recipes.architecture import Architecture
from primus_images.training.backends.loop import weights
from primus_images.training.backends.loop.session import IGNORED, LanguageModel
from primus_images.turbo.packed import bounds_of

if TYPE_CHECKING:
    from primus_images.training.backends.finetune.backend import LoraConfig


# Their kernels read a layer's weight and leave out its adapter, so that PEFT refuses it.
_MAMBAS = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")


def config_of(model: Architecture, attention: str) -> Any:
    """Return transformers' configuration of ``model``."""
    from transformers import AutoConfig

    known = family.family(model.family)
    settings = family.config_of(model)
    support = known.backends.get("finetune", family.Support())
    if "head_dim" in support.lacks:
        del settings["head_dim"]
    if model.moe.experts:
        settings["router_aux_loss_coef"] = model.moe.auxiliary_loss
    # The special tokens are unknown here, and some defaults are outside of a small vocabulary.
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        settings[token] = None
    config = AutoConfig.for_model(known.transformers, **settings, use_cache=False)
    # Recipes have no dropout, but some defaults do.
    for name in config.to_dict():
        if name.endswith(("dropout", "pdrop")):
            setattr(config, name, 0.0)
    config._attn_implementation = attention
    return config


def causal_model(model: Architecture, attention: str, source: Path | None = None) -> Any:
    """Return the model, with parameters without memory.

    If there is ``source``, its config.json describes the model.
    """
    from transformers import AutoModelForCausalLM

    if source is None:
        configuration = config_of(model, attention)
    else:
        # Settings that a recipe cannot express keep the values of the weights' config.json.
        configuration = config_of_weights(source)
        configuration.use_cache = False
        if model.moe.experts:
            configuration.router_aux_loss_coef = model.moe.auxiliary_loss
    kind = AutoModelForCausalLM._model_mapping[type(configuration)]
    configuration._attn_implementation = attention
    if attention == "sdpa" and not kind._supports_sdpa:
        configuration._attn_implementation = "eager"
    with weights.empty():
        return AutoModelForCausalLM.from_config(configuration, dtype=torch.float32)


def layers_of(causal: Any, *, has_formula: bool) -> list[nn.Module]:
    """Return the layers of a model, each of which is sharded on its own.

    Of a model of no family, it is the list of modules with the most weights. It is empty if there
    is none, or if layers share weights.
    """
    if has_formula:
        return list(causal.model.layers)
    lists = [
        module
        for name, module in causal.named_modules()
        if isinstance(module, nn.ModuleList) and not re.search(r"\.\d+\.", name)
    ]
    layers = list(max(lists, key=_numbers, default=nn.ModuleList()))
    names: dict[nn.Parameter, int] = {}
    for _, parameter in causal.named_parameters(remove_duplicate=False):
        names[parameter] = names.get(parameter, 0) + 1
    for layer in layers:
        for _, parameter in layer.named_parameters(remove_duplicate=False):
            if names[parameter] > 1:
                return []
    return layers


def _numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def config_of_weights(source: Path) -> Any:
    """Return transformers' configuration of the model in ``source``, without quantization."""
    from transformers import AutoConfig

    whole = AutoConfig.from_pretrained(source, trust_remote_code=False)
    configuration = whole.get_text_config()
    # transformers ties the weights of a model of several parts as the whole says.
    if whole is not configuration and hasattr(whole, "tie_word_embeddings"):
        configuration.tie_word_embeddings = whole.tie_word_embeddings
    if hasattr(configuration, "quantization_config"):
        del configuration.quantization_config
    return configuration


def adapted(model: Any, lora: "LoraConfig") -> Any:
    """Freeze ``model`` and add adapters.

    Raises SystemExit if a target names no layer, or one that PEFT refuses.
    """
    from peft import LoraConfig as PeftConfig, get_peft_model

    names = _linear_layers(model)
    unknown = sorted(set(lora.targets) - set(names))
    if unknown:
        raise SystemExit(
            f"lora.targets: no linear layer is named {', '.join(unknown)}; there are {names}"
        )
    _refuse_shared(model, list(lora.targets) or names)
    settings = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        init_lora_weights=False,
        target_modules=list(lora.targets) or names,
        task_type="CAUSAL_LM",
    )
    try:
        with weights.empty():
            return get_peft_model(model, settings, autocast_adapter_dtype=False)
    except ValueError as error:
        raise SystemExit(f"lora.targets: {error}; there are {names}") from error


def _refuse_shared(model: Any, targets: Sequence[str]) -> None:
    """Raise SystemExit if layers that get adapters have a weight in common."""
    ends = tuple(f".{target}.weight" for target in targets)
    seen: set[nn.Parameter] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not name.endswith(ends):
            continue
        if parameter in seen:
            raise SystemExit(
                f"lora.targets: layers share {name}, and each would have its own adapter of it; "
                "--mode full trains it, or lora.targets names other layers"
            )
        seen.add(parameter)


def _linear_layers(model: Any) -> list[str]:
    """Return the last names of the linear layers that may get adapters."""
    from transformers.pytorch_utils import Conv1D

    plain, derived = set(), set()
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is head:
            continue
        if type(module) in (nn.Linear, Conv1D):
            plain.add(_last_name(name))
        elif isinstance(module, nn.Linear):
            derived.add(_last_name(name))
    if model.config.model_type in _MAMBAS:
        plain -= {"out_proj"}
    # Some routers are derived from linear layers, and return more than a product. In Falcon, all
    # linear layers are derived ones.
    return sorted(plain or derived)


def _last_name(name: str) -> str:
    """Return the last part of a name, which is no number: layers have these, too."""
    match = re.search(r"[^.]*?(\.\d+)*$", name)
    return match[0] if match else name


class FineTuned(LanguageModel):
    """One of Hugging Face's causal models, with or without PEFT's adapters, for the loop."""

    def __init__(self, model: Any, chunk: int) -> None:
        super().__init__(chunk)
        self.model = model

    @property
    def causal(self) -> Any:
        """Hugging Face's model, without PEFT's wrapper."""
        if hasattr(self.model, "get_base_model"):
            return self.model.get_base_model()
        return self.model

    @property
    @override
    def head(self) -> nn.Linear:
        return self.causal.lm_head

    @override
    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        ends: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        causal = self.causal
        balance = getattr(causal, "router_aux_loss_coef", 0.0)
        options: dict[str, Any] = {}
        if balance:
            options["output_router_logits"] = True
        # Where positions begin again, transformers masks what lies before, unless its attention
        # takes the bounds of documents.
        if ends is not None:
            options["document_bounds"] = bounds_of(ends, tokens.shape[1])
        output = causal.model(input_ids=tokens, position_ids=positions, use_cache=False, **options)
        if not balance or labels is None:
            return output.last_hidden_state, None
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        routed = load_balancing_loss_func(
            output.router_logits,
            causal.num_experts,
            causal.num_experts_per_tok,
            _before_labels(labels, positions),
        )
        return output.last_hidden_state, balance * routed


class WholeLogits(FineTuned):
    """One of Hugging Face's models that primus has no formula of.

    Its logits may be more than those of its output layer.
    """

    @override
    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        positions: torch.Tensor | None = None,
        ends: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        logits = self.causal(input_ids=input_ids, use_cache=False).logits.float().flatten(0, 1)
        return functional.cross_entropy(
            logits, labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )


def _before_labels(labels: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """Return whether a label of the same document depends on each token.

    No label depends on what follows the last one, which is padding.
    """
    samples, length = labels.shape
    places = torch.arange(length, device=labels.device).expand_as(labels)
    documents = torch.zeros_like(labels)
    if positions is not None:
        documents = (positions == 0).cumsum(-1)
    labelled = places.where(labels != IGNORED, -1)
    last_labels = labels.new_full((samples, length + 1), -1)
    last_labels = last_labels.scatter_reduce(-1, documents, labelled, "amax")
    return places <= last_labels.gather(-1, documents)
