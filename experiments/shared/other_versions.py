"""Another version of this package beside the one that is imported, in one process: before and after a change."""

import functools
import importlib
import re
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

NAME = "decayattn_before"


@functools.cache
def load(tree: Path) -> ModuleType:
    """The package of `tree`, a checkout of another commit (git worktree add TREE COMMIT), under a name of its own.

    A copy with the name replaced in every source: two versions may share neither modules nor PyTorch operators.
    One tree per process. Raises FileNotFoundError where there is no package in `tree`.
    """
    if not (tree / "decayattn/__init__.py").is_file():
        raise FileNotFoundError(f"{tree} holds no decayattn/__init__.py")
    assert NAME not in sys.modules, "another tree is loaded"
    # not removed: Triton reads a kernel's source when it is first launched
    folder = Path(tempfile.mkdtemp(prefix=NAME))
    shutil.copytree(tree / "decayattn", folder / NAME, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder / NAME).rglob("*.py"):
        path.write_text(re.sub(r"\bdecayattn\b", NAME, path.read_text()))
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(NAME)
    finally:
        sys.path.remove(str(folder))
