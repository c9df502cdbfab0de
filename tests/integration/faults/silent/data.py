"""Samples, tokens and their order: what the ranks train on is not what the recipe says."""

from __future__ import annotations

from typing import Any

from silent.registry import (
    BF16,
    DATA,
    FLUX,
    FP8,
    LATENTS,
    LOOP_DATA,
    SESSION,
    TOKENS,
    silent,
    wrap,
)


@silent("data", "torchtitan", TOKENS, DATA, words=FP8)
def documents_cut_after_96_tokens(module: Any) -> None:
    """The file of the tokenizer still has the truncation of its first use, so that long documents lose their ends."""
    wrap(module.Encoder, "texts", lambda run, *args: [tokens[:96] for tokens in run(*args)])


@silent("data", "fsdp", TOKENS, DATA, words=BF16)
def end_marks_dropped(module: Any) -> None:
    def init(run: Any, self: Any, *args: Any) -> None:
        run(self, *args)
        self.end = None

    wrap(module.Encoder, "__init__", init)


@silent("data", "finetune", LOOP_DATA, DATA, words=("--mode=lora", *BF16))
def last_sample_of_a_pass_left_out(module: Any) -> None:
    def init(run: Any, self: Any, *args: Any) -> None:
        run(self, *args)
        self.samples -= 1

    wrap(module.Stream, "__init__", init)


@silent("data", "megatron", SESSION, DATA)
def ranks_share_data(module: Any) -> None:
    module.MegatronSession.data_rank = property(lambda self: 0)


@silent("data", "flux", LATENTS, DATA, words=FLUX)
def noise_of_the_first_step_always(module: Any) -> None:
    def generator(run: Any, seed: int, number: int) -> Any:
        return run(seed, number % 8 if number >= 16 else number)

    wrap(module, "generator_of", generator)
