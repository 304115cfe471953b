"""Invalid input is rejected before Ray starts: field, value, and accepted values."""

import json
import subprocess
import sys

import pytest

from tests.support import SUPPORT
from tests.support.tiny_run import child_environment, prepare, settings, write_config

# Per case: changes of a good configuration, and required parts of the error.
BAD_SETTINGS = {
    "unknown section": (["runs={}"], ["runs: unknown key", "accepted: ", "model", "optimizer"]),
    "unknown key": (["run.step=3"], ["run.step: unknown key", "checkpoint_every", "steps"]),
    "unknown key of an encoder": (
        ["model.encoders.vision.freeze=true"],
        ["model.encoders.vision.freeze: unknown key", "train", "projector"],
    ),
    "no mode": (
        ["model.encoders.vision.train=no"], ["model.encoders.vision.train", "frozen", "full"],
    ),
    "rank of an adapter": (
        ["model.language_model.train={lora: {r: 0}}"], ["model.language_model.train", "lora.r"],
    ),
    "layer of an adapter": (
        ["model.language_model.train={lora: {targets: [qproj]}}"],
        ["model.language_model: targets has 'qproj'", "all-linear", "q_proj"],
    ),
    "layer of an adapter that is not linear": (
        ["model.language_model.train={lora: {targets: [embed_tokens]}}"],
        ["model.language_model: targets has 'embed_tokens'", "Embedding", "nn.Linear"],
    ),
    "optimizer of no module": (
        ["optimizer.modules={text: {lr: 0.1}}"],
        ["optimizer.modules has 'text'; the model's modules are vision, llm, vision_projector"],
    ),
    "field of a module's optimizer": (
        ["optimizer.modules={llm: {rate: 0.1}}"], ["optimizer.modules.llm.rate: unknown key"],
    ),
    "muon of matrices in shares": (
        ["optimizer.name=muon",
         "parallel={language_model: {tp: 2, ranks: [1]}, encoders: {vision: {ranks: [0]}}}"],
        ["tp of 'llm' is 2", "'muon'", "accepted: tp 1, or adamw"],
    ),
    "bf16 parameters of fp32 products": (
        ["optimizer.modules={llm: {parameters: bf16_master}}", "run.device=cpu"],
        ["optimizer.modules.llm.parameters is 'bf16_master'", "accepted: fp32, or precision bf16"],
    ),
    "unknown key of a layout": (
        ["parallel.language_model.stages=2"], ["parallel.language_model.stages", "pp", "ranks"],
    ),
    "store that is not known": (
        ["run.storage_path=nowhere://a/b"],
        ["run.storage_path: nowhere:// is not known", "s3:// or gs://", "got 'nowhere://a/b'"],
    ),
    "required key": (["run={steps: 3}"], ["run.storage_path: required, but not given"]),
    "wrong type": (["run.steps=many"], ["run.steps", "a whole number", "'many'"]),
    "no steps": (["run.steps=0"], ["run.steps", "greater than 0", "0"]),
    "unknown word": (["run.precision=fp8"], ["run.precision", "'fp32' or 'bf16'", "'fp8'"]),
    "schedule that is over before the run": (
        ["run.steps=20", "optimizer.total_steps=12"],
        ["optimizer.total_steps is 12 and run.steps 20", "would be 0 from step 13 on",
         "min_lr_ratio"],
    ),
    "unknown schedule": (["optimizer.schedule=step"], ["optimizer.schedule", "cosine", "'step'"]),
    "set without value": (["run.steps"], ["--set takes key.path=value", "'run.steps'"]),
    "set through a value": (["run.steps.more=1"], ["run.steps.more=1", "'steps' is a value"]),
    "set that is no YAML": (["run.steps=[1"], ["--set run.steps=[1"]),
    "unset variable": (["data.train=${RAYMM_NOT_SET}/x"], ["data.train", "RAYMM_NOT_SET"]),
    "no such data": (["data.train=/nowhere/t.jsonl"], ["/nowhere/t.jsonl", "does not exist"]),
    "no such held-out data": (["data.heldout=nowhere.jsonl"], ["nowhere.jsonl", "does not exist"]),
    "no such tokenizer": (["data.tokenizer=/nowhere"], ["data.tokenizer", "'/nowhere'", "folder"]),
    "no such column": (
        ["data.modalities.vision.column=pictures"],
        ["'pictures'", "'vision'", "images", "messages"],
    ),
    "no such processor": (
        ["data.modalities.vision.processor=tests.support.run_processors:none"],
        ["data.modalities.vision.processor", "tests.support.run_processors:none"],
    ),
    "processor that is no function": (
        ["data.modalities.vision.processor=tests.support.run_processors:NOT_A_FUNCTION"],
        ["data.modalities.vision.processor", "NOT_A_FUNCTION", "not a function"],
    ),
    "data for no encoder": (
        ["data.modalities.audio={column: audio, processor: 'tests.support.run_processors:image'}"],
        ["data.modalities", "'audio'", "model.encoders", "'vision'"],
    ),
    "microbatches that do not divide": (
        ["data.microbatches=3"], ["data", "batch_size (4)", "microbatches (3)", "divisible"],
    ),
    "no such model": (
        ["model.encoders.vision.path=/nowhere"],
        ["model.encoders.vision", "path is '/nowhere'", "config.json", "safetensors"],
    ),
    "no such weights": (
        ["model.encoders.vision={factory: 'tests.support.run_processors:small_cnn', "
         "hidden_size: 8, "
         "weights: /nowhere.safetensors}"],
        ["model.encoders.vision", "weights is '/nowhere.safetensors'"],
    ),
    "fresh weights of what has no others": (
        ["model.language_model.missing_weights=fresh"],
        ["model.language_model", "missing_weights is given, but a config has none"],
    ),
    "no such factory": (
        ["model.encoders.vision={factory: 'tests.support.run_processors:cnn', hidden_size: 8}"],
        ["model.encoders.vision", "factory", "tests.support.run_processors:cnn"],
    ),
    "two sources": (
        ["model.language_model.path=/x"],
        ["model.language_model", "exactly one of path, config, factory", "'config'"],
    ),
    "unknown model type": (
        ["model.language_model.config.model_type=lama"],
        ["model.language_model", "model_type is 'lama'", "llama"],
    ),
    "config value of the wrong type": (
        ["model.language_model.config.hidden_size=wide"],
        ["model.language_model", "'llama'", "hidden_size", "wide"],
    ),
    "no such callback": (
        ["model.encoders.vision.postprocess_module=tests.support.run_processors:pool"],
        ["model.encoders.vision", "postprocess_module", "tests.support.run_processors:pool"],
    ),
    "malformed import path": (
        ["model.encoders.vision.preprocess=run_processors.image"],
        ["preprocess", "'run_processors.image'", "package.module:name"],
    ),
    "module that ends the program": (
        ["model.encoders.vision.preprocess=tests.support.leaving_module:anything"],
        ["model.encoders.vision", "leaving_module", "SystemExit: 3"],
    ),
    "callback that is no function": (
        ["model.encoders.vision.preprocess=tests.support.run_processors:NOT_A_FUNCTION"],
        ["model.encoders.vision", "preprocess", "NOT_A_FUNCTION", "expected a function"],
    ),
    "widths without projector": (
        ["model.encoders.vision.projector=null"],
        ["'vision'", "width 16", "takes 32", "linear, mlp"],
    ),
    "wrong width": (
        ["model.encoders.vision.hidden_size=48"],
        ["model.encoders.vision", "hidden_size is 48", "width 16", "postprocess_module"],
    ),
    "unknown projector": (
        ["model.encoders.vision.projector=conv"],
        ["model.encoders.vision.projector", "'linear' or 'mlp'", "'conv'"],
    ),
    "unknown width": (
        ["model.encoders.vision={factory: 'tests.support.run_processors:small_cnn'}"],
        ["model.encoders.vision", "hidden_size"],
    ),
    "placeholder for no encoder": (
        ["model.merge={vision: '<image>', audio: '<image>'}"], ["model.merge", "'audio'", "vision"],
    ),
    "no placeholder": (["model.merge={}"], ["model.merge", "'vision'"]),
    "unknown placeholder": (
        ["model.merge={vision: '<picture>'}"], ["model.merge.vision", "'<picture>'", "tokenizer"],
    ),
    "placeholder of two tokens": (
        ["model.merge={vision: 'a dog'}"], ["model.merge.vision", "'a dog'", "2 tokens"],
    ),
    "zero stages": (
        ["parallel.language_model={pp: 0}"],
        ["parallel.language_model: pp is 0", "at least one stage"],
    ),
    "a degree of no number": (
        ["parallel.encoders={vision: {cp: true}}"],
        ["parallel.encoders.vision.cp", "a whole number", "True"],
    ),
    "no processes": (
        ["parallel.encoders={vision: {cp: 0}}"],
        ["parallel.encoders.vision: cp is 0", "at least 1"],
    ),
    "a degree of parallelism that is none": (
        ["parallel={}", "planning={degrees: [tp, pp]}"], ["degrees has 'pp'", "tp=4"],
    ),
    "a degree for no module": (
        ["parallel={}", "planning={degrees: audio.tp=2}"], ["audio.tp", "vision, llm"],
    ),
    "too many stages": (
        ["parallel.language_model={pp: 3}"], ["'llm'", "3", "at most 2 stages"],
    ),
    "layers that do not add up": (
        ["parallel.language_model={pp: 2, layers: [1, 2]}"], ["'llm'", "(1, 2)", "2 layers"],
    ),
    "ranks that do not match stages": (
        ["parallel.language_model={pp: 2, ranks: [0]}"],
        ["parallel.language_model: ranks is (0,)", "pp=2"],
    ),
    "no chunks": (["parallel.language_model={chunks: 0}"], ["chunks is 0", "at least 1"]),
    "too many chunks": (
        ["parallel.language_model={pp: 2, chunks: 2}"],
        ["pp * chunks of 'llm' is 4", "at most 2 stages"],
    ),
    "layers that do not match chunks": (
        ["parallel.language_model={chunks: 2, layers: [2]}"],
        ["layers is (2,)", "pp=1, chunks=2"],
    ),
    "no copies": (["parallel.encoders={vision: {dp: 0}}"], ["dp is 0"]),
    "ranks that do not match copies": (
        ["parallel.encoders={vision: {dp: 2, ranks: [0]}}"],
        ["ranks is (0,)", "pp=1, dp=2"],
    ),
    "copies that do not divide the microbatches": (
        ["parallel.encoders={vision: {dp: 3}}"],
        ["dp of 'vision' is 3", "num_microbatches=2"],
    ),
    "copies of the language model that do not divide them": (
        ["parallel.language_model={dp: 4}"], ["dp of 'llm' is 4", "num_microbatches=2"],
    ),
    "unknown pipeline schedule": (
        ["parallel.schedule=2f2b"], ["schedule is '2f2b'", "1f1b, zero_bubble, gpipe"],
    ),
    "unknown device to plan for": (
        ["parallel={}", "planning={device: H900, ranks: 2}"],
        ["device is 'H900'", "H100", "A100-80GB"],
    ),
    "no profile to plan with": (
        ["parallel={}", "planning={profile: /nowhere.json, ranks: 2}"],
        ["'/nowhere.json'", "there is no such file"],
    ),
    "tokens of no module": (
        ["parallel={}", "planning={tokens: {audio: 5}}"], ["tokens name 'audio'", "vision, llm"],
    ),
    "no tokens": (
        ["parallel={}", "planning={tokens: {llm: 0}}"], ["tokens of 'llm' is 0", ">= 1"],
    ),
    "no ranks to plan for": (["planning={ranks: 0}"], ["planning.ranks", "greater than 0"]),
    "layout of no encoder": (["parallel.encoders={audio: {}}"], ["'audio'", "vision"]),
    "ranks with holes": (["parallel.language_model={ranks: [5]}"], ["rank"]),
    "no such plan": (["parallel.plan=/nowhere.json"], ["parallel.plan", "'/nowhere.json'"]),
    "folder that cannot be": (
        ["run.storage_path=/dev/null/run"], ["run.storage_path", "'/dev/null/run'"],
    ),
}


