"""What a reader of the packages pays for, each figure with a ceiling that only goes down: `python
tests/style.py [--list NAME]`.

Tokens may grow by what a new feature needs, with a line in the changelog that says so. Nothing is
met by packing: a function may grow longer where its branches become steps with names.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("bitimely", "bitimely_cli", "bitimely_core")
Function = (ast.FunctionDef, ast.AsyncFunctionDef)

COUNTED = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}
# whose lists begin with the worst
RANKED = {"tokens", "branches", "branchy_functions", "wide_functions", "long_functions"}
# dicts that are written to and read from files
RECORDS = {"body", "manifest", "meta", "report", "scores"}
ANY_DICTS = {"dict[str, Any]", "Dict[str, Any]", "Mapping[str, Any]", "MutableMapping[str, Any]"}
# decorators: the function's name is a name that users type
REGISTRIES = {"analyses", "datasets", "models", "objectives"}


def to_words(text: str) -> frozenset[str]:
    """The set of the words of a text."""
    return frozenset(text.split())


FILLERS = to_words("one found own known kept of at here given shown more left")
NOT_PARTICIPLES = to_words(
    "bed embed embedding feed king need nothing red ring seed shed sibling speed string thing warning wing"
)
IRREGULAR = to_words(
    "begun bought broken brought built caught chosen done drawn driven fallen felt foretold forgotten found frozen given gone got grown heard "
    "held hidden hung kept known laid led left lent lost made meant met overridden overwritten paid proven rebuilt rewritten ridden risen "
    "said seen sent shaken shown sold sought spent spoilt spoken spun stolen stood struck stuck swept taken taught thought thrown told torn "
    "understood unknown unseen withheld won worn wound written"
)
METAPHORS = to_words(
    "apart ask asked asking asks climb climbs elsewhere everyone everywhere foretold honest honestly honesty lay lays lies ours people pile "
    "piles remembered said say saying says settle settled settles speak speaks spoken tell telling tells theirs there told waist whole wholly"
)


@dataclass(frozen=True)
class Bound:
    """A figure with its ceiling and the value to reach."""

    figure: str
    ceiling: float
    target: float

    def holds(self, value: float) -> bool:
        return value <= self.ceiling


# a ceiling is the figure as measured, rates rounded up; lower it whenever the figure falls, and
# never meet it by packing
BOUNDS = (
    Bound("long_lines", 17, 30),
    Bound("tokens", 779_387, 480_000),
    Bound("branches", 25.8, 20),
    Bound("branchy_functions", 30, 90),
    Bound("wide_functions", 41, 15),
    Bound("same_keywords", 1_140, 350),
    Bound("filler_names", 16, 300),
    Bound("import_circles", 0, 0),
    Bound("any_dicts", 121, 139),
    Bound("record_reads", 32, 30),
    Bound("annotated_reads", 12, 15),
    Bound("participles", 0.1, 2),
    Bound("repeated_classes", 0, 0),
    Bound("long_functions", 7, 0),
    Bound("metaphors", 1, 0),
    Bound("readme_lines", 120, 120),
    Bound("ingest_options", 25, 24),
)


@cache
def parse_sources() -> dict[str, ast.Module]:
    """Path, relative to the root, of every file of the packages -> its tree."""
    paths = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}


@cache
def walk_sources() -> list[tuple[str, ast.AST]]:
    """Every node of every file, with the file."""
    return [(path, node) for path, tree in parse_sources().items() for node in ast.walk(tree)]


def describe(path: str, node: ast.AST, text: str = "") -> str:
    """`file:line: source`, as editors read it."""
    return f"{path}:{getattr(node, 'lineno', 0)}: {text or ast.unparse(node)[:100]}"


def list_any_dicts() -> list[str]:
    """Occurrences of `dict[str, Any]` and of its `Dict` and `Mapping` forms, in annotations and
    elsewhere.
    """
    return [
        describe(p, n)
        for p, n in walk_sources()
        if isinstance(n, ast.Subscript) and ast.unparse(n) in ANY_DICTS
    ]


def read_container(node: ast.AST) -> ast.expr | None:
    """The container of which `node` reads a constant string key: x of `x["key"]` (load context) and
    of `x.get("key", ...)`; else None.
    """
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        key, container = node.slice, node.value
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "get"
        and node.args
    ):
        key, container = node.args[0], node.func.value
    else:
        return None
    return container if isinstance(key, ast.Constant) and isinstance(key.value, str) else None


def is_json_load(node: ast.AST | None) -> bool:
    """Whether `node` is a call of `json.loads` or `json.load`."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) in {"json.loads", "json.load"}


