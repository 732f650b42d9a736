"""The `headstart` command, also as `python -m headstart`: imports the command line and sets the exit code of Ctrl-C.

This module imports almost nothing, so Ctrl-C prints no traceback even while the command line is being imported.
"""

import os
import sys

from headstart.config.interrupt import INTERRUPT_VARIABLE, INTERRUPTED


def main() -> int:
    """Run the command of `sys.argv` and return its exit code; INTERRUPT_VARIABLE overrides the exit code of Ctrl-C."""
    try:
        from headstart.cli.main import main as run

        code = run()
    except KeyboardInterrupt:
        code = INTERRUPTED
    replaced = os.environ.get(INTERRUPT_VARIABLE, "")
    return int(replaced) if code == INTERRUPTED and replaced.isdecimal() else code


if __name__ == "__main__":
    sys.exit(main())
