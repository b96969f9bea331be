"""What a call puts on the device, counted by torch.profiler."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

# categories under which the profiler's trace files what the device was asked to do
_LAUNCHES = ("kernel", "gpu_memset", "gpu_memcpy")


def count_launches(call: Callable[[], object]) -> list[str]:
    """Names of everything that one call puts on the device: kernels, memsets and copies."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    names: list[str] = []
    for _ in range(2):  # the first profile of a process may miss launches while the tracer starts
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profile:
            result = call()
            torch.cuda.synchronize()
        del result
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profile.export_chrome_trace(str(path))
            names = launches_in_trace(json.loads(path.read_text()))
    return names


def launches_in_trace(trace: dict) -> list[str]:
    """The device's kernels, memsets and copies of a Chrome trace, in the order of their start."""
    events = [event for event in trace["traceEvents"] if event.get("cat") in _LAUNCHES and event.get("ph") == "X"]
    return [event["name"] for event in sorted(events, key=lambda event: event["ts"])]