def list_record_reads() -> list[str]:
    """Reads by string key of the dicts that files are made of.

    Counted: `x["key"]` in load context and `x.get("key")` where x is a variable or an attribute
    with a name in `RECORDS` (`body`, `run.body`, `self.manifest`), is a `json.loads(...)`, or is a
    variable to which the same module assigns a `json.loads(...)`. A nested read
    (`body["final"]["loss"]`)
    counts once. The names alone give 443 of the 502 reads of the first count. Not counted: columns
    of frames and tables, dicts of arrays or tensors, `os.environ`, since none of them has such a
    name.
    """
    found = []
    for path, tree in parse_sources().items():
        assigned = (
            n
            for n in ast.walk(tree)
            if isinstance(n, ast.Assign | ast.AnnAssign) and is_json_load(n.value)
        )
        targets = (
            t for n in assigned for t in (n.targets if isinstance(n, ast.Assign) else [n.target])
        )
        names = RECORDS | {t.id for t in targets if isinstance(t, ast.Name)}
        for node in ast.walk(tree):
            container = read_container(node)
            name = (
                container.id
                if isinstance(container, ast.Name)
                else container.attr
                if isinstance(container, ast.Attribute)
                else ""
            )
            if container is not None and (
                is_json_load(container)
                or name in (names if isinstance(container, ast.Name) else RECORDS)
            ):
                found.append(describe(path, node))
    return found


def list_annotated_reads() -> list[str]:
    """Reads by string key of parameters and variables annotated `dict[str, Any]`: does not go down
    when a dict is only renamed.
    """
    found = []
    for path, tree in parse_sources().items():
        for function in (n for n in ast.walk(tree) if isinstance(n, Function)):
            nodes = list(ast.walk(function))
            annotated = [
                (n.arg, n.annotation) for n in nodes if isinstance(n, ast.arg) and n.annotation
            ]
            annotated += [
                (n.target.id, n.annotation)
                for n in nodes
                if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
            ]
            names = {
                name
                for name, kind in annotated
                if ast.unparse(kind).removesuffix(" | None") in ANY_DICTS
            }
            found += [
                describe(path, n)
                for n in nodes
                if isinstance(c := read_container(n), ast.Name) and c.id in names
            ]
    return sorted(set(found))


