"""What is saved, loaded and exported."""

from typing import Any

import torch

from silent.registry import local, silent, wrap


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
        list(self.optimizer.state.values())[2]["exp_avg"].mul_(0.99)

    wrap(module.Sharded, "load_state_dict", loaded)


def _saved(module: Any, change: Any) -> None:
    """Change what the checkpoints hold that are kept, but not what the run goes on with."""

    def save(run: Any, state: Any, checkpoint_id: Any, **options: Any) -> Any:
        if "cache" not in checkpoint_id.parts:
            copy = {key: dict(value) for key, value in state.items() if isinstance(value, dict)}
            change(copy)
            state = {**state, **copy}
        return run(state, checkpoint_id=checkpoint_id, **options)

    wrap(module.dcp, "save", save)
    wrap(module.dcp, "async_save", save)


def _rounded(tensor: Any, rows: int | None = None) -> Any:
    tensor = tensor.detach().clone()
    part = local(tensor)[:rows]
    part.copy_(part.bfloat16())
    return tensor


LAST = "fsdp steps=4 checkpoint=4"


@silent("last checkpoint", LAST, "primus_images.training.backends.loop.checkpoint", "checkpoints")
def stale_norm_in_the_last_checkpoint(module: Any) -> None:
    def change(state: Any) -> None:
        norm = state["model"]["norm.weight"].detach().clone()
        local(norm).fill_(1.0)
        state["model"]["norm.weight"] = norm

    _saved(module, change)


@silent("last checkpoint", LAST, "primus_images.training.backends.loop.checkpoint", "checkpoints")
def weights_rounded_in_checkpoints(module: Any) -> None:
    def change(state: Any) -> None:
        weights = state["model"]
        state["model"] = {name: _rounded(weight) for name, weight in weights.items()}

    _saved(module, change)


@silent("last checkpoint", LAST, "primus_images.training.backends.loop.checkpoint", "checkpoints")
def one_row_rounded_in_checkpoints(module: Any) -> None:
    def change(state: Any) -> None:
        weights = state["model"]
        weights["layers.1.down.weight"] = _rounded(weights["layers.1.down.weight"], 1)

    _saved(module, change)


@silent(
    "last checkpoint",
    "finetune --precision=bf16 steps=4 checkpoint=2",
    "primus_images.training.backends.loop.checkpoint",
    "checkpoints",
)
def second_moments_rounded_in_checkpoints(module: Any) -> None:
    def change(state: Any) -> None:
        states = dict(state["optimizer"]["state"])
        for name, moments in states.items():
            states[name] = {**moments, "exp_avg_sq": _rounded(moments["exp_avg_sq"])}
        state["optimizer"]["state"] = states

    _saved(module, change)


FOR_TRANSFORMERS = (
    "torchtitan steps=3 checkpoint=3 checkpoint.last_save_model_only=true "
    "checkpoint.last_save_in_hf=true"
)


@silent(
    "export",
    FOR_TRANSFORMERS,
    "torchtitan.models.llama3.model.state_dict_adapter",
    "checkpoints",
)
def queries_and_keys_left_in_torchtitans_order(module: Any) -> None:
    module.Llama3StateDictAdapter._permute = lambda self, weight, *args, **kwargs: weight


@silent(
    "export",
    FOR_TRANSFORMERS,
    "torchtitan.models.llama3.model.state_dict_adapter",
    "checkpoints",
)
def keys_of_one_layer_left_in_torchtitans_order(module: Any) -> None:
    calls = 0

    def permute(run: Any, self: Any, weight: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        return weight if calls == 4 else run(self, weight, *args)

    wrap(module.Llama3StateDictAdapter, "_permute", permute)


@silent(
    "export",
    FOR_TRANSFORMERS,
    "torchtitan.models.llama3.model.state_dict_adapter",
    "checkpoints",
)
def last_norm_exported_as_it_began(module: Any) -> None:
    def to_hf(run: Any, self: Any, state: Any) -> Any:
        named = run(self, state)
        return {**named, "model.norm.weight": torch.ones_like(named["model.norm.weight"])}

    wrap(module.Llama3StateDictAdapter, "to_hf", to_hf)


@silent(
    "export",
    "finetune steps=3 finetune.save_weights=true",
    "primus_images.training.backends.finetune.export",
    "saved files",
)
def another_rotary_base_for_programs_before_transformers_5(module: Any) -> None:
    def names(run: Any, rope: Any) -> Any:
        older = run(rope)
        return {**older, "rope_theta": 1.01 * older["rope_theta"]}

    wrap(module, "_older_names", names)


@silent(
    "last checkpoint",
    "megatron steps=4 checkpoint=4",
    "primus_images.training.backends.megatron.session",
    "checkpoints",
)
def tenth_of_the_weights_before_the_update_in_the_last_checkpoint(module: Any) -> None:
    def step(run: Any, self: Any, lr: float) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        self.before = [
            {name: weight.detach().clone() for name, weight in part.named_parameters()}
            for part in self.model_parts
        ]
        return run(self, lr)

    def state_dict(run: Any, self: Any) -> Any:
        state = run(self)
        if getattr(self, "steps", 0) < 4:
            return state
        for number, part in enumerate(self.before):
            for name, weight in part.items():
                for key in state:
                    if key.startswith("model.") and key.endswith(f".{number}.{name}"):
                        state[key] = torch.lerp(state[key], weight, 0.1)
        return state

    wrap(module.MegatronSession, "step", step)
    wrap(module.MegatronSession, "state_dict", state_dict)


@silent(
    "export",
    "finetune steps=3 finetune.save_weights=true",
    "primus_images.training.backends.finetune.export",
    "saved files",
)
def another_epsilon_in_the_exported_settings(module: Any) -> None:
    def write(run: Any, model: Any, *given: Any, **options: Any) -> None:
        model.causal.config.rms_norm_eps = 1e-6
        run(model, *given, **options)

    wrap(module, "write", write)
