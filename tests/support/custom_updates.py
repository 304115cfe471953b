"""Optimizers and schedules of tests, named in configurations."""

import torch


class Signs(torch.optim.Optimizer):
    """Sign of an average of gradients."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 1e-4, "weight_decay": 0.0})

    def update(self, group, p):
        average = self.state[p].setdefault("average", torch.zeros_like(p))
        average.lerp_(p.grad, 0.1)
        p.sub_(average.sign(), alpha=group["lr"])

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(group, p)


class Counting(Signs):
    def update(self, group, p):
        group["k"] = group.get("k", 0) + 1
        p.sub_(p.grad, alpha=group["lr"] / group["k"])


class Normalised(Signs):
    def update(self, group, p):
        p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


lion, counting, normalised = Signs, Counting, Normalised


def falling(step):
    return 0.5**step


def late(step):
    return [1.0, 1.0, 1.0, 1.0][step]
