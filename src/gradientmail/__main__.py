"""``python -m gradientmail``: the same as the command ``gradientmail``."""

import sys

from gradientmail.commands import main

if __name__ == "__main__":
    sys.exit(main())
