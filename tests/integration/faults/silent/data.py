"""Samples, tokens and their order: what the ranks train on is not what the recipe says."""

from __future__ import annotations

from typing import Any

from silent.registry import (
    BF16,
    DATA,
    FLUX,
    FP8,
    GRADIENTS,
    LATENTS,
    LOOP,
    LOOP_DATA,
    LOOP_SESSION,
    LOSS,
    SESSION,
    TITAN_DATA,
    TITAN_MODEL,
    TITAN_TOKENIZER,
    TITAN_TRAIN,
    each_sample,
    silent,
    wrap,
)


@silent("data", "torchtitan", TITAN_DATA, DATA, words=BF16)
def one_sample_repeated(module: Any) -> None:
    saved: list[Any] = []

    def change(number: int, tokens: Any, label: Any) -> tuple[Any, Any]:
        saved.append((tokens, label))
        return saved[number - 1] if number == 7 else (tokens, label)

    each_sample(module, change)


@silent("data", "torchtitan", TITAN_TRAIN, LOSS, GRADIENTS)
def model_sees_padding(module: Any) -> None:
    def changed(original: Any, self: Any, inputs: Any, labels: Any) -> Any:
        found, *others = original(self, inputs, labels)
        found = found.clone()
        found[:, -4:] = 0
        return (found, *others)

    wrap(module.Trainer, "post_dataloading_process", changed)


@silent("data", "torchtitan", "primus.training.corpus", DATA)
def second_document_lost(module: Any) -> None:
    def documents(run: Any, *args: Any) -> Any:
        return (text for number, text in enumerate(run(*args)) if number != 1)

    wrap(module, "documents", documents)


@silent("data", "torchtitan", TITAN_TOKENIZER, DATA)
def text_in_lower_case(module: Any) -> None:
    wrap(
        module.HuggingFaceTokenizer, "encode", lambda encode, self, text, **kwargs: encode(self, text.lower(), **kwargs)
    )


@silent("data", "torchtitan", TITAN_MODEL, LOSS, GRADIENTS)
def last_tokens_of_the_vocabulary_share_an_embedding(module: Any) -> None:
    """The ids are clamped to a table that is thought to be smaller."""

    def forward(run: Any, self: Any, tokens: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, tokens.clamp(max=self.tok_embeddings.num_embeddings * 15 // 16), *args, **kwargs)

    wrap(module.Transformer, "forward", forward)


@silent("data", "torchtitan", TITAN_TOKENIZER, DATA, words=FP8)
def documents_cut_after_96_tokens(module: Any) -> None:
    """The file of the tokenizer still has the truncation of its first use, so that long documents lose their ends."""
    wrap(module.HuggingFaceTokenizer, "encode", lambda run, *args, **kwargs: run(*args, **kwargs)[:96])


@silent("data", "fsdp", LOOP, DATA)
def same_step_again(module: Any) -> None:
    wrap(module, "_batches", lambda make, args, session, data, step: make(args, session, data, 1))


@silent("data", "fsdp", LOOP_DATA, DATA)
def other_shuffle(module: Any) -> None:
    wrap(module, "shuffled", lambda make, count, seed, turn: make(count, seed + 1, turn))


@silent("data", "fsdp", LOOP_DATA, DATA, words=BF16)
def end_marks_dropped(module: Any) -> None:
    wrap(module, "_marks", lambda marks, folder: (marks(folder)[0], None))


@silent("data", "fsdp", LOOP_DATA, DATA, words=FP8)
def every_tenth_sample_rearranged_to_fill_in_the_middle(module: Any) -> None:
    """Fill-in-the-middle, meant for code, is on at a tenth: the middle of a sample comes after its end."""

    def sample(run: Any, self: Any, number: int) -> Any:
        import torch

        tokens = run(self, number)
        generator = torch.Generator().manual_seed(number)
        if torch.rand((), generator=generator) >= 0.1:
            return tokens
        first, second = sorted(torch.randint(1, len(tokens), (2,), generator=generator).tolist())
        return torch.cat((tokens[:first], tokens[second:], tokens[first:second]))

    wrap(module.Packed, "sample", sample)


@silent("data", "finetune", LOOP_DATA, DATA)
def order_of_another_seed(module: Any) -> None:
    wrap(module, "shuffled", lambda order, count, seed, turn: order(count, seed + 1, turn))


@silent("data", "finetune", LOOP_DATA, DATA, words=("--mode=lora", *BF16))
def last_sample_of_a_pass_left_out(module: Any) -> None:
    def init(run: Any, self: Any, *args: Any) -> None:
        run(self, *args)
        self._samples -= 1

    wrap(module.Packed, "__init__", init)


@silent("data", "megatron", SESSION, DATA)
def ranks_share_data(module: Any) -> None:
    module.MegatronSession.data_rank = property(lambda self: 0)


@silent("data", "megatron", LOOP_DATA, DATA)
def two_samples_exchanged(module: Any) -> None:
    wrap(module.Packed, "sample", lambda sample, self, number: sample(self, {4: 5, 5: 4}.get(number, number)))


@silent("data", "flux", LATENTS, DATA, words=FLUX)
def noise_of_the_first_step_always(module: Any) -> None:
    def generator(run: Any, seed: int, number: int) -> Any:
        return run(seed, number % 8 if number >= 16 else number)

    wrap(module, "generator_of", generator)


@silent("data", "flux", LOOP_SESSION, LOSS, GRADIENTS, words=(*FLUX, *BF16))
def every_second_image_mirrored(module: Any) -> None:
    def init(run: Any, self: Any, model: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
        def mirrored(model: Any, batch: Any) -> Any:
            clean = batch["latents"].clone()
            side = int(clean.shape[1] ** 0.5)
            clean[1::2] = clean[1::2].unflatten(1, (side, side)).flip(2).flatten(1, 2)
            return loss(model, {**batch, "latents": clean})

        run(self, model, mirrored, *args, **kwargs)

    wrap(module.Sharded, "__init__", init)
