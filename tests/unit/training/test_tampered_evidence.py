"""Whatever of a run's evidence is changed, the reference names it."""

import json
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
for name in ("torchtitan", "megatron", "peft", "diffusers"):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)

from tiny_runs import folder  # noqa: E402

from primus_images.training.judge import proof  # noqa: E402
from primus_images.training.judge.reference import parameters, replay  # noqa: E402
from primus_images.training.run.logs import read_run  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

Content = dict[str, Any]
EMBEDDING = "embedding.weight"
GATE = "layers.1.gate.weight"


@pytest.fixture(autouse=True)
def plain_numbers() -> Iterator[None]:
    """The reference sets how its process treats denormal numbers."""
    threads = torch.get_num_threads()
    yield
    torch.set_flush_denormal(False)
    torch.set_num_threads(threads)


def changed(file: str, change: Callable[[Content], object]) -> Callable[[Path], None]:
    """Return what changes the content of ``file``."""

    def tamper(run: Path) -> None:
        path = run / file
        if path.suffix == ".pt":
            content = torch.load(path, weights_only=True)
            change(content)
            torch.save(content, path)
            return
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return tamper


def weights(step: int, name: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    return changed(f"witness/weights-{step}.pt", lambda content: change(content["weights"][name]))


def update(change: Callable[[Content], object]) -> Callable[[Path], None]:
    return changed("witness/update-2.pt", change)


def removed(file: str) -> Callable[[Path], None]:
    return lambda run: (run / file).unlink()


def line(file: str, number: int, **values: object) -> Callable[[Path], None]:
    """Return what changes values of a line of JSON."""

    def tamper(run: Path) -> None:
        lines = (run / file).read_text().splitlines()
        lines[number] = json.dumps(json.loads(lines[number]) | values)
        (run / file).write_text("\n".join(lines) + "\n")

    return tamper


def block(change: Callable[[Any], object], key: str = "out.0") -> Callable[[Path], None]:
    def of_calls(content: Content) -> None:
        for call in content["calls"]["layers.1"]:
            change(call[key])

    return changed("witness/blocks-1-0.pt", of_calls)


def moved_checkpoint(run: Path) -> None:
    shutil.rmtree(run / "checkpoint/step-3")
    shutil.copytree(run / "checkpoint/step-2", run / "checkpoint/step-3")


PLANTED: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "other tokens": (
        changed("witness/batch-2-0.pt", lambda batch: batch["inputs"][1].add_(1)),
        "reference data",
        "step 2, rank 0: 50% of the inputs are others",
    ),
    "other labels": (
        changed("witness/batch-3-0.pt", lambda batch: batch["labels"][0][0].add_(1)),
        "reference data",
        "step 3, rank 0: 25% of the labels are others",
    ),
    "a micro-batch less": (
        changed("witness/batch-2-0.pt", lambda batch: batch["inputs"].pop()),
        "reference data",
        "step 2, rank 0: inputs have the shape [2, 32], not [4, 32]",
    ),
    "no batch": (
        removed("witness/batch-2-0.pt"),
        "reference data",
        "step 2: the ranks took the shares [] of the data, not each of 1 by 1 ranks",
    ),
    "another seed": (
        changed("witness/batch-1-0.pt", lambda batch: batch.update(seed=7)),
        "reference first weights",
        "rank 0 draws random numbers from seed 7, not 1024",
    ),
    "wide weights": (
        weights(0, GATE, lambda tensor: tensor.mul_(1.5)),
        "reference first weights",
        "model.layers.1.mlp.gate_proj.weight begins with a standard deviation of 0.0299",
    ),
    "shifted weights": (
        weights(0, GATE, lambda tensor: tensor.add_(0.006)),
        "reference first weights",
        "model.layers.1.mlp.gate_proj.weight begins with a mean of 0.005",
    ),
    "a norm of 2": (
        weights(0, "norm.weight", lambda tensor: tensor.fill_(2.0)),
        "reference first weights",
        "model.norm.weight does not begin as 1",
    ),
    "no number": (
        weights(0, GATE, lambda tensor: tensor[0, 0].fill_(torch.nan)),
        "reference parameters",
        "model.layers.1.mlp.gate_proj.weight is not finite",
    ),
    "one value": (
        weights(0, GATE, lambda tensor: tensor.fill_(0.25)),
        "reference parameters",
        "model.layers.1.mlp.gate_proj.weight holds one value",
    ),
    "a missing weight": (
        changed("witness/weights-0.pt", lambda content: content["weights"].pop(GATE)),
        "reference parameters",
        "missing: model.layers.1.mlp.gate_proj.weight",
    ),
    "a narrower weight": (
        changed(
            "witness/weights-0.pt",
            lambda content: content["weights"].update({GATE: content["weights"][GATE][:, :40]}),
        ),
        "reference parameters",
        "model.layers.1.mlp.gate_proj.weight: [48, 40], not [48, 48]",
    ),
    "no weights": (removed("witness/weights-2.pt"), "reference", "the run left no weights-2.pt"),
    "a larger gradient": (
        update(lambda content: content["gradients"][GATE].mul_(1.001)),
        "reference gradients",
        "model.layers.1.mlp.gate_proj.weight differs most, at step 2",
    ),
    "no gradient": (
        update(lambda content: content["gradients"].pop(GATE)),
        "reference gradients",
        "step 2: model.layers.1.mlp.gate_proj.weight has no gradient",
    ),
    "no update": (
        removed("witness/update-2.pt"),
        "reference gradients",
        "the optimizer made 2 updates in 3 steps",
    ),
    "ranks apart": (
        update(lambda content: content.update(apart=["x"])),
        "reference gradients",
        "step 2: ranks that share x disagree",
    ),
    "another rate": (
        update(lambda content: content["rates"].update({GATE: 0.5})),
        "reference learning rate",
        "step 2",
    ),
    "another update": (
        weights(3, GATE, lambda tensor: tensor.add_(1e-5)),
        "reference update",
        "step 3",
    ),
    "another loss": (line("exact.jsonl", 1, loss="7.2"), "reference loss", "at step 2"),
    "another norm": (
        line("exact.jsonl", 1, grad_norm="1.3"),
        "reference gradient norm",
        "at step 2",
    ),
    "longer results": (
        block(lambda tensor: tensor.mul_(1.01)),
        "reference blocks",
        "step 1: layers.1",
    ),
    "one wrong token": (
        block(lambda tensor: tensor[0, 9].mul_(1.5)),
        "reference blocks",
        "step 1: layers.1: tokens at position 9 differ",
    ),
    "one wrong position": (
        block(lambda tensor: tensor[:, 5].mul_(1.5)),
        "reference blocks",
        "tokens at position 5 differ",
    ),
    "another gradient of a block": (
        block(lambda tensor: tensor.mul_(1.01), "grad.in.hidden_states"),
        "reference blocks",
        "step 1: gradients",
    ),
    "other random numbers": (
        changed("witness/random-0.json", lambda content: content.update(kept=False)),
        "reference saved files",
        "rank 0 has other random states after loading its checkpoint",
    ),
    "an older checkpoint": (
        moved_checkpoint,
        "reference checkpoints",
        "step-3: model.embed_tokens.weight is not that of the step",
    ),
    "no checkpoint": (
        lambda run: shutil.rmtree(run / "checkpoint/step-3"),
        "reference checkpoints",
        "step 3, the last one, has no checkpoint",
    ),
    "another evaluation": (
        line("eval.jsonl", 0, eval_loss=7.5),
        "reference evaluation",
        "step 2: 7.50000, not 6.9",
    ),
}


