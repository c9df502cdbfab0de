"""Building Hugging Face's models from a recipe's sizes, and loading their weights from Hugging
Face's files.
"""

import json
import math
import re
import shutil
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from typing_extensions import override

from primus_images.files import write_file
from primus_images.recipes import family
from primus_images.recipes.architecture import Architecture
from primus_images.recipes.tensors import MXFP4
from primus_images.training.backends.loop import weights
from primus_images.training.backends.loop.session import LanguageModel
from primus_images.training.text.corpus import TOKENIZER_FILES
from primus_images.training.text.encoder import Encoder

if TYPE_CHECKING:
    from primus_images.training.backends.finetune.backend import LoraConfig

# The output layer and the embedding.
OUTER = ("lm_head.weight", "model.embed_tokens.weight")
# The parts that PEFT adds to the names of weights.
_ADAPTED = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)")
_EXPERTS = re.compile(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)$")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def config_of(model: Architecture, attention: str) -> Any:
    """Return transformers' configuration of ``model``."""
    from transformers import AutoConfig

    known = family.family(model.family)
    settings = family.config_of(model)
    if "head_dim" in known.backends.get("finetune", family.Support()).lacks:
        del settings["head_dim"]
    if model.moe.experts:
        settings |= {"router_aux_loss_coef": model.moe.auxiliary_loss}
    # The special tokens are unknown here, and some defaults are outside of a small vocabulary.
    marks = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = AutoConfig.for_model(known.transformers, **settings, **marks, use_cache=False)
    # Recipes have no dropout, but some defaults do.
    for name in [name for name in config.to_dict() if name.endswith(("dropout", "pdrop"))]:
        setattr(config, name, 0.0)
    config._attn_implementation = attention
    return config


def causal_model(model: Architecture, attention: str, source: Path | None = None) -> Any:
    """Return the model, with parameters without memory. If there is ``source``, its config.json
    describes the model.
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
    if attention != "sdpa" or kind._supports_sdpa:
        configuration._attn_implementation = attention
    else:
        configuration._attn_implementation = "eager"
    with weights.empty():
        return AutoModelForCausalLM.from_config(configuration, dtype=torch.float32)


def config_of_weights(source: Path) -> Any:
    """Return transformers' configuration of the plain model of the weights, although they may be in
    MXFP4.
    """
    from transformers import AutoConfig

    configuration = AutoConfig.from_pretrained(source, trust_remote_code=False).get_text_config()
    if hasattr(configuration, "quantization_config"):
        del configuration.quantization_config
    return configuration


def write(
    model: "FineTuned",
    folder: Path,
    state: Mapping[str, torch.Tensor],
    tokenizer: Path | None,
    source: Path | None = None,
) -> None:
    """Write ``state`` as the weights of ``model`` or its adapters, with the files and special
    tokens of ``tokenizer``.

    The special tokens and ``generation_config.json`` of the initial weights in ``source`` are kept.
    """
    encoder = None
    if tokenizer:
        encoder = Encoder(str(tokenizer))
    if encoder:
        marks = {"bos_token_id": encoder.tokenizer.bos_token_id, "eos_token_id": encoder.end}
    else:
        marks = {}
    for holder in (model.causal.config, model.causal.generation_config):
        holder.use_cache = True
        for key, number in marks.items():
            if getattr(holder, key, None) is None and number is not None:
                setattr(holder, key, number)
    model.model.save_pretrained(folder, state_dict=dict(state))
    if source:
        copied = [source.glob("generation_config.json")]
    else:
        copied = []
    copied += [tokenizer.glob(pattern) for pattern in TOKENIZER_FILES] if tokenizer else []
    for file in filter(Path.is_file, chain(*copied)):
        shutil.copyfile(file, folder / file.name)
    if (file := folder / "config.json").is_file():
        config = json.loads(file.read_text(encoding="utf-8"))
        write_file(
            file,
            json.dumps(config | _older_names(config.get("rope_parameters") or {}), indent=2) + "\n",
        )


def _older_names(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary settings as before transformers 5: servers with an older one would take 10,000
    as the base.
    """
    whole = rope.get("full_attention", rope)
    if "sliding_attention" in rope:
        local = {"rope_local_base_freq": rope["sliding_attention"]["rope_theta"]}
    else:
        local = {}
    scaling = {key: value for key, value in whole.items() if key != "rope_theta"}
    plain = scaling.get("rope_type", "default") == "default"
    if whole:
        return {
            "rope_theta": whole["rope_theta"],
            "rope_scaling": None if plain else scaling,
            **local,
        }
    return {}


