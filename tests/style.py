"""Figures of style of the packages, each with a ceiling that only goes down: `python tests/style.py [--list NAME]`."""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("bitimely", "bitimely_cli", "bitimely_core")
Function = (ast.FunctionDef, ast.AsyncFunctionDef)

RECORDS = {"body", "manifest", "meta", "report", "scores"}  # dicts that are written to and read from files
ANY_DICTS = {"dict[str, Any]", "Dict[str, Any]", "Mapping[str, Any]", "MutableMapping[str, Any]"}
REGISTRIES = {"analyses", "datasets", "models", "objectives"}  # decorators: the function's name is a name that users type


def to_words(text: str) -> frozenset[str]:
    """The set of the words of a text."""
    return frozenset(text.split())


NOT_PARTICIPLES = to_words("bed embed embedding feed king need nothing red ring seed shed sibling speed string thing warning wing")
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
    """A figure with its ceiling (a floor for the number of tests) and the value to reach."""

    figure: str
    ceiling: float
    target: float
    is_floor: bool = False

    def holds(self, value: float) -> bool:
        return value >= self.ceiling if self.is_floor else value <= self.ceiling


BOUNDS = (  # a ceiling is the figure as measured, the two rates rounded up; lower it whenever the figure falls
    Bound("any_dicts", 3, 3),
    Bound("record_reads", 40, 40),
    Bound("annotated_reads", 30, 80),
    Bound("participles", 0.5, 2),
    Bound("repeated_classes", 0, 0),
    Bound("long_functions", 0, 0),
    Bound("metaphors", 1, 0),
    Bound("lines", 65000, 42500),
    Bound("readme_lines", 150, 150),
    Bound("ingest_options", 25, 25),
    Bound("tests", 1470, 1414, is_floor=True),
)


@cache
def parse_sources() -> dict[str, ast.Module]:
    """Path, relative to the root, of every file of the packages -> its tree."""
    paths = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}


def walk_sources() -> Iterator[tuple[str, ast.AST]]:
    """Every node of every file, with the file."""
    for path, tree in parse_sources().items():
        for node in ast.walk(tree):
            yield path, node


def describe(path: str, node: ast.AST, text: str = "") -> str:
    """`file:line: source`, as editors read it."""
    return f"{path}:{getattr(node, 'lineno', 0)}: {text or ast.unparse(node)[:100]}"


def list_any_dicts() -> list[str]:
    """Occurrences of `dict[str, Any]` and of its `Dict` and `Mapping` forms, in annotations and elsewhere."""
    return [describe(p, n) for p, n in walk_sources() if isinstance(n, ast.Subscript) and ast.unparse(n) in ANY_DICTS]


def read_container(node: ast.AST) -> ast.expr | None:
    """The container of which `node` reads a constant string key: x of `x["key"]` (load context) and of `x.get("key", ...)`; else None."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        key, container = node.slice, node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        key, container = node.args[0], node.func.value
    else:
        return None
    return container if isinstance(key, ast.Constant) and isinstance(key.value, str) else None


def is_json_load(node: ast.AST | None) -> bool:
    """Whether `node` is a call of `json.loads` or `json.load`."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) in {"json.loads", "json.load"}


def list_record_reads() -> list[str]:
    """Reads by string key of the dicts that files are made of.

    Counted: `x["key"]` in load context and `x.get("key")` where x is a variable or an attribute with a name in `RECORDS` (`body`,
    `run.body`, `self.manifest`), is a `json.loads(...)`, or is a variable to which the same module assigns a `json.loads(...)`. A nested read (`body["final"]["loss"]`)
    counts once. The names alone give 443 of the 502 reads of the first count. Not counted: columns of frames and tables, dicts of arrays or tensors, `os.environ`, since none of them has such a name.
    """
    found = []
    for path, tree in parse_sources().items():
        assigned = (n for n in ast.walk(tree) if isinstance(n, ast.Assign | ast.AnnAssign) and is_json_load(n.value))
        targets = (t for n in assigned for t in (n.targets if isinstance(n, ast.Assign) else [n.target]))
        names = RECORDS | {t.id for t in targets if isinstance(t, ast.Name)}
        for node in ast.walk(tree):
            container = read_container(node)
            name = container.id if isinstance(container, ast.Name) else container.attr if isinstance(container, ast.Attribute) else ""
            if container is not None and (is_json_load(container) or name in (names if isinstance(container, ast.Name) else RECORDS)):
                found.append(describe(path, node))
    return found


