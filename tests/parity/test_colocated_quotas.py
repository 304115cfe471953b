"""Encoders colocated on ranks with quotas equal one process."""

import itertools
import json
import time

import pytest
import torch

from benchmarks.devices.emulated_backend import EmulatedBackend
from raymm.actors.quota import Multiprocessors
from raymm.actors.weights.source import FactorySource
from raymm.errors import PlanError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import StageId
from tests.support import parity_models as pm
from tests.support.parity_check import OPTIMIZER, check_gradients, check_training, oracle_of

BATCHES = (
    pm.batch([7, 5], 4, vision=[0, 0], audio=[1]), pm.batch([6, 8], 5, vision=[0, 1], audio=[0]),
    pm.batch([4, 9], 6, audio=[0]), pm.batch([10], 7),
)  # fmt: skip


def model_of(frozen: tuple[str, ...] = ()) -> MultimodalModule:
    return MultimodalModule(
        {
            "vision": ModalityModule(
                pm.build(pm.siglip(), 1), "mlp", frozen="vision" in frozen
            ),
            "audio": ModalityModule(
                pm.build(pm.whisper(), 2), "linear", frozen="audio" in frozen
            ),
        },
        ModalityModule(pm.build(pm.llama(tied=True), 3)),
    )  # fmt: skip


def quotas_seen(outputs) -> dict[str, set[float]]:
    """Return the quotas of each module's work."""
    found: dict[str, set[float]] = {}
    for output in outputs:
        for span in output.timeline.compute():
            found.setdefault(span.stage.module, set()).add(span.quota)
    return found


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("options", "frozen"),
    [({}, ()), ({"schedule": "zero_bubble", "recompute": True}, ("vision",))],
    ids=["1f1b", "zero_bubble, recompute, frozen"],
)
def test_colocated(ray_cluster, options, frozen):
    """Use a pipeline of two ranks for both encoders; text-only and one-modality microbatches."""
    model = model_of(frozen)
    oracle = oracle_of(model)
    spec = MultimodalParallelSpec(
        {"vision": ParallelSpec(pp=2, ranks=(0, 1), quota=0.5),
         "audio": ParallelSpec(pp=2, ranks=(0, 1), quota=0.25)},
        ParallelSpec(ranks=(2,)), 4, **options,
    )  # fmt: skip
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        outputs = check_gradients(parallel, oracle, BATCHES)
        seen = quotas_seen(outputs)
        assert 0.5 in seen["vision"] and 0.25 in seen["audio"] and seen["llm"] == {1.0}
        assert 1.0 in seen["audio"]  # the microbatch with audio only
        report, _, of_language = parallel.group.call("quotas")
        assert "'vision': requested 0.5" in report and "'audio': requested 0.25" in report
        assert of_language == ""
        check_training(parallel, oracle, [[BATCHES], [BATCHES[::-1]], [BATCHES, BATCHES[1:]]])


def test_replicated_with_sharded_optimizer(ray_cluster):
    """Put a replica of both encoders on each of the language model's ranks, one with a quota.

    Gradients of the replicas are summed after the slots in which they were computed.
    """
    model = model_of()
    oracle = oracle_of(model)
    one = {"dp": 2, "ranks": (0, 1), "sharding": "zero1"}
    spec = MultimodalParallelSpec(
        {"vision": ParallelSpec(**one, quota=0.3), "audio": ParallelSpec(**one, quota=0.3)},
        ParallelSpec(pp=2, ranks=(0, 1), quota=0.4), 4,
    )
    batches = [BATCHES[0], BATCHES[1], BATCHES[1], BATCHES[0]]
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        outputs = check_gradients(parallel, oracle, batches)
        assert {0.3} <= quotas_seen(outputs)["vision"]
        check_training(parallel, oracle, [[batches], [batches[::-1]], [batches, batches[:2]]])


# -- concurrent -----------------------------------------------------------------------------


