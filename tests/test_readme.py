"""The README's Python example runs as it stands and learns something."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_python_example(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, script], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
