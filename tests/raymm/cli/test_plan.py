"""``raymm plan``: plans, evaluates given plans, explains, measures."""

import json
import re
import sys

import pytest
from PIL import Image

from benchmarks import compare_planners
from benchmarks.baselines.mappings import MAPPINGS
from benchmarks.baselines.pipelines import PIPELINES
from benchmarks.shared import common
from raymm.cli.option_arguments import parse_counts
from raymm.planning.plan import _slower
from raymm.scheduler.costs.device_memory import CONTEXT_BYTES
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.search.evaluation import Option
from raymm.scheduler.search.module_degrees import make_plan

EXAMPLE = "examples/planning/llm32b.yaml"


@pytest.fixture
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def table_rows(text):
    """Return the rows of the printed table: one per stage."""
    return [
        line.split() for line in text.splitlines()
        if re.match(r"(vision|audio|llm) +\d+(@\d+)? ", line)
    ]


def saved_plan(folder):
    return Plan.from_json((folder / "plan.json").read_text())


@pytest.mark.system
def test_a_32b_model_is_planned_from_its_configuration(raymm, tmp_path, wide, monkeypatch):
    """Plan for fewer ranks than in the example, as the search time grows with them."""
    from tests.support import REPOSITORY

    monkeypatch.chdir(REPOSITORY)
    out = tmp_path / "plan"
    code, text = raymm(
        "plan", EXAMPLE, "--ranks", "5", "--layouts", "modality_parallel,colocated",
        "--schedules", "1f1b", "--out", str(out),
    )
    assert code == 0, text
    plan = saved_plan(out)
    assert plan.num_ranks <= 5 and plan.num_microbatches == 24
    assert plan.graph.node("llm").num_layers == 64
    assert plan.memory_limit == 80 * 10**9 - CONTEXT_BYTES
    assert plan.profile.device == "H100" and plan.profile.tokens["llm"] == 4572
    assert len(table_rows(text)) == len(plan.stages)
    assert "tokens/s" in text and "chosen" in text and "slower" in text
    assert "combinations of stages per module within 5 ranks" in text
    for name in ("plan.png", "plan_schedule.png"):
        with Image.open(out / name) as picture:
            assert picture.width > 400
        assert f"{out / name}" in text


def test_plans_that_exceed_memory_are_rejected(raymm, tmp_path, wide, monkeypatch):
    """Reject a 32B model in bf16 on three GPUs of 20 GiB."""
    from tests.support import REPOSITORY

    monkeypatch.chdir(REPOSITORY)
    arguments = ["plan", EXAMPLE, "--ranks", "3", "--schedules", "1f1b", "--out", str(tmp_path)]
    code, text = raymm(*arguments, "--degrees", "none", "--memory-gib", "20")
    assert code == 2 and "NoPlanError" in text and "no plan" in text
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("style", ["pipelined", "multiplexed"])
def test_a_benchmark_compares_plans_with_other_planners(make_config, monkeypatch, capsys, style):
    monkeypatch.setattr(sys, "argv", [
        "compare_planners", make_config({"parallel": None}), "--ranks", "3", "--device", "H100",
        "--style", style, "--json",
    ])
    compare_planners.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    baselines = PIPELINES if style == "pipelined" else MAPPINGS
    names = {"raymm", *(baseline.name for baseline in baselines)}
    assert set(result) == {*common.origin(), "machine", *names}


