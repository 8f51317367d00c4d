"""A recipe as an array of jobs of Slurm: tasks that share the stages by their locks, and that are
requeued when they are stopped.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from bitimely_core.errors import Reason, safe_text, usage_error
from bitimely_core.store import storage

# options of sbatch that the script needs as they are
OWN = {"array", "requeue", "no-requeue", "open-mode", "signal"}
FIRST_LINES = "#!/usr/bin/env bash\n# Written by `bitimely run --slurm`"
SCRIPT = """{first}: the {tasks} tasks of the array share the stages of one recipe. Submit it with sbatch.
#SBATCH --job-name={name}
#SBATCH --array=1-{tasks}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
{options}
set -u
cd -- {folder} || exit 6
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-${{SLURM_CPUS_PER_TASK:-1}}}}"

child='' stopped='' requeue='' caught=''
stop() {{
  stopped=1 caught=1
  [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}}
trap 'requeue=1; stop' USR1 # two minutes before the time limit, and at a preemption under send_user_signal
trap stop TERM INT          # scancel, which ends the task, or a preemption, after which Slurm requeues it

{command} &
child=$!
[ -z "$stopped" ] || stop
code=1 caught=1
while [ -n "$caught" ]; do # a signal ends the wait, not the child
  caught=''
  wait "$child"
  found=$?
  [ "$found" -eq 127 ] || code=$found # 127: the wait before was the last
done
if [ -n "$requeue" ] && [ "$code" -ne 0 ]; then
  scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
fi
exit "$code"
"""


def format_script(recipe: str, arguments: Sequence[str], tasks: int, options: Sequence[str]) -> str:
    """The script of `bitimely run ARGUMENTS` in this folder as an array of `tasks`; `options` are
    further ones of sbatch, `name=value` or `name`.

    Raises UserError (config, exit 2) for what is no option of sbatch, and for one that the script
    sets itself.
    """
    lines = []
    for option in options:
        name, sign, value = option.removeprefix("--").partition("=")
        is_option = re.fullmatch(r"[a-z][a-z0-9-]*", name) and (value or not sign)
        if not (is_option and value.isprintable()):  # a second line would be a command
            raise usage_error(
                safe_text(option),
                "expected NAME=VALUE of an option of sbatch",
                "For example --sbatch time=4:00:00",
                field="--sbatch",
            )
        if name in OWN:
            raise usage_error(
                name,
                "is set by the script",
                "Leave it out; --jobs N is the size of the array",
                field="--sbatch",
            )
        lines.append(f"#SBATCH --{name}{sign}{shlex.quote(value) if value else ''}")
    return SCRIPT.format(
        first=FIRST_LINES,
        name=re.sub(r"[^\w.-]", "_", f"bitimely-{Path(recipe).stem}", flags=re.ASCII),
        tasks=tasks,
        options="\n".join(lines),
        folder=shlex.quote(str(Path.cwd())),
        command=shlex.join([sys.executable, "-m", "bitimely", "run", *arguments]),
    )


def check_script(out: Path) -> None:
    """Whether a script can be written. Raises UserError (exit 2) where its folder is missing, and
    for a file that is no script of `run --slurm`.
    """
    storage.refuse_link(out)
    if not out.parent.is_dir():
        raise usage_error(
            "its folder is missing",
            "expected one that is there",
            "Make it",
            code=Reason.NOT_FOUND,
            file=str(out),
        )
    if out.is_dir() or (out.exists() and not out.read_bytes().startswith(FIRST_LINES.encode())):
        raise usage_error(
            "is there already",
            "expected no file, or a script of run --slurm",
            "Give another name",
            file=str(out),
        )
