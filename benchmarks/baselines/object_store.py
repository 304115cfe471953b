"""Workers of the contenders that send hidden states through Ray's shared memory."""

import warnings

import numpy as np
import torch
from torch import Tensor

from benchmarks.baselines.chain import ChainConfig, StageRunner
from benchmarks.baselines.contender import Worker


class TensorWorker(Worker):
    """Worker that takes and returns torch tensors, as in untuned code."""

    def configure(self, config: ChainConfig) -> None:
        self.runner = StageRunner(config, self.index)

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        """Return the output for the next stage, None on the last. The first stage ignores `x`."""
        return self.runner.forward(microbatch, None if self.runner.is_first else x)

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient for the previous stage, None on the first. The last ignores
        `gradient`.
        """
        return self.runner.backward(microbatch, None if self.runner.is_last else gradient)

    def facts(self) -> tuple[float, float]:
        return self.runner.facts()


def _to_tensor(array: np.ndarray | None) -> Tensor | None:
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else None


def _to_array(tensor: Tensor | None) -> np.ndarray | None:
    return None if tensor is None else tensor.numpy()


class ArrayWorker(TensorWorker):
    """Worker that takes and returns numpy arrays, which Ray reads in place.

    The only copy is the sender's.
    """

    def __init__(self, index: int) -> None:
        super().__init__(index)
        # Received arrays are read-only views of shared memory; no stage writes to its input.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

    def forward(self, microbatch: int, x: np.ndarray | None) -> np.ndarray | None:
        """Run `TensorWorker.forward` on arrays."""
        return _to_array(super().forward(microbatch, _to_tensor(x)))

    def backward(self, microbatch: int, gradient: np.ndarray | None) -> np.ndarray | None:
        """Run `TensorWorker.backward` on arrays."""
        return _to_array(super().backward(microbatch, _to_tensor(gradient)))
