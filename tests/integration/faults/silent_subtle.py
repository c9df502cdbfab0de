"""Subtle silent faults, most of them in BF16: each must exceed the noise of its own precision."""

from __future__ import annotations

import os
from typing import Any

from silent import (
    ADAMW,
    CLOCK,
    CONSTANTS,
    DATA,
    DEEPSEEK,
    DEEPSEEK_WORDS,
    GRADIENTS,
    LANGUAGE,
    LLAMA,
    LOGGED,
    LOOP,
    LOSS,
    MOVED,
    NORM,
    PARAMETERS,
    RATE,
    SESSION,
    SHARDED,
    TITAN_DATA,
    TITAN_LOSS,
    TITAN_METRICS,
    TITAN_MODEL,
    TITAN_MOE,
    TITAN_RATE,
    TITAN_TRAIN,
    TITAN_UTILS,
    UPDATE,
    _each_sample,
    silent,
    wrap,
)  # fmt: skip

BF16 = ("--precision=bf16",)
FP8 = ("--precision=fp8",)
MIXTRAL = ("--recipe=mixtral-8x7b",)
DEEPSEEK_V3 = ("--recipe=deepseek-v3",)
OPTIMIZER = "torchtitan.components.optimizer"
FINETUNE = "primus.training.finetune.models"
REPORT = "primus.training.loop.train"


# torchtitan


@silent("data", "torchtitan", TITAN_DATA, DATA, words=BF16)
def one_sample_repeated(module: Any) -> None:
    kept: list[Any] = []

    def change(number: int, tokens: Any, label: Any) -> tuple[Any, Any]:
        kept.append((tokens, label))
        return kept[number - 1] if number == 7 else (tokens, label)

    _each_sample(module, change)


@silent("labels", "torchtitan", TITAN_LOSS, LOSS, GRADIENTS, words=BF16)
def last_label_masked(module: Any) -> None:
    def masked(loss: Any, pred: Any, labels: Any) -> Any:
        labels = labels.clone()
        labels[:, -1] = -100
        return loss(pred, labels)

    wrap(module, "cross_entropy_loss", masked)


@silent("labels", "torchtitan", TITAN_LOSS, LOSS, GRADIENTS, words=BF16)
def z_loss_added(module: Any) -> None:
    wrap(
        module,
        "cross_entropy_loss",
        lambda loss, pred, labels: loss(pred, labels) + 1e-3 * pred.float().logsumexp(-1).square().sum(),
    )


@silent("model", "torchtitan", TITAN_MODEL, CONSTANTS, words=BF16)
def angles_rounded_to_fp8(module: Any) -> None:
    import torch

    def make(original: Any, *given: Any) -> Any:
        made = torch.view_as_real(original(*given))
        return torch.view_as_complex(made.to(torch.float8_e4m3fn).float())

    wrap(module, "precompute_freqs_cis", make)


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS, words=BF16)
def attention_scale_5_percent(module: Any) -> None:
    original = module.ScaledDotProductAttentionWrapper.forward
    module.ScaledDotProductAttentionWrapper.forward = lambda self, q, k, v, **given: original(
        self, q * 1.05, k, v, **given
    )


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def norm_epsilon_of_one_norm(module: Any) -> None:
    def init(original: Any, self: Any, layer_id: int, args: Any) -> None:
        original(self, layer_id, args)
        self.ffn_norm.eps = 1e-3

    wrap(module.TransformerBlock, "__init__", init)


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS, words=BF16)
def embedding_scaled(module: Any) -> None:
    def forward(original: Any, self: Any, *given: Any, **named: Any) -> Any:
        if not getattr(self, "scaled", False):
            self.scaled = True
            self.tok_embeddings.register_forward_hook(lambda _m, _i, out: out * 1.05)
        return original(self, *given, **named)

    wrap(module.Transformer, "forward", forward)


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS, words=BF16)
def residual_dropped_once(module: Any) -> None:
    count = 0

    def forward(original: Any, self: Any, x: Any, *others: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        out = original(self, x, *others, **named)
        return out - x if count == 8 else out

    wrap(module.TransformerBlock, "forward", forward)


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS, words=FP8)
def gelu_in_fp8(module: Any) -> None:
    import torch

    module.F.silu = torch.nn.functional.gelu


@silent("precision", "torchtitan", "torchtitan.models.llama3.infra.parallelize", GRADIENTS, words=BF16)
def gradients_summed_in_bf16(module: Any) -> None:
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    module.MixedPrecisionPolicy = lambda **given: MixedPrecisionPolicy(**given | {"reduce_dtype": torch.bfloat16})