def list_annotated_reads() -> list[str]:
    """Reads by string key of parameters and variables annotated `dict[str, Any]`: does not go down when a dict is only renamed."""
    found = []
    for path, tree in parse_sources().items():
        for function in (n for n in ast.walk(tree) if isinstance(n, Function)):
            nodes = list(ast.walk(function))
            annotated = [(n.arg, n.annotation) for n in nodes if isinstance(n, ast.arg) and n.annotation]
            annotated += [(n.target.id, n.annotation) for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
            names = {name for name, kind in annotated if ast.unparse(kind).removesuffix(" | None") in ANY_DICTS}
            found += [describe(path, n) for n in nodes if isinstance(c := read_container(n), ast.Name) and c.id in names]
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
    """Functions named by a bare participle (`_told`, `opened`); names that users type, registered by a decorator, are exempt."""
    registered = {n for _, n in list_functions() for d in n.decorator_list if isinstance(d, ast.Call) and ast.unparse(d.func) in REGISTRIES}
    return [describe(p, n, n.name) for p, n in list_functions() if is_participle(n.name) and n not in registered]


def list_repeated_classes() -> list[str]:
    """Class names used more than once, nested and private classes included, each with its files."""
    places: dict[str, list[str]] = {}
    for path, node in walk_sources():
        if isinstance(node, ast.ClassDef):
            places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    return [f"{name}: {', '.join(where)}" for name, where in sorted(places.items(), key=lambda item: -len(item[1])) if len(where) > 1]


def list_long_functions() -> list[str]:
    """Functions longer than 90 lines, from `def` to the last line, the longest first."""
    lengths = sorted(((n.end_lineno or 0) - n.lineno + 1, describe(p, n, n.name)) for p, n in list_functions())
    return [f"{where} ({length} lines)" for length, where in reversed(lengths) if length > 90]


def list_metaphors() -> list[str]:
    """Functions and classes with a word of `METAPHORS` in the name."""
    named = [(p, n) for p, n in walk_sources() if isinstance(n, (*Function, ast.ClassDef))]
    return [describe(p, n, n.name) for p, n in named if METAPHORS & {w.lower() for w in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", n.name)}]


def list_lines() -> list[str]:
    """Files of the packages with their number of lines (`wc -l`), the longest first."""
    lengths = sorted((((ROOT / path).read_bytes().count(b"\n"), path) for path in parse_sources()), reverse=True)
    return [f"{path}: {length}" for length, path in lengths]


def list_ingest_options() -> list[str]:
    """Options that `bitimely ingest --help` prints, `--help` included."""
    import typer

    from bitimely_cli.main import app

    command = typer.main.get_command(app)
    ingest = command.get_command(context := command.make_context("bitimely", ["ingest"], resilient_parsing=True), "ingest")
    text = ingest.get_help(type(context)(ingest, info_name="ingest", parent=context))
    return re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)


def list_tests() -> list[str]:
    """Test functions in tests/."""
    paths = sorted((ROOT / "tests").glob("*.py"))
    return [
        f"{path.name}: {name}" for path in paths for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    ]


LISTS: dict[str, Callable[[], list[str]]] = {
    "any_dicts": list_any_dicts,
    "record_reads": list_record_reads,
    "annotated_reads": list_annotated_reads,
    "participles": list_participles,
    "repeated_classes": list_repeated_classes,
    "long_functions": list_long_functions,
    "metaphors": list_metaphors,
    "lines": list_lines,
    "readme_lines": lambda: (ROOT / "README.md").read_text().splitlines(),
    "ingest_options": list_ingest_options,
    "tests": list_tests,
}


def measure(figure: str) -> float:
    """The value of a figure: a number of places, per 1,000 lines for `any_dicts`, percent of all functions for `participles`."""
    places = LISTS[figure]()
    count = sum(int(place.split()[-1]) for place in places) if figure == "lines" else len(places)
    if figure == "any_dicts":
        return round(1000 * count / measure("lines"), 1)
    return round(100 * count / len(list_functions()), 1) if figure == "participles" else count


def main() -> None:
    """Print the table of figures, or the places of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", choices=LISTS, metavar="NAME", help=f"all places of one figure: {', '.join(LISTS)}")
    if name := parser.parse_args().list:
        print("\n".join(LISTS[name]()))
        return
    print(f"{'figure':<18}{'value':>9}{'ceiling':>9}{'target':>9}  most in")
    for bound in BOUNDS:
        value, places = measure(bound.figure), [place for place in LISTS[bound.figure]() if ".py:" in place]
        counts = Counter(place.split(":")[0] for place in places if bound.figure != "tests").most_common(3)
        worst = places[:3] if bound.figure in {"lines", "long_functions"} else [f"{file} {n}" if n > 1 else file for file, n in counts]
        mark = "" if bound.holds(value) else "! "
        print(f"{bound.figure:<18}{value:>9,g}{bound.ceiling:>9,g}{bound.target:>9,g}  {mark}{', '.join(worst)}")


if __name__ == "__main__":
    main()