def test_a_given_layout_is_evaluated_unchanged(raymm, make_config, tmp_path, wide):
    config = make_config({
        "parallel": {
            "schedule": "zero_bubble", "recompute": True,
            "encoders": {"vision": {"dp": 2, "ranks": [0, 1]}},
            "language_model": {"ranks": [0], "chunks": 2},
        },
    })
    code, text = raymm("plan", config, "--out", str(tmp_path / "plan"), "--svg")
    assert code == 0, text
    plan = saved_plan(tmp_path / "plan")
    assert [(s.id, s.rank) for s in plan.stages] == [
        (StageId("vision", 0), 0),
        (StageId("vision", 0, 1), 1),
        (StageId("llm", 0), 0),
        (StageId("llm", 1), 0),
    ]
    assert plan.schedule == "zero_bubble" and plan.profile.source == "analytic"
    # The stage of the loss needs its activations at once.
    assert [s.recompute for s in plan.stages] == [True, True, True, False]
    assert [row[:2] for row in table_rows(text)] == [
        ["vision", "0"], ["vision", "0@1"], ["llm", "0"], ["llm", "1"]
    ]
    assert "chosen" not in text
    assert re.search(r"^parameters: vision \S+k trained, vision_projector .* trained$", text, re.M)
    for name in ("plan.svg", "plan_schedule.svg"):
        assert "<svg" in (tmp_path / "plan" / name).read_text()


def test_host_memory_is_shown_and_refused_if_a_node_lacks_it(raymm, make_config, tmp_path, wide):
    config = make_config({"run.snapshot_every": 2})
    code, text = raymm("plan", config, "--out", str(tmp_path / "a"))
    assert code == 0 and re.search(r"^host memory of 1 node ", text, re.M)
    columns = "node processes checkpoint snapshots pinned offloaded total"
    assert re.search("^" + columns.replace(" ", " +"), text, re.M)
    code, text = raymm("plan", config, "--out", str(tmp_path / "b"), "--host-memory-gib", "1e-6")
    assert code == 2 and "on each node need" in text
    assert "snapshots (run.snapshot_every)" in text
    assert "asynchronous checkpoints (run.asynchronous_checkpoints)" in text
    assert not (tmp_path / "b").exists()
    code, text = raymm("plan", config, "--host-memory-gib", "0")
    assert code == 2 and "--host-memory-gib is 0.0; it must be above 0" in text


def test_a_saved_plan_is_evaluated_and_rejected_if_too_large(
    raymm, make_config, tmp_path, wide
):
    code, _ = raymm("plan", make_config(), "--out", str(tmp_path / "a"))
    assert code == 0
    again = make_config({"parallel": {"plan": str(tmp_path / "a" / "plan.json")}})
    code, text = raymm("plan", again, "--out", str(tmp_path / "b"))
    assert code == 0 and saved_plan(tmp_path / "b") == saved_plan(tmp_path / "a")
    code, text = raymm(
        "plan", again, "--out", str(tmp_path / "c"), "--memory-gib", "0.0001"
    )
    assert code == 2 and "memory_limit is" in text and "rank 0 (vision.0, llm.0) needs" in text
    assert len(table_rows(text)) == 3  # shown nevertheless
    assert not (tmp_path / "c").exists()


