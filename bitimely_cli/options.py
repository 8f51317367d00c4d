"""Options that verbs share: each is defined once, and grouped into dataclasses that verbs take as
parameters.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from bitimely_cli.completion import complete
from bitimely_cli.screen import screen
from bitimely_core.config import Section, TrainConfig
from bitimely_core.errors import Exit, Reason, UserError, input_warning, safe_text, usage_error
from bitimely_core.storage import refuse_url


def _json(value: bool) -> bool:
    screen.json = screen.json or value
    return value


def _debug(value: bool) -> bool:
    screen.debug = screen.debug or value
    return value


def declare_setting(
    section: type[Section], key: str, metavar: str | None = None, more: str = ""
) -> Any:
    """An option with the name, the help, the choices and the bounds of a field of the settings;
    `more` is added to the help.
    """
    field = section.model_fields[key]
    # a flag has none
    choices = [] if bool in get_args(field.annotation) else _choices(field.annotation)
    listed = f"{', '.join(choices[:-1])} or {choices[-1]}. " if choices else ""
    least = next(
        (
            bound
            for item in field.metadata
            if (bound := getattr(item, "ge", getattr(item, "gt", None))) is not None
        ),
        None,
    )
    most = next(
        (bound for item in field.metadata if (bound := getattr(item, "le", None)) is not None), None
    )
    text = f"{listed}{field.description}{more}"
    return typer.Option(
        f"--{key.replace('_', '-')}",
        help=text,
        metavar=metavar,
        min=least,
        max=most,
        autocompletion=(lambda: choices) if choices else None,
    )


def _choices(annotation: Any) -> list[str]:
    """The values of the first Literal in an annotation."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation) if value is not None]
    return next((found for part in get_args(annotation) if (found := _choices(part))), [])


VIEWS = complete("datasets", "views")
Encoding = Annotated[
    str | None,
    typer.Option(
        "--encoding",
        metavar="NAME",
        help="Encoding of text tables without a byte order mark (default: UTF-8).",
    ),
]

Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help="Data set or view, for example sleep-edf/staging; may be repeated.",
        autocompletion=VIEWS,
    ),
]
OneData = Annotated[
    str | None,
    typer.Option(
        "--data", help="Data set or view, for example sleep-edf/staging.", autocompletion=VIEWS
    ),
]
Run = Annotated[
    str,
    typer.Argument(help="Name or folder of a run.", metavar="RUN", autocompletion=complete("runs")),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Any setting, for example model.tokenizer=patch; may be repeated.",
    ),
]
Device = Annotated[str | None, declare_setting(TrainConfig, "device")]
Devices = Annotated[int | None, declare_setting(TrainConfig, "devices")]
Seed = Annotated[int | None, declare_setting(TrainConfig, "seed")]
Out = Annotated[Path | None, typer.Option("--out", help="Where to write.")]


