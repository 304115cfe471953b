"""Parameters of a module that a process holds."""

from torch import nn

from raymm.actors.modules.cut import CutInfo
from raymm.actors.weights.part import Part, keep_parameters


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(3, 2), nn.LayerNorm(2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4))


INFO = CutInfo(
    "blocks", 0, frozenset({"embed.weight"}), frozenset(), frozenset({"norm.weight", "norm.bias"})
)
ALL = {name for name, _ in Model().named_parameters()}


def held(module):
    return {name for name, _ in module.named_parameters()}


def test_stages_hold_every_parameter_once():
    parts = [Part(INFO, lo, hi) for lo, hi in ((0, 1), (1, 3), (3, 4))]
    owned = [set(part.owned(Model())) for part in parts]
    assert owned[1] == {"blocks.1.weight", "blocks.2.weight"}
    assert sorted(name for names in owned for name in names) == sorted(ALL)
    for part, names in zip(parts, owned, strict=True):
        module = Model()
        part.prune(module)
        assert held(module) == names


def test_a_part_is_restricted_to_names():
    part = Part(INFO, 0, 2, among={"embed.weight", "blocks.1.weight", "norm.bias"})
    assert set(part.owned(Model())) == {"embed.weight", "blocks.1.weight"}
    assert Part(None).owned(Model()) == [name for name, _ in Model().named_parameters()]


def test_tied_parameters_are_kept_under_all_names():
    module = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    module["b"].weight = module["a"].weight
    keep_parameters(module, {"b.weight"})
    assert module["a"].weight is module["b"].weight
