"""Losses of users, in place of the cross entropy of tokens."""

import torch.nn.functional as F


def smoothed(logits, targets):
    return F.cross_entropy(logits, targets, label_smoothing=0.1, reduction="none")


def mean(logits, targets):
    return F.cross_entropy(logits, targets)


def number(logits, targets):
    return 1.0


def relative(logits, targets):
    return smoothed(logits - logits.mean(), targets) * len(targets)


def failing(logits, targets):
    raise KeyError("temperature")


def detached(logits, targets):
    return smoothed(logits.detach(), targets)


def infinite(logits, targets):
    return smoothed(logits, targets) / 0
