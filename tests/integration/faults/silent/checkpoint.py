"""What is saved, loaded and exported."""

from typing import Any

import torch

from silent.registry import silent, wrap


@silent(
    "checkpoint",
    "fsdp --precision=bf16 steps=4",
    "primus_images.training.backends.loop.session",
    "update",
)
def moments_not_saved(module: Any) -> None:
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    wrap(module.Sharded, "state_dict", lambda state, self: {"model": state(self)["model"]})
    module.Sharded.load_state_dict = lambda self, state: set_model_state_dict(
        self._model, state["model"]
    )


@silent("checkpoint", "fsdp", "primus_images.training.backends.loop.checkpoint", "saved files")
def random_state_not_loaded(module: Any) -> None:
    module._set_random_state = lambda state: None


@silent(
    "checkpoint",
    "fsdp --precision=bf16 steps=20",
    "primus_images.training.backends.loop.session",
    "constants",
    "loss",
)
def angles_of_the_default_base_after_a_checkpoint(module: Any) -> None:
    """Tables are not saved; when weights are loaded, they are made again for a base of 10,000."""

    def load(run: Any, self: Any, state: Any) -> None:
        run(self, state)
        length, size = self._model.cosine.shape
        frequencies = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)
        self._model.cosine.copy_(angles.cos())
        self._model.sine.copy_(angles.sin())

    wrap(module.Sharded, "load_state_dict", load)


@silent("checkpoint", "fsdp", "primus_images.training.backends.loop.train", "data")
def data_begin_again_after_a_checkpoint(module: Any) -> None:
    def batches(run: Any, args: Any, session: Any, data: Any, step: int) -> Any:
        loaded = (args.first_step + args.last_step) // 2
        return run(args, session, data, step if step <= loaded else step - loaded)

    wrap(module, "_batches", batches)


@silent(
    "checkpoint",
    "finetune --precision=bf16",
    "primus_images.training.backends.loop.checkpoint",
    "loss",
    "gradients",
    "update",
)
def norms_not_loaded(module: Any) -> None:
    def load(original: Any, state: Any, **args: Any) -> None:
        weights = state["model"]
        state["model"] = {
            name: tensor for name, tensor in weights.items() if not name.endswith("norm.weight")
        }
        original(state, **args)
        state["model"] = weights

    wrap(module.dcp, "load", load)


@silent(
    "checkpoint",
    "finetune --mode=lora finetune.save_weights=true",
    "primus_images.training.backends.finetune.export",
    "saved files",
)
def adapters_saved_with_another_scale(module: Any) -> None:
    def write(original: Any, model: Any, *args: Any) -> None:
        model.model.peft_config["default"].lora_alpha *= 2
        original(model, *args)

    wrap(module, "write", write)


@silent("checkpoint", "flux", "primus_images.training.backends.loop.session", "update")
def first_moments_loaded_negative_in_one_tensor(module: Any) -> None:
    def loaded(run: Any, self: Any, state: Any) -> None:
        run(self, state)
        list(self._optimizer.state.values())[2]["exp_avg"].mul_(0.99)

    wrap(module.Sharded, "load_state_dict", loaded)
