"""Dropout: masks that are missing, repeat, or are others in the backward pass."""

from typing import Any

import torch

from silent.registry import silent, wrap

JOB = "finetune --mode=lora lora.dropout=0.1"
NARROW = f"{JOB} --precision=bf16"
MODULE = "torch.nn.modules.dropout"


@silent("dropout", JOB, MODULE, "dropout")
def dropout_off(module: Any) -> None:
    module.Dropout.forward = lambda self, values: values


@silent("dropout", NARROW, MODULE, "dropout")
def dropout_of_a_tenth_less(module: Any) -> None:
    def forward(self: Any, values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(values, 0.9 * self.p, self.training)

    module.Dropout.forward = forward


@silent("dropout", JOB, MODULE, "dropout")
def one_layer_drops_nothing(module: Any) -> None:
    seen: list[int] = []

    def forward(run: Any, self: Any, values: torch.Tensor) -> Any:
        if id(self) not in seen:
            seen.append(id(self))
        return values if seen.index(id(self)) == 3 else run(self, values)

    wrap(module.Dropout, "forward", forward)


def _repeated(share: float, module: Any) -> None:
    """A layer drops the same inputs in every step, in ``share`` of its tokens."""
    masks: dict[int, torch.Tensor] = {}

    def forward(run: Any, self: Any, values: torch.Tensor) -> Any:
        if not self.training:
            return run(self, values)
        fresh = torch.rand_like(values, dtype=torch.float32) >= self.p
        mask = masks.setdefault(id(self), fresh)
        tokens = round(share * values.shape[1])
        fresh[:, :tokens] = mask[:, :tokens]
        return values * fresh / (1 - self.p)

    wrap(module.Dropout, "forward", forward)


@silent("dropout", JOB, MODULE, "dropout")
def same_mask_in_every_step(module: Any) -> None:
    _repeated(1.0, module)


@silent("dropout", NARROW, MODULE, "dropout")
def same_mask_for_a_tenth_of_the_tokens(module: Any) -> None:
    _repeated(0.1, module)


@silent(
    "dropout",
    f"{NARROW} training.recompute=full",
    "primus_images.training.backends.loop.session",
    "dropout",
)
def another_mask_in_the_recomputation(module: Any) -> None:
    wrap(
        module,
        "checkpoint",
        lambda run, *args, **kwargs: run(*args, **kwargs, preserve_rng_state=False),
    )


@silent("dropout", JOB, MODULE, "dropout")
def ranks_drop_the_same(module: Any) -> None:
    count = 0

    def forward(run: Any, self: Any, values: torch.Tensor) -> Any:
        nonlocal count
        if self.training:
            count += 1
            torch.manual_seed(count)
        return run(self, values)

    wrap(module.Dropout, "forward", forward)


@silent("dropout", JOB, MODULE, "dropout")
def whole_tokens_dropped(module: Any) -> None:
    def forward(run: Any, self: Any, values: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return run(self, values)  # type: ignore[no-any-return]
        kept = (torch.rand(values.shape[:-1]) >= self.p).to(values.dtype)
        return values * kept.unsqueeze(-1) / (1 - self.p)

    wrap(module.Dropout, "forward", forward)


@silent("dropout", JOB, "primus_images.training.backends.loop.session", "dropout")
def masks_of_every_second_step_repeat(module: Any) -> None:
    def forward_backward(run: Any, self: Any, *given: Any) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps % 2:
            self.state = torch.get_rng_state()
        else:
            torch.set_rng_state(self.state)
        return run(self, *given)

    wrap(module.Sharded, "forward_backward", forward_backward)
