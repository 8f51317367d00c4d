"""One thread a worker: workers that each take all cores slow each other down tenfold."""

import os
import random
import secrets
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# fixtures; numpy is imported after the number of threads is set
from short_maps import short_maps  # noqa: F401
from toys import raw, toys  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def same_key() -> Iterator[None]:
    """Pseudonyms, and with them the order of people and their splits, are the same in every run of
    the tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        seeded = SimpleNamespace(
            token_bytes=lambda size: random.Random(17).randbytes(size), token_hex=secrets.token_hex
        )
        # names of temporary files, by token_hex, stay random
        patch.setattr("bitimely_core.store.storage.secrets", seeded)
        # slow, and no test can see what it does
        patch.setattr("bitimely_core.store.storage.os_fsync", lambda fd: None)
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads only wait for each other on tensors as small as those of tests."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
