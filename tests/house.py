"""Rooms of the house: the contents of each folder, and the rooms that it may import.

    python -m tests.house

prints the rooms with their files, lines and floors, the longest file and function, warnings, and
every breach of the rules; ``--draw FILE`` draws the rooms, and ``--metrics --json`` prints measures
of the code (:mod:`tests.house_metrics`, :mod:`tests.house_roads`). A room is a folder of the four
packages, or a public door: a file of ``kernels/`` outside all rooms. Imports inside functions
count, and those for types.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kernels", "scheduler", "actors", "raymm")
# Larger sizes deserve a second look; they do not break the rules. A subject that needs more should
# not be split.
MOST_FILES = 20  # per room, without an __init__.py that only has a docstring
MOST_LINES = 600  # per file
MOST_FUNCTION_LINES = 100

# Accepted imports of a room, in bottom-up order: a room never imports a later one. A package's name
# stands for all of its rooms.
GROUND = ("raymm/errors.py", "raymm/version.py", "raymm/packages.py", "raymm/plural.py")  # for all
TABLE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(GROUND, ()),
    # kernels: tensors only
    "kernels/collectives": (),
    "kernels/flash": (),
    "kernels/mask": (),
    "kernels/host_copies.py": (),
    "kernels/shared_draws.py": (),
    "kernels/choice": ("kernels/mask", "kernels/shared_draws.py"),
    "kernels/cross_entropy.py": ("kernels/collectives",),
    "kernels/preference.py": (),
    "kernels/flash/cpu": ("kernels/flash", "kernels/mask"),
    "kernels/flash/gpu": ("kernels/flash", "kernels/mask", "kernels/host_copies.py"),
    "kernels/attention.py": (
        "kernels/flash", "kernels/mask", "kernels/choice", "kernels/flash/cpu", "kernels/flash/gpu",
    ),
    "kernels/masked_operator.py": (
        "kernels/flash", "kernels/mask", "kernels/choice", "kernels/flash/cpu", "kernels/flash/gpu",
    ),
    "kernels/context_parallel": (
        "kernels/collectives", "kernels/flash", "kernels/mask", "kernels/host_copies.py",
        "kernels/flash/cpu", "kernels/flash/gpu",
    ),
    "kernels/hf": (
        "kernels/collectives", "kernels/mask", "kernels/host_copies.py", "kernels/attention.py",
        "kernels/masked_operator.py", "kernels/context_parallel",
    ),
    # scheduler: decisions as data
    "scheduler/context_parallel": (),
    "scheduler/graph": (),
    "scheduler/progress": (),
    "scheduler/costs": ("scheduler/graph",),
    "scheduler/schedules": (),
    "scheduler/plan": ("scheduler/graph", "scheduler/costs", "scheduler/schedules"),
    "scheduler/program": ("scheduler/graph", "scheduler/plan"),
    "scheduler/multiplex": (
        "scheduler/graph", "scheduler/costs", "scheduler/schedules", "scheduler/plan",
        "scheduler/program",
    ),
    "scheduler/multiplex/solver": ("scheduler/graph", "scheduler/costs", "scheduler/multiplex"),
    "scheduler/schedule/compiled": (),
    "scheduler/schedule": (
        "scheduler/graph", "scheduler/costs", "scheduler/schedules", "scheduler/plan",
        "scheduler/program", "scheduler/schedule/compiled",
    ),
    "scheduler/minibatch": ("scheduler/plan", "scheduler/program", "scheduler/schedule"),
    "scheduler/search": (
        "scheduler/graph", "scheduler/progress", "scheduler/costs", "scheduler/schedules",
        "scheduler/plan", "scheduler/program", "scheduler/schedule",
    ),
    "scheduler/styles": (
        "scheduler/graph", "scheduler/progress", "scheduler/costs", "scheduler/plan",
        "scheduler/schedule", "scheduler/search",
    ),
    # actors: code that runs in Ray
    "actors/memory": ("kernels",),
    "actors/storage": (),
    "actors/quota": (),
    "actors/faults": ("kernels", "actors/storage"),
    "actors/features": (),
    "actors/host": (),
    "actors/modules": ("kernels", "scheduler", "actors/quota"),
    "actors/placement": ("scheduler/plan",),
    "actors/recompute": ("kernels", "scheduler", "actors/quota", "actors/modules"),
    "actors/adapters": ("actors/modules",),
    "actors/experts": ("kernels", "actors/modules"),
    "actors/weights": ("actors/storage", "actors/modules", "actors/adapters"),
    "actors/sharding": (
        "kernels", "scheduler", "actors/modules", "actors/adapters", "actors/experts",
        "actors/weights",
    ),
    "actors/sharding/vlm": ("kernels", "actors/modules", "actors/sharding"),
    "actors/optimizer": (
        "kernels", "scheduler", "actors/modules", "actors/storage", "actors/sharding",
    ),
    "actors/stages/texts": ("kernels", "actors/modules"),
    "actors/stages": (
        "kernels", "scheduler/graph", "actors/adapters", "actors/experts", "actors/features",
        "actors/modules", "actors/weights", "actors/sharding", "actors/sharding/vlm",
        "actors/stages/texts",
    ),
    "actors/executor": (
        "kernels", "scheduler", "actors/quota", "actors/faults", "actors/modules",
        "actors/adapters", "actors/optimizer",
    ),
    "actors/probe": (
        "kernels", "actors/quota", "actors/experts", "actors/modules", "actors/weights",
        "actors/sharding", "actors/stages",
    ),
    "actors/recovery": ("actors/faults", "actors/placement", "actors/optimizer"),
    "actors/probe/vlm": (
        "kernels", "actors/features", "actors/modules", "actors/weights", "actors/sharding",
        "actors/sharding/vlm", "actors/stages", "actors/probe",
    ),
    "actors/probe/experts": (
        "actors/experts", "actors/modules", "actors/weights", "actors/probe", "actors/probe/vlm",
    ),
    "actors/rank": (
        "kernels", "scheduler", "actors/memory", "actors/quota", "actors/faults", "actors/modules",
        "actors/adapters", "actors/features", "actors/host",
        "actors/placement", "actors/recompute", "actors/storage", "actors/sharding",
        "actors/optimizer", "actors/stages", "actors/executor", "actors/recovery",
    ),
    # raymm: the user interface
    "raymm/files": ("actors/faults", "actors/storage"),
    "raymm/data/video": (),
    "raymm/data/remote": ("actors/storage",),
    "raymm/data/samples": ("actors", "raymm/files", "raymm/data/video", "raymm/data/remote"),
    "raymm/data/readers": ("actors/faults", "raymm/data/remote", "raymm/data/samples"),
    "raymm/data/conversations": (
        "actors/modules", "actors/weights", "raymm/data/video", "raymm/data/samples",
    ),
    "raymm/data/sampling": (
        "scheduler", "actors/faults", "raymm/data/video", "raymm/data/remote",
        "raymm/data/samples", "raymm/data/readers", "raymm/data/conversations",
    ),
    "raymm/draw": ("scheduler",),
    "raymm/model": ("kernels", "scheduler", "actors"),
    "raymm/data/loading": (
        "actors", "raymm/files", "raymm/data/video", "raymm/data/samples", "raymm/data/readers",
        "raymm/data/conversations",
        "raymm/data/sampling", "raymm/model",
    ),
    "raymm/layout": ("scheduler", "actors", "raymm/model"),
    "raymm/data": (
        "actors/modules", "raymm/data/video", "raymm/data/samples", "raymm/data/readers",
        "raymm/data/sampling", "raymm/data/loading",
    ),
    "raymm/batch": ("scheduler", "actors", "raymm/model", "raymm/data/loading", "raymm/data"),
    "raymm/costs": (
        "kernels", "scheduler", "actors", "raymm/files", "raymm/data/sampling", "raymm/model",
        "raymm/data",
    ),
    "raymm/runtime/embedded": ("actors",),
    "raymm/runtime": (
        "kernels/choice", "kernels/flash/gpu", "scheduler", "actors", "raymm/runtime/embedded",
        "raymm/model",
        "raymm/data/loading", "raymm/layout", "raymm/data", "raymm/batch", "raymm/costs",
        "raymm/draw",
    ),
    "raymm/config": (
        "kernels/preference.py",
        "scheduler", "actors", "raymm/files", "raymm/data/remote", "raymm/data/conversations",
        "raymm/data/samples", "raymm/data/readers", "raymm/model", "raymm/layout",
        "raymm/data/loading", "raymm/data", "raymm/runtime",
    ),
    "raymm/profiling": (
        "scheduler", "actors", "raymm/model", "raymm/layout", "raymm/costs", "raymm/runtime",
    ),
    "raymm/planning": (
        "scheduler", "actors", "raymm/draw", "raymm/model", "raymm/data/loading", "raymm/layout",
        "raymm/data", "raymm/costs", "raymm/config",
    ),
    "raymm/storage": (
        "scheduler/plan", "actors", "raymm/files", "raymm/data/remote", "raymm/data/samples",
        "raymm/data/readers",
        "raymm/data/conversations", "raymm/model", "raymm/layout", "raymm/data", "raymm/runtime",
        "raymm/config",
    ),
    "raymm/monitor": (
        "actors/placement",
        "scheduler", "raymm/files", "raymm/data/readers", "raymm/data/sampling", "raymm/draw",
        "raymm/model", "raymm/data", "raymm/costs", "raymm/config", "raymm/planning",
    ),
    "raymm/callbacks": ("actors/weights", "raymm/files"),
    "raymm/evaluation": (
        "actors", "raymm/files", "raymm/data/conversations", "raymm/data/samples",
        "raymm/data/loading", "raymm/data", "raymm/runtime", "raymm/config",
    ),
    "raymm/recovery": ("actors/recovery", "raymm/data", "raymm/runtime"),
    "raymm/training": (
        "scheduler", "actors", "raymm/callbacks", "raymm/files", "raymm/data/readers", "raymm/draw",
        "raymm/model",
        "raymm/data/loading", "raymm/layout", "raymm/data", "raymm/costs", "raymm/runtime",
        "raymm/config", "raymm/planning", "raymm/storage", "raymm/monitor",
        "raymm/recovery",
        "raymm/evaluation",
    ),
    "raymm/cli": (
        "kernels", "scheduler", "actors", "raymm/files", "raymm/version.py", "raymm/draw",
        "raymm/model", "raymm/data/remote", "raymm/data/conversations", "raymm/data/samples",
        "raymm/data/readers",
        "raymm/data/loading", "raymm/data", "raymm/costs", "raymm/runtime/embedded",
        "raymm/runtime", "raymm/config", "raymm/profiling",
        "raymm/planning", "raymm/storage", "raymm/evaluation", "raymm/training",
    ),
    "raymm": (
        "scheduler", "actors", "raymm/version.py", "raymm/callbacks", "raymm/model", "raymm/data",
        "raymm/layout", "raymm/runtime", "raymm/config", "raymm/planning",
        "raymm/storage",
        "raymm/training", "raymm/cli",
    ),
}


# Features around the core: their folders and files. Files outside all features are the core.
FEATURES: dict[str, tuple[str, ...]] = {
    "loggers": (
        "raymm/callbacks/logger_run.py", "raymm/callbacks/mlflow.py",
        "raymm/callbacks/ray_metrics.py", "raymm/callbacks/tensorboard.py",
        "raymm/callbacks/wandb.py",
    ),
    "preference training": (
        "kernels/preference.py", "raymm/layout/preference_check.py",
        "raymm/evaluation/first_scores.py",
    ),
    "evaluation": (
        "raymm/evaluation/best_evaluation.py", "raymm/evaluation/heldout.py",
        "raymm/evaluation/text_evaluation.py",
    ),
    "generation": (
        "actors/stages/texts", "raymm/cli/generate.py", "raymm/runtime/generation.py",
    ),
    "rebalancing": ("raymm/monitor/rebalancing.py",),
    "stragglers": ("raymm/monitor/stragglers.py",),
    "feature cache": (
        "actors/features", "actors/stages/feature_stage.py", "raymm/data/loading/feature_lookup.py",
        "raymm/layout/feature_stages.py", "raymm/training/kept_features.py",
    ),
    "adapters": ("actors/adapters",),
    "experts": ("actors/experts", "actors/probe/experts"),
    "video": ("raymm/data/video",),
    "remote data": ("raymm/data/remote",),
    "elastic replicas": ("raymm/training/elastic.py",),
    "freeze phases": ("raymm/training/phases.py",),
    "optimizers": ("actors/optimizer/adamw_8bit.py", "actors/optimizer/custom_optimizer.py"),
    "file systems": ("actors/storage/custom_file_system.py",),
    "custom losses": ("actors/stages/token_loss.py",),
    "plan passes": ("raymm/planning/passes.py",),
    "orders per batch": ("raymm/training/step_orders.py",),
}
# Features that the core must never import: they attach to it by name.
ATTACHED = ("loggers", "rebalancing", "orders per batch")


class Import(NamedTuple):
    """Name that one file imports from another.

    Attributes:
        source: importing file.
        line: line of the import.
        target: imported file.
        name: imported name; the target's own name if the module itself is imported.
    """

    source: str
    line: int
    target: str
    name: str


@functools.cache
def files() -> tuple[str, ...]:
    """Return every Python file of the four packages, relative to the repository's root.

    Links to the packages within ``raymm/`` are not followed.
    """
    found: list[str] = []
    for package in PACKAGES:
        found += (
            str(path.relative_to(ROOT)) for path in sorted((ROOT / package).rglob("*.py"))
        )
    return tuple(found)


@functools.cache
def tree(file: str) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse((ROOT / file).read_text(), file)


@functools.cache
def num_lines(file: str) -> int:
    """Return the lines of a file."""
    return len((ROOT / file).read_text().splitlines())


def room_of(file: str) -> str:
    """Return the room of a file."""
    folder = file.rpartition("/")[0]
    return file if file in TABLE else folder


def module_name(file: str) -> str:
    """Return the dotted name of a file's module."""
    parts = file.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(parts if parts[0] == "raymm" else ["raymm", *parts])


