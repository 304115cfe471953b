"""Optimizers and schedules of users, named in configurations."""

import torch


class Lion(torch.optim.Optimizer):
    """Sign of an average of gradients (Chen et al., 2023)."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 1e-4, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("average_gradient", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(torch.sign(average.lerp(p.grad, 0.1)), alpha=group["lr"])
                average.lerp_(p.grad, 0.01)


def sgd(groups):
    return torch.optim.SGD(groups, momentum=0.9)


def adagrad(groups):
    """State exists before the first step, and is not 0."""
    return torch.optim.Adagrad(groups, initial_accumulator_value=0.1)


def rprop(groups):
    """The first step creates a state that is not 0."""
    return torch.optim.Rprop(groups)


class Normalised(Lion):
    """Updates by the direction of a whole parameter's gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


class OfAll(Lion):
    """Updates by the direction of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([g.norm() for g in gradients if g is not None]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / norm, alpha=group["lr"])


class Counting(Lion):
    """Counts steps in the group."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / group["k"])


class Drawing(Lion):
    """Adds random numbers."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=group["lr"])


class WithNumber(Lion):
    """Keeps a number that is not a tensor."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["count"] = 1


def nothing(groups):
    return None


def regrouped(groups):
    return torch.optim.SGD([p for group in groups for p in group["params"]], lr=0.1)


def failing(groups):
    raise KeyError("width")


not_a_function = 3


def half_after_three(step):
    return 1.0 if step < 3 else 0.5


def negative(step):
    return 1 - step


def zero(step):
    return 0
