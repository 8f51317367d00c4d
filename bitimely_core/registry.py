"""Looks up what names stand for, and imports plug-ins.

The names are of data sets, models, objectives, augmentations, analyses and kinds of data, each
with its facts.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from bitimely_core.errors import (
    Finding,
    Reason,
    UserError,
    clean,
    join_findings,
    safe_text,
    unknown_name_error,
    usage_error,
)
from bitimely_core.system_errors import raise_system_error
from bitimely_core.types import NativeWindow

if TYPE_CHECKING:
    from bitimely_core.page import Page

HERE = Path(__file__).parent
# installed, else a checkout
RECIPES = next(path for path in (HERE / "pipelines", HERE.parent / "pipelines") if path.is_dir())
PRETRAINED = HERE / "pretrained"  # models that come with the package, each as `export` writes it

Facts = TypeVar("Facts")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Entry(Generic[Facts]):
    """A registered function and what is known about it."""

    name: str
    function: Callable[..., Any]
    facts: Facts

    @property
    def help(self) -> str:
        """First paragraph of the function's docstring, on one line."""
        return " ".join((self.function.__doc__ or "").strip().split("\n\n")[0].split())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)


class Registry(Mapping[str, Item]):
    """`kind` name -> item.

    Modules that hold items are imported at the first look-up; the error for an unknown name lists
    the closest ones.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.aliases: dict[str, str] = {}
        self._items: dict[str, Item] = {}
        # module or package -> the only name that it adds, None: any
        self._providers: dict[str, str | None] = {}
        self._loading = False

    def provide(self, module: str, name: str | None = None) -> None:
        """Import `module`, with the modules of a package, when a name is looked up.

        `name`: the only one that it adds.
        """
        self._providers[module] = name

    def add(self, name: str, item: Item) -> None:
        """Register `item`.

        Raises ValueError for a name that is taken, UserError (config, exit 2) where a plug-in has
        taken it; as `check_name`.
        """
        if check_name(name, self.kind) in self._items:
            # where a plug-in has the name, its place is told
            with blame_plugin(getattr(self._items[name], "function", None)):
                raise ValueError(f"{self.kind} {name!r} is registered twice, give another name")
        self._items[name] = item

    def __getitem__(self, key: str) -> Item:
        key = key if key in self else self.aliases.get(key, key)
        if key not in self._items:
            error = unknown_name_error(self.kind, key, list(self) + list(self.aliases))
            # it may be what one of them offers
            error.details = [replace(finding, level="error") for finding in _refused.values()]
            broken_plugins.clear()
            raise error
        return self._items[key]

    def get(self, key: str, default: Any = None) -> Any:
        """The item, or `default` for a name that is not known."""
        return self._items.get(key, default) if key in self else default

    def list_loaded(self) -> list[str]:
        """Names that have been registered so far; nothing is imported."""
        return list(self._items)

    def __contains__(self, key: object) -> bool:
        if key not in self._items:
            self._load(key)
        return key in self._items

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(dict(self._items))

    def __len__(self) -> int:
        self._load()
        return len(self._items)

    def _load(self, key: object = None) -> None:
        """Import the providers that are left; where one of them adds `key` alone, that one, and
        where a module of a package has the name `key`, that module.
        """
        if self._loading:  # a module that is being imported looks a name up
            return
        self._loading = True
        try:
            load_plugins()
            modules = [module for module, name in self._providers.items() if name == key]
            alone = key is not None and bool(modules)
            if isinstance(key, str) and not alone and self._import_namesake(key):
                return
            for module in modules if alone else list(self._providers):
                import_members(module)
                del self._providers[module]
        finally:
            self._loading = False

    def _import_namesake(self, key: str) -> bool:
        """Import the module of a package that has the name `key`; whether that adds it."""
        for provider in (module for module, name in self._providers.items() if name is None):
            module = f"{provider}.{key.replace('-', '_')}"
            if module in list_members(provider):
                importlib.import_module(module)
        return key in self._items


class FunctionRegistry(Registry[Entry[Facts]]):
    """A registry of functions. Call it with the facts to get a decorator.

    >>> things: FunctionRegistry[dict] = FunctionRegistry("thing")
    >>> @things({})
    ... def my_thing(): "Says nothing."
    >>> things["my-thing"].help
    'Says nothing.'
    """

    def __call__(
        self, facts: Facts, *, name: str | None = None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register the decorated function under `name`, else its own name with `-` for `_`."""

        def register(function: Callable[..., Any]) -> Callable[..., Any]:
            key = name or function.__name__.replace("_", "-")
            self.add(key, Entry(key, function, facts))
            return function

        return register


NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*")
MAX_NAME_LENGTH = 150  # characters: names of files are made from it
# no files in Windows
DEVICE_NAMES = {
    "con",
    "prn",
    "aux",
    "nul",
    *(f"{port}{number}" for port in ("com", "lpt") for number in range(10)),
}


def check_name(name: str, kind: str, field: str | None = None) -> str:
    """`name` itself, if it can be the name of one file on any system.

    Every name that users, recipes, plug-ins or records give passes here. Raises UserError
    (path_escape where it leads elsewhere, else config; exit 2) with a similar name that can;
    `field`: the option.
    """
    if (
        NAME.fullmatch(name)
        and len(name) <= MAX_NAME_LENGTH
        and name.split(".")[0].lower() not in DEVICE_NAMES
    ):
        return name
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    close = re.sub(r"[^A-Za-z0-9._+-]+", "-", plain).strip("-._+")[:MAX_NAME_LENGTH]
    close = f"my-{close}" if close.split(".")[0].lower() in DEVICE_NAMES else close or "new"
    raise usage_error(
        f"{safe_text(name)} is no name for a {kind}",
        "expected letters, digits and . _ - +, first a letter, a digit or _, "
        f"at most {MAX_NAME_LENGTH} characters, no device of Windows",
        f"For example {field + ' ' if field else ''}{close}",
        code=Reason.PATH_ESCAPE if re.search(r"[/\\]|^\.*$", name) else Reason.CONFIG,
        field=field,
    )


def find_versions(packages: Iterable[str]) -> dict[str, str]:
    """Package -> its version, or that it is absent."""
    versions = {}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    return versions


_scanned: set[tuple[str, ...]] = set()  # each `sys.path` whose plug-ins have been imported
_refused: dict[str, Finding] = {}  # plug-ins that could not be imported, by name
broken_plugins: dict[str, Finding] = {}  # those that the command line has not shown yet


def list_members(name: str) -> list[str]:
    """The modules directly in a package; of a module none. It is imported."""
    folders = getattr(importlib.import_module(name), "__path__", ())
    return [f"{name}.{member.name}" for member in pkgutil.iter_modules(folders)]


def import_members(name: str) -> None:
    """Import a module, and every module directly in a package: each registers what it offers."""
    for member in list_members(name):
        importlib.import_module(member)


def is_own(point: EntryPoint) -> bool:
    """Whether an entry point is one of bitimely itself."""
    return point.value.startswith("bitimely_core.")


def load_plugins() -> None:
    """Import the entry points of `bitimely.plugins`, those of bitimely itself first.

    A plug-in of another package that cannot be imported is reported in `broken_plugins`; work that
    does not need it goes on.
    """
    if (path := tuple(sys.path)) in _scanned:
        return
    _scanned.add(path)
    points = sorted(entry_points(group="bitimely.plugins"), key=is_own, reverse=True)
    if not any(map(is_own, points)):
        problem = "the installation has no entry points"
        raise usage_error(problem, "expected those of pyproject.toml", "Run: pip install -e .")
    for point in points:
        if point.name not in _refused:
            try:
                point.load()
            except (Exception, SystemExit) as error:  # whatever its author wrote
                raise_system_error(error, stored=False)
                finding = describe_plugin(point, error, find_place(point, error))
                _refused[point.name] = broken_plugins[point.name] = finding


def describe_plugin(point: EntryPoint, error: BaseException, place: str = "") -> Finding:
    """The finding on a plug-in that fails: its module, or the file and line, its package and its
    error.
    """
    package = f" of the package {point.dist.name}" if point.dist is not None else ""
    text = " ".join(str(error).split()) or "no message"
    return Finding(
        Reason.CONFIG,
        f"the plug-in {safe_text(place or point.value)}{package} fails: "
        f"{type(error).__name__}: {clean(text, 200)}",
        "" if place else "expected a module that registers what it offers",
        "Correct or uninstall it",
        level="warning",
    )


def find_plugin_error(error: BaseException) -> UserError | None:
    """An error that was raised in a plug-in, or in what it called, as a UserError.

    It has exit 2 (config). None for any other error.
    """
    for point in list_foreign_points():
        if place := find_place(point, error):
            return join_findings([describe_plugin(point, error, place)])
    return None


def list_foreign_points() -> list[EntryPoint]:
    """The entry points of other packages."""
    return list(filterfalse(is_own, entry_points(group="bitimely.plugins")))


