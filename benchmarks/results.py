"""Page of all measurements, written from the JSON files in ``benchmarks/log``.

``python -m benchmarks.results`` writes ``benchmarks/RESULTS.md`` and the table of figures in
``README.md``. A file of the log is what a benchmark printed with ``--json``, or has its figures as
they were transcribed from an older page: runs, remarks and a table.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from benchmarks.shared.common import REPOSITORY

LOG = REPOSITORY / "benchmarks" / "log"
RESULTS, README = REPOSITORY / "benchmarks" / "RESULTS.md", REPOSITORY / "README.md"
INTRODUCTION = """# Results

Current figures of all benchmarks, each with its command, date and machine.
`python -m benchmarks.results` writes this page from the JSON files in `benchmarks/log`; those with
a field `transcribed` have the figures of an earlier page.
[The log of November 2026](log/2026-11.md) has the complete tables, earlier figures and what changed
them. All measurements ran on 2 CPU cores of shared machines without a GPU. Absolute times vary with
other work on the machine, so compare only ratios within one run. "Load" is the load average during
the run.
**Nothing on this page was measured on a GPU.**
"""


class Section(NamedTuple):
    """Section of the page.

    Attributes:
        title: heading; without one, the section is that of its part.
        claim: what the figures show.
        files: names of files of the log, in the order of the page.
        pictures: alternative text and path of each picture.
    """

    title: str
    claim: str
    files: tuple[str, ...]
    pictures: tuple[tuple[str, str], ...] = ()


# Fields of a benchmark's own JSON that the page shows: the field with the rows, and for each column
# its label and field; the empty field is the name of the row.
FIELDS = {
    name: ("counts", {
        "classes": "", "exact": "exact", "refused": "refused", "unclear": "unclear",
        "wrong": "wrong", "not applicable": "not_applicable", "not tried": "not_tried",
    })
    for name in ("families", "vlm_matrix")
} | {
    "mimo_layouts": ("steps", {
        "seconds of a step": "", "standard, 16 GPUs": "standard",
        "MIMO non-colocated, 17": "non-colocated", "MIMO colocated, 16": "colocated",
        "raymm, 16": "raymm on 16", "raymm, 17": "raymm on 17", "raymm's plan": "plan of 17",
        "GiB of a GPU": "memory_gib",
    }),
}  # fmt: skip

PARTS = {
    "Exactness: does training compute the same as one process?": (
        Section(
            "Classes, layouts and options",
            "raymm trains every class of transformers, layout, feature and row form exactly as one "
            "process does, or refuses it by name.",
            ("exactness", "families", "vlm_matrix"),
        ),
        Section(
            "A model of pretrained weights",
            "A vision-language model of pretrained weights trains, is exported, and computes the "
            "same step on ranks as in one process.",
            ("real_model",),
        ),
    ),
    "Speed: what does a step cost?": (
        Section(
            "Pipeline overhead",
            "A pipeline step of raymm costs at most that of torch.distributed.pipelining.",
            ("pipeline_overhead", "instruction_calls"),
        ),
        Section(
            "End-to-end training",
            "raymm on 2 ranks trains as fast as one process with both cores.",
            ("train_throughput",),
        ),
        Section(
            "Attention on a CPU",
            "Attention on a CPU takes less time and memory than SDPA with a dense bool mask.",
            ("attention_cpu",),
        ),
        Section(
            "Token distribution",
            "Token distribution takes milliseconds and balances attention almost perfectly.",
            ("token_distribution",),
            (("Work and tokens per rank", "token_distribution.png"),),
        ),
        Section(
            "Time of the slowest process",
            "The slowest context-parallel process takes hardly longer than its even share.",
            ("token_time",),
        ),
        Section(
            "Context parallelism",
            "Balanced token distribution gives context-parallel ranks equal work.",
            ("context_parallel",),
        ),
        Section(
            "Cross attention over ranks",
            "Moving queries (LV-XAttn) beats moving keys and values if there are few queries.",
            ("cross_attention",),
        ),
        Section(
            "Tensor parallelism",
            "Tensor parallelism with local tensors is faster than transformers' plan with DTensor.",
            ("tensor_parallel",),
        ),
        Section(
            "Text generation",
            "Two pipeline stages generate text for eight prompts faster than one process with one "
            "prompt at a time.",
            ("generate",),
        ),
        Section(
            "From the command to the first step",
            "A run reaches its first step close to the minimum set by imports and Ray.",
            ("startup",),
        ),
    ),
    "Planning: are plans good, and do runs follow them?": (
        Section(
            "Schedules",
            "raymm's schedules are faster than DAG 1F1B, and plans per batch are faster than the "
            "schedules of other projects, within the same memory.",
            ("schedules", "field_schedules"),
        ),
        Section(
            "Layouts of Megatron MIMO",
            "raymm's plans are at least as fast as the layouts of Megatron MIMO for its 27B model, "
            "in simulation. NVIDIA measured 24 to 35% shorter steps with the non-colocated layout; "
            "the simulation does not reproduce that (key `printed`: -0.5 to 1.6%).",
            ("mimo_layouts",),
        ),
        Section(
            "Planner",
            "The planner is fast, and its joint search beats simpler partitioning.",
            ("planner",),
        ),
        Section(
            "Plans for many devices",
            "The planner plans for up to 10,240 devices within CPU minutes.",
            ("planner_scale",),
        ),
        Section(
            "Communicators",
            "Communicators, setup and driver time per process stay small up to 1,024 processes.",
            ("communicators",),
        ),
        Section(
            "Counted and measured costs",
            "The cost model's counts equal torch's measurements for every kind of module.",
            ("cost_truth",),
        ),
        Section(
            "Predicted and measured steps",
            "The simulator predicts the steps of the runtime.",
            ("predicted_vs_measured",),
            (("A predicted step above the measured one", "predicted_vs_measured.png"),),
        ),
        Section(
            "Mapping modules to stages and shared GPUs",
            "Mappings to shared GPUs are near-optimal and faster than those of other systems.",
            ("mapping_solver",),
        ),
        Section(
            "Multiplexed execution",
            "Multiplexed plans run as fast as predicted, and faster than those of other systems.",
            ("multiplexed",),
        ),
        Section(
            "Plans between the styles",
            "The best of pipelined, multiplexed and mixed plans is found, and runs as predicted.",
            ("styles",),
        ),
        Section(
            "Figures of the papers",
            "Analytic costs and the simulator are compared with [tables of five papers]"
            "(../docs/papers.md).",
            ("papers",),
        ),
    ),
    "Memory: is it predicted and saved?": (
        Section(
            "Planned and measured memory",
            "Planned memory equals the peak bytes of real ranks.",
            ("memory_model",),
        ),
        Section(
            "Recomputation",
            "Selective recomputation fits in little memory at the least cost in time.",
            ("recomputation",),
        ),
        Section(
            "Bytes of optimizers",
            "Plans count the bytes of weights, gradients and optimizer state.",
            ("optimizer_state",),
        ),
    ),
    "Recovery: what do checkpoints and failures cost?": (
        Section(
            "Checkpoints",
            "Checksums add little time to a save (the aim is under 5%), and an asynchronous save "
            "stops training for a fraction of a synchronous one.",
            ("checkpoint_checksum", "checkpoint_stall"),
        ),
        Section(
            "Recovery in place",
            "In-place recovery takes seconds, and its snapshots cost steps little time.",
            ("fault_tolerance",),
        ),
        Section(
            "Random faults",
            "Runs with random faults end bitwise equal to an undisturbed run.",
            ("soak",),
            (("Losses, faults and throughput of the run", "soak.png"),),
        ),
    ),
    "Data: are steps balanced and fed?": (
        Section(
            "Balanced mini-batches",
            "Balanced mini-batches beat random, length-grouped and OmniBal's ISF batches.",
            ("minibatch", "minibatch_drawn"),
        ),
        Section(
            "Rebalancing",
            "Rebalancing recovers the step time that is lost when costs drift.",
            ("rebalancing",),
        ),
        Section(
            "Data workers and cached features",
            "Data workers decode at the rate of torch's DataLoader, their memory does not grow "
            "over a stream, and an epoch with cached features is as fast as training without a "
            "tower.",
            ("data",),
        ),
    ),
    "GPUs, installation and tests": (
        Section(
            "On a GPU",
            "**No GPU has been available**: nothing of raymm is timed on one, and block sizes of "
            "the kernels follow from what the compiler reports. `make gpu PYTHON=python3` and "
            "`make gpu-more PYTHON=python3` (`python -m benchmarks.gpu`) run every check and "
            "timing that needs one GPU, at most nine minutes each.",
            ("gpu",),
        ),
        Section(
            "Installation and tests",
            "Training installs in CPU minutes, and tests take minutes.",
            ("installation", "structure"),
        ),
    ),
}

# Rows of the table in README.md: claim, figure as a format of the log's files, and command.
FIGURES = (
    (
        "gradients of a cut model equal those of the uncut model to 1e-5",
        "{families[counts][language model][exact]} language models and "
        "{families[counts][encoder][exact]} encoders of transformers, "
        "{families[wrong]} wrong; {families[refused]} classes are rejected by name, "
        "{families[not_applicable]} not applicable",
        "families",
    ),
    (
        "the same for vision- and audio-language models, end to end",
        "{vlm_matrix[counts][vision- or audio-language model][exact]} classes of transformers; "
        "{vlm_matrix[counts][vision- or audio-language model][refused]} rejected by name, "
        "{vlm_matrix[counts][vision- or audio-language model][not_applicable]} not applicable, "
        "{vlm_matrix[counts][vision- or audio-language model][wrong]} wrong",
        "vlm_matrix",
    ),
    (
        "step time of the best schedule, relative to 1F1B over the graph of modules, with the same "
        "memory",
        "{schedules[table][rows][2][7]} to {schedules[table][rows][0][7]}, median of 27 models",
        "schedules",
    ),
    (
        "tokens per second, relative to one process that uses both cores and keeps frozen weights "
        "in bf16",
        "{train_throughput[table][rows][2][2]}",
        "train_throughput",
    ),
    (
        "time from a killed rank's error until all ranks have recovered",
        "{fault_tolerance[table][rows][5][1]}; {fault_tolerance[table][rows][6][1]} if a new "
        "process imports everything",
        "fault_tolerance",
    ),
)
_README_TABLE = re.compile(r"\| claim \| figure \| command \|\n(?:\|.*\n)+")


def read_log() -> dict[str, dict[str, Any]]:
    """Return the files of the log by name."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(LOG.glob("*.json"))}


