"""User callbacks, named in configurations."""

from raymm import Callback

CALLS: list[tuple[str, object]] = []


class Recorder(Callback):
    """Callback that records its calls."""

    def on_start(self, run):
        CALLS.append(("start", run))

    def on_restart(self, restart):
        CALLS.append(("restart", restart))

    def on_step(self, row):
        CALLS.append(("step", row))

    def on_evaluation(self, row):
        CALLS.append(("evaluation", row))

    def on_checkpoint(self, checkpoint):
        CALLS.append(("checkpoint", checkpoint))

    def on_end(self, end):
        CALLS.append(("end", end))


class Failing(Callback):
    """Callback that raises at a step."""

    def __init__(self, at: int, error: str = "ValueError") -> None:
        self.at, self.error = at, {"ValueError": ValueError, "SystemExit": SystemExit}[error]

    def on_step(self, row):
        CALLS.append(("failing", row["step"]))
        if row["step"] == self.at:
            raise self.error("the disk of the logger is full")