@silent("precision", "torchtitan", ADAMW, UPDATE, words=BF16)
def weights_rounded_after_update(module: Any) -> None:
    import torch

    def step(original: Any, self: Any, closure: Any = None) -> Any:
        out = original(self, closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.copy_(parameter.data.to(torch.bfloat16))
        return out

    wrap(module.AdamW, "step", step)


@silent("optimizer", "torchtitan", OPTIMIZER, UPDATE, words=BF16)
def epsilon_thousandfold(module: Any) -> None:
    wrap(
        module.OptimizersContainer,
        "__init__",
        lambda init, self, parts, cls, settings: init(self, parts, cls, settings | {"eps": 1e-5}),
    )


@silent("optimizer", "torchtitan", OPTIMIZER, UPDATE, words=BF16)
def adam_without_decoupling(module: Any) -> None:
    import torch

    wrap(
        module.OptimizersContainer,
        "__init__",
        lambda init, self, parts, cls, settings: init(self, parts, torch.optim.Adam, settings),
    )


@silent("optimizer", "torchtitan", TITAN_UTILS, GRADIENTS, words=BF16)
def clipped_at_1_02(module: Any) -> None:
    wrap(
        module,
        "clip_grad_norm_",
        lambda clip, parameters, limit, *given, **named: clip(parameters, limit * 1.02, *given, **named),
    )


@silent("optimizer", "torchtitan", TITAN_UTILS, GRADIENTS, words=BF16)
def each_tensor_clipped_alone(module: Any) -> None:
    import torch

    def clip(original: Any, parameters: Any, limit: float, *given: Any, **named: Any) -> Any:
        parameters = list(parameters)
        norm = original(parameters, 1e9, *given, **named)
        for parameter in parameters:
            torch.nn.utils.clip_grad_norm_([parameter], limit)
        return norm

    wrap(module, "clip_grad_norm_", clip)


@silent("schedule", "torchtitan", TITAN_RATE, RATE, words=BF16)
def rate_one_step_late(module: Any) -> None:
    def step(original: Any, self: Any) -> None:
        if not getattr(self, "waited", False):
            self.waited = True
            return
        original(self)

    wrap(module.LRSchedulersContainer, "step", step)


@silent("schedule", "torchtitan", ADAMW, RATE, UPDATE, words=BF16)
def rate_of_vectors_halved(module: Any) -> None:
    def init(original: Any, self: Any, params: Any, *given: Any, **named: Any) -> None:
        params = list(params)
        named["lr"] = named.get("lr", 1e-3)
        vectors = [p for p in params if p.ndim == 1]
        original(self, [{"params": [p for p in params if p.ndim > 1]}, {"params": vectors}], *given, **named)

    def step(original: Any, self: Any, closure: Any = None) -> Any:
        kept = self.param_groups[-1]["lr"]
        self.param_groups[-1]["lr"] = kept / 2
        out = original(self, closure)
        self.param_groups[-1]["lr"] = kept
        return out

    wrap(module.AdamW, "__init__", init)
    wrap(module.AdamW, "step", step)


@silent("parallel", "torchtitan", TITAN_TRAIN, GRADIENTS, NORM, words=BF16)
def second_rank_silent_once(module: Any) -> None:
    def step(original: Any, self: Any, *given: Any, **named: Any) -> Any:
        loss = original(self, *given, **named)
        if os.environ["RANK"] == "1" and self.step == 3:
            for part in self.model_parts:
                for parameter in part.parameters():
                    if parameter.grad is not None:
                        local = parameter.grad
                        (local.to_local() if hasattr(local, "to_local") else local).zero_()
        return loss

    wrap(module.Trainer, "forward_backward_step", step)


@silent("metrics", "torchtitan", TITAN_METRICS, LOSS, LOGGED, words=BF16)
def loss_of_one_rank(module: Any) -> None:
    wrap(
        module.MetricsProcessor,
        "log",
        lambda log, self, step, average, most, norm, *given, **named: log(
            self, step, most, most, norm, *given, **named
        ),
    )


@silent("clock", "torchtitan", TITAN_METRICS, CLOCK, words=BF16)
def throughput_a_third_up(module: Any) -> None:
    wrap(
        module.MetricsProcessor,
        "log",
        lambda log, self, *given, **named: (
            setattr(self, "ntokens_since_last_log", self.ntokens_since_last_log * 4 // 3),
            log(self, *given, **named),
        )[1],
    )


@silent("model", "torchtitan", DEEPSEEK, LOSS, GRADIENTS, words=(*DEEPSEEK_WORDS, *BF16))
def latent_norm_left_out(module: Any) -> None:
    import torch

    def init(original: Any, self: Any, args: Any) -> None:
        original(self, args)
        self.kv_norm.forward = lambda x: (
            x * self.kv_norm.weight if not torch.is_grad_enabled() else x * (self.kv_norm.weight) * x.float().std()
        )

    wrap(module.Attention, "__init__", init)


@silent("model", "torchtitan", OPTIMIZER, UPDATE, words=DEEPSEEK_WORDS)
def router_bias_never_moved(module: Any) -> None:
    module.build_optimizers_with_moe_load_balancing = lambda parts, config, dims, manager=None: module.build_optimizers(
        parts, config, dims, manager
    )


@silent("model", "torchtitan", TITAN_MOE, LOSS, GRADIENTS, words=(*DEEPSEEK_WORDS, *BF16))
def route_weights_normalized(module: Any) -> None:
    def forward(original: Any, self: Any, x: Any, bias: Any = None) -> Any:
        scores, chosen, count = original(self, x, bias)
        return scores / scores.sum(-1, keepdim=True), chosen, count

    wrap(module.TokenChoiceTopKRouter, "forward", forward)


# our own loop: fsdp and fine-tuning


@silent("data", "fsdp", "primus.training.loop.data", DATA, words=BF16)
def end_marks_dropped(module: Any) -> None:
    wrap(module, "_marks", lambda marks, folder: (marks(folder)[0], None))


@silent("labels", "fsdp", LANGUAGE, LOSS, GRADIENTS, words=BF16)
def one_label_shifted(module: Any) -> None:
    def summed(original: Any, head: Any, states: Any, labels: Any) -> Any:
        labels = labels.clone()
        labels[..., 3:6] = labels[..., 2:5].clone()
        return original(head, states, labels)

    wrap(module, "_summed", summed)


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS, words=("--recipe=mistral-7b", "model.window=32", *BF16))
def window_of_one_more(module: Any) -> None:
    wrap(module, "_window", lambda make, seq_len, window: make(seq_len, window + 1))


@silent("precision", "fsdp", SHARDED, GRADIENTS, words=BF16)
def sums_in_bf16(module: Any) -> None:
    import torch

    original = module.MixedPrecisionPolicy
    module.MixedPrecisionPolicy = lambda **given: original(**given | {"reduce_dtype": torch.bfloat16})


@silent("precision", "fsdp", SHARDED, LOSS, GRADIENTS)
def computed_in_bf16(module: Any) -> None:
    import torch

    original = module.MixedPrecisionPolicy
    module.MixedPrecisionPolicy = lambda **given: original(**given | {"param_dtype": torch.bfloat16})


@silent("optimizer", "fsdp", SHARDED, UPDATE, words=BF16)
def other_second_beta(module: Any) -> None:
    def init(original: Any, self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        for group in self._optimizer.param_groups:
            group["betas"] = (group["betas"][0], 0.96)

    wrap(module.Sharded, "__init__", init)


@silent("schedule", "fsdp", LOOP, RATE, words=BF16)
def rate_a_thousandth_off(module: Any) -> None:
    wrap(module, "learning_rate", lambda rate, config, step: rate(config, step) * (1.001 if step > 3 else 1))


@silent("parallel", "fsdp", SHARDED, GRADIENTS, NORM, words=BF16)
def ranks_weighed_unequally(module: Any) -> None:
    def run(original: Any, self: Any, batches: Any, terms: int) -> Any:
        return original(self, batches, terms * 1.1 if os.environ["RANK"] == "1" else terms / 1.1)

    wrap(module.Sharded, "forward_backward", run)


@silent("metrics", "fsdp", REPORT, NORM, GRADIENTS, words=BF16)
def norm_rounded_up(module: Any) -> None:
    wrap(module.Report, "step", lambda step, self, number, loss, norm, lr: step(self, number, loss, norm * 1.01, lr))


@silent("clock", "fsdp", REPORT, CLOCK, words=BF16)
def clock_slow_by_a_quarter(module: Any) -> None:
    def init(original: Any, self: Any, *given: Any) -> None:
        original(self, *given)
        self._tokens = self._tokens * 5 // 4

    wrap(module.Report, "__init__", init)


@silent("optimizer", "finetune", FINETUNE, PARAMETERS, words=("--mode=lora", *BF16))
def adapters_missing(module: Any) -> None:
    def adapted(original: Any, model: Any, lora: Any) -> Any:
        from dataclasses import replace

        return original(model, replace(lora, targets=["q_proj", "k_proj", "o_proj"]))

    wrap(module, "adapted", adapted)


@silent("model", "finetune", FINETUNE, LOSS, GRADIENTS, words=BF16)
def rotary_base_tripled(module: Any) -> None:
    wrap(module, "_rope", lambda make, model: make(model) | {"rope_theta": 3 * model.rope_theta})


@silent("optimizer", "finetune", FINETUNE, MOVED, GRADIENTS, words=("--mode=lora", *BF16))
def half_of_adapters_frozen(module: Any) -> None:
    def adapted(original: Any, model: Any, lora: Any) -> Any:
        made = original(model, lora)
        for name, parameter in made.named_parameters():
            if ".layers.1." in name and "lora_A" in name:
                parameter.requires_grad_(False)
        return made

    wrap(module, "adapted", adapted)


# Megatron


@silent("model", "megatron", "primus.training.megatron.render", GRADIENTS, NORM, words=MIXTRAL)
def balancing_loss_off(module: Any) -> None:
    wrap(module, "transformer", lambda make, *given: make(*given) | {"moe_aux_loss_coeff": 0.0})


@silent("model", "megatron", "primus.training.megatron.render", UPDATE, words=DEEPSEEK_V3)
def router_bias_still(module: Any) -> None:
    wrap(module, "transformer", lambda make, *given: make(*given) | {"moe_router_bias_update_rate": 0.0})


@silent("model", "megatron", "primus.training.megatron.render", LOSS, GRADIENTS, words=(*MIXTRAL, *BF16))
def tokens_dropped_by_capacity(module: Any) -> None:
    wrap(
        module,
        "transformer",
        lambda make, *given: make(*given) | {"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "probs"},
    )


@silent("model", "megatron", "primus.training.megatron.render", CONSTANTS, words=BF16)
def norm_epsilon(module: Any) -> None:
    wrap(module, "transformer", lambda make, *given: make(*given) | {"layernorm_epsilon": 1e-3})


@silent("precision", "megatron", "primus.training.megatron.render", GRADIENTS, words=BF16)
def gradients_kept_in_bf16(module: Any) -> None:
    wrap(module, "ddp", lambda make, config: make(config) | {"grad_reduce_in_fp32": False})


@silent("optimizer", "megatron", SESSION, GRADIENTS, words=BF16)
def clipped_at_half(module: Any) -> None:
    def init(original: Any, self: Any, *given: Any) -> None:
        original(self, *given)
        for inner in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            inner.config.clip_grad = 0.98

    wrap(module.MegatronSession, "__init__", init)


@silent("optimizer", "megatron", ADAMW, UPDATE, words=BF16)
def moments_narrow(module: Any) -> None:
    import torch

    def step(original: Any, self: Any, closure: Any = None) -> Any:
        out = original(self, closure)
        for state in self.state.values():
            state["exp_avg_sq"].copy_(state["exp_avg_sq"].to(torch.bfloat16))
        return out

    wrap(module.AdamW, "step", step)


@silent("parallel", "megatron", SESSION, NORM, GRADIENTS, words=BF16)
def ranks_not_summed(module: Any) -> None:
    wrap(module, "finalize_model_grads", lambda finish, *given, **named: None)


@silent("parallel", "megatron", SESSION, UPDATE, LOSS, words=BF16)
def stale_copies(module: Any) -> None:
    def step(original: Any, self: Any, lr: float) -> Any:
        kept = [parameter.detach().clone() for parameter in self.model_parts[0].parameters()]
        norm = original(self, lr)
        for parameter, old in zip(self.model_parts[0].parameters(), kept, strict=True):
            if parameter.ndim == 1:
                parameter.data.copy_(old)
        return norm

    wrap(module.MegatronSession, "step", step)


@silent("schedule", "megatron", LOOP, RATE, UPDATE, words=BF16)
def no_decay(module: Any) -> None:
    wrap(module, "learning_rate", lambda rate, config, step: max(rate(config, step), config.lr / 2))


# Checkpoints: a judged run saves, erases and loads its state halfway

CHECKPOINT = "primus.training.loop.train"


@silent("checkpoint", "fsdp", SHARDED, UPDATE, words=BF16)
def moments_not_saved(module: Any) -> None:
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    wrap(module.Sharded, "state_dict", lambda state, self: {"model": state(self)["model"]})
    module.Sharded.load_state_dict = lambda self, state: set_model_state_dict(self._model, state["model"])


@silent("checkpoint", "megatron", CHECKPOINT, LOSS, GRADIENTS, UPDATE, words=BF16)
def weights_saved_in_bf16(module: Any) -> None:
    import torch

    def rounded(state: Any) -> Any:
        if isinstance(state, dict):
            return {key: rounded(value) for key, value in state.items()}
        if torch.is_tensor(state) and state.dtype == torch.float32 and state.ndim:
            return state.bfloat16().float()
        return state

    wrap(module.dcp, "save", lambda save, state, **given: save(rounded(state), **given))


@silent("checkpoint", "finetune", CHECKPOINT, LOSS, GRADIENTS, UPDATE, words=BF16)
def norms_not_loaded(module: Any) -> None:
    def load(original: Any, state: Any, **given: Any) -> None:
        weights = state["model"]
        state["model"] = {name: tensor for name, tensor in weights.items() if not name.endswith("norm.weight")}
        original(state, **given)
        state["model"] = weights

    wrap(module.dcp, "load", load)
