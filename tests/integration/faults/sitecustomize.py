"""Breaks torchtitan, or our own loop, on purpose. Python imports this at start-up when its folder
is on PYTHONPATH.

``PRIMUS_FAULT`` names the fault, or several with commas: of this file, or of ``silent``. The ranks
change a module that they have loaded; the code under test is the shipped code, unchanged and
unaware.
"""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch


def nan(adamw: Any) -> None:
    """The second update leaves NaN in all weights, so step 3 is the first to show it."""
    import torch

    count = 0

    def step(self: Any, closure: Any = None) -> None:
        nonlocal count
        count += 1
        if count == 2:
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.mul_(float("nan"))

    adamw.AdamW.step = step


def no_updates(adamw: Any) -> None:
    """The optimizer changes no weight."""
    adamw.AdamW.step = lambda self, closure=None: None


def no_fp8(float8: Any) -> None:
    """The conversion to FP8 returns the model as it is."""
    float8.convert_to_float8_training = lambda module, **_given: module


def forgets_its_place(data: Any) -> None:
    """A resumed run begins with the first samples again."""
    data.Loader.load_state_dict = lambda self, state: None


def other_seed(utils: Any) -> None:
    """The configuration says one seed, the generators are started with the next."""
    import torch

    set_determinism = utils.set_determinism

    def determined(*given: Any, **named: Any) -> None:
        set_determinism(*given, **named)
        torch.manual_seed(torch.initial_seed() + 1)

    utils.set_determinism = determined


def loop_lost_micro_batch(sharded: Any) -> None:
    """Our own loop counts every micro-batch in the loss, but only the first one's gradient."""
    import torch

    forward_backward = sharded.Sharded.forward_backward

    def without_the_others(self: Any, batches: Any, terms: int) -> Any:
        total = forward_backward(self, batches[:1], terms)
        with torch.no_grad():
            return total + sum(self._loss(self._model, batch) for batch in batches[1:])

    sharded.Sharded.forward_backward = without_the_others


def loop_out_of_memory(train: Any) -> None:
    """Rank 1 runs out of memory in its first step; rank 0 then loses its peer."""
    import torch

    step = train._Loop._mean_loss

    def short(*given: Any) -> Any:
        if os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return step(*given)

    train._Loop._mean_loss = short


def loop_hangs(train: Any) -> None:
    """Rank 1 never comes to its third step."""
    import time

    step = train._Loop._mean_loss

    def hanging(*given: Any) -> Any:
        hanging.count += 1  # type: ignore[attr-defined]
        if os.environ["RANK"] == "1" and hanging.count == 3:  # type: ignore[attr-defined]
            time.sleep(3600)
        return step(*given)

    hanging.count = 0  # type: ignore[attr-defined]
    train._Loop._mean_loss = hanging


def loop_last_batch_not_evaluated(evaluation: Any) -> None:
    """Evaluations leave out the last batch; the training is untouched."""
    batches_of = evaluation.batches_of

    def without_the_last(*given: Any) -> Any:
        return iter(list(batches_of(*given))[:-1])

    evaluation.batches_of = without_the_last


def loop_smooths_evaluations(evaluation: Any) -> None:
    """An evaluation is averaged with the one before, which no checkpoint holds."""
    loss = evaluation.Evaluation.loss

    def smoothed(self: Any) -> float:
        exact = loss(self)
        before = getattr(self, "before", exact)
        self.before = exact
        return float(0.9 * exact + 0.1 * before)

    evaluation.Evaluation.loss = smoothed


def wrong_kernel(functional: Any) -> None:
    """On rank 1, one product of matrices in 40 has a wrong bit in its largest value."""
    import torch

    linear = functional.linear

    def wrong(*given: Any) -> Any:
        result = linear(*given)
        wrong.count += 1  # type: ignore[attr-defined]
        if wrong.count % 40 or os.environ.get("RANK") != "1":  # type: ignore[attr-defined]
            return result
        with torch.no_grad():
            result.view(-1).view(torch.int32)[result.abs().argmax()] ^= 1 << 16
        return result

    wrong.count = 0  # type: ignore[attr-defined]
    functional.linear = wrong


def import_error(llama: Any) -> None:
    """A module of the backend needs one that is not installed."""
    raise ModuleNotFoundError("No module named 'fast_kernels'")


def turbo_left_out(turbo: Any) -> None:
    """No layer is exchanged for Primus Turbo's."""
    turbo.changed_spec = lambda spec, _names: spec


FAULTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "nan": ("torch.optim.adamw", nan),
    "no_updates": ("torch.optim.adamw", no_updates),
    "no_fp8": ("torchao.float8", no_fp8),
    "forgets_its_place": (
        "primus_images.training.backends.torchtitan.data",
        forgets_its_place,
    ),
    "other_seed": ("torchtitan.distributed.utils", other_seed),
    "turbo_left_out": ("primus_images.training.backends.torchtitan.turbo", turbo_left_out),
    "loop_lost_micro_batch": (
        "primus_images.training.backends.loop.session",
        loop_lost_micro_batch,
    ),
    "loop_out_of_memory": ("primus_images.training.backends.loop.train", loop_out_of_memory),
    "loop_last_batch_not_evaluated": (
        "primus_images.training.backends.loop.evaluation",
        loop_last_batch_not_evaluated,
    ),
    "loop_smooths_evaluations": (
        "primus_images.training.backends.loop.evaluation",
        loop_smooths_evaluations,
    ),
    "wrong_kernel": ("torch.nn.functional", wrong_kernel),
    "loop_hangs": ("primus_images.training.backends.loop.train", loop_hangs),
    "import_error": ("primus_images.training.backends.fsdp.llama", import_error),
}


def put(module: str, change: Callable[[Any], None]) -> None:
    """Put a fault in place: one of tokens in the command, any other in the ranks."""
    if (module == "primus_images.training.text.tokens") == ("RANK" in os.environ):
        return
    if module.startswith(("torchtitan", "primus_images.training.backends.torchtitan")):
        # torchtitan chooses its device, and keeps its arguments, when it is imported; the entry of
        # a rank sets these.
        with patch.object(
            sys, "argv", [sys.argv[0], "--job.config_file", f"{sys.argv[-1]}/torchtitan.toml"]
        ):
            importlib.import_module("primus_images.training.backends.torchtitan.cpu").patch_torch()
            importlib.import_module("torchtitan.config")
    change(importlib.import_module(module))


for fault in filter(None, os.environ.get("PRIMUS_FAULT", "").split(",")):
    if fault in ("primus_turbo", "transformer_engine"):
        # No fault: a package that stands in for the real one is installed.
        sys.path.append(str(Path(__file__).with_name("stand_in") / fault))
    elif fault.startswith("burn-in "):
        if "RANK" in os.environ:
            importlib.import_module("burn_in_faults").plant(fault.removeprefix("burn-in "))
    elif fault in FAULTS:
        put(*FAULTS[fault])
    else:
        from silent import SILENT

        put(SILENT[fault].module, SILENT[fault].change)
