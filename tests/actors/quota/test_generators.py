"""Random number generators of the process."""

import random

import numpy as np
import pytest
import torch

from raymm.actors.quota.generators import (
    Ticket,
    generator_state,
    generators_kept,
    host_states,
    seed_generators,
)


def numbers():
    return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()


def test_a_seed_determines_all_numbers():
    drawn = []
    for seed in (2**40 + 1, 2**40 + 1, 5):
        seed_generators(seed)
        drawn.append(numbers())
    assert drawn[0] == drawn[1] and all(a != b for a, b in zip(*drawn[1:], strict=True))


def test_numbers_drawn_in_a_block_are_not_missed_after_it():
    seed_generators(3)
    expected = numbers()
    seed_generators(3)
    with pytest.raises(KeyError), generators_kept():
        numbers()
        raise KeyError
    assert numbers() == expected


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_states_change_with_every_draw(draw):
    torch_state, host_state = generator_state(), host_states()
    draw()
    assert generator_state() == torch_state and host_states() != host_state
    torch.rand(())
    assert generator_state() != torch_state


def test_a_ticket_waits_for_the_one_before():
    first = Ticket(None, 0.01)
    second, third = Ticket(first, 0.01), Ticket(None, 0.01)
    with pytest.raises(TimeoutError, match="not free within 0.01 s"), second:
        pass
    assert not second.entered
    with Ticket(second, 0.01):  # a ticket that gave up does not stop those behind it
        pass
    with third:
        assert third.entered
    with Ticket(third, 0.01):
        pass
