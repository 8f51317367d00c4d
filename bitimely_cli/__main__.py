"""`python -m bitimely_cli`."""

import sys

from bitimely_cli.main import main

sys.exit(main())
