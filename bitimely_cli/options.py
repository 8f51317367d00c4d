"""Options that verbs share: each is defined once, and grouped into dataclasses that verbs take as
parameters.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo
from typer import Argument, Option
from typer.models import OptionInfo

from bitimely_cli.completion import complete
from bitimely_cli.screen import screen
from bitimely_core.config import Section, TrainConfig
from bitimely_core.errors import Exit, Reason, UserError, input_warning, safe_text, usage_error
from bitimely_core.store.storage import refuse_url


def _json(value: bool) -> bool:
    screen.json = screen.json or value
    return value


def _debug(value: bool) -> bool:
    screen.debug = screen.debug or value
    return value


def declare_setting(section: type[Section], key: str, note: str = "") -> Any:
    """An option with the name, the help, the choices and the bounds of a field of the settings;
    `note` is added to the help.
    """
    field = section.model_fields[key]
    # a flag has none
    choices = [] if bool in get_args(field.annotation) else _list_choices(field.annotation)
    names = f"{', '.join(choices[:-1])} or {choices[-1]}. " if len(choices) > 1 else ""
    return Option(
        f"--{key.replace('_', '-')}",
        help=f"{names}{field.description}{note}",
        metavar=_read_metavar(field),
        min=_find_bound(field.metadata, "ge", "gt"),
        max=_find_bound(field.metadata, "le"),
        autocompletion=(lambda: choices) if choices else _complete_listed(field),
    )


def _complete_listed(field: FieldInfo) -> Any:
    """The completion of a field whose help names a listing of its values; None: of others."""
    listing = (field.description or "").partition("see: bitimely list ")[2].partition(".")[0]
    return complete(listing) if listing else None


def _read_metavar(field: FieldInfo) -> str | None:
    """The metavar of a field that says more than its type."""
    extra = field.json_schema_extra
    return str(extra["metavar"]) if isinstance(extra, dict) and "metavar" in extra else None


def _find_type(section: type[Section], key: str) -> Any:
    """What the command line takes for a field: a flag, a number, or text."""
    annotation = section.model_fields[key].annotation
    kinds = {*(get_args(annotation) or [annotation])} - {NoneType}
    if bool in kinds:
        return bool
    return next((kind | None for kind in (int, float) if kinds == {kind}), str | None)


def _list_choices(annotation: Any) -> list[str]:
    """The values of the first Literal in an annotation."""
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation) if value is not None]
    return next(filter(None, map(_list_choices, get_args(annotation))), [])


def _find_bound(metadata: Sequence[Any], *names: str) -> float | None:
    """The first bound of one of the names, such as `ge`, in the metadata of a field."""
    bounds = (getattr(item, name, None) for item in metadata for name in names)
    return next((bound for bound in bounds if bound is not None), None)


VIEWS = complete("datasets", "views")
RUNS = complete("runs", "pretrained")
Encoding = Annotated[
    str | None,
    Option(
        "--encoding",
        metavar="NAME",
        help="Encoding of text tables without a byte order mark (default: UTF-8).",
    ),
]

Data = Annotated[
    list[str] | None,
    Option(
        "--data",
        help="Data set or view, for example sleep-edf/staging; may be repeated.",
        autocompletion=VIEWS,
    ),
]
OneData = Annotated[
    str | None,
    Option("--data", help="Data set or view, for example sleep-edf/staging.", autocompletion=VIEWS),
]
Run = Annotated[str, Argument(help="Name or folder of a run.", metavar="RUN", autocompletion=RUNS)]
Set = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Any setting, for example model.tokenizer=patch; may be repeated.",
    ),
]
Device = Annotated[str | None, declare_setting(TrainConfig, "device")]
Seed = Annotated[int | None, declare_setting(TrainConfig, "seed")]
Out = Annotated[Path | None, Option("--out", help="Where to write.")]


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Base of the groups, whose fields are options of the command line."""

    def collect(self) -> dict[str, Any]:
        """The options that were given, under the names of the library: `no_verify` as
        `verify=False`; without those whose callbacks have acted.
        """
        values = {
            name: value
            for name, value in vars(self).items()
            if is_set(value) and name not in CALLBACK_OPTIONS
        }
        return {**values, "verify": False} if values.pop("no_verify", False) else values


