"""The example's notebook runs in a separate kernel and shows its results.

Common use of notebooks leaves no processes: interrupted cells, repeated cells, restarted kernels.
"""

import re
import time
from pathlib import Path

import nbformat
import pytest
import ray._private.state
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

pytestmark = pytest.mark.system
NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"
PATIENCE_S = 240  # timeout of a cell, on a busy machine
MODEL = """
import raymm, torch
from transformers import LlamaConfig

sizes = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=32)
model = raymm.MultimodalModule({}, LlamaConfig(num_hidden_layers=2, **sizes))
spec = raymm.MultimodalParallelSpec({}, raymm.ParallelSpec(pp=2), 2)
ids = torch.arange(20).view(4, 5)
batch = {"input_ids": ids, "labels": ids}
parallel = spec.apply(model)
"""
STEPS = """
while True:
    output = parallel.train_step(batch)
    print("a step", flush=True)
"""
FIT = """
class Printer(raymm.Callback):
    def on_step(self, row):
        print("a step", flush=True)

run = raymm.RunConfig(storage_path="run", steps=10**6)
raymm.Trainer(model, spec, [batch], run, callbacks=[Printer()]).fit()
"""


@pytest.fixture
def joins_the_cluster(joins, monkeypatch):
    """Let kernels join the session's cluster."""
    for name, value in joins.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def live_actors(ray_cluster):
    """Return a function that counts the living actors that are new."""
    def ids() -> set[str]:
        actors = ray._private.state.actors()
        return {name for name, actor in actors.items() if actor["State"] != "DEAD"}

    before = ids()
    return lambda: len(ids() - before)


class Session:
    """Kernel that runs typed input."""

    def __init__(self, folder: Path) -> None:
        self.manager, self.client = start_new_kernel(cwd=str(folder), startup_timeout=PATIENCE_S)

    def start(self, code: str) -> str:
        """Run a cell without waiting for it.

        The next one follows within milliseconds, and an interruption of this one must not abort it.
        """
        return self.client.execute(code, stop_on_error=False)

    def wait(self, cell: str) -> dict:
        """Return the outcome of a cell."""
        while True:
            reply = self.client.get_shell_msg(timeout=PATIENCE_S)
            if reply["parent_header"].get("msg_id") == cell:
                return reply["content"]

    def run(self, code: str) -> None:
        content = self.wait(self.start(code))
        assert content["status"] == "ok", "\n".join(content.get("traceback", [str(content)]))

    def until_printed(self, text: str) -> None:
        """Wait until a cell prints the text."""
        while text not in self.client.get_iopub_msg(timeout=PATIENCE_S)["content"].get("text", ""):
            pass

    def interrupt(self, cell: str) -> dict:
        self.manager.interrupt_kernel()
        content = self.wait(cell)
        assert content["status"] == "error"
        return content

    def end(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def session(joins_the_cluster, tmp_path):
    started = Session(tmp_path)
    yield started
    started.end()


def until(condition) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_cells_and_kernels_leave_no_processes(session, live_actors):
    session.run(MODEL)
    assert live_actors() == 2
    training = session.start(STEPS)
    session.until_printed("a step")
    assert session.interrupt(training)["ename"] == "KeyboardInterrupt"
    session.run("assert parallel.train_step(batch).loss < 10")  # the session continues
    session.run("parallel = spec.apply(model)")
    until(lambda: live_actors() == 2)

    starting = session.start("parallel = spec.apply(model)")
    until(lambda: live_actors() > 2)
    session.interrupt(starting)
    until(lambda: live_actors() == 2)  # the actors of the bound name
    session.run("del parallel")
    until(lambda: live_actors() == 0)

    fitting = session.start(FIT)
    session.until_printed("a step")
    ended = session.interrupt(fitting)
    assert ended["ename"] == "KeyboardInterrupt" and "step" in ended["evalue"]
    assert live_actors() == 0

    session.run("parallel = spec.apply(model)")
    assert live_actors() == 2
    session.manager.restart_kernel(now=True)
    until(lambda: live_actors() == 0)


def test_the_example(joins_the_cluster, live_actors, tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    NotebookClient(
        notebook, timeout=PATIENCE_S, kernel_name="python3",
        resources={"metadata": {"path": tmp_path}},
    ).execute()
    until(lambda: live_actors() == 0)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = [output["data"] for output in outputs if "data" in output]
    html = "\n".join(data.get("text/html", "") for data in shown)
    assert html.count("data:image/png;base64,") == 1 + 2 + 2  # the plan; loss and schedule, twice
    assert re.findall(r">(\d+/\d+)&nbsp; train · loss [\d.]+ · ", html) == ["30/30", "60/60"]
    assert "<td>vision.0" in html and "steps taken" in html  # the table of ranks
    text = "\n".join(data["text/plain"] for data in shown)
    right, others = map(float, re.findall(r"right pictures ([\d.]+), others' ([\d.]+)", text)[0])
    first, last = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", text)[0])
    assert right < others and last < first / 10
    assert "'vision_projector'" in text
    printed = [output["text"] for output in outputs if output.get("name") == "stderr"]
    # Progress bars of transformers, messages of tqdm and Ray without ipywidgets, and torchao's
    # message about its kernels (transformers imports it) are not raymm's.
    known = (
        r"TqdmWarning|from \.autonotebook import|it/s\]|Missing packages: \['ipywidgets'\]"
        r"|/torchao/|torch/utils/_pytree\.py"
    )
    lines = [line for text in printed for line in re.split(r"[\r\n]+", text)]
    assert [line for line in lines if line.strip() and not re.search(known, line)] == []
