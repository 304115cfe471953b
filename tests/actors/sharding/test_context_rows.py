"""Blocks of a sequence, and a token's cost other than attention."""

import pytest
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st

from raymm.actors.sharding.context_rows import (
    BLOCKS_PER_PROCESS,
    MOST_BLOCK,
    block_size,
    padded_length,
    token_pairs,
)


@given(st.integers(1, 1 << 18), st.integers(1, 64))
def test_blocks_fill_tiles_and_are_enough(length: int, processes: int) -> None:
    block, padded = block_size(length, processes), padded_length(length, processes)
    assert MOST_BLOCK % block == 0
    assert padded % (block * processes) == 0 and length <= padded < length + block * processes
    enough = BLOCKS_PER_PROCESS * processes
    if length >= enough:
        assert padded // block >= enough
        assert padded <= length * (1 + 1 / BLOCKS_PER_PROCESS)
        assert block == MOST_BLOCK or 2 * block * enough > length
    else:
        assert block == 1


@pytest.mark.parametrize(("config", "pairs"), [
    # 218.1 million weights of a layer, 32 heads of 128: 6 / 14 / 3 of 53,248.
    (hf.LlamaConfig(hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
                    num_key_value_heads=8), 7607),
    # Two of eight experts.
    (hf.MixtralConfig(), 13751),
    # A text model within another, whose heads are narrower than its hidden state.
    (hf.Gemma3Config(text_config={"hidden_size": 64, "intermediate_size": 96, "head_dim": 32,
                                  "num_attention_heads": 4, "num_key_value_heads": 2}), 48),
    # It uses other names for key heads and the MLP's width.
    (hf.GPT2Config(n_embd=64, n_head=4), 146),
])  # fmt: skip
def test_pairs_of_a_token(config, pairs: int) -> None:
    assert token_pairs(config) == pairs
