"""Render every committed report again, by the command that it records."""

import json
import shlex
import sys
from pathlib import Path

from quarl_tf.cli import main


def render(reports: Path) -> int:
    """Render all reports of a folder; return 1 if one could not be, 130 after Ctrl-C."""
    failed = 0
    for path in sorted(reports.glob("*/results.json")):
        program, *words = shlex.split(json.loads(path.read_text())["command"])
        # A report that was made in Python records no command line.
        code = main(words) if program == "quarl" else 1
        if code == 130:
            return code
        failed = failed or min(code, 1)
    return failed


if __name__ == "__main__":
    sys.exit(render(Path("reports")))
