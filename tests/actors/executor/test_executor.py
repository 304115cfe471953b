"""The executor in one process: any valid order of instructions gives the same numbers."""

from __future__ import annotations

import copy
import random
import time

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from raymm.actors.executor.executor import DeviceClock, Executor, HostClock, step_clock
from raymm.actors.executor.step_meta import StepMeta
from raymm.actors.modules.draws import module_draws
from raymm.actors.modules.message import Message
from raymm.scheduler.graph.module_graph import Direction
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.program import Instruction, Op, Program


def test_host_marks_are_wall_clock_seconds():
    clock = step_clock(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    before = time.time()
    marks = [clock.mark() for _ in range(3)]
    found = clock.seconds(marks)
    assert found == sorted(found) and clock.seconds([]) == []
    assert found[0] == pytest.approx(before, abs=60.0)
    assert found[2] - found[0] == pytest.approx(marks[2] - marks[0], abs=1e-4)


class Device:
    """A device that takes three seconds from event to event, whenever the host comes by."""

    passed = 0
    waited: list[Device] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Device.passed
        Device.passed += 3

    def synchronize(self) -> None:
        Device.waited.append(self)

    def elapsed_time(self, other: Device) -> float:
        assert Device.waited  # nothing is known of events that have not passed
        return (other.at - self.at) * 1e3


def test_device_marks_are_read_when_the_last_has_passed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Device)
    before = time.time()
    clock = DeviceClock()
    marks = [clock.mark() for _ in range(3)]
    found = clock.seconds(marks)
    assert Device.waited == [marks[-1]]
    assert [b - a for a, b in zip(found, found[1:], strict=False)] == pytest.approx([3, 3])
    assert found[0] - 3 == pytest.approx(before, abs=60.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_device_is_timed_not_its_queue():
    clock = step_clock(torch.device("cuda"))
    a = torch.randn(4096, 4096, device="cuda")
    first = clock.mark()
    start = time.perf_counter()
    for _ in range(50):
        a @ a
    handed_over = time.perf_counter() - start
    seconds = clock.seconds([first, clock.mark()])
    assert seconds[1] - seconds[0] > handed_over / 2


SEED, STEP = 3, 11


class Part(nn.Module):
    """Stage: dropout, batch norm and a spectral norm over the sum of its inputs."""

    def __init__(self, name: str, sink: bool = False) -> None:
        super().__init__()
        self.name, self.sink = name, sink
        self.dropout = nn.Dropout(0.4)
        self.norm = nn.BatchNorm1d(6)
        self.linear = spectral_norm(nn.Linear(6, 6))
        self.seen: list[tuple[list[str], bool]] = []

    def run(self, inputs, received, context):
        self.seen.append((sorted(received), torch.is_grad_enabled()))
        values = [message.tensors[0] for message in received.values()]
        if inputs is not None:
            values.append(inputs["x"])
        hidden = self.linear(self.norm(self.dropout(sum(values)))).tanh()
        if self.sink:
            return Message((), {}, loss=hidden.square().sum() / context.label_tokens)
        return Message((hidden,), {"microbatch": torch.tensor(context.microbatch)})


# Two replicas of a two-stage encoder feed a language model in two stages.
CHAINS = {
    0: (StageId("vision", 0), StageId("vision", 1)),
    1: (StageId("vision", 0, 1), StageId("vision", 1, 1)),
}
LLM = (StageId("llm", 0), StageId("llm", 1))
EDGES = tuple(
    edge
    for first, second in CHAINS.values()
    for edge in ((first, second), (second, StageId("llm", 0)))
) + (LLM,)
WITH_IMAGE = (True, False, True, True, False)
FROZEN = {"none": (), "encoders": (StageId("vision", 0),), "llm": LLM}


def chain(microbatch: int) -> tuple[StageId, ...]:
    return (CHAINS[microbatch % 2] if WITH_IMAGE[microbatch] else ()) + LLM


def stages(frozen: str) -> dict[StageId, Part]:
    torch.manual_seed(0)
    parts = {name: Part(name, name == StageId("llm", 1)) for name in (*CHAINS[0], *LLM)}
    for name in FROZEN[frozen]:
        parts[name].requires_grad_(False)
    for one, other in zip(*CHAINS.values(), strict=True):
        parts[other] = copy.deepcopy(parts[one])
    return parts


def data() -> dict[StageId, list]:
    def rows(seed):
        return [{"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(seed + m))}
                for m in range(len(WITH_IMAGE))]

    return {
        StageId("vision", 0): rows(0),
        StageId("vision", 0, 1): rows(0),
        StageId("llm", 0): rows(50),
    }


def random_program(frozen: str, rng: random.Random, recompute: bool, split: bool):
    """Return a random valid order of instructions; each stage takes microbatches in order."""
    trains = {n: n.first_replica not in FROZEN[frozen] for c in CHAINS.values() for n in c}
    trains |= {n: n not in FROZEN[frozen] for n in LLM}
    waiting: list[tuple[tuple[Op, str, int], set]] = []
    for m in range(len(WITH_IMAGE)):
        names = chain(m)
        gradient = [any(trains[n] for n in names[: i + 1]) for i in range(len(names))]
        for i, name in enumerate(names):
            again = recompute and gradient[i]
            forward = (
                Op.FORWARD_NO_GRAD if not gradient[i]
                else Op.FORWARD_CHECKPOINTED if again else Op.FORWARD
            )
            done = {(names[i - 1], m, "forward")} if i else set()
            done |= {(name, k, "forward") for k in range(m) if name in chain(k)}
            waiting.append(((forward, name, m), done))
            if not gradient[i]:
                continue
            if again:
                waiting.append(((Op.RECOMPUTE, name, m), {(name, m, "forward")}))
            need = {(name, m, "recompute" if again else "forward")}
            if i + 1 < len(names):
                need.add((names[i + 1], m, "gradient"))
            in_two = split and i > 0 and gradient[i - 1] and trains[name]
            waiting.append(((Op.BACKWARD_INPUT if in_two else Op.BACKWARD, name, m), need))
            if in_two:
                waiting.append(((Op.BACKWARD_WEIGHT, name, m), {(name, m, "gradient")}))
    result = {Op.RECOMPUTE: "recompute", Op.BACKWARD: "gradient", Op.BACKWARD_INPUT: "gradient",
              Op.BACKWARD_WEIGHT: "weight"}
    program, done = [], set()
    while waiting:
        ready = [task for task in waiting if task[1] <= done]
        task = rng.choice(ready)
        waiting.remove(task)
        (op, name, m), _ = task
        done.add((name, m, result.get(op, "forward")))
        program.append(Instruction(op, name, m))
    check_program(Program((tuple(program),)))
    return program


def expected(parts: dict[str, Part]) -> dict[int, float]:
    """Return losses of the first replica's stages, run one after another with plain autograd."""
    inputs, losses = data(), {}
    for m in range(len(WITH_IMAGE)):
        message = None
        for name in chain(m):
            name = name.first_replica
            module_draws(SEED, STEP, name.module, m).enter("stage")
            rows = inputs.get(name)
            received = {} if message is None else {"before": message}
            message = parts[name].run(rows and rows[m], received, _Context(m))
        (loss,) = message.outputs
        losses[LLM[1], m] = float(loss.detach())
        if loss.requires_grad:
            loss.backward()
    return losses


class _Context:
    label_tokens = 9

    def __init__(self, microbatch: int) -> None:
        self.microbatch = microbatch


def execute(parts: dict[str, Part], program: list[Instruction]) -> dict[int, float]:
    executor = Executor(parts, EDGES, {}, {}, {})
    keys = tuple(range(len(WITH_IMAGE)))
    meta = StepMeta(STEP, _Context.label_tokens, keys, SEED)
    return executor.run(executor.compile(program), data(), meta).losses


def close(mine, due) -> bool:
    return bool((mine - due).double().norm() <= 1e-6 * due.double().norm())


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("frozen", FROZEN)
def test_any_order_gives_the_gradients_of_plain_autograd(frozen, recompute, split):
    """Use dropout, batch norm, replicas of the encoder, and microbatches without images."""
    reference = stages(frozen)
    losses = expected(reference)
    for trial in range(5):
        rng = random.Random(f"{frozen} {recompute} {split} {trial}")
        program = random_program(frozen, rng, recompute, split)
        parts = stages(frozen)
        assert execute(parts, program) == losses
        for name in (*CHAINS[0], *LLM):
            copies = [parts[n] for n in (name, name._replace(replica=1)) if n in parts]
            for key, due in reference[name].named_parameters():
                held = [dict(one.named_parameters())[key].grad for one in copies]
                held = [gradient for gradient in held if gradient is not None]
                assert (due.grad is None) == (not held)
                if held:
                    assert close(sum(held), due.grad)
        for name in LLM:  # replicas of the encoder have separate statistics
            for key, due in reference[name].norm.named_buffers():
                assert close(dict(parts[name].norm.named_buffers())[key], due)


def test_replicas_get_their_own_microbatches():
    parts = stages("none")
    execute(parts, random_program("none", random.Random(0), True, True))
    # Forward and recomputation of microbatches 0 and 2, and of 3; 1 and 4 have no image.
    first, second = (parts[name].seen for name in (StageId("vision", 1), StageId("vision", 1, 1)))
    assert [names for names, _ in first] == [["vision.0"]] * 4
    assert [names for names, _ in second] == [["vision.0@1"]] * 2
    assert sorted(grad for _, grad in second) == [False, True]
    assert {tuple(names) for names, _ in parts[StageId("llm", 0)].seen} == {("vision",), ()}


def test_pass_two_computes_the_weight_gradients():
    """Check that the gradient chain is finished before any weight has its gradient."""
    parts = stages("none")
    names = chain(0)
    forward = [(Op.FORWARD, name, 0) for name in names]
    chained = [(Op.BACKWARD_INPUT, name, 0) for name in reversed(names[1:])]
    execute(parts, [Instruction(*i) for i in [*forward, *chained]])
    assert all(q.grad is None for part in parts.values() for q in part.parameters())
    later = [(Op.BACKWARD, names[0], 0), *((Op.BACKWARD_WEIGHT, name, 0) for name in names[1:])]
    execute(parts, [Instruction(*i) for i in [*forward, *chained, *later]])
    assert all(q.grad is not None for name in names for q in parts[name].parameters())


def test_a_stage_that_changes_its_inputs_cannot_be_recomputed():
    parts = stages("none")

    def run(inputs, received, context):
        inputs["x"].mul_(2)
        return Message((inputs["x"] * parts[StageId("vision", 0)].linear.weight.sum(),), {})

    parts[StageId("vision", 0)].run = run
    program = [Instruction(Op.FORWARD_CHECKPOINTED, StageId("vision", 0), 0)]
    with pytest.raises(RuntimeError, match="vision.0 changes its inputs in place.*recompute"):
        execute(parts, program)


class Add(nn.Module):
    """Sink that adds its input to its parameters: both have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(4, 6))

    def run(self, inputs, received, context):
        (message,) = received.values()
        return Message((), {}, loss=(message.tensors[0] + self.own).sin().sum())


def test_pass_two_starts_from_the_unsummed_gradient():
    """Check also a sum in place, as collectives do it."""
    own, handed = {}, {}
    for op in (Op.BACKWARD, Op.BACKWARD_INPUT):
        parts = {
            StageId("vision", 0): stages("none")[StageId("vision", 0)],
            StageId("llm", 0): Add(),
        }
        executor = Executor(
            parts,
            [(StageId("vision", 0), StageId("llm", 0))],
            {},
            {},
            {},
            sum_gradient=lambda g: g.mul_(3),
        )
        program = [
            (Op.FORWARD, StageId("vision", 0), 0),
            (Op.FORWARD, StageId("llm", 0), 0),
            (op, StageId("llm", 0), 0),
        ]
        if op is Op.BACKWARD_INPUT:
            program.append((Op.BACKWARD_WEIGHT, StageId("llm", 0), 0))
        program.append((Op.BACKWARD, StageId("vision", 0), 0))
        compiled = executor.compile([Instruction(*i) for i in program])
        executor.run(compiled, data(), StepMeta(STEP, 9, (0,), SEED))
        own[op], handed[op] = (
            parts[StageId("llm", 0)].own.grad,
            parts[StageId("vision", 0)].linear.bias.grad,
        )
    assert torch.equal(own[Op.BACKWARD], own[Op.BACKWARD_INPUT])
    assert torch.equal(handed[Op.BACKWARD], handed[Op.BACKWARD_INPUT])


class Branch(nn.Module):
    """Stage without random numbers: the sum of its inputs, times a matrix."""

    def __init__(self, sink: bool = False) -> None:
        super().__init__()
        self.weight, self.sink = nn.Parameter(torch.randn(6, 6)), sink
        self.eval()

    def run(self, inputs, received, context):
        values = [message.tensors[0] for message in received.values()]
        hidden = (sum(values) if inputs is None else inputs["x"]) @ self.weight
        loss = hidden.square().sum()
        return Message((), {}, loss=loss) if self.sink else Message((hidden,), {})


def test_gradients_of_several_consumers_are_summed():
    a, b, c, d = names = [StageId(name, 0) for name in "abcd"]
    torch.manual_seed(0)
    parts = {name: Branch(sink=name == d) for name in names}
    edges = ((a, b), (a, c), (b, d), (c, d))
    order = [(Op.FORWARD, s) for s in names] + [(Op.BACKWARD, s) for s in reversed(names)]
    executor = Executor(parts, edges, {}, {}, {})
    x = torch.randn(5, 6)
    program = executor.compile([Instruction(op, stage, 0) for op, stage in order])
    result = executor.run(program, {a: [{"x": x}]}, StepMeta(0, 1, (0,)))
    alone = copy.deepcopy(parts)
    first = x @ alone[a].weight
    last = (first @ alone[b].weight + first @ alone[c].weight) @ alone[d].weight
    loss = last.square().sum()
    loss.backward()
    assert result.losses == {(d, 0): pytest.approx(float(loss.detach()))}
    for name in names:
        torch.testing.assert_close(parts[name].weight.grad, alone[name].weight.grad)


class Merging(nn.Module):
    """Stage that inserts features between its own rows, as merge policies do."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(100, 6))

    def run(self, inputs, received, context):
        (message,) = received.values()
        loss = torch.cat([self.rows, message.tensors[0]]).square().sum()
        return Message((), {}, loss=loss)


class Wire:
    """Both ends of a channel: returns a message, and records the sent ones."""

    def __init__(self, message: Message | None = None) -> None:
        self.message, self.sent = message, []

    def expect(self, keys, bound=None):
        pass

    def recv(self):
        return self.message

    def send(self, message):
        self.sent.append(message)

    def end_step(self, timeout):
        pass


def test_a_sent_gradient_keeps_no_other_memory():
    """Check that no view of a larger gradient is sent.

    The gradient of a part of the merged features is such a view, which would keep all of it until
    the message has arrived.
    """
    source, sink = StageId("vision", 0), StageId("llm", 0)
    features = torch.randn(5, 6)
    there, back = Wire(Message((features,), {})), Wire()
    executor = Executor(
        {sink: Merging()}, ((source, sink),), {(sink, source): back}, {(source, sink): there}, {},
    )
    executor.run(
        executor.compile([
            Instruction(Op.RECV, sink, 0, source), Instruction(Op.FORWARD, sink, 0),
            Instruction(Op.BACKWARD, sink, 0),
            Instruction(Op.SEND, sink, 0, source, direction=Direction.BACKWARD),
        ]),
        {}, StepMeta(STEP, 1, (0,), SEED),
    )
    (gradient,) = back.sent[0].tensors
    assert gradient.equal(2 * features)
    assert gradient.untyped_storage().nbytes() == gradient.nbytes


class Thinker(nn.Module):
    """Module with a loss, and with states that another one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def run(self, inputs, received, context):
        states = (inputs["x"] @ self.weight).tanh()
        loss = states.square().sum() * context.scales["thinker"]
        return Message((states,), {}, ("states",), loss)


class Talker(nn.Module):
    """Module that reads states by their name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def run(self, inputs, received, context):
        (message,) = received.values()
        states = dict(zip(message.names, message.tensors, strict=True))["states"]
        return Message((), {}, loss=(states @ self.weight).sin().sum() * context.scales["talker"])


@pytest.mark.parametrize("backwards", [
    [(Op.BACKWARD, 1), (Op.BACKWARD, 0)],
    [(Op.BACKWARD_INPUT, 1), (Op.BACKWARD_INPUT, 0), (Op.BACKWARD_WEIGHT, 0),
     (Op.BACKWARD_WEIGHT, 1)],
], ids=["whole", "split"])
def test_a_stage_with_a_loss_may_be_read(backwards):
    torch.manual_seed(0)
    names = StageId("thinker", 0), StageId("talker", 0)
    parts = {names[0]: Thinker(), names[1]: Talker()}
    scales, x = {"thinker": 0.5, "talker": -0.25}, torch.randn(4, 6)
    states = (x @ parts[names[0]].weight).tanh()
    losses = states.square().sum() * 0.5, (states @ parts[names[1]].weight).sin().sum() * -0.25
    expected = torch.autograd.grad(sum(losses), [parts[name].weight for name in names])
    executor = Executor(parts, (names,), {}, {}, {})
    program = [Instruction(Op.FORWARD, name, 0) for name in names]
    program += [Instruction(op, names[number], 0) for op, number in backwards]
    meta = StepMeta(0, 1, ("shape",), scales=scales)
    result = executor.run(executor.compile(program), {names[0]: [{"x": x}]}, meta)
    assert list(result.losses) == [(name, 0) for name in names]
    assert list(result.losses.values()) == pytest.approx([float(v.detach()) for v in losses])
    for name, due in zip(names, expected, strict=True):
        torch.testing.assert_close(parts[name].weight.grad, due)
