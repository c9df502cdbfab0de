"""Building Hugging Face's models from a recipe's sizes, and loading their weights from Hugging Face's files."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from primus.recipes.architecture import Architecture
from primus.training.finetune.backend import TYPES, FinetuneConfig, LoraConfig
from primus.training.loop import weights
from primus.training.loop.data import marks_of
from primus.training.loop.session import LanguageModel

_OUTER = ("lm_head.weight", "model.embed_tokens.weight")
# The parts that PEFT adds to the names of weights.
_ADAPTED = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)")
_EXPERTS = re.compile(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)$")


def config_of(model: Architecture, attention: str) -> Any:
    """Return transformers' configuration of ``model``. Raises SystemExit for an unsupported family."""
    from transformers import AutoConfig

    if model.family not in TYPES:
        raise SystemExit(f"the finetune backend has no model for the family {model.family}")
    kind = TYPES[model.family]
    settings: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_embeddings,
        "rope_parameters": _rope(model),
        # The special tokens are unknown here, and some defaults are outside of a small vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "use_cache": False,
        "attn_implementation": attention,
    }
    if kind != "qwen2":
        settings["head_dim"] = model.head_size
    if kind == "mistral":
        settings["sliding_window"] = model.window or None
    elif kind == "mixtral":
        settings |= {
            "sliding_window": model.window or None,
            "num_local_experts": model.moe.experts,
            "num_experts_per_tok": model.moe.top_k,
            "intermediate_size": model.moe.ffn_size or model.ffn_size,
            "router_aux_loss_coef": model.moe.auxiliary_loss,
        }
    elif kind == "qwen2" and model.window:
        settings |= {"use_sliding_window": True, "sliding_window": model.window, "max_window_layers": 0}
    return AutoConfig.for_model(kind, **settings)


def _rope(model: Architecture) -> dict[str, Any]:
    scaling = model.rope_scaling
    if scaling.kind == "none":
        return {"rope_type": "default", "rope_theta": float(model.rope_theta)}
    common = {
        "rope_type": scaling.kind,
        "rope_theta": float(model.rope_theta),
        "factor": float(scaling.factor),
        "original_max_position_embeddings": scaling.original_max_position,
    }
    if scaling.kind == "llama3":
        return common | {
            "low_freq_factor": float(scaling.low_freq_factor),
            "high_freq_factor": float(scaling.high_freq_factor),
        }
    return common | {"beta_fast": float(scaling.beta_fast), "beta_slow": float(scaling.beta_slow)}


def causal_model(
    model: Architecture, config: FinetuneConfig, source: Path | None = None, attention: str | None = None
) -> Any:
    """Return the model, with parameters without memory. If there is ``source``, its config.json describes the model.

    ``attention`` replaces the attention implementation of ``config``.
    """
    attention = attention or config.attention
    from transformers import AutoConfig, AutoModelForCausalLM

    if source is None:
        configuration = config_of(model, attention)
    else:
        # Settings that a recipe cannot express keep the values of the weights' config.json.
        configuration = AutoConfig.from_pretrained(source, attn_implementation=attention, use_cache=False)
        if model.moe.experts:
            configuration.router_aux_loss_coef = model.moe.auxiliary_loss
    with weights.empty():
        return AutoModelForCausalLM.from_config(configuration, dtype=torch.float32)


def ready_to_generate(model: FineTuned, tokenizer: Path | None) -> None:
    """Prepare the configuration for export: enable the cache, and set the special tokens of ``tokenizer``.

    Special tokens from the original weights are kept.
    """
    config = model.causal.config
    config.use_cache = True
    marks = marks_of(tokenizer) if tokenizer else {}
    for holder in (config, model.causal.generation_config):
        for key, number in marks.items():
            if getattr(holder, key, None) is None:
                setattr(holder, key, number)
    model.causal.generation_config.use_cache = True


def adapted(model: Any, lora: LoraConfig) -> Any:
    """Freeze ``model`` and add adapters. Raises SystemExit if a target names no layer."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    names.discard("lm_head")
    if unknown := sorted(set(lora.targets) - names):
        raise SystemExit(f"lora.targets: no linear layer is named {', '.join(unknown)}; there are {sorted(names)}")
    with weights.empty():
        return get_peft_model(
            model,
            PeftConfig(
                r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, init_lora_weights=False,
                target_modules=list(lora.targets) or sorted(names), task_type="CAUSAL_LM",
            ),
            autocast_adapter_dtype=False,
        )  # fmt: skip


class FineTuned(LanguageModel):
    """One of Hugging Face's causal models, with or without PEFT's adapters, for the loop."""

    def __init__(self, model: Any, chunk: int) -> None:
        super().__init__(chunk)
        self.model = model

    @property
    def causal(self) -> Any:
        """Hugging Face's model, without PEFT's wrapper."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    @override
    def head(self) -> nn.Linear:
        head: nn.Linear = self.causal.lm_head
        return head

    @override
    def hidden(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        causal = self.causal
        balance = getattr(causal, "router_aux_loss_coef", 0.0)
        output = causal.model(input_ids=tokens, use_cache=False, **({"output_router_logits": True} if balance else {}))
        if not balance:
            return output.last_hidden_state, None
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        routed = load_balancing_loss_func(output.router_logits, causal.num_experts, causal.num_experts_per_tok)
        return output.last_hidden_state, balance * routed


def init(model: nn.Module, seed: int, files: weights.Files | None) -> None:
    """Set every weight of the sharded ``model`` from the files or, without files, from the seed.

    Adapters start without effect. Raises SystemExit if the files lack a weight.
    """
    for name, parameter in model.named_parameters():
        plain = _ADAPTED.sub("", name.removeprefix("model."))
        if ".lora_B." in plain:
            weights.fill(parameter, weights.constant(parameter, 0.0))
        elif ".lora_A." in plain:
            # The same variance as in PEFT's own initialization.
            weights.fill(parameter, weights.normal(plain, parameter, seed, 1 / math.sqrt(3 * parameter.shape[-1])))
        elif files is not None:
            weights.fill(parameter, _stored(files, plain))
        else:
            weights.draw_one(plain, parameter, seed, outer=plain in _OUTER)


def _stored(files: weights.Files, name: str) -> weights.Rows:
    if name in files:
        return files.rows_of(name)
    experts = _EXPERTS.match(name)
    if not experts:
        return files.rows_of(name.replace(".mlp.gate.", ".block_sparse_moe.gate."))
    # Mixtral's files have three matrices per expert. transformers uses stacked matrices of all experts.
    parts = ("w1", "w3") if experts[2] == "gate_up_proj" else ("w2",)
    head = f"{experts[1]}.block_sparse_moe.experts"

    def rows(first: int, last: int) -> torch.Tensor:
        return torch.stack(
            [
                torch.cat([files.whole(f"{head}.{number}.{part}.weight") for part in parts])
                for number in range(first, last)
            ]
        )

    return rows
