"""How the package is built: which way imports run, how long things are, and where TabPFN's insides are known."""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import tabpfn

ROOT = Path(__file__).parents[1]
FOLDERS = ("patches", "calibration", "retrofit", "experiments")
FILES = sorted([*ROOT.glob("*.py"), *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))])

# Each imports itself and what stands before it. What else is in the root is for all, and imports nothing.
LAYERS = (*FOLDERS, "cli")

MOST_LINES, MOST_LINES_OF_A_FUNCTION = 450, 80

# Where TabPFN's insides may be known, and who else may know how to build a network of TabPFN's.
DOORS = ("retrofit/tabpfn_api.py", "patches/tabpfn_v3*.py")
BUILDERS = ("retrofit/hosts.py", "experiments/pretrain.py")
BUILDING = {f"architectures.tabpfn_v3{name}" for name in ("", ".TabPFNV3Config", ".get_architecture")}
PUBLIC = {"TabPFNRegressor", "base.ModelSpecs"}


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def module_of(file: Path) -> str:
    """As what is in it is imported: `retrofit.api`; empty for the package itself."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


MODULES = {module_of(file): file for file in FILES}


def imports(file: Path) -> Iterator[tuple[str, str, ast.AST]]:
    """All of a file's, wherever they stand: (`own` or `tabpfn`, dotted path below that, the node)."""
    package = file.relative_to(ROOT).parts[:-1]
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.ImportFrom):
            at = (*package[: len(package) - node.level + 1],) if node.level else ()
            path = [*at, *(node.module.split(".") if node.module else [])]
            if not node.level:
                top = path.pop(0)
                if top not in ("oretrofit", "tabpfn"):
                    continue
            whose = "tabpfn" if not node.level and top == "tabpfn" else "own"
            for alias in node.names:
                yield whose, ".".join([*path, alias.name]), node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top, _, rest = alias.name.partition(".")
                if top in ("oretrofit", "tabpfn"):
                    yield "own" if top == "oretrofit" else "tabpfn", rest, node


def imported_modules(file: Path) -> set[str]:
    """Which modules of the package a file imports, or imports something of."""
    found = set()
    for whose, path, _ in imports(file):
        if whose == "own":
            found.add(path if path in MODULES else path.rpartition(".")[0])
    return found - {module_of(file)}


def test_imports_are_found():
    """Those under TYPE_CHECKING, in functions, and of a whole module, too."""
    assert {"retrofit.api", "retrofit.ragged.predicting"} <= imported_modules(ROOT / "__init__.py")
    assert {"retrofit.predict_files", "retrofit.terminal", "calibration.variants"} <= imported_modules(ROOT / "cli.py")
    assert {"retrofit.tabpfn_api", "patches.structure"} <= imported_modules(ROOT / "retrofit/ragged/passes.py")


def test_no_circle():
    graph = {module: imported_modules(file) for module, file in MODULES.items()}
    graph.pop("")  # the package itself hands out names of all, when they are asked for
    for imported in graph.values():
        imported.discard("")
    assert all(imported <= graph.keys() for imported in graph.values())
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def layer_of(module: str) -> int:
    first = module.split(".")[0]
    return LAYERS.index(first) if first in LAYERS else -1


def test_imports_run_one_way():
    wrong = [
        f"{module} imports {imported}"
        for module, file in MODULES.items()
        if module != ""
        for imported in imported_modules(file) - {""}
        if layer_of(imported) > layer_of(module)
    ]
    assert not wrong


def test_nobody_takes_names_from_the_package_itself():
    """Its public names are imported when they are asked for: their home would be hidden."""
    assert [name_of(file) for file in FILES if "" in imported_modules(file)] == []


def test_files_are_short():
    lines = {name_of(file): len(file.read_text().splitlines()) for file in FILES}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def is_command(function: ast.FunctionDef) -> bool:
    """Whether it is a command of the command line, whose signature is a list of options."""
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    return any(".command(" in decorator or ".callback(" in decorator for decorator in decorators)


def test_functions_are_short():
    found = {}
    for file in FILES:
        for node in ast.walk(parsed(file)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = node.body[0].lineno if is_command(node) else node.lineno
                if (lines := node.end_lineno - first + 1) > MOST_LINES_OF_A_FUNCTION:
                    found[f"{name_of(file)}: {node.name}"] = lines
    assert found == {}


# ---- TabPFN's insides ----------------------------------------------------------------------------


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(files: list[Path]) -> set[str]:
    """Names with an underscore that some file binds: functions, classes, variables, attributes, parameters."""
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return {name for name in found if is_private(name)}


def strangers() -> list[Path]:
    doors = {file for pattern in DOORS for file in ROOT.glob(pattern)}
    assert len(doors) >= 3
    return [file for file in FILES if file not in doors]


def test_tabpfn_is_imported_through_one_door():
    wrong = []
    for file in strangers():
        allowed = PUBLIC | BUILDING if name_of(file) in BUILDERS else PUBLIC
        wrong += [
            f"{name_of(file)}:{node.lineno} imports tabpfn.{path}"
            for whose, path, node in imports(file)
            if whose == "tabpfn" and path not in allowed
        ]
    assert not wrong


def private_uses(tree: ast.AST, private: set[str], of_tabpfn: set[str]) -> Iterator[str]:
    """Line and text of each use of a private name, or of any name with an underscore of what is TabPFN's."""
    for node in ast.walk(tree):
        name, owner = "", ""
        if isinstance(node, ast.Attribute):
            name, owner = node.attr, ast.unparse(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            if isinstance(node.args[1], ast.Constant):
                name, owner = str(node.args[1].value), ast.unparse(node.args[0])
        if is_private(name) and (name in private or owner.partition(".")[0] in of_tabpfn):
            yield f"{getattr(node, 'lineno', 0)} uses {owner}.{name}"


def test_private_uses_are_found():
    code = "a._x()\nb.c._y = 1\ngetattr(a, '_x')\nself._z\nb.__class__"
    assert sorted(private_uses(ast.parse(code), {"_x"}, {"b"})) == ["1 uses a._x", "2 uses b.c._y", "3 uses a._x"]


def test_private_names_of_tabpfn_are_used_behind_one_door():
    theirs = private_names(sorted(Path(tabpfn.__file__).parent.rglob("*.py")))
    assert {"_initialize_model_variables", "_prepare_model_inputs"} <= theirs
    ours = private_names(FILES)
    wrong = []
    for file in strangers():
        imported = {
            alias.asname or alias.name.partition(".")[0]
            for whose, _, node in imports(file)
            if whose == "tabpfn"
            for alias in node.names
        }
        wrong += [f"{name_of(file)}:{use}" for use in private_uses(parsed(file), theirs - ours, imported)]
    assert not wrong
