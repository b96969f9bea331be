"""Where and of what a figure was measured: the machine, the versions, the commit, the command."""

import datetime
import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
# what has to be committed for the commit to name the code that ran
_CODE = ("decayattn", "experiments", "pyproject.toml")
# folders whose content is recorded, and what git does not track in them
_FOLDERS = ("decayattn", "experiments")
_UNTRACKED = re.compile(r"__pycache__|.*\.(pyc|egg-info)")


def provenance(script: str, argv: list[str], commit: str | None = None) -> dict[str, Any]:
    """The machine, the versions, the commit, the code's trees, the command line and the date.

    The commit is the one given, or in the environment variable DECAYATTN_COMMIT: for a copy without git, or whose git
    does not know what was copied. Else it is git's. The trees (folder → tree_id) tell whether the code was that
    commit's. The folder of decayattn is that of the imported package; of this repository where none is imported.
    """
    imported = sys.modules.get("decayattn")
    package = Path(imported.__file__).parent if imported else ROOT / "decayattn"
    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "driver": _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0") if cuda else None,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "python": platform.python_version(),
        **_commit(commit or os.environ.get("DECAYATTN_COMMIT")),
        "trees": {"decayattn": tree_id(package), "experiments": tree_id(ROOT / "experiments")},
        "command": command_line(script, argv),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def commit_of(tree: Path) -> str | None:
    """The commit that is checked out in a folder, with a "+" where its code differs; None where git does not know."""
    head = _run("git", "-C", str(tree), "rev-parse", "HEAD")
    return head and head + "+" * bool(_run("git", "-C", str(tree), "status", "--porcelain", "--", "decayattn"))


def tree_id(folder: Path) -> str:
    """The id of a folder as a git tree: what `git rev-parse COMMIT:folder` prints, if its files are that commit's.

    It is computed from the files, so a copy without git has it, too. What git does not track is left out: __pycache__,
    *.pyc, *.egg-info, and folders whose names begin with a dot.
    """
    return _object_id("tree", _entries(folder)).hex()


def trees_of(commit: str, repository: Path) -> dict[str, str] | None:
    """The trees of a commit as git has them; None where git does not know the commit."""
    listed = _run("git", "-C", str(repository), "ls-tree", "--full-tree", commit, "--", *_FOLDERS)
    return None if listed is None else {line.split()[3]: line.split()[2] for line in listed.splitlines()}


def _entries(folder: Path) -> bytes:
    """The content of a tree object: mode, name and id of every entry, sorted as if names of folders ended with "/"."""
    found = []
    for path in folder.iterdir():
        name = os.fsencode(path.name)
        is_folder = path.is_dir() and not path.is_symlink()
        if _UNTRACKED.fullmatch(path.name) or (is_folder and name.startswith(b".")):
            continue
        if is_folder:
            if entries := _entries(path):  # git has no empty folders
                found.append((name + b"/", b"40000", name, _object_id("tree", entries)))
        elif path.is_symlink():
            found.append((name, b"120000", name, _object_id("blob", os.fsencode(os.readlink(path)))))
        else:
            mode = b"100755" if path.stat().st_mode & 0o100 else b"100644"
            found.append((name, mode, name, _object_id("blob", path.read_bytes())))
    return b"".join(mode + b" " + name + b"\0" + known for _, mode, name, known in sorted(found))


def _object_id(kind: str, content: bytes) -> bytes:
    return hashlib.sha1(f"{kind} {len(content)}\0".encode() + content, usedforsecurity=False).digest()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit(given: str | None) -> dict[str, Any]:
    """commit, and whether the code differs from it; of a commit given by hand nobody knows that (None)."""
    head = None if given else _run("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if head is None:
        return {"commit": given, "dirty": None}
    return {"commit": head, "dirty": bool(_run("git", "-C", str(ROOT), "status", "--porcelain", "--", *_CODE))}


def _run(*command: str) -> str | None:
    """What a command prints; None if it fails or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def command_line(script: str, argv: list[str]) -> str:
    """The command as one types it in the repository; an absolute path, good on one machine only, is cut to its name."""
    short = [re.sub(r"^(--[\w-]+=)?/.*/", r"\1", argument) for argument in argv]
    return shlex.join(["python", script, *short])
