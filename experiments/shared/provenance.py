"""Origin of a figure: the machine, the versions, the commit, the code's trees, the command."""

import datetime
import functools
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
# the code that ran: all of it has to be committed, and the trees of these folders are recorded
_CODE, _FOLDERS = ("decayattn", "experiments", "pyproject.toml"), ("decayattn", "experiments")
_UNTRACKED = "__pycache__/\n*.pyc\n*.egg-info\n.*/\n"  # in them


def provenance(script: str, argv: list[str]) -> dict[str, Any]:
    """The machine, the versions, the commit, the code's trees, the command line and the date. decayattn's tree is the
    imported package's. In a copy without git, the environment variable DECAYATTN_COMMIT names the commit."""
    imported = sys.modules.get("decayattn")
    package = Path(imported.__file__).parent if imported else ROOT / "decayattn"
    cuda = torch.cuda.is_available()
    driver = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    commit = os.environ.get("DECAYATTN_COMMIT")
    head = None if commit else _git(ROOT, "rev-parse", "HEAD")
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "driver": _run(*driver) if cuda else None,
        "torch": torch.__version__,
        "triton": next((found.version for found in importlib.metadata.distributions(name="triton")), None),
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "python": platform.python_version(),
        "commit": head or commit,
        # unknown for a commit given by hand
        "dirty": bool(_git(ROOT, "status", "--porcelain", "--", *_CODE)) if head else None,
        "trees": {"decayattn": tree_id(package), "experiments": tree_id(ROOT / "experiments")},
        "command": command_line(script, argv),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def commit_of(tree: Path) -> str | None:
    """The commit that is checked out in a folder, with a "+" where its code differs; None where git does not know."""
    head = _git(tree, "rev-parse", "HEAD")
    return head and head + "+" * bool(_git(tree, "status", "--porcelain", "--", "decayattn"))


@functools.cache  # half a second
def tree_id(folder: Path) -> str | None:
    """The id of a folder's files as a git tree, as of `git rev-parse COMMIT:folder`; None where git is not installed.
    Made in an empty repository, so that a copy without one has it, too."""
    with tempfile.TemporaryDirectory() as repository:
        if _run("git", "init", "--quiet", "--bare", repository) is None:
            return None
        Path(repository, "info/exclude").write_text(_UNTRACKED)
        here = ("-c", "core.compression=0", "--git-dir", repository, "--work-tree", str(folder))
        _run("git", *here, "add", "--all", ".", folder=folder)
        return _run("git", *here, "write-tree", folder=folder)


def trees_of(commit: str, repository: Path) -> dict[str, str] | None:
    """The trees of a commit as git has them; None where git does not know the commit."""
    listed = _git(repository, "ls-tree", "--full-tree", commit, "--", *_FOLDERS)
    return None if listed is None else {line.split()[3]: line.split()[2] for line in listed.splitlines()}


def command_line(script: str, argv: list[str]) -> str:
    """The command as typed in the repository; an absolute path, good on one machine only, is cut to its name."""
    short = [re.sub(r"^(--[\w-]+=)?/.*/", r"\1", argument) for argument in argv]
    return shlex.join(["python", script, *short])


def _git(folder: Path, *arguments: str) -> str | None:
    return _run("git", "-C", str(folder), *arguments)


def _run(*command: str, folder: Path | None = None) -> str | None:
    """Standard output of a command; None if it fails or is not there."""
    environment = dict(os.environ)
    if folder is not None:  # the user's settings of git have no say in an id
        environment = {name: value for name, value in environment.items() if not name.startswith("GIT_")}
        environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20, cwd=folder, env=environment
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