def broken_plans(good):
    """Yield edited plan files that must be rejected, and required parts of the error."""
    text = json.dumps(good)
    other = json.loads(text)
    other["num_microbatches"] = 4
    twice = json.loads(text)
    twice["stages"][2]["layers"] = [0, 2]
    unknown = json.loads(text)
    unknown["stages"][0]["gpu"] = 3
    foreign = json.loads(text)
    foreign["graph"]["nodes"][0]["name"] = foreign["stages"][0]["module"] = "image"
    foreign["graph"]["edges"][0][0] = "image"
    foreign["profile"]["modules"]["image"] = foreign["profile"]["modules"].pop("vision", [])
    missing, twice_used, full = json.loads(text), json.loads(text), json.loads(text)
    missing["stages"][2]["layers"] = [2, 3]
    twice_used["stages"][1]["rank"], twice_used["shared_ranks"] = 0, []
    full["memory_limit"] = 100_000
    other_costs, unfrozen = json.loads(text), json.loads(text)
    other_costs["profile"]["modules"]["llm"] = other_costs["profile"]["modules"]["llm"][:1]
    unfrozen["graph"]["nodes"][0]["trainable"][0] = False
    return {
        "plan without a layer": (
            json.dumps(missing), ["stage llm.1", "[2, 3)", "leave a gap", "start at 1"],
        ),
        "plan that uses a rank twice": (
            json.dumps(twice_used), ["rank 0 is used by stages vision.0, llm.0", "shared_ranks"],
        ),
        "plan over the memory limit": (
            json.dumps(full), ["rank 0 (vision.0, llm.0) needs", "memory_limit is 100,000 bytes"],
        ),
        "plan with costs of another model": (
            json.dumps(other_costs), ["profile", "'llm' has 1 layer, the module 2"],
        ),
        "plan of a frozen encoder": (
            json.dumps(unfrozen), ["another model", "layer 0 of 'vision' is frozen in the plan"],
        ),
        "half a plan": (text[:100], ["plan is not JSON"]),
        "plan without stages": (
            json.dumps({k: v for k, v in good.items() if k != "stages"}), ["lacks", "'stages'"],
        ),
        "plan with a layer twice": (json.dumps(twice), ["llm"]),
        "plan with an unknown key": (json.dumps(unknown), ["'gpu'", "accepted", "rank"]),
        "plan of other microbatches": (
            json.dumps(other), ["4 microbatches", "data.microbatches is 2"],
        ),
        "plan of another model": (
            json.dumps(foreign), ["parallel.plan", "another model", "'image'", "'vision'"],
        ),
    }


