"""The image judges keys, values and models as the host does; the committed keys are those of what
it holds.
"""

import json
from pathlib import Path

import pytest

from bad_inputs import INPUTS
from project_kit import Kit

pytestmark = pytest.mark.integration

TESTS = Path(__file__).parents[1]
# Every key of the committed data against the dataclasses that the image imports.
COMPARE = """
import dataclasses, importlib, importlib.metadata, json
from pathlib import Path
import primus_images.recipes
WHERE = {
    "torchtitan": [("torchtitan.config.job_config", "JobConfig", "")],
    "megatron": [
        ("megatron.core.transformer.transformer_config", "TransformerConfig", "model."),
        ("megatron.core.optimizer.optimizer_config", "OptimizerConfig", "optimizer."),
        (
            "megatron.core.distributed.distributed_data_parallel_config",
            "DistributedDataParallelConfig",
            "ddp.",
        ),
        ("primus_images.training.backends.megatron.model", "MegatronConfig", ""),
        ("primus_images.training.backends.loop.config", "LoopConfig", "training."),
    ],
}
def leaves(cls, prefix):
    for field in dataclasses.fields(cls):
        if field.name.startswith("_"):
            continue
        factory = field.default_factory
        inner = factory if dataclasses.is_dataclass(factory) else None
        if inner is not None:
            yield from leaves(inner, f"{prefix}{field.name}.")
        else:
            value = factory() if factory is not dataclasses.MISSING else field.default
            yield prefix + field.name, value
wrong = []
for backend, classes in WHERE.items():
    keys = Path(primus_images.recipes.__file__).parent / "keys"
    data = json.loads((keys / f"{backend}.json").read_text())
    for name, version in data["versions"].items():
        if importlib.metadata.version(name) != version:
            wrong.append(f"{name} is {importlib.metadata.version(name)}, the data are of {version}")
    found = {}
    for module, cls, prefix in classes:
        found.update(leaves(getattr(importlib.import_module(module), cls), prefix))
    wrong += [f"{backend}: {key}" for key in sorted(found.keys() ^ data["keys"].keys())]
    for key, entry in data["keys"].items():
        if "default" in entry and key in found and found[key] != entry["default"]:
            wrong.append(f"{backend}.{key}: {found[key]!r} is not {entry['default']!r}")
print(json.dumps(wrong))
"""


# The same code judges them in tests/unit/test_bad_inputs.py, by data that the test below compares.
@pytest.mark.slow
def test_bad_inputs_are_judged_as_on_the_host(cpu_image: Kit) -> None:
    lend = ("-v", f"{TESTS}:/tests:ro")
    result = cpu_image.primus(
        "run", "cpu", "--no-entrypoint", *lend, "--", "python3", "/tests/bad_inputs.py"
    )
    assert result.code == 0, result.err
    faults = json.loads(result.out)
    assert set(faults) == {given["name"] for given in INPUTS if not given.get("host")}
    assert {name: fault for name, fault in faults.items() if fault is not None} == {}


def test_the_committed_keys_are_those_of_the_backends_inside(cpu_image: Kit) -> None:
    result = cpu_image.primus(
        "run", "cpu", "--no-entrypoint", "--", "python3", "-W", "ignore", "-c", COMPARE
    )
    assert result.code == 0, result.err
    assert json.loads(result.out.splitlines()[-1]) == []
