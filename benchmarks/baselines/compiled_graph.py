"""Ray Compiled Graphs over shared-memory channels: the whole step compiled into one graph."""

from typing import Any

import ray
from ray.dag import InputNode

from benchmarks.baselines.chain import ChainConfig, global_one_f_one_b
from benchmarks.baselines.contender import ActorContender
from benchmarks.baselines.object_store import ArrayWorker

# Room for the serialised array's header beside its bytes.
HEADER_BYTES = 16 * 1024


class GraphWorker(ArrayWorker):
    """An `ArrayWorker` with a last node, for a graph must end in outputs the driver reads."""

    def finish(self, *backwards: None) -> bool:
        """Depends on all of the first stage's backwards: the step is over."""
        return True


class CompiledGraphContender(ActorContender):
    """Forward and backward of every microbatch are nodes, bound in 1F1B order."""

    name = "compiled_graph"
    worker_class = GraphWorker

    def __init__(self) -> None:
        super().__init__()
        self._graph: Any = None
        self._compiled_for: tuple[int, int] | None = None

    def setup(self, config: ChainConfig) -> None:
        super().setup(config)
        wanted = config.message_bytes, config.microbatches
        if wanted == self._compiled_for:
            return
        self._teardown()
        with InputNode() as trigger:
            hidden = dict.fromkeys(range(config.microbatches), trigger)
            for stage, direction, microbatch in global_one_f_one_b(config):
                method = getattr(self.actors[stage], direction)
                hidden[microbatch] = method.bind(microbatch, hidden[microbatch])
            output = self.actors[0].finish.bind(*hidden.values())
        self._graph = output.experimental_compile(
            _buffer_size_bytes=config.message_bytes + HEADER_BYTES
        )
        self._compiled_for = wanted

    def dispatch(self) -> None:
        ray.get(self._graph.execute(0))

    def _teardown(self) -> None:
        if self._graph is not None:
            self._graph.teardown()
        self._graph, self._compiled_for = None, None

    def close(self) -> None:
        self._teardown()
        super().close()
