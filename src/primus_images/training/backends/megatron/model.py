"""Megatron's model of a recipe's sizes, with torch's attention, in its distributed wrapper."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core import distributed, parallel_state
from megatron.core.distributed import torch_fully_sharded_data_parallel as fsdp2
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from primus_images.training.backends.finetune.backend import source_of
from primus_images.training.backends.loop.config import RankJob
from primus_images.training.backends.loop.session import sum_gradients
from primus_images.training.backends.loop.weights import Files
from primus_images.training.backends.megatron import cpu, render, sinks, weights
from primus_images.training.judge.reference.names import from_canonical
from primus_images.turbo.primus_turbo import attention
from primus_images.yamlfile import section


@dataclass(frozen=True, kw_only=True)
class MegatronConfig:
    """Settings that Megatron's own configuration classes do not have.

    ``weights`` are the initial weights: "random" (from the seed), a folder of safetensors files
    with Hugging Face's names, or ``hf:OWNER/NAME``. ``torch_fsdp2`` shards weights, gradients and
    optimizer states over the data-parallel ranks, instead of optimizer states alone.
    """

    weights: str = "random"
    torch_fsdp2: bool = False


class ShardedParallel(fsdp2.TorchFullyShardedDataParallel):  # type: ignore[misc,unused-ignore]
    """Megatron's wrapper of FSDP2, with gradients that are sums over tokens."""

    def __init__(
        self, config: TransformerConfig, ddp: distributed.DistributedDataParallelConfig, part: Any
    ) -> None:
        # Megatron's wrapper omits this: gradients of bfloat16 weights would be summed over the
        # ranks in bfloat16.
        policy = MixedPrecisionPolicy()
        if ddp.grad_reduce_in_fp32:
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        fsdp2.fully_shard = partial(fully_shard, mp_policy=policy)
        super().__init__(config, ddp, part)
        sum_gradients(self)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Do nothing: FSDP2 reduces gradients during the backward pass.

        Megatron's wrapper lacks the argument.
        """

    def scale_gradients(self, scaling_factor: Any) -> None:
        """Divide by the labels of the step. Megatron's wrapper does nothing here."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scaling_factor)


class TorchAttention(MegatronModule):  # type: ignore[misc,unused-ignore]
    """Causal attention by ``scaled_dot_product_attention``, as a core attention of Megatron.

    Megatron's ``DotProductAttention`` stores the scores of all pairs of tokens: 64 GiB per layer
    for 32 heads and 8192 tokens in float32 with its backward pass. Grouped queries, a sliding
    window and latent attention (values of another size than keys) are supported; dropout, packed
    sequences and context parallelism are not.
    """

    def __init__(
        self, config: Any, layer_number: int, softmax_scale: float | None = None, **_other: Any
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, max(1, layer_number)
        )
        self.window = 0
        if windowed:
            # Megatron's window size counts the tokens before the token itself.
            self.window = config.window_size[0] + 1

    def forward(
        self, *tensors: torch.Tensor | None, attn_mask_type: Any = None, **options: Any
    ) -> torch.Tensor:
        """Map query, key and value to [tokens, samples, heads × size of values].

        The mask, which follows, is causal.
        """
        assert all(option is None for option in options.values()), options
        query, key, value, _mask = tensors
        return self.attend(query, key, value).flatten(2)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Map [tokens, samples, heads, size] to [tokens, samples, heads, size of values]."""
        query = query.permute(1, 2, 0, 3)
        key = key.permute(1, 2, 0, 3)
        value = value.permute(1, 2, 0, 3)
        tokens = query.size(2)
        groups = query.size(1) // key.size(1)
        mask = None
        if self.window and tokens > self.window:
            pairs = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device)
            mask = pairs.tril().triu(1 - self.window)
            # With a mask, only the kernels without grouped queries avoid storing all scores.
            key = key.repeat_interleave(groups, dim=1)
            value = value.repeat_interleave(groups, dim=1)
            groups = 1
        context = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=groups > 1,
        )
        return context.permute(2, 0, 1, 3)


class SinkAttention(TorchAttention):
    """The same where each head also has a logit of its own, the sink, that no value belongs to."""

    def __init__(
        self, config: Any, layer_number: int, softmax_scale: float | None = None, **other: Any
    ) -> None:
        super().__init__(config, layer_number, softmax_scale, **other)
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        self.sinks = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
        # Tensor-parallel ranks have different heads.
        self.sinks.tensor_model_parallel = True
        self.sinks.partition_dim = 0
        self.sinks.partition_stride = 1

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Map [tokens, samples, heads, size] to [tokens, samples, heads, size of values]."""
        assert not self.window, "attention with sinks has no window"
        return sinks.attended(query, key, value, self.sinks, self.scale)


class TurboAttention(TorchAttention):
    """The same with Primus Turbo's attention."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Map [tokens, samples, heads, size] to [tokens, samples, heads, size of values]."""
        window = 0
        if query.size(0) > self.window:
            window = self.window
        context = attention(
            query.transpose(0, 1),
            key.transpose(0, 1),
            value.transpose(0, 1),
            scale=self.scale,
            window=window,
        )
        return context.transpose(0, 1)


