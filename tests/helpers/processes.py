"""Python in a process of its own."""

import os
import subprocess
import sys


def run_python(*arguments, without=(), cwd=None, **environment):
    """Output of a process that ends well. without: how variables begin that it does not inherit."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(without)}
    run = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=inherited | environment, capture_output=True, text=True, timeout=900,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
