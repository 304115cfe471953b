"""``raymm plan`` rejects the layouts that ``raymm train`` rejects, with the same messages."""

import pytest

# Changes of a good configuration, and a part of the message.
WRONG = {
    "heads that do not divide": (["parallel.language_model={tp: 3}"], "accepted: divisors of"),
    "heads of an encoder": (["parallel.encoders={vision: {tp: 8}}"], "tp of 'vision' is 8"),
    "experts of a dense model": (["parallel.language_model={dp: 2, ep: 2}"], "ep"),
    "fsdp in a zero bubble": (
        ["parallel={schedule: zero_bubble, language_model: {dp: 2, sharding: fsdp}}"], "fsdp",
    ),
    "muon of shards": (
        ["optimizer.name=muon", "parallel.language_model={tp: 2}"], "tp of 'llm' is 2",
    ),
    "bf16 parameters of fp32 products": (
        ["optimizer.parameters=bf16_master"], "optimizer.parameters is 'bf16_master'",
    ),
    "a schedule that ends before the run": (
        ["optimizer={schedule: cosine, total_steps: 2}", "run.steps=9"], "total_steps is 2",
    ),
    "an optimizer of no module": (
        ["optimizer.modules={text: {lr: 0.1}}"], "optimizer.modules has 'text'",
    ),
    "more stages than layers": (["parallel.language_model={pp: 9}"], "at most"),
    "layers that do not add up": (
        ["parallel.language_model={pp: 2, layers: [1, 4]}"], "(1, 4)",
    ),
    "replicas that do not divide": (["parallel.encoders={vision: {dp: 3}}"], "dp of 'vision' is 3"),
    "nothing that trains": (
        [
            "model.language_model.train=frozen", "model.encoders.vision.train=frozen",
            "model.encoders.vision.projector_train=frozen",
        ],
        "nothing is trained",
    ),
    "another time for no module": (["at={1: {ears: frozen}}"], "at names 'ears'"),
    "a layout of no module": (["parallel.encoders={ears: {}}"], "'ears'"),
}


def sentence(text):
    lines = text.split("error:", 1)[1].splitlines()
    return [line for line in lines if not line.startswith("(in the configuration")]


@pytest.mark.parametrize("name", WRONG)
def test_plan_and_train_refuse_the_same(raymm, make_config, no_new_actors, tmp_path, name):
    settings, part = WRONG[name]
    overrides = [word for setting in settings for word in ("--set", setting)]
    config = make_config({})
    code, refusal = raymm("train", config, *overrides)
    assert code == 2 and part in refusal, refusal
    code, text = raymm("plan", config, *overrides, "--out", str(tmp_path / "plan"))
    assert code == 2 and sentence(text) == sentence(refusal)
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize(("train", "is_advised"), [("full", True), ("{lora: {r: 2}}", False)])
def test_adapters_are_named_where_full_training_does_not_fit(
    raymm, make_config, tmp_path, train, is_advised
):
    code, text = raymm(
        "plan", make_config({"parallel": None}), "--ranks", "1", "--memory-gib", "0.0001",
        "--set", f"model.language_model.train={train}", "--out", str(tmp_path / "plan"),
    )
    assert code == 2 and "no plan" in text
    assert ("raymm train --lora, or model.language_model.train" in text) == is_advised