G = TypeVar("G", bound=OptionGroup)


def take_settings(section: type[Section], verb: str) -> Callable[[type[G]], type[G]]:
    """A decorator that gives a group the options that `section` has for `verb`, without those that
    the group declares itself.
    """

    def extend(group: type[G]) -> type[G]:
        declared = {field.name for field in fields(group)}
        options = []
        for key in section.OPTIONS[verb]:
            kind = _find_type(section, key)
            if key not in declared:
                hint: Any = Annotated[kind, declare_setting(section, key)]
                options.append((key, hint, False if kind is bool else None))
        extended = make_dataclass(
            group.__name__, options, bases=(group,), frozen=True, kw_only=True
        )
        return cast("type[G]", extended)

    return extend


# their callbacks have acted; an unfinished run is continued anyway
CALLBACK_OPTIONS = ("json", "debug", "resume")


@dataclass(frozen=True, kw_only=True)
class CommonOptions(OptionGroup):
    """Options of every verb."""

    workspace: Annotated[
        Path,
        Option(
            "--workspace",
            "-w",
            envvar="BITIMELY_WORKSPACE",
            help="Folder that holds cache, tokens, runs and reports.",
        ),
    ] = Path("workspace")
    json: Annotated[
        bool,
        Option(
            "--json",
            callback=_json,
            is_eager=True,
            help="One JSON object on stdout; all else on stderr.",
        ),
    ] = False
    debug: Annotated[
        bool, Option("--debug", callback=_debug, is_eager=True, help="Show tracebacks.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class WriteOptions(CommonOptions):
    """Options of every verb that writes."""

    dry_run: Annotated[
        bool,
        Option(
            "--dry-run", help="Show what would be done, with sizes and estimates; write nothing."
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class ReadOptions(WriteOptions):
    """Options of verbs that read runs or data and write reports."""

    no_verify: Annotated[
        bool, Option("--no-verify", help="Do not compare checksums; recorded in every report.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(ReadOptions):
    """Options of verbs that run a trained model."""

    batch_size: Annotated[
        int | None, Option(min=1, help="Windows that the model reads at a time.")
    ] = None
    device: Device = None


@dataclass(frozen=True, kw_only=True)
class BuildOptions(ReadOptions):
    """Options of verbs that build data sets or train again."""

    force_new: Annotated[
        bool, Option("--force-new", help="Replace what exists under other settings.")
    ] = False


@take_settings(TrainConfig, "train")
@dataclass(frozen=True, kw_only=True)
class TrainOptions(OptionGroup):
    """Options of a training."""

    tune: Annotated[
        str | None,
        Option(
            metavar="N|LR,LR...",
            help="Try N rates around the preset's, or these; the best in validation.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class StartOptions(BuildOptions):
    """Options of a run that is started or continued."""

    config: Annotated[Path | None, Option(help="Recipe file (TOML).")] = None
    assignments: Set = None
    run: Annotated[
        str | None, Option(help="Name of the new run (default: made from the settings).")
    ] = None
    resume: Annotated[
        bool,
        Option(
            "--resume",
            help="Continue an unfinished run "
            "(also without this option when the settings are the same).",
        ),
    ] = False


def name_workspace(workspace: Path) -> str:
    """The option with which a printed command finds this workspace; "" where it does without."""
    usual = os.environ.get("BITIMELY_WORKSPACE") or CommonOptions.workspace
    return "" if workspace == Path(usual) else f" -w {shlex.quote(str(workspace))}"


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
    longest = max((len(part.encode(errors="replace")) for part in path.parts), default=0)
    if "\0" in str(text) or longest > 255 or len(str(text)) > 4000:
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
    for item in _list_items(value):
        if isinstance(item, float) and not math.isfinite(item):
            raise usage_error(f"found {item}", "expected a finite number", field=name)
        if not isinstance(item, str | Path):
            continue
        text = str(item)
        if not text.strip():
            raise usage_error(
                "no value",
                "expected a text that is not empty",
                f"Leave {name} out, or give its value",
                field=name,
            )
        if not text.isprintable():
            raise usage_error(
                f"found {safe_text(text)}",
                "expected text in UTF-8 without control characters",
                field=name,
            )


def _list_items(value: Any) -> Sequence[Any]:
    """The values of an option that may be repeated, or the value of another one."""
    return value if isinstance(value, list | tuple) else [value]


def describe_parameter(parameter: inspect.Parameter) -> str:
    """The flag of an option, or the metavar of an argument."""
    info = _read_info(parameter)
    for flag in (info.default, *(info.param_decls or ())):
        if isinstance(flag, str) and flag.startswith("--"):
            return flag
    if isinstance(info, OptionInfo):
        return f"--{parameter.name.replace('_', '-')}"
    return info.metavar or parameter.name.upper()


def _read_info(parameter: inspect.Parameter) -> Any:
    """What a parameter is annotated with for typer."""
    return next(iter(get_args(parameter.annotation)[1:]), Option())


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
    parameters = _list_parameters(command, hints, groups)
    for parameter in parameters.values():
        _parse_paths(parameter)

    @functools.wraps(command)
    def run_command(**values: Any) -> int:
        for name, value in values.items():
            _check_value(parameters[name], value)
        if (workspace := values.get("workspace")) is not None:
            _check_workspace(workspace)
            screen.workspace_option = name_workspace(workspace)
        options = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        code = command(**values, **options)
        if code in {Exit.OK, Exit.PARTIAL}:
            _refresh_pages(options.values())
        return code

    signature = inspect.Signature(list(parameters.values()), return_annotation=int)
    run_command.__signature__ = signature  # type: ignore[attr-defined]
    annotations = {name: parameter.annotation for name, parameter in parameters.items()}
    run_command.__annotations__ = {**annotations, "return": int}
    return run_command


def _list_parameters(
    command: Callable[..., int], hints: Mapping[str, Any], groups: Mapping[str, type[OptionGroup]]
) -> dict[str, inspect.Parameter]:
    """The parameters of a command by name, those of its groups in their place."""
    options: dict[str, tuple[Any, Any]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            types = get_type_hints(groups[name], include_extras=True)
            for field in fields(groups[name]):
                options[field.name] = types[field.name], field.default
        else:
            options[name] = hints[name], parameter.default
    return {
        name: inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
        )
        for name, (hint, default) in options.items()
    }


def _check_value(parameter: inspect.Parameter, value: Any) -> None:
    """Refuse texts that cannot be meant, and names of files that cannot be. Raises UserError."""
    check_text(describe_parameter(parameter), value)
    if re.search("FILE|DIR", _read_info(parameter).metavar or ""):
        for item in _list_items(value):
            if isinstance(item, str):
                parse_path(item)


def _parse_paths(parameter: inspect.Parameter) -> None:
    """Let `parse_path` read a parameter that takes paths."""
    kind, *_ = get_args(parameter.annotation) or [parameter.annotation]
    info = _read_info(parameter)
    if _takes_path(kind):
        info.parser, info.metavar = parse_path, info.metavar or "<path>"


def _takes_path(kind: object) -> bool:
    """Whether a type is a path, or is made of one at any depth, as `list[Path] | None` is."""
    return kind is Path or any(map(_takes_path, get_args(kind)))


def _check_workspace(folder: Path) -> None:
    """Raises UserError (not_found, exit 2) where the workspace, or a folder above it, is a file."""
    if not folder.is_dir() and any(path.is_file() for path in (folder, *folder.parents)):
        raise usage_error(
            "is a file",
            "expected a folder, there or to be made",
            "Give another one",
            code=Reason.NOT_FOUND,
            file=str(folder),
        )


def _refresh_pages(groups: Iterable[OptionGroup]) -> None:
    """The page of each workspace to which a verb with these options has written."""
    for group in groups:
        if isinstance(group, WriteOptions) and not group.dry_run:
            refresh_page(group.workspace)


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


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """`k/n` as (k, n) with 1 <= k <= n. Raises UserError (config)."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if match and 1 <= int(match[1]) <= int(match[2]):
        return int(match[1]), int(match[2])
    raise usage_error(
        f"--shard {safe_text(text)}", "expected k/n with 1 <= k <= n", "For example --shard 1/4"
    )