class OptionGroup:
    """Base of the groups: frozen dataclasses whose fields are options of the command line."""

    def collect(self) -> dict[str, Any]:
        """The options that were given, under the names of the library: `no_verify` as
        `verify=False`; without those whose callbacks have acted.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        found = {
            name: value
            for name, value in values.items()
            if is_set(value) and name not in CALLBACK_OPTIONS
        }
        return {**found, "verify": False} if found.pop("no_verify", False) else found


# their callbacks have acted; an unfinished run is continued anyway
CALLBACK_OPTIONS = ("json", "debug", "resume")


@dataclass(frozen=True, kw_only=True)
class CommonOptions(OptionGroup):
    """Options of every verb."""

    workspace: Annotated[
        Path,
        typer.Option(
            "--workspace",
            "-w",
            envvar="BITIMELY_WORKSPACE",
            help="Folder that holds cache, tokens, runs and reports.",
        ),
    ] = Path("workspace")
    json: Annotated[
        bool,
        typer.Option(
            "--json",
            callback=_json,
            is_eager=True,
            help="One JSON object on stdout; all else on stderr.",
        ),
    ] = False
    debug: Annotated[
        bool, typer.Option("--debug", callback=_debug, is_eager=True, help="Show tracebacks.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class WriteOptions(CommonOptions):
    """Options of every verb that writes."""

    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show what would be done, with sizes and estimates; write nothing."
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class ReadOptions(WriteOptions):
    """Options of verbs that read runs or data and write reports."""

    no_verify: Annotated[
        bool,
        typer.Option("--no-verify", help="Do not compare checksums; recorded in every report."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(ReadOptions):
    """Options of verbs that run a trained model."""

    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Windows that the model reads at a time.")
    ] = None
    device: Device = None


@dataclass(frozen=True, kw_only=True)
class BuildOptions(ReadOptions):
    """Options of verbs that build data sets or train again."""

    force_new: Annotated[
        bool, typer.Option("--force-new", help="Replace what exists under other settings.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class TrainOptions(OptionGroup):
    """Options of a training."""

    epochs: Annotated[int | None, declare_setting(TrainConfig, "epochs")] = None
    steps: Annotated[int | None, declare_setting(TrainConfig, "steps")] = None
    batch_size: Annotated[int | None, declare_setting(TrainConfig, "batch_size")] = None
    accumulate: Annotated[int | None, declare_setting(TrainConfig, "accumulate")] = None
    lr: Annotated[float | None, declare_setting(TrainConfig, "lr")] = None
    tune: Annotated[
        str | None,
        typer.Option(
            "--tune",
            metavar="N|LR,LR...",
            help="Try N rates around the preset's, or these; the best in validation.",
        ),
    ] = None
    precision: Annotated[str | None, declare_setting(TrainConfig, "precision")] = None
    device: Device = None
    devices: Devices = None
    compile: Annotated[bool, declare_setting(TrainConfig, "compile")] = False
    checkpoint: Annotated[str | None, declare_setting(TrainConfig, "checkpoint")] = None
    track: Annotated[bool, declare_setting(TrainConfig, "track")] = False
    seed: Seed = None

    def sections(self) -> dict[str, dict[str, Any]]:
        """The options by the sections of the settings."""
        values = self.collect()
        tune = values.pop("tune", None)
        return {"train": values, "tune": {"rates": tune}}


@dataclass(frozen=True, kw_only=True)
class StartOptions(BuildOptions):
    """Options of a run that is started or continued."""

    config: Annotated[Path | None, typer.Option(help="Recipe file (TOML).")] = None
    assignments: Set = None
    run: Annotated[
        str | None, typer.Option(help="Name of the new run (default: made from the settings).")
    ] = None
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue an unfinished run (also without this option when the settings are the same).",
        ),
    ] = False


def is_set(value: Any) -> bool:
    """Whether an option was given; 0 is."""
    return value is not None and value is not False and value != []


def parse_path(text: str | Path) -> Path:
    """A path on this machine. Raises UserError (exit 2) for a URL, and for text that can be no
    path.
    """
    check_text("path", text)
    path = Path(text)
    refuse_url(path)
    if (
        "\0" in str(text)
        or any(len(part.encode(errors="replace")) > 255 for part in path.parts)
        or len(str(text)) > 4000
    ):
        raise usage_error(
            "no path has this form",
            "names are up to 255 bytes long",
            "Give another path",
            code=Reason.NOT_FOUND,
            file=str(text),
        )
    return path


def parse_source(text: str | None) -> str | None:
    """The source of an ingest: a path as `parse_path` takes it, or a URL."""
    return text if text is None or "://" in text else str(parse_path(text))


def check_text(name: str, value: Any) -> None:
    """Refuse an empty text, bytes that are not UTF-8, NaN and infinities. Raises UserError (config,
    exit 2).
    """
    for text in value if isinstance(value, list | tuple) else [value]:
        if isinstance(text, float) and not math.isfinite(text):
            raise usage_error(f"found {text}", "expected a finite number", field=name)
        if isinstance(text, str | Path) and not str(text).strip():
            raise usage_error(
                "no value",
                "expected a text that is not empty",
                f"Leave {name} out, or give its value",
                field=name,
            )
        if isinstance(text, str | Path) and not str(text).isprintable():
            raise usage_error(
                f"found {safe_text(str(text))}",
                "expected text in UTF-8 without control characters",
                field=name,
            )


def describe_parameter(name: str, annotation: Any) -> str:
    """The flag of an option, or the metavar of an argument."""
    info = next(iter(get_args(annotation)[1:]), typer.Option())
    flags = [
        flag
        for flag in (info.default, *(info.param_decls or ()))
        if isinstance(flag, str) and flag.startswith("--")
    ]
    derived = (
        f"--{name.replace('_', '-')}"
        if isinstance(info, OptionInfo)
        else info.metavar or name.upper()
    )
    return next(iter(flags), derived)


def expand_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command, in the place of each parameter that is an `OptionGroup`, the options of that
    group.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {
        name: hint
        for name, hint in hints.items()
        if isinstance(hint, type) and issubclass(hint, OptionGroup)
    }
    shown: dict[str, tuple[Any, Any]] = {}
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name in groups:
            group = groups[parameter.name]
            types = get_type_hints(group, include_extras=True)
            shown |= {field.name: (types[field.name], field.default) for field in fields(group)}  # type: ignore[arg-type]
        else:
            shown[parameter.name] = hints[parameter.name], parameter.default

    labels = {name: describe_parameter(name, annotation) for name, (annotation, _) in shown.items()}
    files = {
        name
        for name, (annotation, _) in shown.items()
        if re.search(
            "FILE|DIR", getattr((*get_args(annotation), None, None)[1], "metavar", None) or ""
        )
    }
    for annotation, _ in shown.values():
        kind, *more = get_args(annotation) or (annotation,)
        if more and Path in (kind, *get_args(kind)):
            more[0].parser, more[0].metavar = parse_path, more[0].metavar or "<path>"

    @functools.wraps(command)
    def run_command(**given: Any) -> int:
        for name, value in given.items():
            check_text(labels[name], value)
            for text in (
                value if isinstance(value, list | tuple) else [value] * isinstance(value, str)
            ):
                if name in files:
                    parse_path(text)
        place = given.get("workspace", Path())
        if not place.is_dir() and any(above.is_file() for above in (place, *place.parents)):
            raise usage_error(
                "is a file",
                "expected a folder, there or to be made",
                "Give another one",
                code=Reason.NOT_FOUND,
                file=str(place),
            )
        values = {
            into: group(**{f.name: given.pop(f.name) for f in fields(group)})  # type: ignore[arg-type]
            for into, group in groups.items()
        }
        code = command(**given, **values)
        write = next((group for group in values.values() if isinstance(group, WriteOptions)), None)
        if write is not None and not write.dry_run and code in {Exit.OK, Exit.PARTIAL}:
            refresh_page(write.workspace)
        return code

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, keyword, default=d, annotation=a) for name, (a, d) in shown.items()
    ]
    run_command.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    run_command.__annotations__ = {
        **{name: annotation for name, (annotation, _) in shown.items()},
        "return": int,
    }
    return run_command


def refresh_page(workspace: Path) -> None:
    """The page of the workspace after a verb; that it cannot be written is a warning."""
    from bitimely_core.workflows.dashboard import refresh_dashboard

    try:
        refresh_dashboard(workspace)
    except Exception as error:  # the verb has done its work
        problem = error.problem if isinstance(error, UserError) else type(error).__name__
        code = error.code if isinstance(error, UserError) else Reason.IO_ERROR
        hint = f"Later: bitimely dashboard -w {workspace}"
        screen.print_finding(
            input_warning(
                code,
                f"not refreshed: {problem}",
                "expected the present state",
                hint,
                file="index.html",
            )
        )


def collect_settings(**sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections without what was not given: `{"train": {"lr": 1e-3}}` for
    `collect_settings(train={"lr": 1e-3, "seed": None}, model={})`.
    """
    given = {
        name: {key: value for key, value in section.items() if is_set(value)}
        for name, section in sections.items()
    }
    return {name: section for name, section in given.items() if section}


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """`k/n` as (k, n) with 1 <= k <= n. Raises UserError (config)."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if found and 1 <= int(found[1]) <= int(found[2]):
        return int(found[1]), int(found[2])
    raise usage_error(
        f"--shard {safe_text(text)}", "expected k/n with 1 <= k <= n", "For example --shard 1/4"
    )