def build(job: RankJob, *, on_cpu: bool) -> list[Any]:
    """Return this rank's parts of the model, several with interleaved pipelines.

    Each reduces its gradients. Weights are read, or random. Raises SystemExit if the files lack
    one.
    """
    if find_spec("transformer_engine") is None:
        cpu.patch_without_te()
    transformer = transformer_config(job, on_cpu=on_cpu)
    methods = weights.defer(transformer)
    choices = job.section(MegatronConfig)
    source = source_of(choices.weights, offline=True)
    virtual_stages: list[int | None] = [None]
    if transformer.virtual_pipeline_model_parallel_size:
        virtual_stages = list(range(transformer.virtual_pipeline_model_parallel_size))
    parts = []
    with _automatic_attention(transformer):
        for stage in virtual_stages:
            part = gpt_model(job, transformer, stage)
            if not on_cpu:
                part.cuda(torch.cuda.current_device())
            if source:
                look_up = partial(
                    from_canonical, "megatron", job.model, look_up=Files(source).whole
                )
                weights.read(part, look_up, tied=job.model.tied_embeddings)
            else:
                seed = job.training.seed
                weights.draw(part, methods, seed, tied=job.model.tied_embeddings)
            parts.append(in_bfloat16(transformer, part) if transformer.bf16 else part)
    return distributed_parts(transformer, parts, job, sharded=choices.torch_fsdp2)


_ATTENTION_VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@contextmanager
def _automatic_attention(transformer: TransformerConfig) -> Iterator[None]:
    """Let Transformer Engine's variables select the attention, if the job leaves it to ``auto``.

    Megatron's ``auto`` asserts that each variable is unset or 1, but an image for AMD GPUs sets
    NVTE_FLASH_ATTN=0.
    """
    variables = {}
    for name in _ATTENTION_VARIABLES:
        if name in os.environ:
            variables[name] = os.environ.pop(name)
    yield
    if transformer.attention_backend == AttnBackend.auto:
        os.environ.update(variables)


def transformer_config(job: RankJob, *, on_cpu: bool) -> TransformerConfig:
    """Return Megatron's configuration of the job's model."""
    model = job.model
    dtype = getattr(torch, job.training.dtype)
    settings = section(job.config, "model")
    tensor_ranks = settings.get("tensor_model_parallel_size", 1)
    # Its layers need a GPU, and images for GPUs train proxies on CPUs, too.
    has_engine = not on_cpu and find_spec("transformer_engine") is not None
    values = {
        **render.transformer(model, job.training),
        "activation_func": torch.nn.functional.silu,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "use_cpu_initialization": on_cpu,
        "transformer_impl": "local",
        # The local grouped product needs another package, so each expert has its own product.
        "moe_grouped_gemm": has_engine and bool(model.moe.experts),
        # Experts require it with tensor parallelism; without it, latent attention's norms count
        # gradients twice.
        "sequence_parallel": tensor_ranks > 1,
    }
    if has_engine:
        values["transformer_impl"] = "transformer_engine"
    values |= settings
    if values.get("moe_aux_loss_coeff"):
        # With a loss per token, Megatron 0.16.1 weights this loss by the tokens of the rank, not of
        # the micro-batch. It would be too small by the number of ranks that share a sequence and,
        # if it is counted by sequences, by the number of sequences.
        values["moe_aux_loss_coeff"] *= tensor_ranks
        if values.get("moe_router_load_balancing_type") == "seq_aux_loss":
            values["moe_aux_loss_coeff"] *= job.training.micro_batch_size
    if values.get("fp8") and not has_engine:
        raise SystemExit("megatron: FP8 needs Transformer Engine, which is not installed here")
    if model.mla.kv_lora_rank:
        return MLATransformerConfig(**values)
    return TransformerConfig(**values)


def gpt_model(job: RankJob, transformer: TransformerConfig, stage: int | None) -> GPTModel:
    """Return this rank's part of the model. ``stage`` is that of an interleaved pipeline."""
    return GPTModel(
        config=transformer,
        transformer_layer_spec=_spec(transformer, job, stage),
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        vp_stage=stage,
        **render.gpt(job.model, job.training.seq_len),
    )


def in_bfloat16(transformer: TransformerConfig, part: GPTModel) -> Float16Module:
    """Return ``part`` in bfloat16, but for the biases of its routers."""
    wrapped = Float16Module(transformer, part)
    for module in part.modules():
        if isinstance(module, TopKRouter):
            # Its biases stay in float32, as a forward pass converts them.
            module._maintain_float32_expert_bias()
    return wrapped


def distributed_parts(
    transformer: TransformerConfig, parts: Sequence[Any], job: RankJob, *, sharded: bool
) -> list[Any]:
    """Return the ``parts`` with what reduces their gradients."""
    settings = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": not sharded}
    settings |= section(job.config, "ddp")
    ddp = distributed.DistributedDataParallelConfig(**settings)
    if sharded:
        return [ShardedParallel(transformer, ddp, part) for part in parts]
    return [
        distributed.DistributedDataParallel(transformer, ddp, part, disable_bucketing=number > 0)
        for number, part in enumerate(parts)
    ]


def _spec(config: TransformerConfig, job: RankJob, vp_stage: int | None) -> Any:
    has_engine = config.transformer_impl == "transformer_engine"
    block = get_gpt_decoder_block_spec(
        config, has_engine, normalization="RMSNorm", vp_stage=vp_stage
    )
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention.submodules
        if job.model.sinks:
            attention.core_attention = SinkAttention
        elif "turbo-attention" in job.turbo:
            attention.core_attention = TurboAttention
        elif not has_engine:
            attention.core_attention = TorchAttention
    if not has_engine:
        _use_own_norms(block, in_attention=config.qk_layernorm)
    return block


def _use_own_norms(block: Any, *, in_attention: bool) -> None:
    block.layer_norm = Norm
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = Norm
        layer.submodules.pre_mlp_layernorm = Norm
        attention = layer.submodules.self_attention.submodules
        for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
            if in_attention and hasattr(attention, name):
                setattr(attention, name, Norm)


class Norm(torch.nn.RMSNorm):  # type: ignore[misc,unused-ignore]
    """torch's RMSNorm.

    Megatron's wrapper of it refuses sequence parallelism, which only needs an attribute.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_other: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel
