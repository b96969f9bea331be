"""Where and of what a figure was measured: the machine, the versions, the commit, the command."""

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
# what has to be committed for the commit to name the code that ran
_CODE = ("decayattn", "experiments", "pyproject.toml")


def provenance(script: str, argv: list[str], commit: str | None = None) -> dict[str, Any]:
    """The machine, the versions, the commit, the command line and the date.

    The commit is the one given, or in the environment variable DECAYATTN_COMMIT: for a copy without git, or whose git
    does not know what was copied. Else it is git's.
    """
    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "driver": _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0") if cuda else None,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "python": platform.python_version(),
        **_commit(commit or os.environ.get("DECAYATTN_COMMIT")),
        "command": command_line(script, argv),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def commit_of(tree: Path) -> str | None:
    """The commit that is checked out in a folder, with a "+" where its code differs; None where git does not know."""
    head = _run("git", "-C", str(tree), "rev-parse", "HEAD")
    return head and head + "+" * bool(_run("git", "-C", str(tree), "status", "--porcelain", "--", "decayattn"))


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
