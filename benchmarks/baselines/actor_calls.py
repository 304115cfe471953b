"""Plain Ray actor calls: one per stage, microbatch and direction, passing object refs."""

import ray

from benchmarks.baselines.chain import ChainConfig, global_one_f_one_b
from benchmarks.baselines.contender import ActorContender
from benchmarks.baselines.object_store import ArrayWorker


class ActorCallsContender(ActorContender):
    """Contender that submits calls in 1F1B order; an actor keeps the order of calls from one
    caller.
    """

    name = "actor_calls"
    worker_class = ArrayWorker

    def setup(self, config: ChainConfig) -> None:
        super().setup(config)
        self.config, self.order = config, global_one_f_one_b(config)

    def dispatch(self) -> None:
        hidden: dict[int, ray.ObjectRef | None] = dict.fromkeys(range(self.config.microbatches))
        last_calls = {}
        for stage, direction, microbatch in self.order:
            method = getattr(self.actors[stage], direction)
            # Replacing the reference lets Ray free the hidden state that the next call has
            # consumed.
            hidden[microbatch] = method.remote(microbatch, hidden[microbatch])
            last_calls[stage] = hidden[microbatch]
        ray.wait(list(last_calls.values()), num_returns=len(last_calls), fetch_local=False)
        ray.get(last_calls[0])
