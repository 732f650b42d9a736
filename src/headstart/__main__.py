"""`python -m headstart` is `headstart`."""

import sys

from headstart.cli import main

if __name__ == "__main__":
    sys.exit(main())