PLANS = list(broken_plans({
    "stages": [{}, {}, {}], "num_microbatches": 2, "profile": {"modules": {"llm": []}},
    "graph": {"nodes": [{"trainable": [True]}], "edges": [["", ""]]},
}))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return the outcome of every case, all from one process without Ray."""
    folder = tmp_path_factory.mktemp("bad")
    inputs = prepare(folder)
    config = write_config(settings(inputs, folder / "run", 4), folder / "good.yaml")
    (folder / "list.yaml").write_text("- run\n- model\n")
    (folder / "no.yaml").write_text("run: [1\n")
    first = {"plan": ["plan", config, "--out", str(folder / "plan")]}
    results = run_cases(folder, first)
    cases = {
        name: ["train", config, *(part for one in overrides for part in ("--set", one))]
        for name, (overrides, _) in BAD_SETTINGS.items()
    }
    if results["plan"]["code"] == 0:
        good = json.loads((folder / "plan" / "plan.json").read_text())
        for number, (name, (text, _)) in enumerate(broken_plans(good).items()):
            file = folder / f"plan-{number}.json"
            file.write_text(text)
            cases[name] = ["train", config, "--set", f"parallel.plan={file}"]
    cases["no such file"] = ["train", str(folder / "nothing.yaml")]
    cases["no sections"] = ["train", str(folder / "list.yaml")]
    cases["no YAML"] = ["train", str(folder / "no.yaml")]
    results.update(run_cases(folder, cases))
    results["folder"] = folder
    return results


def run_cases(folder, cases):
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, str(SUPPORT / "cli_cases.py"), "cases.json", "results.json"]
    subprocess.run(command, cwd=folder, env=child_environment(), check=True, timeout=240)
    return json.loads((folder / "results.json").read_text())


def assert_refused(outcome, expected):
    assert "Traceback" not in outcome["text"], outcome["text"]
    assert outcome["code"] == 2, outcome["text"]
    missing = [part for part in expected if part not in outcome["text"]]
    assert not missing, f"{missing} not in: {outcome['text']}"
    assert not outcome["ray_started"]


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_bad_settings(outcomes, name):
    assert_refused(outcomes[name], BAD_SETTINGS[name][1])


@pytest.mark.parametrize("name", PLANS)
def test_bad_plan_files(outcomes, name):
    good = json.loads((outcomes["folder"] / "plan" / "plan.json").read_text())
    assert_refused(outcomes[name], broken_plans(good)[name][1])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no such file", ["nothing.yaml", "there is no such file"]),
        ("no sections", ["list.yaml", "list", "sections"]),
        ("no YAML", ["no.yaml", "not valid YAML"]),
    ],
)
def test_bad_files(outcomes, name, expected):
    assert_refused(outcomes[name], expected)


def test_plan_shows_draws_and_saves_without_ray(outcomes):
    outcome = outcomes["plan"]
    assert outcome["code"] == 0 and not outcome["ray_started"], outcome["text"]
    folder = outcomes["folder"] / "plan"
    for name in ("plan.png", "plan_schedule.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    rows = [line.split() for line in outcome["text"].splitlines()]
    rows = [row for row in rows if row and row[0] in ("vision", "llm")]
    assert [row[:2] for row in rows] == [["vision", "0"], ["llm", "0"], ["llm", "1"]]
    assert rows[0][2:6] == ["0-1", "+p", "0", "0:0"]  # layers, rank, node and GPU
    assert [row[3] for row in rows[1:]] == ["0", "1"]  # ranks
    assert "predicted" in outcome["text"] and "analytic costs of cpu" in outcome["text"]
    assert not (outcomes["folder"] / "run").exists()


def test_more_ranks_than_the_cluster_has(raymm, make_config, no_new_actors, ray_cluster):
    has = ray_cluster.cluster_resources()["CPU"]
    code, text = raymm("train", make_config({"resources.cpus": 5}))
    assert code == 2 and "ClusterError" in text
    assert f"2 ranks of 5 CPU each, 10 CPU in total, plus 0.1 CPU for data workers; the " \
        f"cluster has {has:g} CPU" in text


def test_gpus_that_the_cluster_does_not_have(raymm, make_config, no_new_actors, ray_cluster):
    if ray_cluster.cluster_resources().get("GPU", 0):
        pytest.skip("the cluster has GPUs")
    code, text = raymm("train", make_config({"run.device": "cuda"}))
    assert code == 2 and "run.device is 'cuda'" in text and "set run.device to cpu" in text
