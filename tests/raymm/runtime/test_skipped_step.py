"""Origin of non-finite values among all tensors that they reached."""

from raymm.actors.optimizer.finite import Place
from raymm.data import MicrobatchMeta
from raymm.runtime.skipped_step import skipped_step
from raymm.scheduler.plan.stage import StageId

NAN = float("nan")
EDGES = [
    (StageId("vision", 0), StageId("vision", 1)), (StageId("vision", 1), StageId("llm", 0)),
    (StageId("audio", 0), StageId("llm", 0)), (StageId("llm", 0), StageId("llm", 1)),
]  # fmt: skip


def place(kind, stage, microbatch, rows=(), count=0, of=None, batch=0):
    return Place(kind, stage, batch, microbatch, of or stage, tuple(rows), count)


def meta(ids, **items):
    return MicrobatchMeta(
        num_samples=len(ids), seq_len=4, tokens=4, lengths=(4,), label_tokens=2, items=items,
        shapes={}, dtypes={}, sample_ids=tuple(ids),
    )


BATCH = [meta(["a", "b"], vision=[0, 1, 1]), meta(["c", "d"], vision=[1], audio=[0, 1])]


def began(*places, batches=(BATCH,)):
    step = skipped_step(
        7, NAN, NAN, [None, places[:1], places[1:]], EDGES, batches, "llm"
    )
    return [(o.stage, o.what, o.microbatch, o.sample_ids) for o in step.began], step


def test_only_the_origin_is_reported():
    found, step = began(
        place("gradient", StageId("llm", 0), 0, [1], 2),
        place("output", StageId("llm", 1), 0),
        place("output", StageId("llm", 0), 0, [1], 2),
        place("output", StageId("vision", 1), 0, [2], 3),
        place("output", StageId("llm", 0), 1, [0, 1], 2),
        place("parameters", StageId("llm", 0), -1),
    )
    assert found == [
        ("vision.1", "output", 0, ("b",)), ("llm.0", "output", 1, ("c", "d")),
    ]
    assert str(step) == (
        "step 7 was not applied: loss nan, gradient norm nan; it began in the output of "
        "vision.1, microbatch 0, samples 'b', and in 1 more"
    )


def test_two_beginnings_of_one_microbatch():
    found, _ = began(
        place("output", StageId("llm", 0), 1),
        place("output", StageId("audio", 0), 1, [0], 2),
        place("output", StageId("vision", 0), 1, [0], 1),
        place("output", StageId("vision", 1), 1, [0], 1),
    )
    assert found == [("vision.0", "output", 1, ("d",)), ("audio.0", "output", 1, ("c",))]


def test_gradients_begin_at_the_other_end():
    found, _ = began(
        place("gradient", StageId("vision", 1), 0, [0], 3, of=StageId("vision", 0)),
        place("gradient", StageId("llm", 0), 0, [0], 3, of=StageId("vision", 1)),
        Place("parameters", StageId("vision", 0), names=("w",), count=1),
    )
    assert found == [("llm.0", "gradient", 0, ("a",))]
    found, step = began(Place("parameters", StageId("vision", 0), names=("w", "b"), count=9))
    assert found == [("vision.0", "parameters", None, ())]
    assert "in the gradients of parameters of vision.0 (w, b), summed over micro" in str(step)


def test_shards_of_processes_are_joined():
    """Attribute rows that are not samples (sharded tokens, packed rows) to all samples."""
    found, _ = began(
        place("output", StageId("vision", 0), 0, [0], 3),
        place("output", StageId("vision", 0), 0, [2], 3),
    )
    assert found == [("vision.0", "output", 0, ("a", "b"))]
    assert began(place("output", StageId("llm", 1), 0, [5], 9))[0] == [
        ("llm.1", "output", 0, ("a", "b"))
    ]


def test_batches_and_names_that_are_not_known():
    found, step = began(
        place("output", StageId("vision", 0), 1, [0], 1, batch=1), batches=(BATCH, BATCH)
    )
    assert found == [("vision.0", "output", 1, ("d",))] and "microbatch 1 of batch 1" in str(step)
    assert began(place("output", StageId("llm", 0), 1, [0], 2, batch=5))[0] == [
        ("llm.0", "output", 1, ())
    ]
    assert began(place("output", StageId("tower"), 1, [4], 9), batches=())[0] == [
        ("tower", "output", 1, ("4",))
    ]
    assert skipped_step(1, 0.5, 1.0, [None, None], EDGES) is None
    step = skipped_step(1, 0.5, 1e30, [[], []], EDGES)
    assert str(step) == "step 1 was not applied: loss 0.5, gradient norm 1e+30"
    assert step.to_dict() == {"loss": "0.5", "grad_norm": "1e+30", "beginnings": 0, "began": []}
