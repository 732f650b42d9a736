"""The `headstart` command, also as `python -m headstart`: imports the command line, and sets the exit code of Ctrl-C.

Imports next to nothing itself: Ctrl-C ends without a traceback also while the command line is imported.
"""

import os
import sys

from headstart.config.interrupt import INTERRUPT_VARIABLE, INTERRUPTED


def main() -> int:
    """Runs the command of `sys.argv` and returns its exit code; INTERRUPT_VARIABLE replaces that of Ctrl-C."""
    try:
        from headstart.cli.main import main as run

        code = run()
    except KeyboardInterrupt:
        code = INTERRUPTED
    replaced = os.environ.get(INTERRUPT_VARIABLE, "")
    return int(replaced) if code == INTERRUPTED and replaced.isdecimal() else code


if __name__ == "__main__":
    sys.exit(main())
