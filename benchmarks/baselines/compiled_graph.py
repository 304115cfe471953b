"""Ray Compiled Graphs over shared-memory channels: the entire step compiled into one graph."""

import contextlib
import logging
import os
import signal
from typing import Any

import ray
from ray.dag import InputNode

from benchmarks.baselines.chain import ChainConfig, global_one_f_one_b
from benchmarks.baselines.contender import ActorContender
from benchmarks.baselines.object_store import ArrayWorker, TensorWorker

# Room for the serialised array's header in addition to its bytes.
HEADER_BYTES = 16 * 1024
STEP_TIMEOUT_S = 120
# Actors are killed, not torn down (see setup), which this logger reports at length.
logging.getLogger("ray.dag.compiled_dag_node").setLevel(logging.CRITICAL)


class _GraphNodes:
    """Graph methods of an actor in addition to `forward` and `backward`."""

    def finish(self, *backwards: None) -> bool:
        """Return the graph's output, which depends on all backwards of the first stage: a step's
        end.
        """
        return True


class TensorGraphWorker(_GraphNodes, TensorWorker):
    """Worker that sends torch tensors."""


class ArrayGraphWorker(_GraphNodes, ArrayWorker):
    """Worker that sends numpy arrays."""


class CompiledGraphContender(ActorContender):
    """Contender with a node per forward and backward of every microbatch, bound in 1F1B order.

    Torch tensors are passed between nodes by Ray's tensor transport for shared memory. (Otherwise
    they would be pickled entirely: 9 ms of CPU time for 4 MB.)
    """

    name = "compiled_graph"
    worker_class = TensorGraphWorker
    tensor_transport: str | None = "shm"

    def __init__(self) -> None:
        super().__init__()
        self._graph: Any = None
        self._compiled_for: tuple[int, int] | None = None

    def setup(self, config: ChainConfig) -> None:
        wanted = config.message_bytes, config.microbatches
        if wanted == self._compiled_for:
            super().setup(config)
            return
        # New actors for each graph: the teardown of the second graph compiled for the same actors
        # hangs (ray 2.60).
        self.close()
        super().setup(config)
        with InputNode() as trigger:
            hidden = dict.fromkeys(range(config.microbatches), trigger)
            for stage, direction, microbatch in global_one_f_one_b(config):
                method = getattr(self.actors[stage], direction)
                node = method.bind(microbatch, hidden[microbatch])
                if self.tensor_transport:
                    node = node.with_tensor_transport(self.tensor_transport)
                hidden[microbatch] = node
            output = self.actors[0].finish.bind(*hidden.values())
        self._graph = output.experimental_compile(
            _buffer_size_bytes=config.message_bytes + HEADER_BYTES,
            # Each channel has a buffer per step in flight, by default 10: 6 GB at 24 x 4 MB.
            _max_inflight_executions=1,
        )
        self._compiled_for = wanted

    def dispatch(self) -> None:
        ray.get(self._graph.execute(0), timeout=STEP_TIMEOUT_S)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def pause(self) -> None:
        # An actor that waits for a channel polls it (measured: half a core each, all the time),
        # which would slow down the other contenders.
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        self.resume()  # the actors terminate themselves, which stopped processes cannot
        super().close()
        self._graph, self._compiled_for = None, None


class ArrayCompiledGraphContender(CompiledGraphContender):
    """Contender with numpy arrays, which the receiver reads in place: the tuned form."""

    name = "compiled_graph_numpy"
    worker_class = ArrayGraphWorker
    tensor_transport = None


class PlainCompiledGraphContender(CompiledGraphContender):
    """Contender with torch tensors without a transport hint, `experimental_compile`'s default."""

    name = "compiled_graph_plain"
    tensor_transport = None