@cache
def list_functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function and method, nested ones included, with its file."""
    return [(path, node) for path, node in walk_sources() if isinstance(node, Function)]


def is_participle(name: str) -> bool:
    """Whether a name is one word and that a participle, leading and trailing underscores aside."""
    word = name.strip("_")
    regular = word.endswith(("ed", "ing")) and word not in NOT_PARTICIPLES
    return "_" not in word and word.islower() and (regular or word in IRREGULAR)


def list_participles() -> list[str]:
    """Functions named by a bare participle (`_told`, `opened`); names that users type, registered
    by a decorator, are exempt.
    """
    registered = {
        n
        for _, n in list_functions()
        for d in n.decorator_list
        if isinstance(d, ast.Call) and ast.unparse(d.func) in REGISTRIES
    }
    return [
        describe(p, n, n.name)
        for p, n in list_functions()
        if is_participle(n.name) and n not in registered
    ]


def list_repeated_classes() -> list[str]:
    """Class names used more than once, nested and private classes included, each with its files."""
    places: dict[str, list[str]] = {}
    for path, node in walk_sources():
        if isinstance(node, ast.ClassDef):
            places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    return [
        f"{name}: {', '.join(where)}"
        for name, where in sorted(places.items(), key=lambda item: -len(item[1]))
        if len(where) > 1
    ]


def list_long_functions() -> list[str]:
    """Functions longer than 90 lines, from `def` to the last line, the longest first."""
    lengths = sorted(
        ((n.end_lineno or 0) - n.lineno + 1, describe(p, n, n.name)) for p, n in list_functions()
    )
    return [f"{where} ({length} lines)" for length, where in reversed(lengths) if length > 90]


def list_metaphors() -> list[str]:
    """Functions and classes with a word of `METAPHORS` in the name."""
    named = [(p, n) for p, n in walk_sources() if isinstance(n, (*Function, ast.ClassDef))]
    return [
        describe(p, n, n.name)
        for p, n in named
        if METAPHORS & {w.lower() for w in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", n.name)}
    ]


@cache
def count_tokens(path: str) -> tuple[int, set[int]]:
    """Names, operators, numbers and strings of a file, and the lines on which they stand."""
    stream = io.StringIO((ROOT / path).read_text())
    tokens = [token for token in tokenize.generate_tokens(stream.readline) if token.type in COUNTED]
    return len(tokens), {
        line for token in tokens for line in range(token.start[0], token.end[0] + 1)
    }


def list_tokens() -> list[str]:
    """Files of the packages with their number of tokens, the longest first: what a reader reads,
    however it is broken into lines.
    """
    counts = sorted(((count_tokens(path)[0], path) for path in parse_sources()), reverse=True)
    return [f"{path}: {count}" for count, path in counts]


def list_code_lines() -> list[str]:
    """Files with their number of lines that hold a word of code: neither docstrings, comments and
    imports nor brackets alone.
    """
    rows = []
    for path, tree in parse_sources().items():
        left_out: set[int] = set()
        for node in ast.walk(tree):
            if (
                isinstance(node, (*Function, ast.ClassDef, ast.Module))
                and ast.get_docstring(node) is not None
            ):
                left_out.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                left_out.update(range(node.lineno, (node.end_lineno or 0) + 1))
        text = (ROOT / path).read_text().splitlines()
        lines = [
            line
            for line in count_tokens(path)[1] - left_out
            if re.search(r"[\w\"']", text[line - 1])
        ]
        rows.append(f"{path}: {len(lines)}")
    return rows


def count_branches(tree: ast.AST) -> int:
    """Places where a reader must hold two cases in mind: if, elif, ternary, loop, except, case,
    each further operand of and/or, each part of a comprehension.
    """
    count = 0
    for node in ast.walk(tree):
        if isinstance(
            node,
            ast.If
            | ast.IfExp
            | ast.For
            | ast.AsyncFor
            | ast.While
            | ast.ExceptHandler
            | ast.match_case,
        ):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
    return count


def list_branches() -> list[str]:
    """Files with their number of branches, the most first."""
    counts = sorted(
        ((count_branches(tree), path) for path, tree in parse_sources().items()), reverse=True
    )
    return [f"{path}: {count}" for count, path in counts]


def list_branchy_functions() -> list[str]:
    """Functions with more than ten branches, nested functions counted with them, the most first."""
    counts = sorted(
        ((count_branches(n), describe(p, n, n.name)) for p, n in list_functions()), reverse=True
    )
    return [f"{where} ({count} branches)" for count, where in counts if count > 10]


def list_wide_functions() -> list[str]:
    """Functions with eight or more parameters, the most first; `*args` and `**kwargs` are not
    counted.
    """
    counts = sorted(
        (
            (len([*n.args.posonlyargs, *n.args.args, *n.args.kwonlyargs]), describe(p, n, n.name))
            for p, n in list_functions()
        ),
        reverse=True,
    )
    return [f"{where} ({count} parameters)" for count, where in counts if count >= 8]


def list_same_keywords() -> list[str]:
    """Arguments of the form `x=x`: options that are handed on by hand."""
    keywords = (
        (p, n)
        for p, n in walk_sources()
        if isinstance(n, ast.keyword) and isinstance(n.value, ast.Name)
    )
    return [
        describe(p, n) for p, n in keywords if isinstance(n.value, ast.Name) and n.arg == n.value.id
    ]


def list_filler_names() -> list[str]:
    """Variables, parameters and functions that bear a name of `FILLERS`, which says nothing of what
    they hold.
    """
    found = []
    for path, node in walk_sources():
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        else:
            name = (
                node.arg
                if isinstance(node, ast.arg)
                else node.name
                if isinstance(node, Function)
                else ""
            )
        if name in FILLERS:
            found.append(describe(path, node, name))
    return found


def name_module(path: str) -> str:
    """The name under which a file is imported."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def list_imports() -> dict[str, set[str]]:
    """Module -> modules of the packages that it imports: at the top, inside functions, for type
    checkers, and by a text given to `import_module`.
    """
    modules = {name_module(path) for path in parse_sources()}
    imports: dict[str, set[str]] = {}
    for path, tree in parse_sources().items():
        names = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= inner & modules or {node.module}
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
                names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
        imports[name_module(path)] = (names & modules) - {name_module(path)}
    return imports


