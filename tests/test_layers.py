"""The cut of the code, checked: who may import what, how large things are, what they are called."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "gradientmail"

# Imports point to a smaller number. Modules of one number never import each other, except the
# shared words and files inside one folder.
LAYERS = {
    **dict.fromkeys(("schema", "event", "health", "events", "clock", "calls", "errors"), 0),
    **dict.fromkeys(("buffers", "forking", "opened"), 0),
    **dict.fromkeys(("mailbox", "backend"), 1),
    **dict.fromkeys(("exchange", "algorithm"), 2),
    **dict.fromkeys(
        ("handoff", "run", "progress", "rhythm", "attendance", "loop_thread", "failures", "due"), 3
    ),
    "estimates": 3,
    **dict.fromkeys(("watch", "deltas", "blanks"), 4),
    **dict.fromkeys(("joining", "election", "collecting", "holding", "sweeping"), 5),
    **dict.fromkeys(("committing", "versions"), 6),
    **dict.fromkeys(("learner", "courier", "syncer"), 7),
    **dict.fromkeys(("node", "checkpoint"), 8),
    **dict.fromkeys(("arguments", "verification", "blocking"), 9),
    **dict.fromkeys(("alignment", "patterns", "session"), 10),
    **dict.fromkeys(("testing", "__init__"), 11),
    "commands": 12,
    "__main__": 13,
}
# Beyond the numbers: the two columns of the picture stay apart all the way down.
APART = {("exchange", "backend"), ("algorithm", "mailbox"), ("learner", "mailbox")}
BACKEND_CONTRACT = {
    f"testing/backend_{part}.py"
    for part in ("arithmetic", "formats", "parameters", "range", "sums", "values")
}
# Packages from outside the standard library, and the only places that may name them.
THIRD_PARTY = {
    "torch": {"backend/torch_chunks.py"},
    "mlx": {"backend/mlx.py"},
    # The contract of backends is written in numpy; compression uses it only if it is installed.
    "numpy": {"backend/numpy_chunks.py", "exchange/compression.py", *BACKEND_CONTRACT},
    "ml_dtypes": {"backend/numpy_chunks.py"},
    "boto3": {"mailbox/s3_client.py"},
    "botocore": {"mailbox/s3_client.py"},
    "zstandard": {"exchange/compression.py"},
    "safetensors": {"exchange/payload.py"},
}
TEST_KIT = {"hypothesis", "pytest"}
VAGUE = {"manager", "handler", "helper", "helpers", "util", "utils"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50

FILES = sorted(PACKAGE.rglob("*.py"))
every_file = pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PACKAGE).as_posix())


def part_of(path: Path) -> str:
    """The first name below the package: ``mailbox`` for ``mailbox/s3.py``."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Every module, or name in a module, that the code imports; also by ``import_module``."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                assert level == 0, f"line {node.lineno}: relative import"
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Call(
                func=ast.Attribute(attr="import_module")
                | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def faults_of_import(path: Path, name: str) -> Iterator[str]:
    """What is wrong with the file at ``path`` importing ``name``."""
    here, (top, *rest) = part_of(path), name.split(".")
    if top == "gradientmail":
        # `from gradientmail import errors` names a part, `… import Session` the root.
        there = rest[0] if rest and rest[0] in LAYERS else "__init__"
        words = LAYERS[here] == LAYERS[there] == 0
        if there != here and not words and LAYERS[there] >= LAYERS[here]:
            yield f"{here} imports {there}, which is not below it"
        if (here, there) in APART:
            yield f"{here} imports {there}: they are to know nothing of each other"
    elif top in THIRD_PARTY:
        if path.relative_to(PACKAGE).as_posix() not in THIRD_PARTY[top]:
            yield f"imports {top}, which only {', '.join(THIRD_PARTY[top])} may"
    elif top not in sys.stdlib_module_names and not (here == "testing" and top in TEST_KIT):
        yield f"imports {top}, which is not a dependency"
    if name in ("os.environ", "os.environb", "os.getenv"):
        yield f"imports {name}: no module reads the environment"
    if here == "learner" and top in ("asyncio", "threading", "socket"):
        yield f"imports {top}: the learner does no I/O and knows no event loop"


@every_file
def test_imports_point_down(path: Path) -> None:
    assert part_of(path) in LAYERS, f"give {part_of(path)} its place in LAYERS"
    tree = ast.parse(path.read_text("utf-8"))
    assert [f for name in imported_names(tree) for f in faults_of_import(path, name)] == []


@pytest.mark.parametrize(
    ("here", "code", "fault"),
    [
        ("exchange/records.py", "from gradientmail.algorithm import merge", "not below it"),
        ("exchange/records.py", "from gradientmail import algorithm", "not below it"),
        ("exchange/records.py", "import gradientmail.backend.base", "nothing of each other"),
        ("learner.py", "from gradientmail.syncer import Syncer", "not below it"),
        ("syncer.py", "from gradientmail.learner import Learner", "not below it"),
        ("mailbox/memory.py", "import gradientmail", "not below it"),
        ("algorithm/merge.py", "def f():\n    import torch", "only backend/torch_chunks.py"),
        ("backend/__init__.py", "import_module('torch')", "only backend/torch_chunks.py"),
        ("session.py", "import requests", "not a dependency"),
        ("session.py", "from os import environ", "environment"),
        ("learner.py", "import asyncio", "no event loop"),
    ],
)
def test_the_rules_find_what_they_forbid(here: str, code: str, fault: str) -> None:
    names = list(imported_names(ast.parse(code)))
    found = [f for name in names for f in faults_of_import(PACKAGE / here, name)]
    assert len(found) == 1
    assert fault in found[0]


@every_file
def test_no_module_reads_the_environment(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    reads = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
    ]
    assert reads == [], f"lines {reads}"


@every_file
def test_names_say_what_a_thing_is(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    names = [path.stem] + [node.name for node in ast.walk(tree) if isinstance(node, kinds)]
    pieces = {name: set(re.findall(r"[A-Z]?[a-z]+", name)) for name in names}
    assert [name for name in names if VAGUE & {piece.lower() for piece in pieces[name]}] == []


@every_file
def test_files_and_functions_are_small(path: Path) -> None:
    source = path.read_text("utf-8")
    assert len(source.splitlines()) <= MAX_FILE_LINES
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert long == []


def test_import_loads_no_framework() -> None:
    code = (
        "import sys, gradientmail as gm\n"
        "gm.MemoryMailbox(), gm.DiLoCo(100, 8)\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(shown.stdout.split())
    assert "gradientmail" in loaded
    assert loaded & {"torch", "numpy", "mlx", "boto3", "botocore", "zstandard"} == set()
