"""Files of measured layer costs."""

import pytest

from raymm.costs.profile_files import load_table, save_table
from raymm.errors import PlanError
from raymm.scheduler.costs.layer_costs import LayerCost
from raymm.scheduler.costs.profile_table import Measurement, ProfileTable


def test_a_written_table_is_read_again(tmp_path):
    layer = LayerCost(0.1, 0.2, 0.3, activation_bytes=4)
    table = ProfileTable({"llm": (Measurement(8, 1, (layer,)),)}, {"llm": 8})
    file = save_table(table, tmp_path / "new" / "costs.json")
    assert load_table(file) == table


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PlanError, match="profile is '.*none.json'; there is no such file"):
        load_table(tmp_path / "none.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": NaN}', "\u00fc"])
def test_invalid_files_are_named(tmp_path, text):
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(PlanError, match=f"^{file}: "):
        load_table(file)
