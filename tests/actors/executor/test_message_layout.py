"""A layout accepts a message if and only if it is the message's own."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.actors.executor.message_layout import Layout
from raymm.actors.modules.message import Message

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
