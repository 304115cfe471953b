"""Stages of several modules concurrently in the executor, in one process."""

from __future__ import annotations

import copy
import itertools
import threading
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch import nn

from benchmarks.devices.emulated_backend import EmulatedBackend, EmulatedModule
from raymm.actors.executor.colocation import Colocation
from raymm.actors.executor.executor import Executor
from raymm.actors.executor.step_meta import StepMeta
from raymm.actors.modules import precision
from raymm.actors.modules.message import Message
from raymm.actors.modules.module_state import may_draw
from raymm.actors.optimizer.gradient_reduction import (
    GradientReduction,
    ParameterReference,
    SharedParameter,
)
from raymm.actors.quota import CudaBackend, Multiprocessors, RecordingBackend
from raymm.actors.quota.recording import AccountedStream
from raymm.errors import InternalError, PlanError
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.program import BACKWARDS, COMPUTE, FORWARDS
from raymm.scheduler.schedule.lower import lower
from tests.support.quota_spans import most_sms, seconds_together

WIDTH, MICROBATCHES = 6, 4
QUOTAS = {"vision": 0.5, "audio": 0.25}
BOTH = [("vision", "audio")] * MICROBATCHES
SOME = [("vision", "audio"), ("audio",), ("vision", "audio"), ("vision",)]


class Part(nn.Module):
    """Stage with dropout and batch norm over the sum of its inputs."""

    def __init__(self, sink: bool = False) -> None:
        super().__init__()
        self.sink = sink
        self.body = nn.Sequential(
            nn.Dropout(0.4), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )

    def run(self, inputs, received, context):
        values = [message.tensors[0] for message in received.values()]
        if inputs is not None:
            values.append(inputs["x"])
        hidden = self.body(sum(values))
        if self.sink:
            return Message((), {}, loss=hidden.square().sum() / context.label_tokens)
        return Message((hidden,), {})


