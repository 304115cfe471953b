"""Recipes run as written: the files, commands and code of each page, in the page's order.

A block of output on a page must appear in what the command before it prints, with any numbers. A
command that kills a rank runs during the command before it, on a rank of this process's cluster.
"""

import io
import json
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from examples.vlm import tiny
from raymm.cli.main import main
from raymm.monitor.metrics import read_metrics
from tests.docs.pages import Block, blocks
from tests.support.processes import ranks_of, wait_until

LANGUAGES = ("sh", "yaml", "python", "json", "text")
KILL = "kill -9 $(pgrep -n -f ray::RankActor)\n"
KILL_AFTER_STEPS = 5
NUMBER = re.compile(r"\d[\d.,]*(?:e[+-]?\d+)?")
# For runs that are planned: the tests' cluster has more logical CPUs than most machines have cores.
ONE_RANK = ["--set", "planning.ranks=1"]
RECIPES: dict[str, list[Block]] = {}
for block in blocks(*LANGUAGES):
    if Path(block.page).name.startswith("recipe-") and not block.skipped:
        RECIPES.setdefault(block.page, []).append(block)


def pattern(line: str) -> str:
    """Return a pattern for a printed line: with any numbers, and anything for an ellipsis."""
    parts = (re.escape(part).replace("…", ".*") for part in NUMBER.split(" ".join(line.split())))
    return r"\d[\d.,e+-]*".join(parts).replace(r"\ ", r"\s+")


def missing_lines(shown: str, printed: str) -> list[str]:
    """Return the lines of a block that the output does not contain in this order."""
    remaining, missing = printed, []
    for line in filter(str.strip, shown.splitlines()):
        if found := re.search(pattern(line), remaining):
            remaining = remaining[found.end() :]
        else:
            missing.append(line)
    return missing


def values(text: str) -> Iterator[Any]:
    """Yield the JSON values of a text, each of one or several lines."""
    decoder, text = json.JSONDecoder(), text.strip()
    while text:
        value, end = decoder.raw_decode(text)
        yield value
        text = text[end:].lstrip()


def kill_a_rank(run_folder: Path) -> None:
    """Kill the newest rank of this process once the run has taken some steps."""
    file = run_folder / "metrics.jsonl"
    wait_until(
        lambda: file.is_file() and len(read_metrics(file)) >= KILL_AFTER_STEPS, 240, "steps"
    )
    os.kill(ranks_of(os.getpid())[-1], signal.SIGKILL)


def run_command(command: str) -> None:
    """Run a command of raymm or the tiny model's in this process."""
    words = shlex.split(command, comments=True)
    if words[0] == "raymm":
        planned = words[1] == "train" and "--model" in words
        assert main([*words[1:], *(ONE_RANK if planned else [])]) == 0, command
        return
    assert words[:3] == ["python", "-m", "examples.vlm.tiny"], command
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words[2:])
        tiny.main()


def run_block(block: Block, names: dict) -> None:
    """Run the commands or the code of a block."""
    if block.language == "python":
        exec(compile(block.text, str(block), "exec"), names)
        return
    for command in re.sub(r"\\\n\s*", "", block.text).splitlines():
        run_command(command)


def test_there_are_recipes():
    names = [Path(page).stem.removeprefix("recipe-") for page in sorted(RECIPES)]
    assert names == ["full", "lora", "plan", "preference", "recover", "serve"]


@pytest.mark.usefixtures("blank_pictures")
@pytest.mark.cells(1)  # the other pages run in make test-sweep
@pytest.mark.parametrize("page", sorted(RECIPES))
@pytest.mark.timeout(900)
def test_a_recipe_runs_and_prints_what_it_shows(page, ray_cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    names, printed = {"__name__": "recipe"}, ""
    steps = RECIPES[page]
    for block, following in zip(steps, [*steps[1:], None], strict=True):
        if block.language == "json":  # the first rows of the file that its title names
            rows, file = list(values(block.text)), list(values(Path(block.title).read_text()))
            assert rows == file[: len(rows)] and len(rows) == 3, block
        elif block.title:
            Path(block.title).write_text(block.text)
        elif block.language == "text":
            assert missing_lines(block.text, printed) == [], printed
        elif block.text != KILL:
            killer = None
            if following and following.text == KILL:
                folder = Path(re.search(r"--output (\S+)", block.text)[1])
                killer = threading.Thread(target=kill_a_rank, args=(folder,))
                killer.start()
            with redirect_stdout(io.StringIO()) as output, redirect_stderr(output):
                run_block(block, names)
            if killer:
                killer.join()
            printed = output.getvalue()
            print(f"--- {block}\n{printed}")


def test_lines_that_are_not_printed_are_noticed():
    printed = "step 1/3 loss 5.84\nsaved in runs/x\n"
    assert missing_lines("step   10/30  loss 4.1\n…\nsaved in …", printed) == []
    assert missing_lines("saved in runs/x\nstep 1/3", printed) == ["step 1/3"]