def test_measured_costs(raymm, make_config, tmp_path, wide):
    """Plan with a synthetic profile, which is read like a measured one."""
    layer = {
        "forward": 0.01, "backward_input": 0.01, "backward_weight": 0.01,
        "activation_bytes": 10, "parameter_bytes": 10, "output_bytes": 10,
    }
    slow = {**layer, "forward": 0.05}
    table = {
        "format": 1, "default": {"vision": 8, "llm": 20}, "device": "some CPU", "dtype": "fp32",
        "modules": {
            "vision": [{"tokens": 8, "samples": 2, "layers": [layer] * 3}],
            "llm": [
                {"tokens": 20, "samples": 2, "layers": [layer, slow]},
                {"tokens": 40, "samples": 2, "layers": [slow, slow]},
            ],
        },
    }
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(table))
    arguments = ["plan", make_config({"parallel": None}), "--ranks", "3", "--profile", str(file)]
    code, text = raymm(*arguments, "--out", str(tmp_path / "a"))
    assert code == 0 and "measured costs of some CPU" in text
    profile = saved_plan(tmp_path / "a").profile
    assert profile.modules["llm"][0].forward == 0.01 and profile.tokens["llm"] == 20
    # 20 tokens per sample, while the measured microbatch has two
    code, text = raymm(*arguments, "--tokens", "llm=20", "--out", str(tmp_path / "b"))
    assert code == 0
    assert saved_plan(tmp_path / "b").profile.modules["llm"][0].forward == 0.05
    table["modules"]["llm"][0]["layers"] = table["modules"]["llm"][1]["layers"] = [layer]
    file.write_text(json.dumps(table))
    code, text = raymm(*arguments, "--out", str(tmp_path / "c"))
    assert code == 2 and "PlanError" in text and "'llm' has 1 layer, the module 2" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--ranks", "0"], ["--ranks is 0", "at least 1"]),
        (["--ranks", "2", "--device", "H900"], ["--device is 'H900'", "H100"]),
        (["--ranks", "2", "--schedules", "2f2b"], ["--schedules has '2f2b'", "1f1b"]),
        (["--ranks", "2", "--layouts", "flat"], ["--layouts has 'flat'", "colocated"]),
        (["--ranks", "2", "--tokens", "llm"], ["--tokens has 'llm'", "llm=4096"]),
        (["--ranks", "2", "--tokens", "audio=3"], ["--tokens name 'audio'", "vision, llm"]),
        (["--ranks", "2", "--memory-gib", "0"], ["--memory-gib is 0", "above 0"]),
        (["--ranks", "2", "--ranks-per-node", "0"], ["--ranks-per-node is 0"]),
        (["--ranks", "2", "--time-limit", "0"], ["--time-limit is 0", "seconds above 0"]),
        (["--ranks", "2", "--time-limit", "nan"], ["--time-limit is nan", "seconds above 0"]),
        (["--ranks", "2", "--microbatches", "0"], ["--microbatches is 0"]),
        (["--ranks", "2", "--profile", "/no.json"], ["'/no.json'", "no such file"]),
        (["--ranks", "2", "--measure", "0"], ["--measure is 0", "at least 1"]),
    ],
)
def test_bad_options_are_refused(raymm, make_config, tmp_path, wide, arguments, expected):
    config = make_config({"parallel": None})
    code, text = raymm("plan", config, *arguments, "--out", str(tmp_path / "plan"))
    assert code == 2 and "Traceback" not in text, text
    assert [part for part in expected if part not in text] == [], text
    assert not (tmp_path / "plan").exists()
    assert config not in text, "the configuration is not at fault"


def test_an_error_about_several_options_lists_them(raymm, make_config, tmp_path, wide):
    code, text = raymm(
        "plan", make_config({"parallel": None}), "--ranks", "4", "--degrees", "llm.tp=3",
        "--tokens", "llm=8", "--set", "run.seed=3", "--out", str(tmp_path / "plan"),
    )
    assert code == 2 and "tp of 'llm' is 3" in text
    assert "(with --ranks 4 --tokens llm=8 --degrees llm.tp=3)" in text
    assert "config.yaml with --set run.seed=3)" in text


def test_an_error_about_an_override_names_it(raymm, make_config):
    config = make_config()
    code, text = raymm("plan", config, "--set", "run.seed=3", "--set", "run.step=3")
    assert code == 2 and f"{config} with --set run.seed=3 --set run.step=3:\n" in text


def test_a_time_limit_returns_the_best_plan_so_far(raymm, make_config, tmp_path, wide):
    config = make_config({"parallel": None})
    code, text = raymm(
        "plan", config, "--ranks", "4", "--time-limit", "1e-9", "--out", str(tmp_path / "plan")
    )
    assert code == 0, text
    assert "the search was stopped by the time limit of 1e-09 s" in text
    assert saved_plan(tmp_path / "plan").num_ranks <= 4


def test_measure_runs_the_best_and_keeps_the_fastest(
    raymm, make_config, tmp_path, wide, ray_cluster, ended_actors
):
    config = make_config({"parallel": None})
    out = tmp_path / "plan"
    code, text = raymm(
        "plan", config, "--ranks", "2", "--degrees", "none", "--schedules", "1f1b",
        "--measure", "2", "--out", str(out),
    )
    assert code == 0, text
    rows = [line for line in text.splitlines() if "%" in line and ": vision" in line]
    measured = [line for line in rows if re.search(r"[+-]\d+\.\d%$", line.strip())]
    assert len(measured) == 2
    # Columns: mark, plan, predicted, measured, error. The marked one is the fastest.
    times = {line.strip().startswith("*"): float(line.split()[-2]) for line in measured}
    assert times[True] == min(times.values())
    assert saved_plan(out).num_ranks == 2
    assert set(ended_actors()) == {"DEAD"}  # some were started, and all have ended


