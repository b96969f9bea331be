"""Who imports whom in the package: no module stands above one that imports it, and each folder knows those below it."""

import ast
from pathlib import Path

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


def modules():
    """Names and files."""
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts).removesuffix(".__init__"), file


def imports():
    """Module → those of the package that it imports when it is imported itself."""
    files = dict(modules())
    found = {name: set() for name in files}
    for name, file in files.items():
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                named = (f"{node.module}.{alias.name}" for alias in node.names)
                found[name] |= {full if full in files else node.module for full in named} & files.keys() - {name}
    return found


def test_no_module_imports_itself_by_way_of_others():
    above = imports()
    while above:
        lowest = {name for name, below in above.items() if not below & above.keys()}
        assert lowest, f"in a circle, or above one: {sorted(above)}"
        above = {name: below for name, below in above.items() if name not in lowest}


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
