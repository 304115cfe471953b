"""Ids of runs in loggers: kept by a resumed run, new for a new one."""

from raymm.callbacks.callback import RunInfo
from raymm.callbacks.logger_run import logger_run_id


def run(folder, first_step):
    return RunInfo("mine", folder, first_step, 9, {}, {})


def test_a_resumed_run_keeps_its_id(tmp_path):
    identities = iter(["one", "two", "three"])
    make = identities.__next__
    assert logger_run_id(run(tmp_path, 0), "mlflow", make) == "one"
    assert logger_run_id(run(tmp_path, 5), "mlflow", make) == "one"
    assert logger_run_id(run(tmp_path, 5), "wandb", make) == "two"  # another logger
    assert logger_run_id(run(tmp_path, 0), "mlflow", make) == "three"  # a new run
    assert (tmp_path / "mlflow_run_id").read_text() == "three\n"