@pytest.mark.parametrize(("seconds", "text"), [
    (1.0, "as fast"), (1.0004, "as fast"), (1.001, "0.1% slower"), (1.5, "50.0% slower"),
])
def test_plans_with_the_same_time_are_not_called_slower(seconds, text):
    cost = LayerCost(1.0, 1.0, 1.0)
    graph = ModuleGraph((ModuleNode("llm", (True, True)),), ())
    plan = make_plan(graph, {"llm": ((0, 2),)}, 1, "1f1b", CostProfile({"llm": (cost, cost)}))
    options = (Option("a", plan, 1.0, ()), Option("b", plan, seconds, ()))
    assert _slower(options[1], options[0]) == text


def test_the_tokens_option_takes_module_and_number():
    assert parse_counts("--tokens", ["llm=4096", "vision=1025"]) == {"llm": 4096, "vision": 1025}


def test_degrees_are_searched_shown_and_saved(raymm, make_config, tmp_path, wide):
    """Check that searched degrees are never slower than a pipeline, and use more processes."""
    config = make_config({"parallel": None, "data.microbatches": 2})
    seconds = {}
    for degrees in ("none", "auto", "llm.tp=2,vision.dp=2"):
        out = tmp_path / degrees
        code, text = raymm(
            "plan", config, "--ranks", "6", "--device", "H100", "--degrees", degrees,
            "--out", str(out),
        )
        assert code == 0, text
        plan = saved_plan(out)
        seconds[degrees] = float(re.search(r"predicted ([\d.]+) \S+ per step", text)[1])
        assert plan.num_processes <= 6
        assert (plan.num_processes > plan.num_ranks) == ("of each device" in text), text
        if degrees == "none":
            assert plan.num_processes == plan.num_ranks and "shared" not in text
    assert seconds["auto"] <= seconds["none"]
    assert {(s.tp, s.cp) for s in plan.module_stages("llm")} == {(2, 1)}
    assert len(plan.replicas("llm")) == 1 and len(plan.replicas("vision")) == 2
    assert re.search(r"chosen .* vision \d x2, llm \d \(tp 2\); \d ranks, \d devices", text), text


def test_a_plan_that_must_span_nodes_reports_it(raymm, make_config, tmp_path, wide):
    arguments = ["plan", make_config({"parallel": None}), "--ranks", "4", "--device", "H100",
                 "--degrees", "llm.cp=2", "--out", str(tmp_path / "plan")]
    for per_node, straddles in ((1, True), (2, False)):
        code, text = raymm(*arguments, "--ranks-per-node", str(per_node))
        assert code == 0, text
        assert ("note: process groups span nodes and use slower links: " in text) == straddles


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        ("pp", ["degrees has 'pp'", "tp, cp, dp"]),
        ("tp=0", ["degrees has 'tp=0'"]),
        ("llm.tp", ["degrees has 'llm.tp'", "llm.tp=4"]),
        ("audio.dp=2", ["audio.dp", "vision, llm"]),
        ("llm.tp=3", ["tp of 'llm' is 3", "heads"]),
        ("llm.dp=4", ["llm.dp=4", "does not divide 2 microbatches"]),
    ],
)
def test_impossible_degrees_are_rejected(raymm, make_config, tmp_path, wide, degrees, expected):
    config = make_config({"parallel": None})
    code, text = raymm(
        "plan", config, "--ranks", "4", "--device", "H100", "--degrees", degrees,
        "--out", str(tmp_path / "plan"),
    )
    assert code == 2 and "Traceback" not in text, text
    assert [part for part in expected if part not in text] == [], text
