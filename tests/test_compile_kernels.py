"""What every machine can know of the kernels on sm_90: that they compile, fit, and keep their products asynchronous."""

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "experiments/compile_kernels.py"


def test_both_backends_compile_for_sm90():
    """One tile per kernel, head dimension, direction and way to lay out sequences; the interpreter, which this process
    may use, compiles none."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    options = ["--head-dims", "64", "128", "--decays", "scalar", "--paths", "TMA", "small", "packed", "decode"]
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *options], env=environment, capture_output=True, text=True, timeout=900,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    for backend, kernels in {
        "hopper": ["forward_kernel", "gradients_kernel"],
        "triton": [
            "forward_kernel",
            "key_gradients_kernel",
            "query_gradients_kernel",
            "gradients_kernel",
            "split_kernel",
        ],
    }.items():
        for dim in (64, 128):
            for kernel in kernels:
                assert re.search(rf"^{backend} +D{dim} .* {kernel} ", run.stdout, re.MULTILINE), (backend, dim, kernel)
