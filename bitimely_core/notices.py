"""Which notices a workspace has shown: each stands on the screen once, and on every page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from bitimely_core.errors import UserError
from bitimely_core.store import storage
from bitimely_core.system_errors import raise_system_error

SHOWN = ".notices.json"
# how a notice begins that speaks of data or of the files of a run: it is shown each time
NAMED = re.compile(r"Of run |(?!none: )[a-z0-9][\w./-]*: ")


def select_unseen(notices: Iterable[str], workspace: Path) -> list[str]:
    """The notices that no verb has shown in this workspace, and those on its data and files. They
    count as shown from now on; where that cannot be stored they are shown again.
    """
    path, lines = workspace / SHOWN, list(dict.fromkeys(notices))
    try:
        earlier = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise_system_error(error)
        earlier = []
    marks = {line: storage.fingerprint(line) for line in lines if not NAMED.match(line)}
    fresh = [line for line in lines if line not in marks or marks[line] not in earlier]
    new = [marks[line] for line in fresh if line in marks]
    if new and workspace.is_dir():
        with suppress(OSError, UserError):  # a workspace that cannot be written
            storage.write_json(path, [*earlier, *new])
    return fresh
