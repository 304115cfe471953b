"""Run hooks of tests, named in configurations."""

from raymm import RunHook


class Mean(RunHook):
    """Mean of all losses since the beginning of the run."""

    def __init__(self, prefix: str = "mean") -> None:
        self.name, self.total, self.steps = f"{prefix}_loss", 0.0, 0

    def after_step(self, context, row):
        self.total, self.steps = self.total + row["loss"], self.steps + 1
        return {self.name: self.total / self.steps}

    def state_dict(self):
        return {"total": self.total, "steps": self.steps}

    def load_state_dict(self, state):
        self.total, self.steps = state["total"], state["steps"]
