"""`python -m bitimely`: the command line."""

import sys

from bitimely_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