def list_import_circles() -> list[str]:
    """Sets of modules each of which imports, directly or not, all others of the set."""
    imports = list_imports()

    def reach(start: str) -> set[str]:
        reached, waiting = set(), [start]
        while waiting:
            new = imports[waiting.pop()] - reached
            reached |= new
            waiting += new
        return reached

    reached = {module: reach(module) for module in imports}
    circles = {
        frozenset(m for m in reached[module] if module in reached[m])
        for module in imports
        if module in reached[module]
    }
    return sorted(" ".join(sorted(circle)) for circle in circles)


def list_long_lines() -> list[str]:
    """Lines of more than 100 characters."""
    lines = (
        (path, number, line)
        for path in parse_sources()
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
    )
    return [
        f"{path}:{number}: {line.strip()[:100]}" for path, number, line in lines if len(line) > 100
    ]


def list_ingest_options() -> list[str]:
    """Options that `bitimely ingest --help` prints, `--help` included."""
    import typer

    from bitimely_cli.main import app

    command = typer.main.get_command(app)
    ingest = command.get_command(
        context := command.make_context("bitimely", ["ingest"], resilient_parsing=True), "ingest"
    )
    text = ingest.get_help(type(context)(ingest, info_name="ingest", parent=context))
    return re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)


LISTS: dict[str, Callable[[], list[str]]] = {
    "long_lines": list_long_lines,
    "tokens": list_tokens,
    "branches": list_branches,
    "branchy_functions": list_branchy_functions,
    "wide_functions": list_wide_functions,
    "same_keywords": list_same_keywords,
    "filler_names": list_filler_names,
    "import_circles": list_import_circles,
    "any_dicts": list_any_dicts,
    "record_reads": list_record_reads,
    "annotated_reads": list_annotated_reads,
    "participles": list_participles,
    "repeated_classes": list_repeated_classes,
    "long_functions": list_long_functions,
    "metaphors": list_metaphors,
    "readme_lines": lambda: (ROOT / "README.md").read_text().splitlines(),
    "ingest_options": list_ingest_options,
}


@cache
def list_places(figure: str) -> list[str]:
    """The places that a figure counts."""
    return LISTS[figure]()


def add_counts(places: list[str]) -> int:
    """The sum of rows of the form `file: number`."""
    return sum(int(place.split()[-1]) for place in places)


def measure(figure: str) -> float:
    """The value of a figure: a number of places, per 100 lines of code for `branches`, percent of
    functions for `participles`.
    """
    places = list_places(figure)
    if figure == "tokens":
        return add_counts(places)
    if figure == "branches":
        return round(100 * add_counts(places) / add_counts(list_code_lines()), 1)
    return (
        round(100 * len(places) / len(list_functions()), 1)
        if figure == "participles"
        else len(places)
    )


def main() -> None:
    """Print the table of figures, or the places of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--list",
        choices=LISTS,
        metavar="NAME",
        help=f"all places of one figure: {', '.join(LISTS)}",
    )
    if name := parser.parse_args().list:
        print("\n".join(list_places(name)))
        return
    print(f"{'figure':<18}{'value':>9}{'ceiling':>9}{'target':>9}  most in")
    for bound in BOUNDS:
        value, places = (
            measure(bound.figure),
            [place for place in list_places(bound.figure) if ".py:" in place],
        )
        counts = Counter(place.split(":")[0] for place in places).most_common(3)
        worst = (
            places[:3]
            if bound.figure in RANKED
            else [f"{file} {n}" if n > 1 else file for file, n in counts]
        )
        mark = "" if bound.holds(value) else "! "
        print(
            f"{bound.figure:<18}{value:>9,g}{bound.ceiling:>9,g}{bound.target:>9,g}  {mark}{', '.join(worst)}"
        )


if __name__ == "__main__":
    main()
