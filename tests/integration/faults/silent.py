"""Silent faults: training goes on, the loss falls, nothing is printed. The reference must name each.

A fault is a function that changes a module after it was loaded. ``SILENT`` lists name → class of fault, backend,
module, function and the checks of which at least one must fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple


class Silent(NamedTuple):
    """``kind`` is the class of fault; ``names``: at least one of these checks must fail."""

    kind: str
    backend: str
    module: str
    change: Callable[[Any], None]
    names: tuple[str, ...]
    words: tuple[str, ...] = ()


DATA, LOSS = "reference data", "reference loss"
NORM, GRADIENTS = "reference gradient norm", "reference gradients"
LOGGED = "steps logged"
RATE, UPDATE = "reference learning rate", "reference update"
CONSTANTS = "reference constants"
BLOCKS = "reference blocks"
PARAMETERS, MOVED, CLOCK = "reference parameters", "reference trained weights", "clock"

SILENT: dict[str, Silent] = {}
# Faults whose effect is smaller than what their precision rounds, and that no check names.
ESCAPED: dict[str, Silent] = {}


def silent(
    kind: str, backend: str, module: str, *names: str, words: tuple[str, ...] = (), escapes: bool = False
) -> Any:
    def keep(change: Callable[[Any], None]) -> Callable[[Any], None]:
        where = ESCAPED if escapes else SILENT
        where[f"{backend}_{change.__name__}"] = Silent(kind, backend, module, change, names, words)
        return change

    return keep


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``around(original, *arguments)``."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *given, **named: around(original, *given, **named))


TITAN_DATA = "torchtitan.hf_datasets.text_datasets"
TITAN_MODEL = "torchtitan.models.llama3.model.model"
TITAN_MOE = "torchtitan.models.moe.moe"
TITAN_LOSS = "torchtitan.components.loss"
TITAN_TRAIN = "torchtitan.train"
TITAN_RATE = "torchtitan.components.lr_scheduler"
TITAN_UTILS = "torchtitan.distributed.utils"
TITAN_METRICS = "torchtitan.components.metrics"
ADAMW = "torch.optim.adamw"
DEEPSEEK = "torchtitan.models.deepseek_v3.model.model"


def _each_sample(module: Any, change: Callable[[int, Any, Any], tuple[Any, Any]]) -> None:
    original = module.HuggingFaceTextDataset.__iter__

    def samples(self: Any) -> Any:
        for number, (inputs, label) in enumerate(original(self)):
            tokens, wanted = change(number, inputs["input"], label)
            yield {"input": tokens}, wanted

    module.HuggingFaceTextDataset.__iter__ = samples


# torchtitan: data and labels


@silent("data", "torchtitan", TITAN_DATA, DATA)
def same_batch(module: Any) -> None:
    kept: list[Any] = []

    def first(number: int, tokens: Any, label: Any) -> tuple[Any, Any]:
        if number < 4:
            kept.append((tokens, label))
        return kept[number % 4]

    _each_sample(module, first)


@silent("data", "torchtitan", TITAN_DATA, DATA)
def every_rank_same_data(module: Any) -> None:
    module.split_dataset_by_node = lambda dataset, rank, size: dataset


@silent("data", "torchtitan", "torchtitan.components.tokenizer", DATA)
def no_begin_mark(module: Any) -> None:
    wrap(
        module.HuggingFaceTokenizer,
        "encode",
        lambda encode, self, text, **_given: encode(self, text, add_bos=False, add_eos=True),
    )


@silent("data", "torchtitan", TITAN_DATA, DATA)
def reversed_samples(module: Any) -> None:
    _each_sample(module, lambda number, tokens, label: (tokens.flip(0), label.flip(0)))


@silent("data", "torchtitan", TITAN_DATA, DATA)
def rare_corruption(module: Any) -> None:
    def corrupt(number: int, tokens: Any, label: Any) -> tuple[Any, Any]:
        if number == 9:
            tokens = tokens.clone()
            tokens[17] = 5
        return tokens, label

    _each_sample(module, corrupt)


@silent("labels", "torchtitan", TITAN_DATA, DATA)
def labels_not_shifted(module: Any) -> None:
    _each_sample(module, lambda number, tokens, label: (tokens, tokens))


@silent("labels", "torchtitan", TITAN_LOSS, LOSS)
def labels_shifted_twice(module: Any) -> None:
    wrap(module, "cross_entropy_loss", lambda loss, pred, labels: loss(pred, labels.roll(-1, 1)))


@silent("labels", "torchtitan", TITAN_LOSS, LOSS)
def first_half_not_trained(module: Any) -> None:
    def halved(loss: Any, pred: Any, labels: Any) -> Any:
        labels = labels.clone()
        labels[:, : labels.shape[1] // 2] = -100
        return loss(pred, labels)

    wrap(module, "cross_entropy_loss", halved)


@silent("labels", "torchtitan", TITAN_LOSS, LOSS)
def label_smoothing(module: Any) -> None:
    import torch

    module.cross_entropy_loss = lambda pred, labels: torch.nn.functional.cross_entropy(
        pred.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum", ignore_index=-100, label_smoothing=0.02
    )


# torchtitan: model


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def attention_not_causal(module: Any) -> None:
    import torch

    class Open(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any, **given: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    module.ScaledDotProductAttentionWrapper = Open


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def wrong_rotary_base(module: Any) -> None:
    wrap(module, "precompute_freqs_cis", lambda make, dim, end, theta, scaling: make(dim, end, theta / 2, scaling))


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def no_rotary(module: Any) -> None:
    module.apply_rotary_emb = lambda xq, xk, **_given: (xq, xk)


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def no_rotary_scaling(module: Any) -> None:
    def unscaled(make: Any, dim: Any, end: Any, theta: Any, scaling: Any) -> Any:
        scaling.scaling_factor = 1.0
        return make(dim, end, theta, scaling)

    wrap(module, "precompute_freqs_cis", unscaled)


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def wrong_attention_scale(module: Any) -> None:
    original = module.ScaledDotProductAttentionWrapper.forward
    module.ScaledDotProductAttentionWrapper.forward = lambda self, q, k, v, **given: original(
        self, q * 0.9, k, v, **given
    )


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def gelu_for_silu(module: Any) -> None:
    import torch

    module.F.silu = torch.nn.functional.gelu


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def layer_skipped(module: Any) -> None:
    def forward(original: Any, self: Any, x: Any, *others: Any, **named: Any) -> Any:
        return x if self.layer_id == 1 else original(self, x, *others, **named)

    wrap(
        module.TransformerBlock,
        "__init__",
        lambda init, self, layer_id, args: (init(self, layer_id, args), setattr(self, "layer_id", layer_id))[0],
    )
    wrap(module.TransformerBlock, "forward", forward)


@silent("model", "torchtitan", TITAN_MODEL, PARAMETERS)
def layer_missing(module: Any) -> None:
    def fewer(init: Any, self: Any, args: Any) -> None:
        args.n_layers -= 1
        init(self, args)

    wrap(module.Transformer, "__init__", fewer)


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def wrong_norm_epsilon(module: Any) -> None:
    def init(original: Any, self: Any, layer_id: int, args: Any) -> None:
        original(self, layer_id, args)
        self.attention_norm.eps = 1e-2

    wrap(module.TransformerBlock, "__init__", init)


@silent("model", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def dropout_left_on(module: Any) -> None:
    import torch

    wrap(module.FeedForward, "forward", lambda run, self, x: torch.nn.functional.dropout(run(self, x), 0.02))


@silent("model", "torchtitan", TITAN_MODEL, PARAMETERS)
def equal_first_weights(module: Any) -> None:
    def init(original: Any, self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        for layer in list(self.layers.values())[1:]:
            for own, first in zip(layer.parameters(), self.layers["0"].parameters(), strict=True):
                own.data.copy_(first.data)

    wrap(module.Transformer, "init_weights", init)


# torchtitan: optimizer, schedule, loop


@silent("schedule", "torchtitan", TITAN_RATE, RATE, UPDATE)
def rate_zero_later(module: Any) -> None:
    def step(original: Any, self: Any) -> None:
        original(self)
        for schedule in self.schedulers:
            if schedule.last_epoch >= 4:
                for group in schedule.optimizer.param_groups:
                    group["lr"] = 0.0

    wrap(module.LRSchedulersContainer, "step", step)


@silent("schedule", "torchtitan", TITAN_RATE, RATE)
def schedule_never_steps(module: Any) -> None:
    module.LRSchedulersContainer.step = lambda self: None


@silent("optimizer", "torchtitan", ADAMW, UPDATE, GRADIENTS)
def every_fourth_step_skipped(module: Any) -> None:
    count = 0

    def step(original: Any, self: Any, closure: Any = None) -> Any:
        nonlocal count
        count += 1
        return None if count % 4 == 0 else original(self, closure)

    wrap(module.AdamW, "step", step)


@silent("optimizer", "torchtitan", TITAN_UTILS, GRADIENTS)
def clipping_off(module: Any) -> None:
    wrap(
        module,
        "clip_grad_norm_",
        lambda clip, parameters, limit, *given, **named: clip(parameters, 1e9, *given, **named),
    )


@silent("optimizer", "torchtitan", "torchtitan.components.optimizer", UPDATE)
def other_beta(module: Any) -> None:
    def container(original: Any, self: Any, parts: Any, cls: Any, settings: Any) -> None:
        original(self, parts, cls, settings | {"betas": (0.9, 0.999)})

    wrap(module.OptimizersContainer, "__init__", container)


@silent("optimizer", "torchtitan", "torchtitan.components.optimizer", UPDATE)
def no_weight_decay(module: Any) -> None:
    wrap(
        module.OptimizersContainer,
        "__init__",
        lambda init, self, parts, cls, settings: init(self, parts, cls, settings | {"weight_decay": 0.0}),
    )


@silent("optimizer", "torchtitan", TITAN_TRAIN, MOVED, GRADIENTS)
def layer_frozen(module: Any) -> None:
    def init(original: Any, self: Any, config: Any) -> None:
        original(self, config)
        for parameter in self.model_parts[0].layers["1"].parameters():
            parameter.requires_grad_(False)

    wrap(module.Trainer, "__init__", init)


@silent("optimizer", "torchtitan", TITAN_TRAIN, GRADIENTS, UPDATE)
def stale_gradients(module: Any) -> None:
    def step(original: Any, self: Any, data: Any) -> None:
        zero = self.optimizers.zero_grad
        if self.step > 2:
            self.optimizers.zero_grad = lambda *given, **named: None
        original(self, data)
        self.optimizers.zero_grad = zero

    wrap(module.Trainer, "train_step", step)


@silent("optimizer", "torchtitan", TITAN_UTILS, GRADIENTS)
def noise_in_gradients(module: Any) -> None:
    import torch

    def clip(original: Any, parameters: Any, *given: Any, **named: Any) -> Any:
        norm = original(parameters, *given, **named)
        for parameter in parameters:
            if parameter.grad is not None:
                local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
                local.mul_(1 + 1e-3 * torch.sin(torch.arange(local.numel()).view_as(local)))
        return norm

    wrap(module, "clip_grad_norm_", clip)


@silent("parallel", "torchtitan", "torchtitan.models.llama3.infra.parallelize", NORM, GRADIENTS)
def gradients_halved(module: Any) -> None:
    module.disable_fsdp_gradient_division = lambda model: None


@silent("precision", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def one_layer_in_bf16(module: Any) -> None:
    import torch

    wrap(
        module.FeedForward,
        "forward",
        lambda run, self, x: run(self, x.bfloat16().float()) if x.dtype == torch.float32 else run(self, x),
    )


@silent("precision", "torchtitan", "torch.optim.adamw", UPDATE)
def moments_in_bf16(module: Any) -> None:
    import torch

    def step(original: Any, self: Any, closure: Any = None) -> Any:
        out = original(self, closure)
        for state in self.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key].copy_(state[key].to(torch.bfloat16))
        return out

    wrap(module.AdamW, "step", step)


@silent("clock", "torchtitan", TITAN_METRICS, CLOCK)
def throughput_doubled(module: Any) -> None:
    wrap(
        module.MetricsProcessor,
        "log",
        lambda log, self, *given, **named: (
            setattr(self, "ntokens_since_last_log", 2 * self.ntokens_since_last_log),
            log(self, *given, **named),
        )[1],
    )


@silent("metrics", "torchtitan", TITAN_METRICS, LOSS, LOGGED)
def smoothed_loss(module: Any) -> None:
    kept: list[float] = []

    def log(original: Any, self: Any, step: int, average: Any, *given: Any, **named: Any) -> Any:
        kept.append(float(average))
        return original(self, step, sum(kept[-2:]) / len(kept[-2:]), *given, **named)

    wrap(module.MetricsProcessor, "log", log)


@silent("metrics", "torchtitan", TITAN_METRICS, NORM, LOGGED)
def norm_after_clipping(module: Any) -> None:
    wrap(
        module.MetricsProcessor,
        "log",
        lambda log, self, step, average, most, norm, *given, **named: log(
            self, step, average, most, min(norm, 0.7), *given, **named
        ),
    )


DEEPSEEK_WORDS = ("--recipe=deepseek-16b",)


@silent("model", "torchtitan", TITAN_MOE, LOSS, GRADIENTS, words=DEEPSEEK_WORDS)
def one_expert_per_token(module: Any) -> None:
    def forward(original: Any, self: Any, x: Any, bias: Any = None) -> Any:
        scores, chosen, count = original(self, x, bias)
        scores = scores.clone()
        scores[:, 1:] = 0
        return scores, chosen, count

    wrap(module.TokenChoiceTopKRouter, "forward", forward)


@silent("model", "torchtitan", TITAN_MOE, LOSS, GRADIENTS, words=DEEPSEEK_WORDS)
def router_not_trained(module: Any) -> None:
    def forward(original: Any, self: Any, x: Any, bias: Any = None) -> Any:
        scores, chosen, count = original(self, x, bias)
        return scores.detach(), chosen, count

    wrap(module.TokenChoiceTopKRouter, "forward", forward)


@silent("model", "torchtitan", TITAN_MOE, LOSS, GRADIENTS, words=DEEPSEEK_WORDS)
def shared_expert_left_out(module: Any) -> None:
    wrap(module.MoE, "forward", lambda run, self, x: run(self, x) - 0.5 * self.shared_experts(x))


# torchtitan uses YaRN only where a sequence is longer than the original ones; those of this job have 128 tokens.
@silent("model", "torchtitan", DEEPSEEK, LOSS, GRADIENTS,
        words=(*DEEPSEEK_WORDS, "model.rope_scaling.original_max_position=64"))  # fmt: skip
def no_yarn(module: Any) -> None:
    def make(original: Any, args: Any) -> Any:
        kept, args.original_seq_len = args.original_seq_len, args.max_seq_len
        out = original(args)
        args.original_seq_len = kept
        return out

    wrap(module, "precompute_freqs_cis", make)


# our own loop: fsdp and fine-tuning

LOOP = "primus.training.loop.train"
LOOP_DATA = "primus.training.loop.data"
LANGUAGE = "primus.training.loop.session"
SHARDED = "primus.training.loop.sharded"
LLAMA = "primus.training.fsdp.llama"


@silent("data", "fsdp", LOOP, DATA)
def same_step_again(module: Any) -> None:
    wrap(module, "_batches", lambda make, given, session, data, step: make(given, session, data, 1))


@silent("data", "fsdp", LOOP_DATA, DATA)
def corpus_not_shuffled(module: Any) -> None:
    import torch

    module.shuffled = lambda count, seed, turn: torch.arange(count)


@silent("data", "fsdp", LOOP_DATA, DATA)
def other_shuffle(module: Any) -> None:
    wrap(module, "shuffled", lambda make, count, seed, turn: make(count, seed + 1, turn))


@silent("labels", "fsdp", LOOP_DATA, DATA)
def labels_equal_inputs(module: Any) -> None:
    def batch(original: Any, self: Any, *given: Any) -> Any:
        made = original(self, *given)
        return made | {"labels": made["input_ids"]}

    wrap(module._Tokens, "batch", batch)


@silent("labels", "fsdp", LANGUAGE, LOSS)
def last_label_dropped(module: Any) -> None:
    def summed(original: Any, head: Any, states: Any, labels: Any) -> Any:
        labels = labels.clone()
        labels[-1] = -100
        return original(head, states, labels)

    wrap(module, "_summed", summed)


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS)
def future_seen(module: Any) -> None:
    import torch

    original = torch.nn.functional.scaled_dot_product_attention
    module.functional.scaled_dot_product_attention = lambda *given, **named: original(
        *given, **named | {"is_causal": False}
    )


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS)
def rotation_backwards(module: Any) -> None:
    wrap(module, "_rotate", lambda rotate, states, cosine, sine: rotate(states, cosine, -sine * 0.5))


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS)
def keys_not_rotated(module: Any) -> None:
    count = 0

    def rotate(original: Any, states: Any, cosine: Any, sine: Any) -> Any:
        nonlocal count
        count += 1
        return states if count % 2 == 0 else original(states, cosine, sine)

    wrap(module, "_rotate", rotate)


@silent("model", "fsdp", LLAMA, LOSS, GRADIENTS)
def window_off_by_one(module: Any) -> None:
    wrap(module, "_window", lambda make, seq_len, window: make(seq_len, window + 1))


SILENT["fsdp_window_off_by_one"] = SILENT["fsdp_window_off_by_one"]._replace(
    words=("--recipe=mistral-7b", "model.window=32")
)


@silent("optimizer", "fsdp", SHARDED, GRADIENTS)
def never_clipped(module: Any) -> None:
    module.nn.utils.clip_grads_with_norm_ = lambda *_given, **_named: None


@silent("optimizer", "fsdp", SHARDED, UPDATE)
def twice_the_decay(module: Any) -> None:
    def init(original: Any, self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        for group in self._optimizer.param_groups:
            group["weight_decay"] *= 2

    wrap(module.Sharded, "__init__", init)


@silent("optimizer", "fsdp", SHARDED, UPDATE, MOVED, GRADIENTS)
def embedding_frozen(module: Any) -> None:
    def step(original: Any, self: Any, lr: float) -> Any:
        self._trained[0].grad = None
        return original(self, lr)

    wrap(module.Sharded, "step", step)


@silent("schedule", "fsdp", "primus.training.loop.config", RATE)
def no_warm_up(module: Any) -> None:
    module.learning_rate = lambda config, step: config.lr


SILENT["fsdp_no_warm_up"] = SILENT["fsdp_no_warm_up"]._replace(module=LOOP)


@silent("parallel", "fsdp", SHARDED, GRADIENTS, NORM)
def mean_over_ranks(module: Any) -> None:
    def step(original: Any, self: Any, lr: float) -> Any:
        for parameter in self._trained:
            if parameter.grad is not None:
                parameter.grad.div_(2)
        return original(self, lr)

    wrap(module.Sharded, "step", step)


@silent("parallel", "fsdp", SHARDED, NORM, GRADIENTS)
def one_rank_lost(module: Any) -> None:
    def run(original: Any, self: Any, batches: Any, terms: int) -> Any:
        return original(self, batches, terms * 1000 if os.environ["RANK"] == "1" else terms)

    wrap(module.Sharded, "forward_backward", run)


@silent("parallel", "fsdp", SHARDED, NORM, GRADIENTS)
def last_micro_batch_lost(module: Any) -> None:
    import torch

    def run(original: Any, self: Any, batches: Any, terms: int) -> Any:
        total = original(self, batches[:-1], terms)
        with torch.no_grad():
            return total + self._loss(self._model, batches[-1])

    wrap(module.Sharded, "forward_backward", run)


@silent("metrics", "fsdp", "primus.training.loop.train", LOSS)
def loss_of_the_step_before(module: Any) -> None:
    kept: list[float] = []

    def step(original: Any, self: Any, number: int, loss: float, norm: float, lr: float) -> None:
        kept.append(loss)
        original(self, number, kept[-2] if len(kept) > 1 else loss, norm, lr)

    wrap(module.Report, "step", step)


@silent("clock", "fsdp", "primus.training.loop.train", CLOCK)
def tokens_counted_twice(module: Any) -> None:
    def init(original: Any, self: Any, *given: Any) -> None:
        original(self, *given)
        self._tokens *= 2

    wrap(module.Report, "__init__", init)


@silent("model", "finetune", "primus.training.finetune.models", LOSS, GRADIENTS)
def other_rotary_base(module: Any) -> None:
    wrap(module, "_rope", lambda make, model: make(model) | {"rope_theta": 10000.0})


@silent("model", "finetune", "primus.training.finetune.models", LOSS, GRADIENTS, words=("--mode=lora",))
def adapter_scaled_twice(module: Any) -> None:
    def adapted(original: Any, model: Any, lora: Any) -> Any:
        from dataclasses import replace

        return original(model, replace(lora, alpha=2 * lora.alpha))

    wrap(module, "adapted", adapted)


@silent("model", "finetune", "primus.training.finetune.models", LOSS, GRADIENTS, words=("--mode=lora",))
def adapter_dropout(module: Any) -> None:
    def adapted(original: Any, model: Any, lora: Any) -> Any:
        from dataclasses import replace

        return original(model, replace(lora, dropout=0.1))

    wrap(module, "adapted", adapted)


@silent(
    "optimizer", "finetune", "primus.training.finetune.models", MOVED, PARAMETERS, GRADIENTS, words=("--mode=lora",)
)
def base_trained_too(module: Any) -> None:
    def adapted(original: Any, model: Any, lora: Any) -> Any:
        made = original(model, lora)
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.requires_grad_(True)
        return made

    wrap(module, "adapted", adapted)


# Megatron

SESSION = "primus.training.megatron.session"
MEGATRON_ATTENTION = "primus.training.megatron.model"


@silent("schedule", "megatron", SESSION, UPDATE)
def half_the_rate(module: Any) -> None:
    wrap(module.MegatronSession, "step", lambda step, self, lr: step(self, lr / 2))


@silent("optimizer", "megatron", SESSION, UPDATE)
def decay_of_norms(module: Any) -> None:
    def init(original: Any, self: Any, *given: Any) -> None:
        original(self, *given)
        for group in self._optimizer.param_groups:
            group["weight_decay"] = 0.1

    wrap(module.MegatronSession, "__init__", init)


@silent("optimizer", "megatron", SESSION, UPDATE)
def third_step_skipped(module: Any) -> None:
    import torch

    count = 0

    def step(original: Any, self: Any, lr: float) -> Any:
        nonlocal count
        count += 1
        return original(self, lr if count != 3 else 0.0)

    wrap(module.MegatronSession, "step", step)
    assert torch


@silent("labels", "megatron", SESSION, LOSS)
def labels_rolled(module: Any) -> None:
    def run(original: Any, self: Any, batches: Any, terms: int) -> Any:
        return original(self, [{**b, "labels": b["labels"].roll(-1, 1)} for b in batches], terms)

    wrap(module.MegatronSession, "forward_backward", run)


@silent("model", "megatron", MEGATRON_ATTENTION, LOSS, GRADIENTS)
def mask_ignored(module: Any) -> None:
    import torch

    original = torch.nn.functional.scaled_dot_product_attention
    torch.nn.functional.scaled_dot_product_attention = lambda *given, **named: original(
        *given, **named | {"is_causal": False, "attn_mask": None}
    )


@silent("model", "megatron", "primus.training.megatron.render", LOSS, GRADIENTS)
def interleaved_rotary(module: Any) -> None:
    wrap(module, "transformer", lambda make, *given: make(*given) | {"rotary_interleaved": True})


@silent("parallel", "megatron", SESSION, NORM, UPDATE)
def micro_batch_twice(module: Any) -> None:
    def run(original: Any, self: Any, batches: Any, terms: int) -> Any:
        return original(self, batches, terms) if os.environ["RANK"] == "0" else original(self, batches, terms) * 1.0

    wrap(module.MegatronSession, "forward_backward", run)
    wrap(module, "finalize_model_grads", lambda finish, *given, **named: None)


@silent("data", "megatron", SESSION, DATA)
def ranks_share_data(module: Any) -> None:
    module.MegatronSession.data_rank = property(lambda self: 0)