def adapted(model: Any, lora: "LoraConfig") -> Any:
    """Freeze ``model`` and add adapters. Raises SystemExit if a target names no layer, or one that
    PEFT refuses.
    """
    from peft import LoraConfig as PeftConfig, get_peft_model

    # Some routers are linear layers that return more than a product.
    names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if type(module) is nn.Linear
    }
    names.discard("lm_head")
    unknown = sorted(set(lora.targets) - names)
    if unknown:
        raise SystemExit(
            f"lora.targets: no linear layer is named {', '.join(unknown)}; there are "
            f"{sorted(names)}"
        )
    settings = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        init_lora_weights=False,
        target_modules=list(lora.targets) or sorted(names),
        task_type="CAUSAL_LM",
    )
    try:
        with weights.empty():
            return get_peft_model(model, settings, autocast_adapter_dtype=False)
    except ValueError as error:
        raise SystemExit(f"lora.targets: {error}; there are {sorted(names)}") from error


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
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        causal = self.causal
        balance = getattr(causal, "router_aux_loss_coef", 0.0)
        if balance:
            more = {"output_router_logits": True}
        else:
            more = {}
        # Where positions begin again, transformers masks what lies before.
        output = causal.model(input_ids=tokens, position_ids=positions, use_cache=False, **more)
        if not balance or labels is None:
            return output.last_hidden_state, None
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        counted = _before_labels(labels, positions)
        routed = load_balancing_loss_func(
            output.router_logits, causal.num_experts, causal.num_experts_per_tok, counted
        )
        return output.last_hidden_state, balance * routed


class WholeLogits(FineTuned):
    """One of Hugging Face's models that primus has no formula of: its logits may be more than its
    output layer's.
    """

    @override
    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        logits = self.causal(input_ids=input_ids, use_cache=False).logits.float().flatten(0, 1)
        return functional.cross_entropy(
            logits, labels.flatten(), ignore_index=-100, reduction="sum"
        )


def _before_labels(labels: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """Return whether a label of the same document depends on each token: none does behind the last
    one, on padding.
    """
    places = torch.arange(labels.shape[1], device=labels.device).expand_as(labels)
    if positions is None:
        documents = torch.zeros_like(labels)
    else:
        documents = (positions == 0).cumsum(-1)
    none = labels.new_full((len(labels), labels.shape[1] + 1), -1)
    lasts = none.scatter_reduce(-1, documents, places.where(labels != -100, -1), "amax")
    return places <= lasts.gather(-1, documents)


def init(model: nn.Module, seed: int, files: weights.Files | None, norm: float = 1.0) -> None:
    """Set every weight of the sharded ``model`` from the files or, without files, from the seed
    (norms to ``norm``).

    Adapters start without effect. Raises SystemExit if the files lack a weight.
    """
    for name, parameter in model.named_parameters():
        plain = _ADAPTED.sub("", name.removeprefix("model."))
        if ".lora_B." in plain:
            weights.fill(parameter, weights.constant(parameter, 0.0))
        elif ".lora_A." in plain:
            # The same variance as in PEFT's own initialization.
            weights.fill(
                parameter,
                weights.normal(plain, parameter, seed, 1 / math.sqrt(3 * parameter.shape[-1])),
            )
        elif files is not None:
            weights.fill(parameter, stored(files, plain))
        else:
            weights.draw_one(plain, parameter, seed, outer=plain in OUTER, norm=norm)
    if files is not None:
        buffers = dict(model.named_buffers())
        for name in buffers.keys() & model.state_dict().keys():
            weights.fill(
                buffers[name], stored(files, _ADAPTED.sub("", name.removeprefix("model.")))
            )


def stored(files: weights.Files, name: str) -> weights.Rows:
    """Return the rows of a parameter of transformers' model from files."""
    experts = _EXPERTS.match(name)
    packed = [f"{name}{part}" for part in MXFP4]
    if packed[0] in files:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        return lambda first, last: convert_moe_packed_tensors(
            *(files.rows_of(part)(first, last) for part in packed)
        )
    if name in files or not experts:
        return files.rows_of(name)
    # Files have three matrices per expert. transformers stacks those of all experts.
    head = f"{experts[1]}.mlp.experts"
    places = _PARTS[experts[2]]

    def rows(first: int, last: int) -> torch.Tensor:
        experts = range(first, last)
        return torch.stack(
            [
                torch.cat([files.whole(f"{head}.{n}.{part}.weight") for part in places])
                for n in experts
            ]
        )

    return rows
