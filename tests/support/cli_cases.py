"""Runs several command lines in one process without Ray, and records their outcomes.

python cli_cases.py CASES.json RESULTS.json
"""

import json
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import ray

from raymm.cli.main import main

attempts: list[dict] = []


def refuse_to_start(*arguments, **options):
    """Replace ``ray.init``: no case may reach it."""
    attempts.append(options)
    raise RuntimeError("Ray would have been started")


def outcome(arguments: list[str]) -> dict:
    """Return exit code, all output, and True if Ray was started."""
    attempts.clear()
    output = StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        try:
            code = main(arguments)
        except BaseException:
            code = None
            traceback.print_exc()
    return {"code": code, "text": output.getvalue(), "ray_started": bool(attempts)}


if __name__ == "__main__":
    ray.init = refuse_to_start
    cases = json.loads(Path(sys.argv[1]).read_text())
    results = {name: outcome(arguments) for name, arguments in cases.items()}
    Path(sys.argv[2]).write_text(json.dumps(results))
