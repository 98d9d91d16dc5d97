"""Imports point downwards only (docs/structure.md), wherever in a file they stand."""

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"

# Layer of a module, or of a package and all in it; the longest name counts.
LAYERS = {
    "mars.errors": 0,
    "mars.counter": 0,
    "mars.streams": 1,
    "mars.masks": 1,
    "mars.objective": 1,
    "mars.draft_objective": 1,
    "mars.draft_head": 1,
    "mars.decoding.options": 1,
    "mars.decoding.accept": 1,
    "mars.decoding.clock": 1,
    "mars.decoding.drafts": 1,
    "mars.decoding.forecast": 1,
    "mars.decoding.plan": 1,
    "mars.decoding.planner": 1,
    "mars.decoding.verify": 1,
    "mars.decoding.stop": 1,
    "mars.decoding.sampling": 1,
    "mars.compat": 2,
    "mars.default_model": 2,
    "mars.mask_token": 2,
    "mars.gated": 2,
    "mars.checkpoint": 2,
    "mars.engine": 3,
    "mars.engine.kernels": 2,
    "mars.decoding": 4,
    "mars.data": 4,
    "mars.baselines": 5,
    "mars.evaluation": 5,
    "mars.distill": 5,
    "mars.serving": 5,
    "mars.training": 6,
    "mars.cli": 7,
    "mars.demo": 7,
    "mars.__main__": 8,
    "mars": 8,  # offers names of every layer, imported on first use
}
PURE = {
    "mars.errors": set(),
    "mars.decoding.options": set(),
    "mars.decoding.stop": set(),
    "mars.decoding.drafts": set(),
    "mars.counter": {"torch"},
    "mars.streams": {"torch"},
    "mars.masks": {"torch"},
    "mars.objective": {"torch"},
    "mars.draft_objective": {"torch"},
    "mars.draft_head": {"torch"},
    "mars.decoding.accept": {"torch"},
    "mars.decoding.plan": {"torch"},
    "mars.decoding.verify": {"torch"},
    "mars.decoding.sampling": {"torch"},
}


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {module_name(path): path for path in sorted((SOURCE / "mars").rglob("*.py"))}


def layer(module: str) -> int:
    """Return the layer of a module; only files directly in `mars` must be listed by name."""
    known = [name for name in LAYERS if module == name or module.startswith(name + ".")]
    best = max(known, key=len)
    assert best != "mars" or module == "mars", f"{module} has no layer: add it to LAYERS"
    return LAYERS[best]


def imports(module: str, *, at_import_only: bool = False) -> Iterator[str]:
    """Yield what a module imports, as modules (`from package import module` gives the module).

    With `at_import_only`, only what is imported when the module itself is.
    """
    tree = ast.parse(PATHS[module].read_text())
    skipped = set()
    if at_import_only:
        for node in ast.walk(tree):
            is_lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            is_lazy |= isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            skipped |= {id(inner) for inner in ast.walk(node)} if is_lazy else set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{module}: use absolute imports"
            assert node.level == 0, f"{module}: use absolute imports"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in PATHS else node.module


@pytest.mark.parametrize("module", PATHS)
def test_imports_point_downwards(module):
    upwards = [
        imported
        for imported in imports(module)
        if imported.partition(".")[0] == "mars"
        # The version is the one thing that modules may ask of the package itself.
        and imported != "mars"
        and layer(imported) > layer(module)
    ]
    assert not upwards, f"{module} (layer {layer(module)}) imports {upwards}"


@pytest.mark.parametrize("module", PURE)
def test_cores_know_little(module):
    outside = {imported.partition(".")[0] for imported in imports(module)} - {"mars"}
    assert outside - sys.stdlib_module_names <= PURE[module]


def test_no_module_imports_itself_in_a_circle():
    graph = {
        module: {i for i in imports(module, at_import_only=True) if i in PATHS} for module in PATHS
    }
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_only_the_version_is_taken_from_the_package_itself():
    for module, path in PATHS.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "mars":
                assert [alias.name for alias in node.names] == ["__version__"], module


def test_light_modules_import_nothing_heavy():
    """Otherwise `mars --help` would wait for torch; test_project runs it."""
    for module in PATHS:
        if layer(module) >= LAYERS["mars.cli"] and not module.startswith("mars.demo"):
            roots = {i.partition(".")[0] for i in imports(module, at_import_only=True)}
            assert roots - sys.stdlib_module_names <= {"mars", "typer"}, module
