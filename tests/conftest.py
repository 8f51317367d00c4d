"""One thread a worker: workers that each take all cores slow each other down tenfold."""

import os
import time
from collections.abc import Callable

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture
def seconds() -> Callable[[Callable[[], object]], float]:
    """CPU time of a call, the least of three: for ratios inside of one test."""

    def measured(call: Callable[[], object]) -> float:
        taken = []
        for _ in range(3):
            before = time.process_time()
            call()
            taken.append(time.process_time() - before)
        return min(taken)

    return measured