class Sleeper(nn.Module):
    """Stage that sleeps and uses no random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.work = EmulatedModule()
        self.eval()

    def run(self, inputs, received, context):
        return Message((self.work(inputs["x"]),), {})


def plan_of(quotas=QUOTAS, frozen=(), **options) -> Plan:
    """Return a plan on one rank: a two-stage encoder, a one-stage encoder, and a language model."""
    stage_options = {k: options.pop(k) for k in ("recompute",) if k in options}
    graph = ModuleGraph(
        tuple(
            ModuleNode(name, (name not in frozen,) * layers)
            for name, layers in (("vision", 2), ("audio", 1), ("llm", 1))
        ),
        (("vision", "llm"), ("audio", "llm")),
    )
    stages = tuple(
        Stage(m, i, (i, i + 1), 0, quota=quotas.get(m), **(stage_options if m != "llm" else {}))
        for m, i in (("vision", 0), ("vision", 1), ("audio", 0), ("llm", 0))
    )
    return Plan(graph, stages, MICROBATCHES, **options)


def parts_of(plan: Plan) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    parts = {s.id: Part(sink=s.module == "llm") for s in plan.stages}
    for stage in plan.stages:
        if not plan.trainable(stage):
            parts[stage.id].requires_grad_(False)
    return parts


def inputs_of(plan: Plan, present) -> dict[str, list]:
    def x(seed):
        return {"x": torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))}

    rows = {
        StageId(module, 0): [
            x(100 * number + m) if module == "llm" or module in present[m] else None
            for m in range(len(present))
        ]
        for number, module in enumerate(("vision", "audio", "llm"))
    }
    return rows


def step(
    plan, present, colocation=None, parts=None, reduction=None, training=True, inputs=None,
    autocast=None,
):
    """Return losses, gradients, buffers and spans of one step."""
    parts = parts_of(plan) if parts is None else parts
    executor = Executor(
        parts, plan.stage_edges, {}, {}, {}, timeout=timedelta(seconds=30), colocation=colocation,
        reduction=None if reduction is None else reduction(parts),
        device=next(parts[StageId("llm", 0)].parameters()).device, autocast=autocast,
    )
    program = executor.compile(lower(plan, present).ranks[0])
    keys = tuple(range(len(present)))
    meta = StepMeta(step=3, label_tokens=11, keys=keys, seed=5, training=training)
    result = executor.run(program, inputs_of(plan, present) if inputs is None else inputs, meta)
    gradients = {
        (name, key): p.grad for name, part in parts.items() for key, p in part.named_parameters()
    }
    buffers = {
        (name, key): b for name, part in parts.items() for key, b in part.named_buffers()
    }
    return result.losses, gradients, buffers, result.spans


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(
        (a is None and b is None) or torch.equal(a, b)
        for a, b in ((one[key], other[key]) for key in one)
    )


@pytest.mark.cells(4)
@pytest.mark.parametrize("present", [BOTH, SOME], ids=["both", "some"])
@pytest.mark.parametrize(
    "options",
    [{}, {"recompute": True}, {"schedule": "zero_bubble"}, {"schedule": "gpipe"},
     {"frozen": ("vision",)}],
    ids=["1f1b", "recompute", "zero_bubble", "gpipe", "frozen"],
)  # fmt: skip
def test_concurrent_stages_equal_sequential_ones_bitwise(options, present):
    """Use dropout, batch norm, split backwards and recomputation in concurrent stages."""
    backend = RecordingBackend()
    plan = plan_of(**options)
    colocation = Colocation(plan.quota_sets(0), backend, 30.0)
    mine = step(plan, present, colocation)
    due = step(plan_of(quotas={}, **options), present)
    assert mine[0] == due[0]
    assert same(mine[1], due[1]) and same(mine[2], due[2])
    assert any(g is not None for g in due[1].values())
    quotas = {span[1].module: span[6] for span in mine[3] if span[6] < 1}
    assert quotas == QUOTAS
    assert {span.partition.module for span in backend.account.spans} == set(QUOTAS)
    assert all(span[6] == 1.0 for span in due[3])
    colocation.close()


def test_gradient_sums_wait_for_the_whole_group():
    """Use parameters that this process holds twice, like tied weights.

    Each sum starts once all of the step's backwards are done.
    """
    plan = plan_of()

    def reduction(parts):
        parameters = {(n, k): p for n, part in parts.items() for k, p in part.named_parameters()}
        shared = [
            SharedParameter(
                (
                    ParameterReference(0, StageId("vision", 0), key),
                    ParameterReference(0, StageId("vision", 1), key),
                )
            )
            for key in ("body.2.weight", "body.2.bias")
        ]
        return GradientReduction(0, parameters, shared, {})

    colocation = Colocation(plan.quota_sets(0), RecordingBackend(), 30.0)
    mine = step(plan, BOTH, colocation, reduction=reduction)
    due = step(plan_of(quotas={}), BOTH, reduction=reduction)
    assert mine[0] == due[0] and same(mine[1], due[1])
    colocation.close()


# -- overlap --------------------------------------------------------------------------------

SECONDS = {"vision": 0.03, "audio": 0.02}


def emulated() -> EmulatedBackend:
    def seconds(module, degree, quota, colocated):
        return SECONDS[module] * (1 if colocated else 0.5)

    return EmulatedBackend(seconds, seconds, Multiprocessors(100, 1))


def sleepers(frozen: bool) -> tuple[Plan, dict[str, nn.Module]]:
    graph = ModuleGraph(
        (ModuleNode("vision", (not frozen,)), ModuleNode("audio", (not frozen,)),
         ModuleNode("llm", (True,))),
        (("vision", "llm"), ("audio", "llm")),
    )  # fmt: skip
    stages = tuple(Stage(n, 0, (0, 1), 0, quota=QUOTAS.get(n)) for n in (*QUOTAS, "llm"))
    parts = {
        StageId("vision", 0): Sleeper(),
        StageId("audio", 0): Sleeper(),
        StageId("llm", 0): Part(sink=True).eval(),
    }
    if frozen:
        for name in (StageId("vision", 0), StageId("audio", 0)):
            parts[name].requires_grad_(False)
    return Plan(graph, stages, MICROBATCHES), parts


@pytest.mark.parametrize("frozen", [False, True])
def test_sleeping_modules_overlap(frozen):
    """Check that partners in a group overlap, by the step's clock and by the backend's record."""
    plan, parts = sleepers(frozen)
    backend = emulated()
    colocation = Colocation(plan.quota_sets(0), backend, 30.0)
    reference = copy.deepcopy(parts)
    losses, gradients, _, spans = step(plan, BOTH, colocation, parts)
    kinds = [FORWARDS] if frozen else [FORWARDS, BACKWARDS]
    for kind, microbatch in itertools.product(kinds, range(MICROBATCHES)):
        one, other = (
            next(s for s in spans if s[0] in kind and s[1] == StageId(m, 0) and s[2] == microbatch)
            for m in QUOTAS
        )
        assert max(one[3], other[3]) < min(one[4], other[4]), (kind, microbatch)
    for early, late in itertools.pairwise(_turn_intervals(spans)):
        assert early[1] <= late[0]  # a group ends before the next one begins
    assert most_sms(backend.account) == 75
    assert seconds_together(backend.account, "vision", "audio") > 0
    expected = _by_autograd(reference)
    assert losses == pytest.approx(expected[0], rel=1e-6)
    for key, gradient in gradients.items():
        due = expected[1][key]
        assert (gradient is None) == (due is None)
        if due is not None:
            assert due.norm() > 0 and (gradient - due).norm() <= 1e-5 * due.norm(), key
    colocation.close()


def _turn_intervals(spans):
    """Return (start, end) of all concurrent groups, in the order of the step."""
    own = sorted((s[3], s[4], s[6] < 1) for s in spans if s[0] in COMPUTE)
    found: list[list[float]] = []
    for start, end, beside in own:
        if found and beside and start < found[-1][1]:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([start, end])
    return found


def _by_autograd(parts):
    """Run the same step without raymm: x + weight of each encoder, then the language model."""
    rows = inputs_of(None, BOTH)
    losses = {}
    for m in range(MICROBATCHES):
        hidden = sum(rows[StageId(n, 0)][m]["x"] + parts[StageId(n, 0)].work.weight for n in QUOTAS)
        body = parts[StageId("llm", 0)].body(hidden + rows[StageId("llm", 0)][m]["x"])
        loss = body.square().sum() / 11
        loss.backward()
        losses[StageId("llm", 0), m] = loss.item()
    return losses, {
        (name, key): p.grad for name, part in parts.items() for key, p in part.named_parameters()
    }


# -- streams --------------------------------------------------------------------------------


class LoggedStream(AccountedStream):
    """Stream that logs its calls. Events are (stream, number)."""

    def __init__(self, name, log, partition=None, account=None) -> None:
        super().__init__(partition, account)
        self.name, self.log, self.events = name, log, 0

    def record(self):
        self.events += 1
        self.log.append((self.name, "record", self.events))
        return self.name, self.events

    def wait(self, event):
        self.log.append((self.name, "wait", event))

    def keep(self, tensors):
        self.log.append((self.name, "keep", {t.data_ptr() for t in tensors}))


class LoggedBackend(RecordingBackend):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple] = []
        self.main = LoggedStream("main", self.log)

    def create(self, partition, colocated=()):
        return LoggedStream(partition.module, self.log, partition, self.account)

    def current(self):
        return self.main


def test_groups_fork_from_the_ranks_stream_and_join_it():
    """Check the stream order of every group.

    Modules wait for the work on the rank's stream and keep its tensors; then that stream waits for
    the modules and keeps theirs. (A GPU's streams guarantee neither order nor memory beyond that.)
    """
    # one stage each, so that all work of the encoders is in groups
    plan = sleepers(frozen=False)[0]
    backend = LoggedBackend()
    colocation = Colocation(plan.quota_sets(0), backend, 30.0)
    backend.log.clear()
    inputs = inputs_of(plan, BOTH)
    made: dict[str, list[int]] = {StageId("vision", 0): [], StageId("audio", 0): []}
    parts = parts_of(plan)
    for name, pointers in made.items():
        run = parts[name].run

        def noted(*args, run=run, pointers=pointers):
            message = run(*args)
            pointers.append(message.tensors[0].data_ptr())
            return message

        parts[name].run = noted
    step(plan, BOTH, colocation, parts, inputs=inputs)
    log = backend.log
    forks = [i for i, entry in enumerate(log) if entry[:2] == ("main", "record")]
    assert len(forks) == 2 * MICROBATCHES
    for begin, after in itertools.pairwise([*forks, len(log)]):
        group = log[begin:after]
        modules = {name for name, *_ in group} - {"main"}
        assert modules <= set(QUOTAS) and modules
        for module in modules:
            what = [(kind, value) for name, kind, value in group if name == module]
            assert what[0] == ("wait", ("main", group[0][2]))
            event = next(value for kind, value in what if kind == "record")
            assert ("main", "wait", (module, event)) in group
    kept = {name: set() for name in ("main", *QUOTAS)}
    for name, kind, value in log:
        if kind == "keep":
            kept[name] |= value
    for module in QUOTAS:
        assert {row["x"].data_ptr() for row in inputs[StageId(module, 0)]} <= kept[module]
    assert set(made[StageId("vision", 0)]) | set(made[StageId("audio", 0)]) <= kept["main"]
    colocation.close()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@needs_gpu
@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=["1f1b", "recompute"])
def test_on_green_contexts(options):
    """Compare losses and gradients with the whole device, on a GPU.

    Without dropout they are equal up to rounding of batch norm's order of sums.
    """
    found = []
    for quotas in (QUOTAS, {}):
        plan = plan_of(quotas, **options)
        parts = {name: part.cuda() for name, part in parts_of(plan).items()}
        rows = {
            name: [{"x": row["x"].cuda()} for row in of_stage]
            for name, of_stage in inputs_of(plan, BOTH).items()
        }
        backend = CudaBackend() if quotas else None
        colocation = Colocation([quotas], backend, 60.0) if quotas else None
        found.append(step(plan, BOTH, colocation, parts, inputs=rows))
    (losses, gradients, *_), (due, their_gradients, *_) = found
    assert losses == pytest.approx(due, rel=1e-5)
    for key, gradient in gradients.items():
        other = their_gradients[key]
        assert other.norm() > 0 and (gradient - other).norm() <= 1e-5 * other.norm(), key


# -- errors ---------------------------------------------------------------------------------


def test_a_stage_that_raises_is_named():
    plan = plan_of()
    parts = parts_of(plan)
    parts[StageId("audio", 0)].body[2] = nn.Linear(WIDTH + 1, WIDTH)
    colocation = Colocation(plan.quota_sets(0), RecordingBackend(), 30.0)
    with pytest.raises(InternalError, match="module 'audio' failed: RuntimeError: mat1 and mat2"):
        step(plan, BOTH, colocation, parts)
    colocation.close()


def test_impossible_quotas_and_shared_weights_are_refused():
    with pytest.raises(PlanError, match=r"quota of 'audio' is 0\.01 .*accepted: 0\.06061"):
        Colocation([{"vision": 0.5, "audio": 0.01}], RecordingBackend(), 30.0)
    colocation = Colocation([QUOTAS], RecordingBackend(), 30.0)
    one, other = Part(), Part()
    colocation.check({"vision": [one], "audio": [other], "llm": [one]})
    other.body[2] = one.body[2]
    with pytest.raises(ValueError, match="concurrent modules without shared parameters"):
        colocation.check({"vision": [one], "audio": [other]})
    assert "'vision': requested 0.5 (66.0 SMs), granted 64 of 132" in colocation.report()
    colocation.close()


# -- random numbers -------------------------------------------------------------------------


class Quiet(Part):
    """Stage that declares that it uses no random numbers in training, which holds for encoders."""

    may_draw = False

    def __init__(self, sink: bool = False) -> None:
        super().__init__(sink)
        self.body[0] = nn.Identity() if not sink else nn.Dropout(0.4)


class Masking(Quiet):
    """Stage that uses random numbers against its declaration, as masked autoencoders do."""

    def run(self, inputs, received, context):
        message = super().run(inputs, received, context)
        if self.sink:
            return message
        return Message((message.tensors[0] * (torch.rand(WIDTH) > 0.5),), {})


@pytest.mark.parametrize("kind", [Quiet, Masking])
def test_random_stages_are_detected(kind):
    """Run two steps, as the first one detects it; the language model draws between them."""
    plan = plan_of()
    seen = []
    for quotas in (QUOTAS, {}):
        torch.manual_seed(0)
        parts = {s.id: kind(sink=s.module == "llm") for s in plan.stages}
        colocation = Colocation([QUOTAS], RecordingBackend(), 30.0) if quotas else None
        executor = Executor(parts, plan.stage_edges, {}, {}, {}, colocation=colocation)
        program = executor.compile(lower(plan_of(quotas), BOTH).ranks[0])
        losses = []
        for number in range(2):
            meta = StepMeta(number, 11, tuple(range(MICROBATCHES)), seed=5)
            losses.append(executor.run(program, inputs_of(plan, BOTH), meta).losses)
        gradients = {
            (n, k): p.grad for n, part in parts.items() for k, p in part.named_parameters()
        }
        seen.append((losses, gradients))
        if colocation is not None:
            colocation.close()
    (mine, my_gradients), (due, their_gradients) = seen
    assert mine == due and same(my_gradients, their_gradients)
    assert due[0] != due[1]  # other numbers in another step


def test_simple_layers_use_no_random_numbers():
    simple = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.LayerNorm(2))
    assert not may_draw(simple)
    assert may_draw(nn.Sequential(simple, nn.Dropout(0.0)))
    assert not may_draw(nn.Sequential(simple, nn.Dropout(0.5)).eval())
    assert may_draw(nn.Sequential(simple, Quiet())) and not may_draw(Quiet(), (Quiet,))


class CurrentStream(AccountedStream):
    """Stream that is current in a thread, like CUDA's current stream."""

    threads = threading.local()

    @contextmanager
    def use(self):
        with super().use():
            before = getattr(self.threads, "stream", "main")
            self.threads.stream = self.partition.module
            yield
            self.threads.stream = before


class CurrentBackend(RecordingBackend):
    def create(self, partition, colocated=()):
        return CurrentStream(partition, self.account)


def test_casts_of_a_module_run_on_its_stream(monkeypatch):
    """Check the stream of each autograd node.

    Autograd runs a node, and the accumulation of the parameter's gradient, on the stream that was
    current when the node was created. On the rank's stream, modules' gradients would be serialised.
    """
    plan = plan_of()
    parts = parts_of(plan)
    made: dict[int, str] = {}
    early = precision._early_gradient

    def noted(copy):
        (parameter, _), = copy.grad_fn.next_functions
        made[id(parameter.variable)] = getattr(CurrentStream.threads, "stream", "main")
        return early(copy)

    monkeypatch.setattr(precision, "_early_gradient", noted)
    colocation = Colocation(plan.quota_sets(0), CurrentBackend(), 30.0)
    losses, gradients, _, _ = step(plan, BOTH, colocation, parts, autocast=torch.bfloat16)
    colocation.close()
    for name, part in parts.items():
        for key in ("weight", "bias"):
            parameter = part.get_parameter(f"body.2.{key}")
            assert made[id(parameter)] == (name.module if name.module in QUOTAS else "main")
    alone = step(plan_of(quotas={}), BOTH, autocast=torch.bfloat16)
    assert losses == alone[0] and same(gradients, alone[1])