def find_place(point: EntryPoint, error: BaseException) -> str:
    """File and line of a plug-in in which an error was raised, or what was called there; "": in
    none of its lines.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_of_plugin(point, frame.filename):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return ""


def is_of_plugin(point: EntryPoint, file: str) -> bool:
    """Whether a file is the module, or in the package, of an entry point."""
    spec = find_spec(point.module.partition(".")[0])
    root = Path((spec and spec.origin) or "/dev/null")
    return Path(file).is_relative_to(root.parent if root.name == "__init__.py" else root)


@contextmanager
def blame_plugin(function: Callable[..., Any] | None) -> Iterator[None]:
    """An error that a plug-in's function leads to outside of its own lines, such as one in drawing
    what it returned, is a UserError (config, exit 2) with the place of that function.
    """
    try:
        yield
    except Exception as error:
        code = getattr(function, "__code__", None)
        file = code.co_filename if code else ""
        points = [point for point in list_foreign_points() if is_of_plugin(point, file)]
        if code is None or isinstance(error, UserError) or not points or find_plugin_error(error):
            raise
        raise_system_error(error)
        place = f"{Path(file).name}:{code.co_firstlineno}"
        raise join_findings([describe_plugin(points[0], error, place)]) from error


Task = Literal["none", "classification", "multilabel", "regression", "survival"]


@dataclass(frozen=True, kw_only=True)
class View:
    """How windows are cut from a cached data set: channels, clock, labels, split.

    `epochs` views take one window per labelled epoch; the others slide `window` with `stride` over
    the complete recording.
    """

    channels: tuple[str, ...]
    rate: float  # Hz, the clock of the windows
    window: int  # samples a window at `rate`
    stride: int | None = None  # None: the window
    task: Task = "none"
    classes: tuple[str, ...] = ()
    # annotation text -> class; texts that are not here give no epoch; None: each is its own class
    labels: dict[str, str] | None = None
    seconds: float = 0.0  # a window of a view with window 0; 0: all of the first recording
    # seconds; annotations are cut into epochs of this length; 0: the commonest length
    epoch: float | None = None
    # (class, seconds): keep this much of it around the first and last other class
    trim: tuple[str, float] | None = None
    split: str = "subject"
    # channels brought to `rate` by repeating values (the others: linear interpolation)
    hold: tuple[str, ...] = ()
    # faster channels that the view brings to `rate` with an anti-alias filter; others are refused
    decimate: tuple[str, ...] = ()
    # attribute of the recording that holds its label, or channel that holds those of windows by
    # their starts
    target: str | None = None
    unit: str = ""  # of the labels of a regression; "": not known
    # what stretching the time does to the labels: a rate is divided, a duration multiplied
    label_scales: Literal["", "rate", "duration"] = ""
    # a window's label is the mean of the numeric annotations over it, where they cover this share
    # of it
    overlap: float | None = None
    # channel with the times, in seconds, of the samples of all others, which are irregular; a
    # window keeps them as its times
    clock: str = ""
    # with `epoch`: a window around each annotation without a duration, instead of epochs of those
    # that last
    points: bool = False
    # with `clock`: samples are brought to `rate`, each step the mean of those in it
    grid: bool = False
    # with `clock`: usual share of a window's samples that are observed, for estimates of costs
    observed: float = 1.0
    notice: str = ""  # what must stand beside every score on this view
    help: str = ""


@dataclass(frozen=True, kw_only=True)
class DatasetBaseline:
    """What a data set measures of the recording under a window.

    It stands beside every score on its views, and `train signal` makes a run of it.
    """

    name: str  # a key of `baselines` in scores.json
    about: str  # for pages: the method and its source
    # -> a number or numbers [D], NaN where it cannot be measured
    measure: Callable[[NativeWindow], Any]
    channels: tuple[str, ...] = ()  # that it reads; (): those of the windows
    # whether the numbers are features of a linear model; else the first is the prediction
    fitted: bool = False
    views: tuple[str, ...] = ()  # (): all that have labels
    version: int = 1  # raise it where the predictions change: they are stored


@dataclass(frozen=True, kw_only=True)
class DatasetFacts:
    """What `bitimely list datasets` shows and what `ingest` and `tokenize` go by.

    The view "" is the data set's own.
    """

    title: str
    views: dict[str, View]
    licence: str
    url: str
    download: str
    layout: str = ""  # what SOURCE looks like: folders and files, in words
    paper: dict[str, Any]  # the statistics that the paper prints
    rules: dict[str, str]  # documented rules, copied into the ingest report
    options: dict[str, Any] | None = None  # option -> default, beyond those of every data set
    # Hz of channels that are published at another rate than that of the views
    native_rates: dict[str, float] = field(default_factory=dict)
    needs_source: bool = True
    kind: Literal["recordings", "events"] = "recordings"  # a key of `data_kinds`
    baselines: tuple[DatasetBaseline, ...] = ()
    # what a subject id stands for: subject, recording, segment or window; or a function of the ids
    # of subjects and recordings that names it
    subject_unit: str | Callable[[Iterable[str], Iterable[str]], str] = "subject"
    # files of a user: recordings at levels that differ by a thousand are named
    own_files: bool = False


def find_network(name: str) -> Entry[ModelFacts]:
    """The model of a name. Raises UserError (exit 2): unknown_name; config for a method, which
    has no network to pre-train.
    """
    if name not in models and name in methods:
        raise usage_error(
            f"{name} has no network and is fitted on labels at once",
            "expected a model that is pre-trained",
            f"Run: bitimely train {name} --data DATASET/VIEW",
            field="model",
        )
    return models[name]


def find_subject_unit(dataset: str, index: Any = None) -> str:
    """What a subject id of the data set stands for.

    `index` is a table of subject_id and recording_id. Without it the answer is subject where ids
    decide.
    """
    unit = datasets[dataset].facts.subject_unit if dataset in datasets else "subject"
    if isinstance(unit, str):
        return unit
    if index is None:
        return "subject"
    return unit(index["subject_id"].to_list(), index["recording_id"].to_list())


Choices = dict[str, Any]  # name -> value: options, choices and results of verbs


@dataclass(frozen=True, kw_only=True)
class DataKind:
    """The operations of one kind of data, which verbs look up here."""

    section: Literal["tokenize", "build"]  # of a recipe: the one with the choices of its tokens
    option_groups: tuple[str, ...] = ()  # of the command line, beyond those of every data set
    no_folds: str = ""  # hint where its tokens have no test folds; "": they have
    split_choices: Callable[[Choices, Choices | None], tuple[Choices, Choices | None]]
    # options of an ingest, choices of tokens -> options of the cache, choices of the tokens that
    # the ingest makes too (None: makes none)
    # of an ingest, before any work
    check_arguments: Callable[[Choices, Choices, Path], None] = lambda choices, arguments, folder: (
        None
    )
    # scanned source -> options that its files decide, where none are given
    recognize_source: Callable[[Any], Choices] = lambda source: {}
    # options of an ingest, cache folder -> as the manifest keeps them
    pin_options: Callable[[Choices, Path], Choices]
    ingest: Callable[..., Any]  # (run, shard, wait, force_new=) -> `IngestReport` or `IngestPart`
    # an ingest report as it is printed
    protect_report: Callable[[Choices], Choices] = lambda report: report
    # (cache folder, out, **choices) -> what `write_tokens` would make
    plan_tokens: Callable[..., Choices]
    # (cache, out, verify=, force_new=, **choices); not again with the same choices
    write_tokens: Callable[..., None]
    # writes exports beside new tokens (cache, tokens) -> their page, if they have one
    write_extras: Callable[[Path, Path], Page | None] = lambda cache, tokens: None
    open_tokens: Callable[..., Any]  # (folder, verify=) -> windows or sequences
    summarize_tokens: Callable[[Path], Choices]  # folder -> result of the verb
    # that result -> a line for the screen, the next verb
    describe_tokens: Callable[[Choices], tuple[str, str]]
    # (facts, view, cache or None, window, rate) -> windows, channels, length, codes
    estimate_size: Callable[..., Choices]
    # scores, windows -> the scores as they are printed
    protect_scores: Callable[[Any, Any], Any] = lambda scores, windows: scores
    # token folder -> whether a label has counts that are withheld
    has_withheld_labels: Callable[[Path], bool] = lambda folder: False
    # (file, rows, probabilities, table of ids): predictions up to prediction times; None: it has no
    # such times
    write_predictions: Callable[..., Any] | None = None
    # (source, run folder, preparation, home, as_of=, options=) -> `tokens.sequences.NewHistories`;
    # None: its new data are recordings
    read_subjects: Callable[..., Any] | None = None


# kind of a token set -> kind of its data
TOKEN_KINDS = {"windows": "recordings", "sequences": "events"}


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What is known about a model before it is built.

    `family` names the section of a preset that holds its dimensions.
    """

    # retention, attention, recurrent, other, or of a model with dimensions of its own: its name
    family: str
    objective: str  # the default for pre-training
    readout: str  # the default for fine-tuning
    directions: tuple[str, ...] = ()  # cycled over the layers
    attention: bool = False  # returns maps
    input: tuple[str, ...] = ("regular",)
    source: str = ""  # the method's own paper
    known: str = ""  # what is known about the paper's claims
    config: type[Any] | None = None  # class of its settings; None: `config.ModelConfig`
    # which requirements of objectives it meets; None: those of its own objective
    capabilities: tuple[str, ...] | None = None
    budget_changes: Callable[[Any], dict[str, Any]] = (
        lambda config: {}
    )  # what `--budget matched` changes in a configuration before the width
    lr: float = 1e-3  # largest learning rate of `train`, which starts from random weights
    # of signals, where neither the preset nor the user names one; "": that of `ModelConfig`
    tokenizer: str = ""
    step: int | None = None  # widths that it tries are multiples of this; None: of 2 x heads