def results_page(log: dict[str, dict[str, Any]]) -> str:
    """Return the page of results, in Markdown.

    Raises:
        SystemExit: a file is on no section of the page, or has fields that FIELDS lacks.
    """
    shown = {name for part in PARTS.values() for section in part for name in section.files}
    if different := shown ^ set(log):
        names = ", ".join(sorted(different))
        raise SystemExit(f"benchmarks/log and PARTS of benchmarks/results.py differ: {names}")
    contents = [
        (part, ", ".join(f"[{s.title}](#{_anchor(s.title)})" for s in sections))
        for part, sections in PARTS.items()
    ]
    text = [INTRODUCTION, _table(("question", "sections"), contents)]
    for part, sections in PARTS.items():
        text.append(f"## {part.partition(':')[0]}\n")
        for title, claim, files, pictures in sections:
            text.append(f"### {title}\n{claim}\n")
            text += [_measurement(name, log[name]) for name in files]
            text += [f"![{alternative}](../docs/images/{file})\n" for alternative, file in pictures]
    return "\n".join(text)


def readme(text: str, log: dict[str, dict[str, Any]]) -> str:
    """Return the text of README.md with the figures of the log."""
    rows = [
        (claim, figure.format(**log).replace("*", ""), f"`python -m benchmarks.{name} --json`")
        for claim, figure, name in FIGURES
    ]
    table = _table(("claim", "figure", "command"), rows)
    return _README_TABLE.sub(lambda _: table, text)


