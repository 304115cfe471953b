"""Claim: with cached features, an epoch is as fast as training without a tower.

Run with `python -m benchmarks.feature_cache --json`.

The example's job (`examples/alignment/stamps.yaml`: EfficientNet-Lite and Whisper, both frozen,
projectors, SmolLM2; prepared by `make train`) on its first rows, one epoch per run:

- `plain`: the unchanged job; every step runs the towers;
- `first`: an empty cache, which is filled;
- `second`: the cache of `first`: the features of every item are cached, as in any later epoch;
- `no_tower`: a model whose encoders return their inputs, with data that are the features
  themselves, in files.

`second` and `no_tower` run the same steps alternately, in one cluster; `epoch2_over_no_tower` is
the median over steps of the ratio of their seconds, the wait for data included. Their losses and
those of `first` must be bitwise equal. `plain` computes the items of a microbatch together, and
some kernels then round differently: `plain_same_bits` reports if its losses are bitwise equal too.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from benchmarks.shared import common
from raymm.actors.features.feature_folder import FeatureFolder
from raymm.actors.features.kept_features import FEATURES
from raymm.config.build import build_model, build_plan
from raymm.config.sections import CacheSection, TrainConfig, load_config
from raymm.data import StepLoader
from raymm.data.loading.feature_lookup import FeatureLookup, item_key
from raymm.runtime.parallel_model import ParallelModel
from raymm.training.kept_features import KeptFeatures

CONFIG = common.REPOSITORY / "examples" / "alignment" / "stamps.yaml"
COLUMNS = {"vision": "images", "audio": "audio"}
FILLED_SECONDS = 2.0  # wait for background writes after the last step


class Identity(nn.Module):
    """Encoder that returns its input."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features


def identity() -> nn.Module:
    """Build the encoders of `no_tower`."""
    return Identity()


def load_features(path: str) -> dict[str, torch.Tensor]:
    """Load an item's features from a file of the cache, as the processor of `no_tower`."""
    file = Path(path)
    features = FeatureFolder(file.parents[1], 0).read(file.stem)
    if features is None:
        raise ValueError(f"{path} holds no features")
    return {"features": features[FEATURES]}


class Run:
    """Job that runs steps."""

    def __init__(self, config: TrainConfig, cache: CacheSection | None, steps: int) -> None:
        model = build_model(config)
        plan = build_plan(config, model)
        assert plan is not None  # the file has layouts
        self.kept = KeptFeatures.of(cache, model, plan, config.data, "cpu bf16")
        self.parallel = ParallelModel(
            model, self.kept.plan, optimizer=config.optimizer.build(config.run.steps),
            precision="bf16", seed=config.run.seed, features=self.kept.folders,
            resources=config.resources.for_device("cpu"),
        )
        lookup = self.kept.lookup
        self.steps = self._steps(config, lookup, steps)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.tower_spans = 0

    def _steps(
        self, config: TrainConfig, lookup: FeatureLookup | None, steps: int
    ) -> Iterator[Any]:
        with StepLoader(config.data, steps=steps, features=lookup) as loader:
            yield from loader

    def take(self) -> None:
        """Run one step."""
        start = time.perf_counter()
        step = next(self.steps)
        output = self.parallel.submit(
            (step.microbatches, step.meta), update=True, keep=step
        ).result()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(output.loss)
        self.tower_spans += sum(
            span.stage.module in COLUMNS and span.stage.index == 0 and span.op.startswith("forward")
            for span in output.timeline.spans
        )

    def end(self) -> None:
        """Stop the job's processes."""
        self.steps.close()  # pyright: ignore[reportAttributeAccessIssue]  a generator
        self.parallel.shutdown()


