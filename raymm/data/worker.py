"""The Ray actor that builds steps and leaves their tensors in the object store."""

import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import ray
import torch

from raymm.data.builder import Skipped, StepBuilder
from raymm.data.collate import MicrobatchMeta, split_parts
from raymm.data.config import DataConfig
from raymm.data.errors import DataError
from raymm.data.object_store import StoredTensors
from raymm.data.readers import Dataset


@dataclass(frozen=True)
class StoredStep:
    """A built step whose tensors are references; ``parts`` as from ``split_parts``."""

    parts: list[dict[str, ray.ObjectRef]]
    meta: list[MicrobatchMeta]
    skipped: list[Skipped]


class DataWorker:
    """Builds steps. It owns the objects it stores, so they live no longer than it does.

    Args:
        config: the data configuration.
        dataset: the split's samples.
        import_path: the driver's ``sys.path``; Ray itself hands on only the script's folder,
            and processor functions may lie elsewhere.
        shuffled: modalities to shuffle (``StepBuilder.build``).
    """

    def __init__(
        self,
        config: DataConfig,
        dataset: Dataset,
        import_path: Sequence[str],
        shuffled: Sequence[str],
    ):
        sys.path.extend(path for path in import_path if path and path not in sys.path)
        torch.set_num_threads(1)
        self._builder = StepBuilder(config, dataset)
        self._shuffled = tuple(shuffled)

    def pid(self) -> int:
        """Process id, for messages and tests."""
        return os.getpid()

    def load(
        self, indices: Sequence[int] | Sequence[Sequence[int]]
    ) -> StoredStep | DataError:
        """``StepBuilder.build``. Errors are returned, because Ray would wrap one that is raised."""
        try:
            built = self._builder.build(indices, self._shuffled)
            parts = [
                {name: ray.put(StoredTensors(part)) for name, part in split_parts(mb).items()}
                for mb in built.microbatches
            ]
            return StoredStep(parts, built.meta, built.skipped)
        except DataError as error:
            error.__cause__ = error.__context__ = None  # may not be picklable
            return error
        except Exception as error:
            failure = DataError(f"a data worker failed: {type(error).__name__}: {error}")
            failure.add_note(traceback.format_exc())
            return failure


def start_worker(
    config: DataConfig, dataset: ray.ObjectRef, shuffled: Sequence[str]
) -> ray.actor.ActorHandle:
    """Start one ``DataWorker``; ``dataset`` refers to a ``raymm.data.readers.Dataset``."""
    return (
        ray.remote(DataWorker)
        .options(
            num_cpus=config.worker_cpus,
            max_restarts=0,
            # Several workers decode side by side; threads below them would only fight.
            runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}},
        )
        .remote(config, dataset, list(sys.path), tuple(shuffled))
    )
