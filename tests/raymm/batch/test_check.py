"""Batches in memory that the driver rejects without a process; accepted ones run."""

from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raymm.actors.modules.merge import ReplaceTokens
from raymm.batch.check import PartsCheck
from raymm.errors import DataError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from tests.support import parity_models as pm
from tests.support import wrong_batches as wb


@cache
def checked(merge: str = "prepend") -> tuple[MultimodalModule, PartsCheck]:
    model = wb.small_model(wb.replacing() if merge == "replace" else None)
    return model, PartsCheck(model)


def assert_refused(batch, expected: list[str], merge: str) -> None:
    with pytest.raises(DataError) as caught:
        checked(merge)[1].microbatches(batch, 2)
    missing = [part for part in expected if part not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


@pytest.mark.parametrize("name", wb.WRONG)
def test_wrong_batches_are_rejected_by_key_and_value(name):
    assert_refused(*wb.WRONG[name], "prepend")


@pytest.mark.parametrize("name", wb.WRONG_PLACES)
def test_placeholders_that_do_not_match_are_refused(name):
    assert_refused(*wb.WRONG_PLACES[name], "replace")


def losses(microbatches, merge: str) -> list[float]:
    model = checked(merge)[0]
    with torch.no_grad():
        return [float(model(**one)) for one in microbatches]


@pytest.mark.parametrize("merge", ["prepend", "replace"])
def test_what_means_the_same_gives_the_same(merge):
    check = checked(merge)[1]
    expected = losses(check.microbatches(wb.good_batch(), 2), merge)
    for name, batch in wb.equal_numbers().items():
        assert losses(check.microbatches(batch, 2), merge) == expected, name
        assert losses(check.microbatches([batch], 2), merge) == pytest.approx(
            losses([batch], merge)
        ), name


def test_the_single_process_reference_rejects_too():
    model = checked()[0]
    for name, (batch, _) in wb.WRONG.items():
        if isinstance(batch, dict) and {"input_ids", "labels"} <= set(batch) and name not in (
            "nothing to predict", "only first tokens to predict", "rows that do not divide",
            "a text that is too long", "pixels that want a gradient",
            # The encoder itself raises the error in this process.
            "an argument that nothing reads", "an argument that a callback cannot use",
            "another argument", "images of another size", "images of one channel",
            "images of no channel", "a short sound",
        ):
            with pytest.raises(DataError):
                model(**batch)


def test_items_that_the_merge_policy_would_drop_are_refused():
    check = PartsCheck(wb.small_model(ReplaceTokens({"vision": pm.IMAGE_TOKEN})))
    with pytest.raises(DataError, match="'audio', which has no placeholder token"):
        check.microbatches([wb.good_batch()], 1)


class Appending:
    """User-defined merge policy without ``check``: appends up to eight encodings to the text."""

    def __call__(self, features, inputs):
        embeds, labels = inputs["inputs_embeds"], inputs["labels"]
        for name, found in features.items():
            index = inputs["sample_index"][name]
            most = int(torch.bincount(index, minlength=len(labels)).max()) * found.shape[1]
            if most > 8:
                raise IndexError(f"room for 8 tokens of {name}, not {most}")
            more = embeds.new_zeros(len(labels), most, embeds.shape[2])
            for row in range(len(labels)):
                part = found[index == row].flatten(0, 1)
                more[row, : len(part)] = part
            embeds = torch.cat([embeds, more], 1)
            labels = torch.nn.functional.pad(labels, (0, most), value=-100)
        return {"inputs_embeds": embeds, "labels": labels}


class WithGains(Appending):
    """Merge policy that depends on the width of embeddings."""

    def __call__(self, features, inputs):
        merged = super().__call__(features, inputs)
        return {**merged, "inputs_embeds": merged["inputs_embeds"] * torch.ones(32)}


@pytest.mark.parametrize("policy", [Appending(), WithGains()], ids=["any_width", "one_width"])
def test_merge_policies_without_a_check_are_tried(policy):
    check = PartsCheck(wb.small_model(policy))
    good = wb.good_batch()
    good["audio"] = None
    assert len(check.microbatches([good], 1)) == 1
    crowded = pm.batch([5, 5], 3, vision=[0, 0, 0])
    with pytest.raises(DataError, match="IndexError: room for 8 tokens of vision, not 12"):
        check.microbatches([crowded], 1)
    with pytest.raises(DataError, match="longest row of the microbatch has 68 tokens, .* up to 64"):
        check.microbatches([pm.batch([60], 3, vision=[0, 0])], 1)


@pytest.mark.parametrize("returned, said", [
    (lambda given: None, "returned a NoneType; accepted: a dict"),
    (lambda given: {"labels": given["labels"]}, "returned inputs_embeds None"),
    (lambda given: {**given, "labels": given["labels"][:, 1:]}, "accepted: one length"),
    (lambda given: {**given, "inputs_embeds": given["inputs_embeds"][..., :1]}, "wide"),
    (lambda given: {**given, "labels": given["labels"].fill_(-100)}, "label tokens into 0"),
])
def test_invalid_results_of_merge_policies_are_rejected(returned, said):
    check = PartsCheck(wb.small_model(lambda features, inputs: returned(inputs)))
    with pytest.raises(DataError, match=said):
        check.microbatches([wb.good_batch()], 1)


def test_rotary_positions_are_unlimited():
    """Accept texts beyond Llama's configured positions, and a microbatch without labels."""
    config = pm.llama()
    config.max_position_embeddings = 8
    check = PartsCheck(MultimodalModule(None, ModalityModule(config)))
    unlabelled = pm.batch([5, 4], 3)
    unlabelled["labels"].fill_(-100)
    assert len(check.microbatches([pm.batch([20, 5], 3), unlabelled], 1)) == 2


@pytest.mark.parametrize("merge", ["prepend", "replace"])
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(wb.changes(), max_size=4), split=st.booleans())
def test_any_batch_runs_or_is_rejected_by_name(merge, steps, split):
    """Check that only raymm's own errors are raised, and that accepted batches run."""
    batch = wb.good_batch()
    for change in steps:
        batch = wb.changed(batch, change)
    try:
        found = checked(merge)[1].microbatches(batch if split else [batch], 2)
    except DataError as error:
        assert any(word in str(error) for word in ("accepted", "must be equal", "not divisible"))
        return
    assert len(losses(found, merge)) == (2 if split else 1)
