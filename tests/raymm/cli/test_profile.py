"""``raymm profile`` on a tiny run: written files, output, and rejected input."""

import json
from contextlib import redirect_stdout
from io import StringIO

import pytest
from PIL import Image

from raymm.cli.main import main
from raymm.cli.profile import parse_lengths, profile_rows
from raymm.config.build import build_model
from raymm.config.sections import load_config
from raymm.costs.profile_files import load_table, save_table
from raymm.errors import PlanError
from raymm.model.multimodal import module_graph
from raymm.scheduler.costs.layer_costs import layer_work
from tests.support.tiny_run import STEPS, change, settings, write_config


@pytest.fixture(scope="module")
def profiled(inputs, tmp_path_factory, ray_cluster):
    """Run the command once; return its config, output and table."""
    folder = tmp_path_factory.mktemp("profiled")
    values = settings(inputs, folder / "run", STEPS)
    change(values, "model.encoders.vision.train", "frozen")
    config = write_config(values, folder / "config.yaml")
    target = folder / "new" / "profile.json"
    command = ["profile", config, "--out", str(target), "--lengths", "16,48", "--repeats", "2"]
    with redirect_stdout(StringIO()) as output:
        assert main(command) == 0
    return load_config(config), output.getvalue(), load_table(target), target


def test_profile_measures_saves_prints_and_draws(profiled):
    config, output, table, target = profiled
    graph = module_graph(build_model(config))
    profile = table.at()
    profile.check(graph)
    # Two images of four patches; two rows, each with its image's tokens before the text.
    rows = table.default["vision"] // 4
    assert rows in (1, 2)
    assert [row.samples for row in table.modules["vision"]] == sorted({1, rows, 2 * rows})
    assert {32, 96} <= {row.tokens for row in table.modules["llm"]}
    assert table.default["llm"] in {row.tokens for row in table.modules["llm"]}
    for layers in profile.modules.values():
        assert all(layer.forward > 0 and layer.backward_input > 0 for layer in layers)
        assert all(layer.activation_bytes > 0 for layer in layers)
    # The planner applies the rules for frozen modules, not the measurement.
    assert layer_work(graph, profile)["vision"][0].backward == 0
    assert profile.modules["vision"][0].backward_input > 0

    assert {"torch", "ray", "transformers", "python"} <= set(table.versions)
    assert (table.dtype, len(table.date)) == ("fp32", 25)
    assert json.loads(target.read_text())["format"] == 1
    assert [path.name for path in sorted(target.parent.iterdir())] == [
        "profile.json", "profile.png"
    ]
    with Image.open(target.with_suffix(".png")) as picture:
        assert picture.width > 400 and len(picture.convert("L").getcolors()) > 20
    assert "(projector)" in output and "activ. MB" in output
    assert "wrote" in output and "profile.png" in output

    model = build_model(config).materialize()
    for name, part in (("vision", model.vision_encoder), ("llm", model.language_model)):
        held = 4 * sum(p.numel() for p in part.parameters())
        if name == "llm":  # its embedding is tied: on the first and on the last stage
            held += 4 * part.module.get_input_embeddings().weight.numel()
        assert sum(layer.parameter_bytes for layer in profile.modules[name]) == held


def test_the_saved_table_reads_back_the_same(profiled, tmp_path):
    *_, table, _ = profiled
    again = load_table(save_table(table, tmp_path / "copy.json"))
    assert again == table
    assert not list(tmp_path.glob(".copy*"))
    (tmp_path / "copy.json").write_text("{}")
    with pytest.raises(PlanError, match="copy.json: the profile lacks the key 'format'"):
        load_table(tmp_path / "copy.json")
    with pytest.raises(PlanError, match="nothing.json'; there is no such file"):
        load_table(tmp_path / "nothing.json")


def test_layers_that_cost_the_same_share_a_row(profiled):
    config, _, table, _ = profiled
    graph = module_graph(build_model(config))
    shown = profile_rows(table, graph)
    assert shown.row_count <= sum(node.num_layers for node in graph.nodes)
    labels = list(shown.columns[1].cells)
    assert "2 (projector)" in labels


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--out", "p.txt"], "--out is 'p.txt'; the name must end in .json"),
        (["--out", "p.json", "--lengths", "16,long"], "--lengths has 'long'"),
        (["--out", "p.json", "--lengths", "65"], "the language model takes at most 64 positions"),
        (["--out", "p.json", "--lengths", "1"], "lengths has 1; each must be"),
        (["--out", "p.json", "--repeats", "0"], "--repeats is 0"),
    ],
)
def test_bad_arguments_are_refused_before_any_actor_starts(
    raymm, make_config, no_new_actors, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    code, output = raymm("profile", make_config(), *arguments)
    assert code == 2
    assert message in output
    assert not (tmp_path / "p.json").exists()


def test_a_rank_that_does_not_fit_the_cluster_is_refused(raymm, make_config, tmp_path, ray_cluster):
    config = make_config({"resources.cpus": 1000})
    code, output = raymm("profile", config, "--out", str(tmp_path / "p.json"))
    assert code == 2
    assert "the plan has 1 rank of 1000 CPU each" in output


def test_lengths_are_whole_numbers():
    assert parse_lengths("512, 1024,") == (512, 1024)
    assert parse_lengths("") == ()
    for text in ("-5", "1.5", "a"):
        with pytest.raises(PlanError, match="--lengths has"):
            parse_lengths(text)