@dataclass(frozen=True, kw_only=True)
class MethodFacts:
    """What is known about a method without a network.

    The registered function fits it: (config, `method_contract.MethodFit`) -> arrays by name.
    """

    input: tuple[str, ...]  # signals, events
    tasks: tuple[str, ...]  # of views
    # (fitted method, rows) -> probabilities [n, K] or values [n]
    score: Callable[[Any, Any], Any]
    config: type[Any]  # class of its settings
    # settings, windows -> settings with what the windows decide
    resolve: Callable[[Any, Any], Any] = lambda config, windows: config
    source: str = ""  # the method's own paper


@dataclass(frozen=True, kw_only=True)
class ObjectiveFacts:
    """`leak_free`: true, false, null (no target of its own) or a text that names the condition."""

    leak_free: bool | str | None
    # of a prediction; around: everything but what is hidden
    context: Literal["past", "past or future", "around"] = "around"
    config: type[Any] | None = None  # class of its settings; None: `config.ObjectiveConfig`
    # of a model: one-way or alternating (layers of given directions), hidden (tokens that can be
    # hidden), or its method
    requires: str = ""
    # refuses a model's configuration with a UserError (config, exit 2)
    check: Callable[[Any], None] = lambda config: None
    notice: str = ""  # one line on the screen when a run starts with it
    # forward passes through all weights of the model in a step, for estimates of its cost
    passes: int = 1
    rows: int = 1  # fewest rows of a micro-batch; 2: it compares rows with each other (contrastive)
    draw: Callable[..., Any] | None = None
    # (model, batch on the CPU as the model reads it, a generator for each row, config) ->
    # `Batch.draws`, None: draws nothing; drawn ahead
    targets: Callable[[Any, Any], dict[str, Any]] | None = None
    # (model of histories, batch) -> number of targets of each term of its loss; None: the terms
    # have the same ones
    # what it draws from its own generator is of the step: the same in every process and micro-batch
    shared: bool = False
    # its targets are states of tokens, not samples: tokens that share samples show it parts of them
    states: bool = False


