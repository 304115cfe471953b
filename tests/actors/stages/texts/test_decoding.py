"""The likeliest next tokens."""


import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.actors.modules.merge import Prepend
from raymm.actors.modules.message import Decode, MicrobatchContext
from raymm.actors.stages.language import LanguageSpec, LanguageStage
from raymm.actors.stages.texts.decoding import (
    KeyValueCaches,
    PreparedInputs,
    check_joins,
    joined_arguments,
    likeliest,
)
from raymm.errors import ModelError
from tests.support import parity_models as pm

VOCABULARY = 60


def lfm2() -> hf.PretrainedConfig:
    """Return a model with convolution layers, whose states are not keys and values."""
    return hf.Lfm2Config(
        vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=3, pad_token_id=0,
        num_attention_heads=4, num_key_value_heads=2, block_auto_adjust_ff_dim=False,
        layer_types=["conv", "full_attention", "conv"],
    )


# Rotary positions, windows shorter than texts; learned positions, and states that support only one
# text at a time.
TOGETHER = {"llama": pm.llama, "gemma3": pm.gemma3}
APART = {"gpt2": pm.gpt2, "lfm2": lfm2}


class Writing:
    """Single stage of a model."""

    def __init__(self, config: hf.PretrainedConfig) -> None:
        self.model = pm.build(config, 3).eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4)  # every token depends on all previous ones
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
    return request.param, Writing((TOGETHER | APART)[request.param]())


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


@pytest.mark.parametrize("rope", [
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]},
    {"rope_type": "dynamic", "factor": 4.0},
])
def test_frequencies_do_not_depend_on_longer_texts(rope):
    """Check rotary embeddings that change for the whole batch once one of its texts is long."""
    config = pm.llama()
    config.max_position_embeddings = 8
    config.rope_parameters = {
        "rope_theta": 10000.0, "original_max_position_embeddings": 8, **rope
    }
    model = Writing(config)
    prompts = [[5, 17, 3], [40, 2, 9, 31, 7, 8, 1, 60, 44], [11, 25]]
    texts = [[*p, *model.tokens([p], Decode((n,), True))] for n, p in enumerate(prompts)]
    for numbers, rows in (((0, 1), [1, 1]), ((0, 2), [2])):
        model.rows.clear()
        tokens = model.tokens([texts[n][-1:] for n in numbers], Decode(numbers, False))
        assert model.rows == rows
        if 1 in numbers:  # later values belong to the short text alone
            tokens = tokens[:1]
        assert tokens == [model.alone(texts[n]) for n in numbers][: len(tokens)]
        for number, token in zip(numbers, tokens, strict=False):
            texts[number].append(token)


def test_states_without_length_stay_separate():
    config = lfm2()
    config.layer_types = ["conv"] * 3
    with pytest.raises(ModelError):
        check_joins([hf.DynamicCache(config=config) for _ in range(2)], pm.build(pm.llama(), 1))


@pytest.mark.cells(1)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_finished_texts_are_dropped(name):
    """Check texts that continue together or separately, and texts in training."""
    model = pm.build((TOGETHER | APART)[name](), 3).eval()
    caches = KeyValueCaches(model, 0, model.config.num_hidden_layers)
    prepared = PreparedInputs(model)
    alive: list[weakref.ref] = []

    def step(ids, decode):
        ids = torch.tensor(ids)
        with torch.no_grad(), caches.arguments(decode, ids.shape[1]) as caching:
            if decode.first:
                alive.append(weakref.ref(caching["past_key_values"]))
            model(**prepared.arguments(decode, {"input_ids": ids}, caching))

    for text in range(3):
        step([[5, 17, 3][text:]], Decode((text,), True))
    try:
        step([[7], [8]], Decode((0, 2), False, ended=(1,)))
    except ModelError:
        step([[7]], Decode((0,), False))
        step([[8]], Decode((2,), False))
    gc.collect()
    assert [text() is None for text in alive] == [False, True, False]
    with caches.arguments(None, 1):
        gc.collect()
        assert all(text() is None for text in alive)


def test_arguments_of_vlms_are_batched():
    """Pad arguments with a text's length, and concatenate items.

    Other arguments are rejected, as their meaning for a batch is unknown.
    """
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
    with pytest.raises(ModelError):
        joined_arguments([{**short, "use_cache": False}, long])
    # counted from the cache, they would be those of the longest text
    with pytest.raises(ModelError):
        joined_arguments([{**row, "position_ids": None} for row in (short, long)])
    with pytest.raises(ModelError):  # tokens of one text; unknown for the other
        joined_arguments([{**short, "kinds": torch.ones(1, 1)}, long])
    with pytest.raises(ModelError):
        joined_arguments([{**short, "mask": torch.ones(1, 2)}, {**long, "mask": torch.ones(1, 3)}])


class Columns:
    """Group of threads, each with some columns of the vocabulary."""

    def __init__(self, size: int) -> None:
        self._values: list[torch.Tensor] = []
        self._all = threading.Barrier(size, timeout=60)

    def all_reduce_max(self, value: torch.Tensor) -> torch.Tensor:
        self._values.append(value)
        self._all.wait()
        largest = torch.stack(self._values).amax(0)
        if not self._all.wait():
            self._values.clear()
        self._all.wait()
        return largest


def test_ties_give_the_smallest_token_on_any_number_of_processes() -> None:
    logits = torch.tensor([[0.0, 3, 3, 1], [-1, -2, -3, -1], [0, 0, 0, 5]])
    expected = [1.0, 0.0, 3.0]
    assert likeliest(logits).tolist() == expected
    for bounds in ([0, 2, 4], [0, 1, 1, 4]):
        pairs = list(zip(bounds, bounds[1:], strict=False))
        group = Columns(len(pairs))
        with ThreadPoolExecutor(len(pairs)) as pool:
            tokens = [pool.submit(likeliest, logits[:, a:b], a, group) for a, b in pairs]
            assert [each.result().tolist() for each in tokens] == [expected] * len(pairs)
