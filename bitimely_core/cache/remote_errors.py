"""Requests to other machines: tried again where that may help, and their failures in words."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from multiprocessing import TimeoutError as StillRunning
from typing import Any, TypeVar

from bitimely_core.cache.remote_files import RemoteSource
from bitimely_core.cache.workers import StopFlag
from bitimely_core.errors import Exit, Reason, UserError, input_error, usage_error
from bitimely_core.system_errors import RETRY_HINT, raise_system_error

TRIES = 4  # in a row without a byte
PAUSE = 0.5  # seconds before the second try, then twice as long each time
TRANSIENT_STATUS = {408, 425, 429}
# that another try does not change
REFUSALS = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EISDIR}
# names of errors and of their bases, and status of a web server, by what they mean
NO_ACCESS = {
    "PermissionError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "CredentialRetrievalError",
    "TokenRetrievalError",
    401,
    403,
}
ABSENT = {"FileNotFoundError", "NotADirectoryError", 404, 410}
TRANSIENT = {"OSError", "ClientError", "BotoCoreError", "FSTimeoutError"}
WEB_CLIENTS = ("aiohttp", "asyncio")  # modules of their errors
ABSENT_FILE = ("it is no longer there", "expected the file that was listed", RETRY_HINT)
ABSENT_FOLDER = (
    "there is no such folder",
    "expected the URL of a folder",
    "Check the path. Of a single file, give the folder that it lies in",
)
T = TypeVar("T")


class EndedEarlyError(ConnectionError):
    """A file had fewer bytes than stated, without an error of the connection."""


def watch(results: Any, stop: StopFlag) -> Iterator[Any]:
    """Items of a thread pool; a signal ends the wait within a moment. Raises UserError."""
    while True:
        stop.check()
        try:
            yield results.next(timeout=0.2)
        except StillRunning:
            continue
        except StopIteration:
            return


def wait_between_tries(count: int, stop: StopFlag) -> None:
    """Pause after `count` tries, twice as long after each. Raises UserError after a signal."""
    until = time.monotonic() + PAUSE * 2 ** max(0, count - 1)
    while (rest := until - time.monotonic()) > 0:
        stop.check()
        time.sleep(min(rest, 0.2))


def retry(call: Callable[[], T], remote: RemoteSource, name: str, stop: StopFlag) -> T:
    """The result of `call`, tried a few times where the server or the network fails.

    `name`: the file or folder that it asks for. Raises UserError.
    """
    for count in range(1, TRIES + 1):
        stop.check()
        try:
            return call()
        except UserError:
            raise
        except Exception as error:
            raise_system_error(error, stored=False)
            is_file = name != "" and not name.endswith("/")
            fault = describe_failure(error, remote.locate(name), is_file=is_file)
            if count == TRIES or fault.exit_code != Exit.RESOURCES:
                raise fault from None
        wait_between_tries(count, stop)
    raise AssertionError


def describe_failure(error: BaseException, url: str, *, is_file: bool = False) -> UserError:
    """An error of a remote file system; exit 6 where another try may succeed.

    Its text is not shown: it may hold credentials. `is_file`: `url` is a file that was listed.
    """
    if isinstance(error, UserError):
        return error
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and type(cause).__module__.startswith(WEB_CLIENTS):
        assert cause is not None
        error = cause  # fsspec gives every failure of a web server that name
    status = getattr(error, "status", 0)
    signs = {kind.__name__ for kind in type(error).__mro__} | {status}
    if signs & NO_ACCESS:
        return input_error(
            Reason.IO_ERROR,
            "no permission",
            "expected to be allowed to list and read it",
            "Give credentials in the environment, as its own tools take them",
            file=url,
        )
    if signs & ABSENT:
        problem, requirement, hint = ABSENT_FILE if is_file else ABSENT_FOLDER
        return usage_error(problem, requirement, hint, code=Reason.NOT_FOUND, file=url)
    if _is_transient(error, signs, status):
        problem = "the server does not answer"
        if isinstance(error, EndedEarlyError):
            problem = "ends before the size that the server states"
        tried, hint = f"tried {TRIES} times", f"Check the network. {RETRY_HINT}"
        return UserError(Reason.IO_ERROR, problem, tried, hint, url, exit_code=Exit.RESOURCES)
    return input_error(
        Reason.IO_ERROR,
        f"the server refuses the request ({status or type(error).__name__})",
        "expected a folder that can be listed",
        "Check the URL",
        file=url,
    )


def _is_transient(error: BaseException, signs: set[str | int], status: int) -> bool:
    """Whether another try may succeed."""
    if "FileExpired" in signs:
        return True
    if 400 <= status < 500 and status not in TRANSIENT_STATUS:
        return False
    return bool(signs & TRANSIENT) and getattr(error, "errno", None) not in REFUSALS
