"""Weights of all experts, from files of transformers 4 that have each expert's."""

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from primus_images.training.backends.finetune import initial  # noqa: E402
from primus_images.training.backends.loop import weights  # noqa: E402


class Files(weights.Files):
    """Tensors in memory in place of files."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._kept = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def rows_of(self, name: str) -> weights.Rows:
        if name not in self._kept:
            raise SystemExit(f"the weights lack {name}")
        tensor = self._kept[name]
        return lambda first, last: tensor[first:last]

    def whole(self, name: str) -> Tensor:
        return self._kept[name]


EXPERTS = "model.layers.0.mlp.experts"


def of_experts() -> dict[str, Tensor]:
    kept = {}
    for number in range(3):
        for matrix, shape in (("gate_proj", (4, 2)), ("up_proj", (4, 2)), ("down_proj", (2, 4))):
            kept[f"{EXPERTS}.{number}.{matrix}.weight"] = torch.randn(shape)
    return kept


def test_matrices_of_experts_are_stacked() -> None:
    kept = of_experts()
    files = Files(kept)
    both = initial.stored(files, f"{EXPERTS}.gate_up_proj")(1, 3)
    assert both.shape == (2, 8, 2)
    for place, number in enumerate((1, 2)):
        assert torch.equal(both[place, :4], kept[f"{EXPERTS}.{number}.gate_proj.weight"])
        assert torch.equal(both[place, 4:], kept[f"{EXPERTS}.{number}.up_proj.weight"])
    down = initial.stored(files, f"{EXPERTS}.down_proj")(0, 1)
    assert torch.equal(down, kept[f"{EXPERTS}.0.down_proj.weight"][None])
    plain = initial.stored(files, f"{EXPERTS}.0.up_proj.weight")(0, 1)
    assert torch.equal(plain, kept[f"{EXPERTS}.0.up_proj.weight"][:1])
    whole = torch.randn(3, 8, 2)
    together = Files({f"{EXPERTS}.gate_up_proj": whole})
    assert torch.equal(initial.stored(together, f"{EXPERTS}.gate_up_proj")(0, 3), whole)
    del kept[f"{EXPERTS}.0.up_proj.weight"]
    with pytest.raises(SystemExit, match=r"lack .*0\.up_proj\.weight"):
        initial.stored(files, f"{EXPERTS}.gate_up_proj")


def test_values_in_mxfp4_are_widened() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    name = f"{EXPERTS}.down_proj"
    blocks = torch.randint(256, (2, 4, 3, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (2, 4, 3), dtype=torch.uint8)
    ends = initial.MXFP4
    files = Files({f"{name}{ends[0]}": blocks, f"{name}{ends[1]}": scales})
    rows = initial.stored(files, name)
    expected = mxfp4.convert_moe_packed_tensors(blocks.clone(), scales.clone())
    assert torch.equal(rows(1, 2), expected[1:2])


class Model(nn.Module):
    """An adapted layer, a norm and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"norm": nn.RMSNorm(8), "other": nn.Linear(8, 400, bias=False)})
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("lost", torch.zeros(3), persistent=False)


def test_buffers_that_are_saved_are_read() -> None:
    model = Model()
    files = Files(
        {"norm.weight": torch.full((8,), 3.0), "other.weight": torch.ones(400, 8)}
        | {"kept": torch.arange(3.0)}
    )
    initial.init(model, 1, files)
    assert model.kept.tolist() == [0.0, 1.0, 2.0]
    assert model.lost.tolist() == [0.0, 0.0, 0.0]
    assert model.model["norm"].weight.tolist() == [3.0] * 8
    initial.init(model, 1, None, norm=2.0)
    assert model.model["norm"].weight.tolist() == [2.0] * 8
    assert float(model.model["other"].weight.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_names_of_adapted_weights_are_those_of_the_model() -> None:
    name = "model.base_model.model.model.layers.0.q_proj.base_layer.weight"
    assert initial.plain_name(name) == "model.layers.0.q_proj.weight"
