"""Where the real samples and the generator of malformed inputs are; what needs them is skipped
where they are not.
"""

import os
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2] / "shared"
SAMPLES = Path(os.environ.get("BITIMELY_TEST_DATA", SHARED / "data"))
BAD_INPUTS = Path(os.environ.get("BITIMELY_BAD_INPUTS", SHARED / "tools" / "bad_inputs"))


def require_sample(path: Path) -> Path:
    """The path itself, if it is there."""
    if not path.exists():
        pytest.skip(f"{path} is not there: set BITIMELY_TEST_DATA or BITIMELY_BAD_INPUTS")
    return path


def needs_sample(path: Path) -> pytest.MarkDecorator:
    """Skips the test where the path is not there."""
    return pytest.mark.skipif(
        not path.exists(),
        reason=f"{path} is not there: set BITIMELY_TEST_DATA or BITIMELY_BAD_INPUTS",
    )
