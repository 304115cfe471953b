"""Texts that a stage goes on with at once, whichever and in which order, get the tokens that the
model gives each alone, from all its tokens and without a cache."""

import parity_models as pm
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.actors.modules.merge import Prepend
from raymm.actors.modules.message import Decode, MicrobatchContext
from raymm.actors.stages.language import LanguageSpec, LanguageStage
from raymm.actors.stages.texts.joined_texts import TextsApart, joined_arguments

VOCABULARY = 60


def lfm2() -> hf.PretrainedConfig:
    """Layers of convolutions, whose states are no keys and values."""
    return hf.Lfm2Config(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=3, pad_token_id=0,
        num_attention_heads=4, num_key_value_heads=2, block_auto_adjust_ff_dim=False,
        layer_types=["conv", "full_attention", "conv"],
    )


# Positions that are rotary, windows shorter than texts; learnt positions, and states that only one
# text at a time can go on with.
TOGETHER, APART = {"llama": pm.llama, "gemma3": pm.gemma3}, {"gpt2": pm.gpt2, "lfm2": lfm2}


class Writing:
    """A model's only stage."""

    def __init__(self, name: str) -> None:
        self.model = pm.build((TOGETHER | APART)[name](), 3).eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4)  # what is written depends on all that was before
        blocks = self.model.config.num_hidden_layers
        spec = LanguageSpec("llm", None, blocks, Prepend())
        self.stage = LanguageStage(spec, 0, blocks, self.model)
        self.rows: list[int] = []
        self.model.get_output_embeddings().register_forward_pre_hook(
            lambda _, args: self.rows.append(args[0].shape[0] * args[0].shape[1])
        )

    @torch.no_grad()
    def tokens(self, ids, decode):
        ids = torch.tensor(ids)
        given = {
            "input_ids": ids, "attention_mask": torch.ones_like(ids),
            "labels": torch.full_like(ids, -100), "sample_index": {},
        }
        message = self.stage.run(given, {}, MicrobatchContext(1, decode=decode))
        return [int(token) for token in message.scores]

    @torch.no_grad()
    def alone(self, ids):
        logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits
        return int(logits[0, -1].argmax())


@pytest.fixture(scope="module", params=[*TOGETHER, *APART])
def writing(request):
    return request.param, Writing(request.param)


texts = st.lists(
    st.lists(st.integers(1, VOCABULARY), min_size=1, max_size=12), min_size=2, max_size=4
)


@settings(max_examples=25, deadline=None)
@given(prompts=texts, data=st.data())
def test_each_text_gets_its_own_tokens(writing, prompts, data):
    name, model = writing
    written: list[list[int]] = []
    for number, prompt in enumerate(prompts):
        (token,) = model.tokens([prompt], Decode((number,), True))
        written.append([*prompt, token])
    ended: list[int] = []
    alive = list(range(len(prompts)))
    for _ in range(data.draw(st.integers(1, 4))):
        order = data.draw(st.permutations(alive))
        order = order[: data.draw(st.integers(1, len(order)))]
        model.rows.clear()
        tokens = model.tokens(
            [[written[number][-1]] for number in order], Decode(tuple(order), False, tuple(ended))
        )
        assert model.rows == ([len(order)] if name in TOGETHER else [1] * len(order))
        ended.clear()
        for number, token in zip(order, tokens, strict=True):
            written[number].append(token)
        if len(alive) > 1 and data.draw(st.booleans()):
            ended.append(alive.pop(data.draw(st.integers(0, len(alive) - 1))))
    for prompt, text in zip(prompts, written, strict=True):
        for length in range(len(prompt), len(text)):
            assert model.alone(text[:length]) == text[length]


def test_arguments_of_whole_models_are_those_of_a_batch():
    """What each text has in its own length is put behind padding; items follow one another; of what
    is neither, nobody knows what it is of all."""
    short = {
        "input_ids": torch.tensor([[7]]), "attention_mask": torch.ones(1, 2, dtype=torch.int64),
        "position_ids": torch.full((3, 1, 1), 1), "use_cache": True, "pixel_values": None,
    }
    long = {
        "input_ids": torch.tensor([[8]]), "attention_mask": torch.ones(1, 4, dtype=torch.int64),
        "position_ids": torch.full((3, 1, 1), 9), "use_cache": True,
        "image_grid_thw": torch.tensor([[1, 2, 2], [1, 4, 4]]), "past_key_values": object(),
    }
    joined = joined_arguments([short, long])
    assert set(joined) == {*short, *long} - {"past_key_values"}
    assert joined["input_ids"].tolist() == [[7], [8]]
    assert joined["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert joined["position_ids"].tolist() == [[[1], [9]]] * 3
    assert joined["use_cache"] is True and joined["pixel_values"] is None
    assert joined["image_grid_thw"].tolist() == [[1, 2, 2], [1, 4, 4]]
    with pytest.raises(TextsApart):
        joined_arguments([{**short, "use_cache": False}, long])
    with pytest.raises(TextsApart):  # counted from the cache, they would be the longest one's
        joined_arguments([{**row, "position_ids": None} for row in (short, long)])
    with pytest.raises(TextsApart):
        joined_arguments([{**short, "mask": torch.ones(1, 2)}, {**long, "mask": torch.ones(1, 3)}])
