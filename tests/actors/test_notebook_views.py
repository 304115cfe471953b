"""Notebook views of a running model; a deleted name releases all resources."""

import base64
import gc
import os
import re
import signal
import time
import weakref
from pathlib import Path

import pytest
import torch
import transformers as hf

from raymm.actors.rank.rank_resources import RankResources
from raymm.errors import ClusterError, DataError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.training.result import Result

LLAMA = dict(
    hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=16,
    num_key_value_heads=2,
)
IDS = torch.arange(10).view(2, 5)


def started(**options):
    model = MultimodalModule({}, ModalityModule(hf.LlamaConfig(**LLAMA)))
    return MultimodalParallelSpec({}, ParallelSpec(pp=2), 2).apply(model, **options)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_model_and_its_steps_are_short_and_named(ray_cluster):
    with started() as parallel:
        output = parallel.execute({"input_ids": IDS, "labels": IDS})
        assert len(repr(output)) < 400 and "Timeline(2 ranks, " in repr(output)
        shown = output._repr_html_()
        assert f"loss {output.loss:.4f}" in shown and "8 label tokens" in shown
        busy = output.timeline.stage_busy()
        shares = [f"{seconds / output.timeline.makespan:.0%}" for seconds in busy.values()]
        assert re.findall(r">(\d+%)<", shown) == shares and len(shares) == 2
        assert all(f">{stage}<" in shown for stage in busy)
        table = parallel._repr_html_()
        assert len(repr(parallel)) < 100
        for rank in parallel.group.pids():
            assert f"<td>{rank['pid']}</td>" in table and rank["host"] in table
        assert "llm.0" in table and "0 steps taken" in table
        os.kill(parallel.group.places[1].pid, signal.SIGKILL)
        with pytest.raises(RuntimeError):
            parallel.execute({"input_ids": IDS, "labels": IDS})
        assert "the processes have ended" in parallel._repr_html_()


def test_rebinding_a_name_ends_its_processes(ray_cluster):
    parallel = started()
    before = [place.pid for place in parallel.group.places]
    parallel.execute({"input_ids": IDS, "labels": IDS})
    parallel = started()
    after = [place.pid for place in parallel.group.places]
    end = time.monotonic() + 60
    while not all(map(gone, before)):
        assert time.monotonic() < end, "the first model's processes are still there"
        time.sleep(0.1)
    assert not any(map(gone, after))
    del parallel
    while not all(map(gone, after)):
        assert time.monotonic() < end, "the second model's processes are still there"
        time.sleep(0.1)


def test_a_result_has_its_pictures_in_it(tmp_path):
    picture = tmp_path / "loss.png"
    picture.write_bytes(b"\x89PNG a picture")
    files = {"loss curve": picture, "schedule": tmp_path / "gone.png", "plan": tmp_path / "p.json"}
    row = {"step": 7, "loss": 1.25, "tokens_per_s": 1234.5}
    shown = Result(row, [row], tmp_path / "step-7", Path("runs/<mine>"), files)._repr_html_()
    assert "runs/&lt;mine&gt;: 7 steps, loss 1.2500, 1,234 tokens/s" in shown
    assert shown.count("<img") == 1
    assert base64.b64encode(picture.read_bytes()).decode() in shown
    assert "0 steps" in Result({}, [], None, tmp_path)._repr_html_()


def test_an_earlier_model_that_has_the_cluster_is_named(ray_cluster):
    three_each = RankResources(cpus=3)
    parallel = started(resources=three_each)
    with pytest.raises(ClusterError, match=r"2 x \(3 CPU\) are needed, but an earlier model "
                       r"of this process still holds 2 x \(3 CPU\) of the cluster's 8 CPU"):
        started(resources=three_each)
    assert parallel.execute({"input_ids": IDS, "labels": IDS}).loss > 0
    del parallel  # releases placements, too, not only processes
    with started(resources=three_each) as again:
        assert again.steps_taken == 0


def test_a_wrong_batch_does_not_hold_a_model(ray_cluster):
    parallel = started()
    try:
        parallel.train_step({"input_ids": IDS.float(), "labels": IDS})
    except DataError as error:
        kept = error  # a notebook keeps the last error
    held = weakref.ref(parallel)
    del parallel
    gc.collect()
    assert held() is None and kept.__traceback__ is not None
