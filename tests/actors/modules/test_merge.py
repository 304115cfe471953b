"""Merge policies, and the language stage's checks of any policy."""

import pytest
import torch
from torch import nn

from raymm.actors.modules.merge import Prepend, ReplaceTokens
from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.actors.stages.language import LanguageSpec, LanguageStage
from raymm.errors import ModelError

IMAGE, SOUND, H = 8, 9, 4


class TinyLM(nn.Module):
    """Model with embeddings and a head, which is enough for the merge."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, H), nn.Linear(H, 10)

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head


def inputs(ids, labels=None, **index):
    ids = torch.tensor(ids)
    return {
        "input_ids": ids,
        "labels": torch.tensor(labels) if labels else torch.full_like(ids, -100),
        "attention_mask": torch.ones_like(ids),
        "sample_index": {name: torch.tensor(rows) for name, rows in index.items()},
    }


def embedded(given):
    return {**given, "inputs_embeds": given["input_ids"][..., None].expand(-1, -1, H).float()}


def run(policy, given, features, ids=("cat-1", "dog-2")):
    stage = LanguageStage(LanguageSpec("llm", None, 1, policy), 0, 1, TinyLM())
    received = {name: Message((tensor,), {}) for name, tensor in features.items()}
    return stage._merge(given, received, MicrobatchContext(1, sample_ids=tuple(ids)))


def test_features_replace_placeholders_in_any_item_order():
    given = embedded(inputs([[1, 8, 8, 2, 8, 8], [8, 8, 9, 3, 4, 5]], vision=[1, 0, 0], audio=[1]))
    vision = torch.arange(3.0)[:, None, None] * 10 + torch.arange(2.0)[:, None] + torch.zeros(H)
    audio = torch.full((1, 1, H), 77.0)
    merged = ReplaceTokens({"vision": IMAGE, "audio": SOUND})(
        {"vision": vision, "audio": audio}, given
    )
    assert merged["inputs_embeds"][..., 0].tolist() == [
        [1, 10, 11, 2, 20, 21], [0, 1, 77, 3, 4, 5]
    ]


def test_prepending_drops_padding_and_pads_on_the_right():
    given = inputs([[1, 2, 3], [4, 5, 0]], [[-100, 2, 3], [-100, 5, -100]], vision=[1, 1])
    given["attention_mask"] = torch.tensor([[1, 1, 1], [1, 1, 0]])
    merged = Prepend()({"vision": torch.full((2, 1, H), 7.0)}, embedded(given))
    assert merged["inputs_embeds"][..., 0].tolist() == [[1, 2, 3, 0], [7, 7, 4, 5]]
    assert merged["labels"].tolist() == [[-100, 2, 3, -100], [-100, -100, -100, 5]]
    assert merged["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    "rows,features",
    [([1, 8, 8, 2], 1), ([1, 8, 8, 8], 1), ([1, 2, 3, 4], 1), ([1, 8, 8, 2], 0)],
    ids=["too few features", "too many placeholders", "no placeholder", "no features"],
)
def test_a_count_that_does_not_match_names_the_sample(rows, features):
    given = inputs([[1, 8, 2, 3], rows], vision=[0] + [1] * features)
    tensors = {"vision": torch.zeros(1 + features, 1, H)}
    with pytest.raises(ModelError, match=r"'vision'.*must be equal.*dog-2") as error:
        run(ReplaceTokens({"vision": IMAGE}), given, tensors)
    assert "cat-1" not in str(error.value)


def test_placeholders_without_any_item_in_the_microbatch():
    with pytest.raises(ModelError, match=r"has 2 placeholder tokens \(id 8\).*give 0.*cat-1"):
        run(ReplaceTokens({"vision": IMAGE}), inputs([[1, 8, 8, 2], [1, 2, 3, 4]]), {})


@pytest.mark.parametrize("change", ["drop", "add"])
def test_a_policy_must_keep_the_number_of_label_tokens(change):
    def policy(features, given):
        labels = given["labels"].clone()
        if change == "drop":
            labels[0, 2] = -100
        else:
            labels[1, 3] = 3
        return {**given, "labels": labels}

    given = inputs([[1, 2, 3, 4], [1, 2, 3, 4]], [[-100, -100, 3, 4], [-100, -100, 3, -100]])
    kept = 2 if change == "drop" else 4
    with pytest.raises(ModelError, match=f"turned 3 label tokens into {kept}"):
        run(policy, given, {})


def test_a_label_on_a_placeholder_is_refused():
    given = inputs([[1, 8, 8, 2]], [[-100, 8, 8, 2]], vision=[0])
    with pytest.raises(ModelError, match="turned 3 label tokens into 1"):
        run(ReplaceTokens({"vision": IMAGE}), given, {"vision": torch.zeros(1, 2, H)})