@functools.cache
def imports() -> tuple[Import, ...]:
    """Return every import of one file of the packages by another."""
    modules = {module_name(file): file for file in files()}
    found = []
    for file in files():
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Import):
                names = [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{file}:{node.lineno}: imports are absolute"
                names = [(node.module or "", alias.name) for alias in node.names]
            else:
                continue
            for module, name in names:
                whole = f"{module}.{name}" if name else module
                target = modules.get(whole) or modules.get(module)
                if target is not None and target != file:
                    found.append(Import(file, node.lineno, target, name or module))
    return tuple(found)


def rooms() -> dict[str, list[str]]:
    """Return the files of every room, without those that only have a docstring."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in files():
        if not file.endswith("__init__.py") or len(tree(file).body) > 1:
            found[room_of(file)].append(file)
    return dict(found)


def sentence(room: str) -> str:
    """Return the first sentence of a room's docstring."""
    file = room if room.endswith(".py") else f"{room}/__init__.py"
    text = " ".join((ast.get_docstring(tree(file)) or "").split("\n\n")[0].split())
    return text.split(". ")[0].removesuffix(".")


def may_import(room: str) -> set[str]:
    """Return the other rooms that a room's files may import."""
    if room in GROUND:
        return set(GROUND[: GROUND.index(room)])
    return {
        other for name in (*GROUND, *TABLE[room]) for other in TABLE
        if other == name or (name in PACKAGES and other.startswith(f"{name}/"))
    } - {room}


def forbidden() -> list[str]:
    """Return imports that the table does not allow, and imports of private names."""
    wrong = []
    for one in imports():
        source, target = room_of(one.source), room_of(one.target)
        if source != target and target not in may_import(source):
            wrong.append(f"{one.source}:{one.line}: {source} may not import {target} ({one.name})")
        if one.name.startswith("_") and not one.name.startswith("__"):
            wrong.append(f"{one.source}:{one.line}: {one.name} is private to {one.target}")
    return wrong


def feature_of(file: str) -> str | None:
    """Return the feature of a file; None for the core."""
    return next((
        feature for feature, places in FEATURES.items()
        if any(file == place or file.startswith(f"{place}/") for place in places)
    ), None)


def feature_imports() -> dict[str, list[Import]]:
    """Return the imports of each feature by the core. The table of public names in
    ``raymm/__init__.py`` does not count."""
    found: dict[str, list[Import]] = {feature: [] for feature in FEATURES}
    for one in imports():
        feature = feature_of(one.target)
        is_core = feature_of(one.source) is None and one.source != "raymm/__init__.py"
        if feature is not None and is_core:
            found[feature].append(one)
    return found


def circles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return groups of nodes that reach each other (Tarjan, 1972)."""
    after: dict[str, set[str]] = defaultdict(set)
    for source, target in edges:
        if source != target:
            after[source].add(target)
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for other in sorted(after[node]):
            if other not in order:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], order[other])
        if lowest[node] == order[node]:
            place = stack.index(node)
            group, stack[place:] = stack[place:], []
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(after):
        if node not in order:
            visit(node)
    return found


def floors(edges: Mapping[str, set[str]]) -> dict[str, int]:
    """Return the floor of every room: 1 without imports, else one above the highest import."""

    @functools.cache
    def floor(room: str) -> int:
        return 1 + max((floor(other) for other in edges[room]), default=0)

    return {room: floor(room) for room in edges}


def functions() -> list[tuple[int, str, str]]:
    """Return (lines, file, name) of every function, the longest first."""
    found = [
        (node.end_lineno - node.lineno + 1, file, node.name)
        for file in files()
        for node in ast.walk(tree(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    ]
    return sorted(found, reverse=True)


def problems() -> list[str]:
    """Return all breaches of the rules."""
    found = forbidden()
    inside = rooms()
    found += [
        f"{one.source}:{one.line}: the core may not import {one.target} ({feature}), which "
        "attaches by name"
        for feature in ATTACHED for one in feature_imports()[feature]
    ]
    found += [
        f"no file {place!r} of the feature {feature!r}"
        for feature, places in FEATURES.items() for place in places
        if not any(file == place or file.startswith(f"{place}/") for file in files())
    ]
    found += [f"no room {room!r} in the table" for room in inside if room not in TABLE]
    found += [f"room {room!r} of the table is empty" for room in TABLE if room not in inside]
    found += [
        "files import each other: " + ", ".join(circle)
        for circle in circles((one.source, one.target) for one in imports())
    ]
    found += [
        "rooms import each other: " + ", ".join(circle)
        for circle in circles((room_of(one.source), room_of(one.target)) for one in imports())
    ]
    return found


def warnings() -> list[str]:
    """Return the sizes that deserve a second look."""
    found = [
        f"{room} has {len(names)} files; more than {MOST_FILES} ask for a second look"
        for room, names in rooms().items() if len(names) > MOST_FILES
    ]
    found += [
        f"{file} has {num_lines(file)} lines; more than {MOST_LINES} ask for a second look"
        for file in files() if num_lines(file) > MOST_LINES
    ]
    return found + [
        f"{file}: {name} has {lines} lines; more than {MOST_FUNCTION_LINES} ask for a second look"
        for lines, file, name in functions()
        if lines > MOST_FUNCTION_LINES
    ]


def room_imports() -> dict[str, set[str]]:
    """Return the imported rooms of every room."""
    edges: dict[str, set[str]] = {room: set() for room in rooms()}
    for one in imports():
        source, target = room_of(one.source), room_of(one.target)
        if source != target and source in edges and target in edges:
            edges[source].add(target)
    return edges


def main() -> None:
    """Print the house, and exit with 1 if it breaks a rule."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw the rooms (.png, .svg)")
    parser.add_argument(
        "--metrics", action="store_true",
        help="print measures of the code's size and shape instead; trains a tiny model, a minute",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the measures as one JSON object, last on stdout"
    )
    args = parser.parse_args()
    if args.metrics:
        return _print_metrics(args.json)
    wrong = problems()
    inside = rooms()
    if not wrong:
        floor = floors(room_imports())
        for room, names in inside.items():
            lines = sum(map(num_lines, names))
            print(f"{room:32} floor {floor[room]:2}  {len(names):2} files {lines:6} lines")
    for package in PACKAGES:
        of_package = [file for file in files() if file.startswith(f"{package}/")]
        print(f"{package}: {len(of_package)} files, {sum(map(num_lines, of_package))} lines")
    longest = max(files(), key=num_lines)
    print(f"longest file: {longest}, {num_lines(longest)} lines")
    lines, file, name = functions()[0]
    print(f"longest function: {name} of {file}, {lines} lines")
    print("\n".join(f"warning: {text}" for text in warnings()))
    print(f"rooms: {len(inside)}; against the rules: {len(wrong)}")
    if args.draw is not None:
        from tests.house_picture import draw_rooms

        draw_rooms(args.draw, room_imports(), {room: sentence(room) for room in inside})
    if wrong:
        raise SystemExit("\n".join(wrong))


def _print_metrics(as_json: bool) -> None:
    from tests.house_metrics import members, metrics
    from tests.house_roads import road_metrics, roads

    values = metrics() | road_metrics(roads())
    if as_json:
        print(json.dumps(values))
        return
    for name, value in values.items():
        if isinstance(value, int | float):
            print(f"{name:32} {value:>10,}")
    for name, found in (members() | values["roads"]).items():
        print(f"\n{name}:", *found, sep="\n    ")


if __name__ == "__main__":
    main()