def first_rows(config: Mapping[str, Any], count: int, folder: Path) -> list[dict[str, Any]]:
    """Return the first rows of the job's data, with absolute paths."""
    source = Path(config["data"]["train"])
    rows = [json.loads(line) for line in source.read_text().splitlines()[:count]]
    for row in rows:
        for column in COLUMNS.values():
            if row.get(column):
                row[column] = [str(source.parent / path) for path in _listed(row[column])]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def without_towers(
    values: dict[str, Any], rows: list[dict[str, Any]], folders: Mapping[str, FeatureFolder],
    folder: Path,
) -> dict[str, Any]:
    """Return the job's configuration with features as data."""
    changed = []
    for row in rows:
        row = dict(row)
        for name, column in COLUMNS.items():
            if row.get(column):
                row[column] = [str(folders[name].file(item_key(path))) for path in row[column]]
        changed.append(row)
    (folder / "features.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
    values = json.loads(json.dumps(values))
    values["data"]["train"] = str(folder / "features.jsonl")
    for name in COLUMNS:
        section = values["model"]["encoders"][name]
        values["model"]["encoders"][name] = {
            "factory": "benchmarks.feature_cache:identity", "train": "frozen",
            "hidden_size": section["hidden_size"], "projector": section["projector"],
        }
        values["data"]["modalities"][name]["processor"] = "benchmarks.feature_cache:load_features"
    return values


def measure(rows: int, folder: Path) -> dict[str, Any]:
    """Run all four jobs for an epoch each."""
    loaded = load_config(CONFIG)
    values = json.loads(loaded.model_dump_json(exclude_unset=True))
    values["data"].pop("heldout")
    values["run"].pop("eval_every")
    values["run"]["storage_path"] = str(folder / "run")
    values["data"]["train"] = values["data"]["train"][0]["path"]
    chosen = first_rows(values, rows, folder)
    values["data"] |= {"train": str(folder / "rows.jsonl"), "media_folders": ["/"]}
    config = _config(values, folder / "job.yaml")
    steps = rows // config.data.batch_size
    cache = CacheSection(features="disk", folder=str(folder / "features"))
    runs: dict[str, Run] = {}
    for name, asked in (("plain", None), ("first", cache)):
        runs[name] = run = Run(config, asked, steps)
        for _ in range(steps):
            run.take()
        time.sleep(FILLED_SECONDS)
        run.end()
    bare = without_towers(values, chosen, runs["first"].kept.folders, folder)
    runs["second"] = Run(config, cache, steps)
    runs["no_tower"] = Run(_config(bare, folder / "bare.yaml"), None, steps)
    for number in range(steps):
        order = ("second", "no_tower") if number % 2 else ("no_tower", "second")
        for name in order:
            runs[name].take()
    for name in ("second", "no_tower"):
        runs[name].end()
    return result_of(runs)


def _config(values: Mapping[str, Any], file: Path) -> TrainConfig:
    file.write_text(yaml.safe_dump(dict(values)))
    return load_config(file)


def result_of(runs: Mapping[str, Run]) -> dict[str, Any]:
    """Return the figures."""
    median = {name: statistics.median(run.seconds[1:]) for name, run in runs.items()}
    pairs = list(zip(runs["second"].seconds, runs["no_tower"].seconds, strict=True))[1:]
    same = runs["first"].losses == runs["second"].losses == runs["no_tower"].losses
    return {
        "epoch2_over_no_tower": round(statistics.median(a / b for a, b in pairs), 4),
        "epoch2_over_plain": round(median["second"] / median["plain"], 4),
        "same_bits": same,
        "plain_same_bits": runs["plain"].losses == runs["first"].losses,
        "tower_forwards": {name: run.tower_spans for name, run in runs.items()},
        "median_step_seconds": {name: round(seconds, 4) for name, seconds in median.items()},
        "steps": len(pairs),
    }


def main() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument("--rows", type=int, default=180, help="rows of the data; a step has 12")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="raymm-features-") as folder, common.local_ray(4):
        result = {"benchmark": "feature_cache", **measure(args.rows, Path(folder))}
    result["machine"] = common.machine()
    print(json.dumps(result))
    if not result["same_bits"]:
        sys.exit("the losses are not bitwise equal")


if __name__ == "__main__":
    main()
