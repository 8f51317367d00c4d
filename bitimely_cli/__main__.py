"""Entry point of `python -m bitimely_cli`, the same as the command `bitimely`."""

import sys

from bitimely_cli.main import main

sys.exit(main())
