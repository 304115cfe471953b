"""``raymm train`` with modules on quotas of one rank."""

import json

import pytest

from raymm.scheduler.plan.plan import Plan
from tests.support.tiny_run import curve

QUOTAS = {"parallel.encoders.vision.quota": 0.25, "parallel.language_model.quota": 0.75}


def test_quotas_do_not_change_a_run(make_config, raymm, finished, tmp_path):
    """Colocate the encoder with the first language model stage; losses are bitwise equal.

    The saved plan has the quotas, of the shared rank only.
    """
    code, text = raymm("train", make_config(QUOTAS))
    assert code == 0, text
    run = tmp_path / "run"
    assert curve(run) == curve(finished.path)
    plan = Plan.from_json((run / "plan.json").read_text())
    assert [plan.quota_sets(rank) for rank in (0, 1)] == [({"vision": 0.25, "llm": 0.75},), ()]
    names = [e["args"]["name"] for e in json.loads((run / "trace.json").read_text())["traceEvents"]
             if e["name"] == "thread_name" and e["pid"] == 1]  # fmt: skip
    assert any(name.endswith(", vision on 0.25") for name in names)


def test_a_layout_with_quotas_is_evaluated(make_config, raymm, no_new_actors, tmp_path):
    """Check that the layout is predicted, shown and saved, and that the saved file is read."""

    def plan(config, folder):
        code, text = raymm("plan", config, "--device", "H100", "--out", str(folder))
        assert code == 0, text
        return text, (folder / "plan.json").read_text()

    text, saved = plan(make_config(QUOTAS), tmp_path / "one")
    assert "quota" in text and "0.25" in text and "0.75" in text and "per step" in text
    assert Plan.from_json(saved).quota_sets(0) == ({"vision": 0.25, "llm": 0.75},)
    given = make_config({"parallel": {"plan": str(tmp_path / "one" / "plan.json")}})
    again, saved_again = plan(given, tmp_path / "two")
    assert again.splitlines()[:8] == text.splitlines()[:8]
    assert Plan.from_json(saved_again).stages == Plan.from_json(saved).stages


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel.encoders.vision.quota": 2},
         ["parallel.encoders.vision", "quota is 2.0", "at most 1"]),
        ({"parallel.encoders.vision.quota": "half"},
         ["parallel.encoders.vision.quota", "a number", "'half'"]),
        ({"parallel.encoders.vision.quota": 0.5},
         ["quota of 'vision' is 0.5", "name the same ranks"]),
        ({**QUOTAS, "parallel.encoders.vision.quota": 0.5}, ["on rank 0 sum to 1.25", "at most 1"]),
        ({**QUOTAS, "parallel.encoders.vision.quota": 0.01},
         ["rank 0", "quota of 'vision' is 0.01", "accepted: 0.06061"]),
    ],
    ids=["above 1", "no number", "alone", "sum", "granularity"],
)  # fmt: skip
def test_impossible_quotas_are_rejected(make_config, raymm, no_new_actors, changes, words):
    code, text = raymm("train", make_config(changes))
    assert code != 0
    for word in words:
        assert word in " ".join(text.split()), text