def failing(run: Path) -> dict[str, str]:
    """Return the names and reasons of the reference's verdicts that do not pass."""
    findings = json.loads(json.dumps(replay.replay(run)))
    verdicts = proof.verdicts(findings, read_run(run))
    return {verdict.name: verdict.reason for verdict in verdicts if not verdict.passed}


def copied(name: str, place: Path) -> Path:
    """Return a copy of a run without its caches, which the reference does not read."""
    run = place / "run"
    shutil.copytree(folder(name), run)
    return run


@pytest.mark.parametrize("case", PLANTED)
def test_change_is_named(case: str, tmp_path: Path) -> None:
    tamper, verdict, words = PLANTED[case]
    run = copied("fsdp", tmp_path)
    tamper(run)
    reasons = failing(run)
    assert words in reasons.get(verdict, ""), reasons


def test_nothing_is_named_without_a_change(tmp_path: Path) -> None:
    assert failing(copied("fsdp", tmp_path)) == {}


LORA = "model.layers.0.self_attn.q_proj"
MASKS = "base_model.model.model.layers.0.self_attn.q_proj.lora_dropout.default"


def masks(change: Callable[[Any], object], step: int = 2) -> Callable[[Path], None]:
    def of_layer(content: Content) -> None:
        (name,) = [name for name in content["masks"] if name.endswith(MASKS)]
        change(content["masks"][name])

    return changed(f"witness/dropout-{step}-0.pt", of_layer)


