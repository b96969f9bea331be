"""What tests of scripts share."""

import socket
import subprocess
import sys
import time

import pytest


@pytest.fixture(scope="session")
def processes_that_meet() -> None:
    """Two processes of torch's own add a number over gloo; in a sandbox without a loopback device they never meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = f"""
import datetime, sys, torch
torch.distributed.init_process_group(
    "gloo", init_method="tcp://127.0.0.1:{port}", rank=int(sys.argv[1]), world_size=2,
    timeout=datetime.timedelta(seconds=30),
)
total = torch.ones(1)
torch.distributed.all_reduce(total)
assert total == 2
torch.distributed.destroy_process_group()
"""
    both = [subprocess.Popen([sys.executable, "-c", code, str(rank)], stderr=subprocess.DEVNULL) for rank in range(2)]
    deadline = time.monotonic() + 60
    try:
        met = all(process.wait(max(0, deadline - time.monotonic())) == 0 for process in both)
    except subprocess.TimeoutExpired:
        met = False
    for process in both:
        process.kill()
        process.wait()
    if not met:
        pytest.skip("two processes of this machine cannot reach one another over gloo on 127.0.0.1")
