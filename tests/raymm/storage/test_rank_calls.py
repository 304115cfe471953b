"""Reports of ranks about their shards."""

import pytest

from raymm.errors import CheckpointError, RankFailedError
from raymm.storage.rank_calls import call_ranks_behind


class Group:
    """Group of ranks whose calls are tasks."""

    def __init__(self, ray, errors):
        self.ray, self.errors = ray, errors

    def start(self, method, *args):
        @self.ray.remote(num_cpus=0)
        def write(error):
            if error is not None:
                raise error
            return "written"

        return [write.remote(error) for error in self.errors]

    def check_running(self):
        pass


@pytest.mark.parametrize(("error", "kind", "message"), [
    (CheckpointError("cannot write x: full"), CheckpointError, "^cannot write x: full$"),
    (MemoryError("of 7 bytes"), CheckpointError, "^rank 1 has no memory to write its shard$"),
    (KeyError("x"), RankFailedError, "KeyError"),
])  # fmt: skip
def test_a_rank_that_cannot_write_is_not_lost(ray_cluster, error, kind, message):
    """Distinguish a missing checkpoint, after which the run continues, from a lost rank."""
    assert call_ranks_behind(Group(ray_cluster, [None, None]), "write") == ["written"] * 2
    with pytest.raises(kind, match=message):
        call_ranks_behind(Group(ray_cluster, [None, error]), "write")
