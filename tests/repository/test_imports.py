"""Imports between the package's modules, and numbers of arguments of functions.

No module imports one that is above it, each folder knows those below it, and the graph has few levels.
"""

import ast
import functools
from pathlib import Path

import pytest

import decayattn

PACKAGE = Path(decayattn.__file__).parent
# folders of backends/, and what each may import of the others
BELOW = {
    "runtime": set(),
    "tiles": set(),
    "planning": {"runtime", "tiles"},
    "portable": {"planning", "runtime", "tiles"},
    "hopper/common": {"planning", "runtime", "tiles"},
    "hopper/forward": {"hopper/common", "planning", "runtime", "tiles"},
    "hopper/backward": {"hopper/common", "planning", "runtime", "tiles"},
}

# the most levels of a part of the package: modules of the longest chain of imports inside it
LEVELS = {"decayattn.backends": 9, "decayattn.backends.hopper": 8}
# functions of more than 16 arguments: users' keyword arguments; and kernels, because Triton takes
# descriptors and unspecialised integers at the top level only
MANY_ARGUMENTS = {
    "decayattn.backends.hopper.forward.kernel.forward_kernel",
    "decayattn.backends.hopper.backward.kernel.gradients_kernel",
    "decayattn.integrations.transformers.__init__",
    "decayattn.nn.attention.__init__",
    "decayattn.distributed.api.context_parallel_attention",
}


def modules():
    """Names and files."""
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts).removesuffix(".__init__"), file


@functools.cache
def imports(inside_functions=False):
    """Module → those of the package that it imports when it is imported itself, or also when its functions run."""
    files = dict(modules())
    found = {name: set() for name in files}
    for name, file in files.items():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree) if inside_functions else tree.body:
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                named = (f"{node.module}.{alias.name}" for alias in node.names)
                found[name] |= {full if full in files else node.module for full in named} & files.keys() - {name}
    return found


@pytest.mark.parametrize("inside_functions", [False, True])
def test_no_module_imports_itself_by_way_of_others(inside_functions):
    above = imports(inside_functions)
    while above:
        lowest = {name for name, below in above.items() if not below & above.keys()}
        assert lowest, f"in a circle, or above one: {sorted(above)}"
        above = {name: below for name, below in above.items() if name not in lowest}


def levels(part):
    """Map the modules of a part of the package to their levels: 1 if it imports no other of the part."""
    inside = {name: below for name, below in imports().items() if name == part or name.startswith(f"{part}.")}
    found = {}
    while ready := {n for n, below in inside.items() if n not in found and below & inside.keys() <= found.keys()}:
        level = 1 + max(found.values(), default=0)
        found |= dict.fromkeys(ready, level)
    return found


@pytest.mark.parametrize("part", LEVELS)
def test_the_graph_of_imports_has_few_levels(part):
    found = levels(part)
    assert max(found.values()) <= LEVELS[part], sorted(found.items(), key=lambda item: -item[1])


def test_functions_take_few_arguments():
    many = {}
    for name, file in modules():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                arguments = node.args
                count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
                if count > 16:
                    many[f"{name}.{node.name}"] = count
    assert many.keys() <= MANY_ARGUMENTS
    assert max(many.values()) <= 27


def folder(name):
    path = name.removeprefix("decayattn.backends.").replace(".", "/")
    return next((known for known in BELOW if path == known or path.startswith(f"{known}/")), None)


def test_folders_of_the_backends_know_those_below():
    for name, below in imports().items():
        own = folder(name)
        if own is not None:
            others = {folder(other) for other in below} - {own, None}
            assert others <= BELOW[own], f"{name} imports of {sorted(others - BELOW[own])}"


def test_nothing_but_a_backend_imports_its_kernels():
    for name, below in imports().items():
        for backend in ("portable", "hopper"):
            inside = f"decayattn.backends.{backend}"
            if not name.startswith(inside):
                kernels = {other for other in below if other.startswith(f"{inside}.")}
                assert not kernels, f"{name} imports {sorted(kernels)}"
