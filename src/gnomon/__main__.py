"""`python -m gnomon` is the `gnomon` command."""

import sys

from gnomon.cli import main

if __name__ == "__main__":
    sys.exit(main())
