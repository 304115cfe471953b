"""The worker of both contenders that move hidden states through Ray's shared memory."""

import warnings

import numpy as np
import torch

from benchmarks.baselines.chain import ChainConfig, StageRunner
from benchmarks.baselines.contender import Worker


def to_tensor(array: np.ndarray | None) -> torch.Tensor | None:
    """The tensor over a received array, without a copy."""
    return None if array is None else torch.from_numpy(array)


class ArrayWorker(Worker):
    """Hidden states travel as numpy arrays, which Ray writes and reads with one copy in all.

    (A torch tensor would be copied once more by the receiver.)
    """

    def __init__(self, index: int) -> None:
        super().__init__(index)
        # Received arrays are read-only views of shared memory; no stage writes to its input.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

    def configure(self, config: ChainConfig) -> None:
        self.runner = StageRunner(config, self.index)

    def forward(self, microbatch: int, x: np.ndarray | None) -> np.ndarray | None:
        """Output for the next stage, None on the last. The first stage ignores `x`."""
        y = self.runner.forward(microbatch, None if self.runner.is_first else to_tensor(x))
        return None if y is None else y.numpy()

    def backward(self, microbatch: int, gradient: np.ndarray | None) -> np.ndarray | None:
        """Gradient for the stage before, None on the first. The last ignores `gradient`."""
        incoming = None if self.runner.is_last else to_tensor(gradient)
        outgoing = self.runner.backward(microbatch, incoming)
        return None if outgoing is None else outgoing.numpy()

    def facts(self) -> tuple[float, float]:
        return self.runner.facts()