@dataclass(frozen=True, kw_only=True)
class AugmentationFacts:
    """What is known about an augmentation: a function (row, draw, context) -> row.

    `row` is a `LabelledRow`, `draw` the numpy generator of that row, `context` an
    `AugmentationContext`.
    """

    mixes_labels: bool = False  # class ids become shares, [C] float32, before it is called


@dataclass(frozen=True, kw_only=True)
class AnalysisFacts:
    """`takes` names what the analysis needs: runs, a data set, or a model by name."""

    takes: Literal["runs", "run", "data", "model"]
    # compares with labels of held-out subjects: refused where the run was trained on them
    scores: bool = False
    help: str = ""


datasets: FunctionRegistry[DatasetFacts] = FunctionRegistry("data set")
models: FunctionRegistry[ModelFacts] = FunctionRegistry("model")
methods: FunctionRegistry[MethodFacts] = FunctionRegistry("method")
objectives: FunctionRegistry[ObjectiveFacts] = FunctionRegistry("objective")
augmentations: FunctionRegistry[AugmentationFacts] = FunctionRegistry("augmentation")
analyses: FunctionRegistry[AnalysisFacts] = FunctionRegistry("analysis")
data_kinds: Registry[DataKind] = Registry("kind of data")
row_readers: Registry[Callable[[Any, Any], Sequence[Any]]] = Registry(
    "reader of rows"
)  # token set, positions [n] in its index -> the rows as a data set of torch gives them
