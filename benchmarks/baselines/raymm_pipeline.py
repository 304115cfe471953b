"""raymm's own runtime on the chain: programs run in actors, one call per actor and step."""

from benchmarks.baselines.chain import ChainConfig, ChainResult
from benchmarks.baselines.contender import Contender


class RaymmContender(Contender):
    """Not connected yet: `setup` says so."""

    name = "raymm"

    def setup(self, config: ChainConfig) -> None:
        raise NotImplementedError(
            "raymm is not connected to benchmarks.pipeline_overhead yet; "
            "leave it out with --only torch_pipelining compiled_graph actor_calls "
            "isend_irecv_floor"
        )

    def dispatch(self) -> None:
        raise NotImplementedError("RaymmContender.setup must come first")

    def result(self) -> ChainResult:
        raise NotImplementedError("RaymmContender.setup must come first")

    def close(self) -> None:
        return
