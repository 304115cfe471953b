"""Layouts that both ends of an edge predict without a description.

Rules are learned from messages, and messages arrive even after wrong predictions.
"""

from __future__ import annotations

import random
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.actors.executor.channels import Link, RecvChannel, SendChannel
from raymm.actors.executor.layouts import Layout, LayoutRules
from raymm.actors.executor.step_meta import LayoutKey
from raymm.actors.modules.message import Message
from tests.support.fork_server import run_processes
from tests.support.same_messages import check_equal

TENSORS = st.builds(
    lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    st.sampled_from([(), (0,), (2,), (2, 3), (3, 2)]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
MESSAGES = st.builds(
    Message, st.lists(TENSORS, max_size=2).map(tuple),
    st.dictionaries(st.sampled_from("ab"), TENSORS, max_size=2),
    st.sampled_from([(), ("x",), ("y",)]),
)


@settings(deadline=None, max_examples=300)
@given(first=MESSAGES, second=MESSAGES)
def test_a_message_only_matches_its_own_layout(first: Message, second: Message) -> None:
    layout = Layout.of(first)
    assert layout.is_of(first)
    assert Layout.decode(layout.encode()).is_of(first)
    assert layout.is_of(second) == (layout == Layout.of(second))


TIMEOUT = timedelta(seconds=30)
CPU = torch.device("cpu")
WIDTH = 3


def key_of(sizes: tuple[int, ...], structure: int = 0) -> LayoutKey:
    return LayoutKey(hash((structure, sizes)), structure, sizes)


def layout_of(rows: int, tokens: int) -> Layout:
    return Layout(
        (((rows, tokens, WIDTH), torch.float32),), (("mask", (rows, tokens), torch.bool),)
    )


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 400)), min_size=60, max_size=60),
    st.integers(1, 4), st.integers(0, 7), st.sampled_from([1, 2, 4, 7]), st.integers(0, 3),
)
def test_sizes_linear_in_a_data_size_are_learned(sizes, slope, offset, divisor, shift):
    """Compare with the function itself; errors are only possible in the first few messages."""
    rules, wrong = LayoutRules(), 0
    for rows, length in sizes:
        tokens = slope * ((length + min(shift, divisor - 1)) // divisor) + offset
        key, layout = key_of((rows, length)), layout_of(rows, tokens)
        if rules.expect(key) != layout:
            wrong += 1
            rules.learn(key, layout)
    assert wrong <= 24


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 9)), max_size=80))
def test_unpredictable_layouts_are_given_up(cases):
    """Use arbitrary layouts: a prediction is a layout or None, and fits the last message."""
    rules = LayoutRules()
    for a, b, value in cases:
        key = key_of((a, b))
        rules.learn(key, layout_of(a, value))
        assert rules.expect(key) in (None, layout_of(a, value))


def test_other_structures_and_keys_do_not_change_a_rule():
    rules = LayoutRules()
    for length in (5, 9, 14):
        rules.learn(key_of((2, length)), layout_of(2, length))
    assert rules.expect(key_of((2, 31))) == layout_of(2, 31)
    assert rules.expect(key_of((2, 31), structure=1)) is None
    assert rules.expect("text") is None
    assert rules.expect(key_of((2, 31, 1))) is None


def _steps(seed: int) -> list[list[tuple[LayoutKey, Message]]]:
    """Return microbatches of two structures: learnable sizes with exceptions, and random sizes.

    Some occur several times in a step, some again in a later one.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def message(key: LayoutKey) -> Message:
        rows, length = key.sizes
        tokens = (length + 1) // 2 if key.structure == 0 else hash(key.sizes) % 11
        if key.structure == 0 and length % 13 == 0:
            tokens += 1  # an exception to the rule
        side = {"mask": torch.rand(rows, tokens, generator=generator) > 0.5}
        hidden = torch.randn(rows, tokens, WIDTH, generator=generator)
        return Message((hidden,), side if rows > 1 or key.structure == 1 else {})

    steps = []
    for _ in range(12):
        keys = [key_of((rng.randint(1, 3), rng.randint(1, 60)), rng.randint(0, 1))
                for _ in range(rng.randint(1, 6))]
        keys += rng.choices(keys, k=2)
        steps.append([(key, message(key)) for key in keys])
    return steps


def _exchange(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    link = Link(dist.group.WORLD, 1 - rank, tag=5)
    for number, in_order in enumerate((False, True, False, False)):
        sender = SendChannel({0: link}, CPU)
        receiver = RecvChannel({0: link}, CPU, TIMEOUT, in_order=in_order)
        for messages in _steps(seed=number):
            keys = [key for key, _ in messages]
            if rank == 0:
                sender.expect(keys)
                for _, message in messages:
                    sender.send(message)
                sender.end_step(TIMEOUT)
            else:
                receiver.expect(keys)
                for key, message in messages:
                    if in_order:
                        receiver.post()
                    check_equal(str(key), receiver.recv(), message)
        dist.barrier()
        sender.end_step(TIMEOUT)
    dist.barrier()
    dist.destroy_process_group()


def _noted(described: list, describe, *args, **options) -> None:
    described.append(args)
    describe(*args, **options)


def _without_descriptions(rank: int, store: str) -> None:
    """Check that after a few messages, new lengths and gradients are not described."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    link, back = (Link(dist.group.WORLD, 1 - rank, tag) for tag in (0, 1))
    outputs = SendChannel({0: link}, CPU)
    inputs = RecvChannel({0: link}, CPU, TIMEOUT)
    gradients = SendChannel({0: back}, CPU, gradients=True)
    handed_back = RecvChannel({0: back}, CPU, TIMEOUT, outputs=outputs)
    described = []
    for channel in (outputs, gradients):
        channel._describe = partial(_noted, described, channel._describe)
    for step in range(20):
        lengths = [3 + 7 * step, 5 + 7 * step]
        keys = [key_of((2, length)) for length in lengths]
        if rank == 0:
            outputs.expect(keys)
            handed_back.expect(keys)
        else:
            inputs.expect(keys)
            gradients.expect(keys)
        for length in lengths:
            hidden = (torch.full((2, length, WIDTH), float(length)),)
            message = Message(hidden, {"lengths": torch.tensor([length])})
            if rank == 0:
                outputs.send(message)
                check_equal("gradient", handed_back.recv(), Message(hidden, {}))
            else:
                received = inputs.recv()
                check_equal("output", received, message)
                gradients.send(Message(received.tensors, {}))
        for channel in (outputs, gradients):
            channel.end_step(TIMEOUT)
    assert len(described) == (2 if rank == 0 else 0)  # lengths of the first step
    dist.barrier()
    for channel in (outputs, gradients):
        channel.end_step(TIMEOUT)
    dist.destroy_process_group()


def test_messages_arrive_after_wrong_predictions(tmp_path):
    """Fail if an assertion in either process fails."""
    run_processes(_exchange, (str(tmp_path / "store"),), 2)


def test_new_sizes_need_no_description(tmp_path):
    run_processes(_without_descriptions, (str(tmp_path / "store"),), 2)
