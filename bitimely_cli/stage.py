"""`python -m bitimely_cli.stage VERB WORKSPACE JSON`: one training of a recipe in one of several
processes under torchrun.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from bitimely_core.errors import UserError
from bitimely_core.pipeline.stage_actions import run_training
from bitimely_core.system_errors import find_system_error
from bitimely_core.train.distributed import claim_report, find_lost_peer


def main(verb: str, workspace: str, call: str) -> int:
    """Run the training; 0, or the exit code of the error, which the first process that has it
    prints on stderr.
    """
    try:
        run_training(verb, json.loads(call), workspace=Path(workspace))
    except Exception as error:
        fault = find_system_error(error) or find_lost_peer(error) or error
        if not isinstance(fault, UserError):
            raise
        if claim_report():
            sys.stderr.write(fault.finding.line() + "\n")
        return int(fault.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