def _measurement(name: str, recorded: dict[str, Any]) -> str:
    """Return commands, dates, machines, remarks and figures of a file."""
    runs = recorded.get("runs", [recorded])
    paragraphs = (" ".join(f"{describe_run(run)}." for run in runs), recorded.get("remarks"))
    text = "\n\n".join(filter(None, paragraphs)) + "\n"
    if "transcribed" in recorded:
        table = recorded.get("table")
        return f"{text}\n{_table(table['columns'], table['rows'])}" if table else text
    if name not in FIELDS:
        raise SystemExit(f"benchmarks/log/{name}.json: add its fields to FIELDS of {__name__}")
    field, columns = FIELDS[name]
    rows = [
        [row[key] if key else label for key in columns.values()]
        for label, row in recorded[field].items()
    ]
    return f"{text}\n{_table(columns, rows)}"


def describe_run(run: dict[str, Any]) -> str:
    """Return command, date, commit and machine of a run, in Markdown."""
    machine = run["machine"]
    if isinstance(machine, str):
        return f"`{run['command']}`, {run['date']}, {machine}"
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    commit = f", commit {run['commit']}" if run["commit"] else ""
    return (
        f"`{run['command']}`, {machine['date'][:10]}{commit}, {machine['cpu']}, load "
        f"{machine['load_average_1min']}; {versions}"
    )


def _table(columns: Any, rows: Any) -> str:
    cells = [list(columns), ["---"] * len(list(columns)), *rows]
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in cells)


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def main() -> None:
    log = read_log()
    for file, text in ((RESULTS, results_page(log)), (README, readme(README.read_text(), log))):
        file.write_text(text)


if __name__ == "__main__":
    main()
