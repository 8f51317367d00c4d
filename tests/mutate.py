"""Mutation sampling: changes one operator at a time in a copy of the tree and records which changes
the tests detect.

    python tests/mutate.py --list                          # the sample, without running anything
    python tests/mutate.py --json mutants.json             # 10 mutants an area, about half an hour on one core
    python tests/mutate.py --area splits --per-area 20 --seed 1
    python tests/mutate.py --root ../other-checkout        # another version; the tests come from there, too

A mutant is killed if a test fails that passes without it, or runs into the timeout. The tests that
name the changed function run first, then those of the area that are not slow, the slow ones only
for mutants that survive these. Survivors are printed with the line before and after; whether such a
change is equivalent or a test is missing is for a reader to decide. Annotations, docstrings,
f-strings, assertions, decorators and the texts of errors are not mutated.

The draw depends on the seed and on the text of the lines, not on paths: a version in which code
only moved gets the same mutants.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import fnmatch
import importlib.util
import json
import os
import queue
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).parents[1]
SELECTIONS = (
    "not slow and not long and not gpu and not spark",
    "slow and not long and not gpu and not spark",
)
IGNORED = shutil.ignore_patterns(".*", "__pycache__", "workspace", "dist", "build", "fuzz")
COMMENT = re.compile(r"\s\s#.*")  # left out where lines are shown and hashed
# exit codes; a collection error is 2, failed tests are 1
PYTEST_OK, PYTEST_USAGE, PYTEST_NOTHING = 0, 4, 5

Kind = Literal["comparison", "arithmetic", "boolean", "constant", "call"]
Status = Literal["killed", "timeout", "survived"]


class Area(NamedTuple):
    """A part of the tree and the tests that check it."""

    sources: tuple[str, ...]  # globs from the root, `!` excludes; those without a file are skipped
    tests: tuple[str, ...]  # globs in tests/, the fast and decisive ones first


AREAS = {
    "operator": Area(
        ("bitimely_core/ops/**/*.py",),
        (
            "test_retention.py",
            "test_rotary.py",
            "test_paper.py",
            "test_models.py",
            "test_model_formulas.py",
            "test_svd.py",
        ),
    ),
    "formats": Area(
        ("bitimely_core/formats/**/*.py",),
        (
            "test_*format*.py",
            "test_edf*.py",
            "test_wfdb*.py",
            "test_pickles.py",
            "test_generic.py",
            "test_sleep_edf.py",
            "test_ptb_xl.py",
            "test_ts_datasets.py",
            "test_pophr_sources.py",
            "test_pophr_layouts.py",
            "test_matlab.py",
            "test_archives.py",
            "test_accepted_inputs.py",
            "test_bad_inputs.py",
            "test_cache*.py",
        ),
    ),
    "cache": Area(
        ("bitimely_core/cache/**/*.py",),
        (
            "test_cache*.py",
            "test_ingest*.py",
            "test_store.py",
            "test_generic.py",
            "test_sleep_edf.py",
            "test_ptb_xl.py",
            "test_emg.py",
            "test_epilepsy.py",
            "test_ts_datasets.py",
            "test_tokens.py",
            "test_splits.py",
            "test_token_folders.py",
            "test_accepted_inputs.py",
            "test_bad_inputs.py",
            "test_folds.py",
        ),
    ),
    "claims": Area(
        (
            "bitimely_core/claims/**/*.py",
            "bitimely_core/tokens/sequences.py",
            "!*/subject_splits.py",
            "!*/synthetic*.py",
        ),
        (
            "test_pophr_*.py",
            "test_sequences.py",
            "test_meds_*.py",
            "test_claims.py",
            "test_synthetic_claims.py",
            "test_claims_*.py",
            "test_first_steps.py",
            "test_event_inputs.py",
            "test_training_split.py",
            "test_privacy*.py",
            "test_probing.py",
        ),
    ),
    "evaluation": Area(
        ("bitimely_core/evaluate/**/*.py",),
        (
            "test_evaluate*.py",
            "test_verdicts.py",
            "test_conformal.py",
            "test_vectors.py",
            "test_baselines.py",
            "test_folds.py",
            "test_calibration.py",
            "test_probing.py",
            "test_tuning.py",
            "test_results.py",
            "test_saliency.py",
            "test_predict*.py",
        ),
    ),
    "survival": Area(
        ("bitimely_core/evaluate/survival_metrics.py", "bitimely_core/methods/hazards.py"),
        ("test_survival.py", "test_event_times.py"),
    ),
    "endpoints": Area(
        ("bitimely_core/evaluate/endpoints.py",),
        ("test_endpoints.py", "test_evaluate*.py", "test_predict*.py"),
    ),
    "privacy": Area(
        ("bitimely_core/privacy.py",),
        ("test_privacy_rules.py", "test_small_cohorts.py", "test_privacy*.py"),
    ),
    "disclosure": Area(
        ("bitimely_core/claims/disclosure.py", "bitimely_core/claims/protected_scores.py"),
        ("test_small_cohorts.py", "test_event_times.py", "test_privacy*.py"),
    ),
    "predict": Area(
        (
            "bitimely_core/evaluate/prediction.py",
            "bitimely_core/evaluate/conformal.py",
            "bitimely_core/workflows/predict.py",
        ),
        ("test_predict*.py", "test_conformal.py", "test_point_runs.py"),
    ),
    "pages": Area(
        (
            "bitimely_core/report/numbers.py",
            "bitimely_core/report/page_text.py",
            "bitimely_core/report/score_blocks.py",
        ),
        (
            "test_page_numbers.py",
            "test_report.py",
            "test_verdicts.py",
            "test_results.py",
            "test_event_times.py",
        ),
    ),
    "splits": Area(
        ("bitimely_core/tokens/splits.py", "bitimely_core/claims/subject_splits.py"),
        (
            "test_tokens.py",
            "test_splits.py",
            "test_token_folders.py",
            "test_folds.py",
            "test_pophr_cleaning.py",
            "test_pophr_properties.py",
            "test_pophr_arguments.py",
            "test_pophr_sources.py",
            "test_pophr_layouts.py",
            "test_training_split.py",
            "test_ptb_xl.py",
            "test_meds_*.py",
            "test_claims_resume.py",
            "test_claims.py",
        ),
    ),
}

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
    ast.BitXor: ("^", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
BOOLEANS: dict[type[ast.boolop], tuple[str, str]] = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
CALL_PAIRS = (
    ("min", "max"),
    ("any", "all"),
    ("floor", "ceil"),
    ("minimum", "maximum"),
    ("argmin", "argmax"),
    ("amin", "amax"),
    ("nanmin", "nanmax"),
    ("zeros", "ones"),
    ("zeros_like", "ones_like"),
    ("bisect_left", "bisect_right"),
    ("startswith", "endswith"),
)
CALLS = dict((*CALL_PAIRS, *(pair[::-1] for pair in CALL_PAIRS)))
MESSAGE_CALLS = {
    "UserError",
    "Finding",
    "usage",
    "refused",
    "corrupt",
    "tell",
    "warn",
    "cast",
    "TypeVar",
}
LOGGERS = {"log", "logger", "logging", "warnings"}
EXEMPT_KEYWORDS = {"strict", "description"}
# their `+`, `*`, `/` and `%` raise TypeError if changed: trivially killed
SEQUENCES = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)


@dataclass(frozen=True)
class Mutant:
    """One change of one operator."""

    area: str
    kind: Kind
    file: str  # from the root
    line: int  # 1-based
    start: int  # bytes of the file that are replaced: [start, end)
    end: int
    replacement: str
    before: str  # the line, stripped
    after: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before}  ->  {self.after}"


@dataclass(frozen=True)
class Outcome:
    """A mutant and the result of its tests."""

    mutant: Mutant
    status: Status
    test: str | None  # the test that failed
    seconds: float


class Change(NamedTuple):
    """A replacement of bytes [start, end) of a source text."""

    kind: Kind
    start: int
    end: int
    replacement: str


class ChangeFinder(ast.NodeVisitor):
    """Collects the possible changes of a module, in `changes`."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.changes: list[Change] = []
        self._line_starts = [0, *(m.end() for m in re.finditer(rb"\n", source))]
        self.visit(ast.parse(source))

    def _start(self, node: ast.expr | ast.stmt) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def _replace_between(
        self, kind: Kind, left: ast.expr, right: ast.expr, operator: str, replacement: str
    ) -> None:
        """The operator is the only token between two operands, but for parentheses and comments."""
        start = self._end(left)
        gap = re.sub(
            rb"#[^\n]*", lambda m: b" " * len(m[0]), self.source[start : self._start(right)]
        )
        pattern = operator if "\\" in operator else re.escape(operator)
        found = re.search(pattern.encode(), gap)
        assert found, f"no {operator} in {gap!r}"
        self.changes.append(Change(kind, start + found.start(), start + found.end(), replacement))

    def visit_Compare(self, node: ast.Compare) -> None:
        for (left, right), operator in zip(
            pairwise([node.left, *node.comparators]), node.ops, strict=True
        ):
            self._replace_between("comparison", left, right, *COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        operands = (node.left, node.right)
        is_type = isinstance(node.op, ast.BitOr) and any(map(_is_type, operands))
        if type(node.op) in ARITHMETIC and not is_type and not any(map(_is_sequence, operands)):
            self._replace_between("arithmetic", *operands, *ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in ARITHMETIC and not _is_sequence(node.value):
            self._replace_between("arithmetic", node.target, node.value, *ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in pairwise(node.values):
            self._replace_between("boolean", left, right, *BOOLEANS[type(node.op)])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        start = self._start(node)
        if isinstance(node.op, ast.Not):
            word = re.compile(rb"not\s*").match(self.source, start)
            assert word
            self.changes.append(Change("boolean", start, word.end(), ""))
        elif isinstance(node.op, ast.USub):
            self.changes.append(Change("arithmetic", start, start + 1, "+"))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool | int):  # 7 -> 8, True -> False
            changed = not node.value if isinstance(node.value, bool) else node.value + 1
            self.changes.append(
                Change("constant", self._start(node), self._end(node), str(changed))
            )

    def visit_Call(self, node: ast.Call) -> None:
        function, end = node.func, self._end(node.func)
        name = (
            function.id
            if isinstance(function, ast.Name)
            else function.attr
            if isinstance(function, ast.Attribute)
            else ""
        )
        owner = (
            function.value.id
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
            else ""
        )
        if name in MESSAGE_CALLS or owner in LOGGERS:
            return
        if name in CALLS:
            self.changes.append(Change("call", end - len(name), end, CALLS[name]))
        elif name == "sorted":
            self.changes.append(Change("call", self._end(node), self._end(node), "[::-1]"))
        elif name == "reversed":
            self.changes.append(Change("call", end - len(name), end, "iter"))
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in EXEMPT_KEYWORDS:
            self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        names = {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
        if names.isdisjoint({"TYPE_CHECKING", "__name__"}):
            self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        # neither annotations nor decorators
        for part in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(part)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in node.body:
            self.visit(part)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Texts of errors are not mutated."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Assertions are no behaviour."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Most are messages, and their parts have no exact positions before Python 3.12."""


def _is_sequence(node: ast.expr) -> bool:
    return isinstance(node, SEQUENCES) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def _is_type(node: ast.expr) -> bool:
    """Whether an operand of `|` makes it a union of types: None, a built-in class or a name like
    `Path` or `list[int]`.
    """
    base = node.value if isinstance(node, ast.Subscript) else node
    if isinstance(base, ast.Name):
        return isinstance(getattr(builtins, base.id, None), type) or bool(
            re.match(r"[A-Z]\w*[a-z]", base.id)
        )
    return isinstance(base, ast.Constant) and base.value is None


def mutate(source: bytes, change: Change | Mutant) -> bytes:
    """`source` with one change."""
    return source[: change.start] + change.replacement.encode() + source[change.end :]


def find_mutants(root: Path, area: str, files: Iterable[Path]) -> Iterator[Mutant]:
    """All mutants of `files`."""
    for file in files:
        source, name = file.read_bytes(), file.relative_to(root).as_posix()
        for kind, start, end, replacement in ChangeFinder(source).changes:
            head, tail = source[:start].rpartition(b"\n")[2], source[end:].partition(b"\n")[0]
            lines = (head + middle + tail for middle in (source[start:end], replacement.encode()))
            before, after = (COMMENT.sub("", line.decode()).strip() for line in lines)
            yield Mutant(
                area,
                kind,
                name,
                source.count(b"\n", 0, start) + 1,
                start,
                end,
                replacement,
                before,
                after,
            )


def find_sources(root: Path, area: Area) -> list[Path]:
    """The files of an area."""
    excluded = [pattern[1:] for pattern in area.sources if pattern.startswith("!")]
    found = {
        file
        for pattern in area.sources
        if not pattern.startswith("!")
        for file in root.glob(pattern)
    }
    return sorted(
        f
        for f in found
        if not any(fnmatch.fnmatch(f.relative_to(root).as_posix(), p) for p in excluded)
    )


def draw_mutants(root: Path, name: str, area: Area, number: int, seed: int) -> list[Mutant]:
    """`number` mutants of an area, as many of each kind as there are: the kinds take turns, within
    a kind a hash decides.
    """
    seen: Counter[tuple[str, str, str]] = Counter()
    ranked: dict[Kind, list[tuple[str, Mutant]]] = {
        kind: [] for kind in ("comparison", "arithmetic", "boolean", "constant", "call")
    }
    for mutant in find_mutants(root, name, find_sources(root, area)):
        key = (mutant.kind, mutant.before, mutant.after)
        seen[key] += 1  # equal lines get different hashes
        ranked[mutant.kind].append(
            (sha256(repr((seed, *key, seen[key])).encode()).hexdigest(), mutant)
        )
    queues = [sorted(mutants, key=lambda pair: pair[0]) for mutants in ranked.values()]
    turns = [
        (turn, i, pair[1]) for i, mutants in enumerate(queues) for turn, pair in enumerate(mutants)
    ]
    return [mutant for _, _, mutant in sorted(turns, key=lambda t: t[:2])[:number]]


def select_tests(root: Path, area: Area, file: str | None = None) -> list[str]:
    """The test files of an area, the likeliest for `file` first: those with its name, then by the
    imports that name it.
    """
    found: dict[str, None] = {}
    for pattern in area.tests:
        found.update(
            dict.fromkeys(f"tests/{path.name}" for path in sorted((root / "tests").glob(pattern)))
        )
    if file is None:
        return list(found)
    path = Path(file)
    stem = path.parent.name if path.stem == "__init__" else path.stem

    def rank(test: str) -> tuple[bool, int]:
        imports = [line for line in (root / test).read_text().splitlines() if "import" in line]
        return (
            stem not in Path(test).stem,
            -sum(bool(re.search(rf"\b{stem}\b", line)) for line in imports),
        )

    return sorted(found, key=rank)


def _list_definitions(
    nodes: Iterable[ast.AST], source: str
) -> Iterator[tuple[ast.FunctionDef | ast.ClassDef, str]]:
    lines = source.splitlines()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.end_lineno:
            yield node, "\n".join(lines[node.lineno - 1 : node.end_lineno])


def find_near_tests(root: Path, area: Area, mutant: Mutant, most: int = 40) -> list[str]:
    """Up to `most` tests that name the function of a mutant, then those that name one of its module
    that uses it, and so on.
    """
    source = (root / mutant.file).read_text()
    tree = ast.parse(source)
    names = [
        node.name
        for node, _ in _list_definitions(ast.walk(tree), source)
        if node.lineno <= mutant.line <= (node.end_lineno or 0)
    ]
    for name in names:  # grows
        users = (
            node.name
            for node, text in _list_definitions(tree.body, source)
            if re.search(rf"\b{name}\b", text)
        )
        names += [user for user in users if user not in names]
    files = dict.fromkeys(
        (
            *select_tests(root, area, mutant.file),
            *(f"tests/{path.name}" for path in sorted(root.glob("tests/test_*.py"))),
        )
    )
    texts = {file: (root / file).read_text() for file in files}
    tests = [
        (f"{file}::{node.name}", body)
        for file, text in texts.items()
        for node, body in _list_definitions(ast.parse(text).body, text)
    ]
    named = (
        test
        for name in names
        for test, body in tests
        if "::test_" in test and re.search(rf"\b{name}\b", body)
    )
    return list(dict.fromkeys(named))[:most]


class Runner:
    """Runs tests on a copy of the tree, in a temporary folder."""

    def __init__(self, root: Path, folder: Path, timeout: float, memory: float) -> None:
        self.folder, self.tree, self.timeout, self.memory = (
            folder,
            folder / "tree",
            timeout,
            int(memory * 2**30),
        )
        self.confirmed: set[str] = set()  # tests that passed without a mutant
        shutil.copytree(root, self.tree, ignore=IGNORED)
        if (root.parent / "shared").is_dir():  # where the tests look for data
            (folder / "shared").symlink_to((root.parent / "shared").resolve())

    def run_tests(self, tests: Sequence[str], selection: str) -> tuple[Status, str | None]:
        """The result of `tests` with the markers of `selection`, and the test that failed."""
        shutil.rmtree(self.tree / ".hypothesis", ignore_errors=True)  # no examples of other mutants
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-m",
            selection,
            "-p",
            "no:cacheprovider",
            "--hypothesis-seed=0",
        ]
        command += [f"--basetemp={self.folder / 'pytest'}", "--tb=no", "-rfE", *tests]
        environment = {**os.environ, "PYTHONPATH": str(self.tree), "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command,
            cwd=self.tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=self._limit_memory,
        ) as process:
            try:
                text = process.communicate(timeout=self.timeout)[0].decode(errors="replace")
            except subprocess.TimeoutExpired:
                return "timeout", None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    # with the workers that tests have started
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode in (PYTEST_OK, PYTEST_NOTHING):
            return "survived", None
        if process.returncode == PYTEST_USAGE:
            raise SystemExit(f"pytest cannot run {' '.join(tests)}:\n{text}")
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        return "killed", failed[1] if failed else f"exit code {process.returncode}"

    def _limit_memory(self) -> None:
        # RLIMIT_AS would change how windows are read
        resource.setrlimit(resource.RLIMIT_DATA, (self.memory, self.memory))

    def run_selections(self, tests: Sequence[str]) -> tuple[Status, str | None]:
        """First the fast tests, then the slow ones."""
        for selection in SELECTIONS:
            status, test = self.run_tests(tests, selection)
            if status != "survived":
                break
        return status, test

    def run_mutant(self, mutant: Mutant, area: Area) -> Outcome:
        """The result of the tests of `area` for one mutant."""
        began, file = time.monotonic(), self.tree / mutant.file
        source, compiled = file.read_bytes(), Path(importlib.util.cache_from_source(str(file)))
        try:
            mutated = mutate(source, mutant)
            ast.parse(mutated)  # a syntax error would pass for a killed mutant
            file.write_bytes(mutated)
            # it counts as current for a source of the same size and second
            compiled.unlink(missing_ok=True)
            near = find_near_tests(self.tree, area, mutant)
            status, test = self.run_tests(near, SELECTIONS[0]) if near else ("survived", None)
            if status == "survived":
                status, test = self.run_selections(select_tests(self.tree, area, mutant.file))
        finally:
            file.write_bytes(source)
            compiled.unlink(missing_ok=True)
        if status != "survived":
            self.confirm(area, test)
        return Outcome(mutant, status, test, round(time.monotonic() - began, 1))

    def check(self, area: Area) -> None:
        """Exits unless the sources of an area would be imported from this copy."""
        probe = "import sys, importlib.util as u; print(u.find_spec(sys.argv[1]).origin)"
        for package in sorted(
            {source.relative_to(self.tree).parts[0] for source in find_sources(self.tree, area)}
        ):
            command = [sys.executable, "-c", probe, package]
            origin = subprocess.check_output(
                command,
                text=True,
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(self.tree)},
            )
            if not origin.startswith(str(self.tree)):
                raise SystemExit(
                    f"{package} would be imported from {origin.strip()}, not from {self.tree}"
                )

    def confirm(self, area: Area, test: str | None) -> None:
        """Exits unless `test` passes without a mutant, on this copy; None, or no name of a test:
        all tests of the area.
        """
        # ids may hold spaces
        named = (
            None
            if test is None or "::" not in test
            else test
            if test.endswith("]")
            else test.partition("[")[0]
        )
        key = named or repr(area)
        if key not in self.confirmed:
            status, failed = (
                self.run_tests([named], "")
                if named
                else self.run_selections(select_tests(self.tree, area))
            )
            if status != "survived":
                raise SystemExit(f"the tests do not pass without a mutant ({status}: {failed})")
            self.confirmed.add(key)


def run_mutants(
    root: Path,
    mutants: Sequence[Mutant],
    areas: dict[str, Area],
    *,
    jobs: int,
    timeout: float,
    memory: float,
) -> Iterator[Outcome]:
    """Runs the tests for each mutant; yields in the order of `mutants`. Exits if a test that killed
    one fails without it.
    """
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder, ThreadPoolExecutor(jobs) as pool:
        idle: queue.SimpleQueue[Runner] = queue.SimpleQueue()
        runners = [Runner(root, Path(folder) / str(i), timeout, memory) for i in range(jobs)]
        for name in dict.fromkeys(mutant.area for mutant in mutants):
            runners[0].check(areas[name])
        for runner in runners:
            idle.put(runner)

        def run(mutant: Mutant) -> Outcome:
            runner = idle.get()
            try:
                return runner.run_mutant(mutant, areas[mutant.area])
            finally:
                idle.put(runner)

        yield from pool.map(run, mutants)


def format_report(outcomes: Sequence[Outcome]) -> str:
    """A table of killed and sampled mutants by area, then the survivors."""
    grouped: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        grouped[outcome.mutant.area].append(outcome)
    rows = [
        (name, sum(o.status != "survived" for o in group), len(group))
        for name, group in grouped.items()
    ]
    rows.append(("all", sum(row[1] for row in rows), sum(row[2] for row in rows)))
    lines = [
        f"{'area':<12}{'killed':>8}{'sampled':>9}",
        *(f"{name:<12}{killed:>8}{sampled:>9}" for name, killed, sampled in rows),
    ]
    for title, status in (("survived", "survived"), ("killed by the timeout", "timeout")):
        if found := [f"  {o.mutant}" for o in outcomes if o.status == status]:
            lines += ["", f"{title}:", *found]
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to mutate")
    parser.add_argument("--area", action="append", choices=AREAS, help="repeatable; default: all")
    parser.add_argument("--per-area", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--timeout",
        type=float,
        default=400,
        help="seconds a run of the tests may last; a mutant beyond it counts as killed",
    )
    parser.add_argument("--memory", type=float, default=8, help="GiB of data of a process")
    parser.add_argument("--json", type=Path, help="file for the outcomes")
    parser.add_argument("--list", action="store_true", help="print the sample and stop")
    options = parser.parse_args()
    root = options.root.resolve()
    areas = {name: AREAS[name] for name in options.area or AREAS}
    mutants = [
        m
        for name, area in areas.items()
        for m in draw_mutants(root, name, area, options.per_area, options.seed)
    ]
    if options.list:
        print(*(f"{m.area:<11}{m.kind:<11} {m}" for m in mutants), sep="\n")
        return
    outcomes = []
    for o in run_mutants(
        root, mutants, areas, jobs=options.jobs, timeout=options.timeout, memory=options.memory
    ):
        outcomes.append(o)
        print(
            f"{o.status:<9}{o.seconds:7.1f} s  {o.mutant.area:<11}{o.mutant}  [{o.test or '-'}]",
            flush=True,
        )
        if options.json:
            options.json.write_text(
                json.dumps(
                    {"seed": options.seed, "outcomes": [asdict(o) for o in outcomes]}, indent=1
                )
                + "\n"
            )
    print(f"\n{format_report(outcomes)}")


if __name__ == "__main__":
    main()
