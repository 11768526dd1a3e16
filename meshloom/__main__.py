"""``python -m meshloom`` is the ``meshloom`` command."""

import sys

from meshloom.cli import main

if __name__ == "__main__":
    sys.exit(main())