@pytest.mark.parametrize(
    ("tamper", "verdict", "words"),
    [
        (
            masks(lambda calls: calls.append(calls[0])),
            "reference dropout",
            f"step 2, rank 0: {LORA} dropped inputs 3 times, not 2",
        ),
        (
            masks(lambda calls: [mask.fill_(True) for mask in calls]),
            "reference dropout",
            f"{LORA} keeps 9",
        ),
        (
            masks(lambda calls: calls[1].copy_(calls[0])),
            "reference dropout",
            f"{LORA} has 8",
        ),
        (
            changed(
                "witness/weights-3.pt",
                lambda content: next(
                    tensor
                    for name, tensor in content["weights"].items()
                    if "q_proj.base_layer" in name
                ).add_(1e-3),
            ),
            "reference trained weights",
            "q_proj.weight is frozen and changed",
        ),
        (
            changed(
                "witness/weights-0.pt",
                lambda content: next(
                    tensor for name, tensor in content["weights"].items() if ".lora_B." in name
                ).add_(1e-3),
            ),
            "reference parameters",
            "is not zero, so the adapted model is not the given one",
        ),
        (
            changed("weights/config.json", lambda config: config.update(rms_norm_eps=0.5)),
            "reference saved files",
            "config.json: rms_norm_eps is 0.5",
        ),
        (
            changed("weights/config.json", lambda config: config.update(eos_token_id=9)),
            "reference saved files",
            "config.json: eos_token_id is 9",
        ),
        (
            lambda run: (run / "weights/tokenizer.json").write_text("{}"),
            "reference saved files",
            "tokenizer.json is not the tokenizer's",
        ),
    ],
)
def test_change_of_adapters_is_named(
    tamper: Callable[[Path], None], verdict: str, words: str, tmp_path: Path
) -> None:
    run = copied("finetune-lora", tmp_path)
    tamper(run)
    reasons = failing(run)
    assert words in reasons.get(verdict, ""), reasons


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"r": 3}, "adapter_config.json: r is 3, not 4"),
        ({"target_parameters": ["gate"]}, "target_parameters is ['gate'], not None"),
        ({"lora_alpha": 1.0}, "lora_alpha is 1.0, not 16.0"),
    ],
)
def test_change_of_exported_adapters_is_named(
    settings: Content, words: str, tmp_path: Path
) -> None:
    run = copied("finetune-adapters", tmp_path)
    changed("weights/adapter_config.json", lambda config: config.update(settings))(run)
    assert words in failing(run)["reference saved files"]


def test_a_weight_that_is_not_finite_is_named_once() -> None:
    weights = {"q_proj.lora_B.weight": torch.full((4, 2), torch.nan)}
    sentences = list(parameters._odd_values({"first_step": 1, "mode": "lora"}, weights))
    assert sentences == ["q_proj.lora_B.weight is not finite"]