class SleepingEncoder(torch.nn.Module):
    """Encoder whose forward sleeps: (B, ...) -> (B, 1, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(1, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return self.blocks[0](x)[:, None]


def make_sleeper() -> SleepingEncoder:
    return SleepingEncoder()


def emulated() -> EmulatedBackend:
    """Return an accounting backend of an emulated GPU in hundredths; the modules sleep themselves.
    """
    return EmulatedBackend(lambda *_: 0.0, lambda *_: 0.0, Multiprocessors(100, 1))


def test_frozen_encoders_run_concurrently(ray_cluster):
    def encoder():
        return ModalityModule(
            FactorySource(f"{__name__}:make_sleeper"), None, frozen=True,
            hidden_size=8, example_inputs={"x": torch.ones(1, 1)},
        )

    llm = pm.llama(layers=2)
    llm.hidden_size = 8
    model = MultimodalModule({"vision": encoder(), "audio": encoder()}, ModalityModule(llm, seed=3))
    shared = {"ranks": (0,), "quota": 0.5}
    spec = MultimodalParallelSpec(
        {"vision": ParallelSpec(**shared), "audio": ParallelSpec(**shared)}, ParallelSpec(), 2
    )
    batches = []
    for seed in range(2):
        one = pm.text([6, 5], seed)
        for name in ("vision", "audio"):
            one[name] = {"x": torch.ones(1, 1), "sample_index": torch.tensor([0])}
        batches.append(one)
    with spec.apply(model, quota_backend=emulated) as parallel:
        parallel.execute(batches)  # the first step finds that they use no random numbers
        timeline = parallel.execute(batches).timeline
    for microbatch in range(2):
        one, other = (
            next(s for s in timeline.compute() if (s.stage, s.microbatch) == (name, microbatch))
            for name in (StageId("vision", 0), StageId("audio", 0))
        )
        assert max(one.start, other.start) < min(one.end, other.end)
    rank = sorted((s for s in timeline.compute() if s.rank == 0), key=lambda s: s.start)
    first, second = rank[:2], rank[2:]
    assert max(s.end for s in first) <= min(s.start for s in second)
    assert timeline.busy(0) < sum(s.end - s.start for s in rank)


# -- rejected before anything starts --------------------------------------------------------


@pytest.mark.parametrize(
    ("vision", "audio", "why"),
    [
        ({"quota": 0.7}, {"quota": 0.4}, r"on rank 0 sum to 1\.1; accepted: at most 1"),
        ({"quota": 0.5}, {}, r"quota of 'vision' is 0\.5, but no other module with a quota is on"),
        ({"quota": 0.5, "ranks": (1,)}, {"quota": 0.5}, "accepted: quotas of modules that name"),
        ({"quota": 0.5}, {"quota": 0.02}, r"rank 0: quota of 'audio' is 0\.02 .*accepted: 0\.0606"),
        ({"quota": 0.5, "tp": 2}, {"quota": 0.5, "tp": 2}, "its tp 2; accepted: quotas on ranks"),
    ],
)
def test_impossible_quotas(ray_cluster, ended_actors, vision, audio, why):
    specs = {
        name: ParallelSpec(**{"ranks": (0,), **one})
        for name, one in (("vision", vision), ("audio", audio))
    }
    with pytest.raises(PlanError, match=why):
        MultimodalParallelSpec(specs, ParallelSpec(ranks=(2,) if "ranks" in vision else (1,)),
                               2).apply(model_of())  # fmt: skip
    assert ended_actors() == []


def test_stages_alone_keep_the_whole_device():
    """Put the shorter encoder on the last rank only, so the other's first stage has rank 0 alone.

    The plan file records this.
    """
    spec = MultimodalParallelSpec(
        {"vision": ParallelSpec(pp=2, ranks=(0, 1), quota=0.5),
         "audio": ParallelSpec(ranks=(1,), quota=0.5)}, ParallelSpec(ranks=(2,)), 2,
    )  # fmt: skip
    plan = spec.plan(model_of())
    both = ({"vision": 0.5, "audio": 0.5},)
    assert [plan.quota_sets(rank) for rank in range(3)] == [(), both, ()]
    assert Plan.from_json(plan.to_json()) == plan
    stages = json.loads(plan.to_json())["stages"]
    assert {(s["module"], s["index"]): s["quota"] for s in stages} == {
        ("vision", 0): None, ("vision", 1): 0.5, ("audio", 0): 0.5, ("llm", 0): None,
    }
    for one, other in itertools.combinations(plan.stages, 2):
        assert one.id != other.id
