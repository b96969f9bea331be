"""Leave out every wait, arrival and fence of the Hopper kernels, one at a time, and see if that shows. Usage::

    python tests/helpers/leave_out_waits.py                              # everything, on a CPU
    python tests/helpers/leave_out_waits.py --directions backward --head-dims 64

Without one of them, the kernels run several problems on a CPU (gluon_on_cpu) in several orders of their warps. There
has to be a race, a deadlock, or another result than before. An omission without effect is printed with its line. That
line may serve speed alone, or be done by the compiler as well, or matter to single warps of a warpgroup, which here run
in step.
"""

import argparse
import collections
import contextlib
import functools
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":  # before anything imports triton; the tests that import this know where they run
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from gluon_on_cpu import language, machine
from hopper_problems import MIXED, emulated, make, make_packed, row_scales

from decayattn import decay_attention, decay_attention_varlen
from decayattn.backends.hopper import backend as hopper

KERNELS = Path(inspect.getfile(hopper)).parent
# files with functions that a site distinguishes by their callers
SHARED = ("common/pipelines.py", "forward/shared.py", "backward/shared.py")
# in which order warps and copies take turns
SEEDS = range(4)
WAITS = [
    (language.mbarrier, "wait"),
    (language.mbarrier, "arrive"),
    (language.mbarrier, "expect"),
    (language.gluon_compat, "thread_barrier"),
    (language.tma, "store_wait"),
    (machine.Warps, "wait_for_products"),
    (machine.Warps, "fence"),
]
# (file, line) of a call, and of its callers if needed
Site = tuple[tuple[str, int], ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directions", nargs="+", choices=["forward", "backward"], default=["forward", "backward"])
    parser.add_argument("--head-dims", nargs="+", type=int, choices=[64, 128, 192, 256], default=[64, 128, 192, 256])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for direction in options.directions:
        for dim in options.head_dims:
            report(direction, dim)


def report(direction: str, dim: int) -> None:
    expected = {(name, seed): results(direction, *problem, seed) for (name, problem, seed) in runs(dim)}
    sites = sorted(calls(lambda: [results(direction, *problem, seed) for (_, problem, seed) in runs(dim)], direction))
    noticed = 0
    for number, site in enumerate(sites, 1):
        with without(site):
            what = first_difference(direction, dim, expected)
        noticed += what is not None
        print(f"{direction} D{dim} {number}/{len(sites)} {what or 'NOT NOTICED'}: {text(site)}", flush=True)
    print(f"{direction} D{dim}: {noticed} of {len(sites)} noticed", flush=True)


def first_difference(direction: str, dim: int, expected: dict) -> str | None:
    for name, problem, seed in runs(dim):
        try:
            got = results(direction, *problem, seed)
        except Exception as error:
            return type(error).__name__
        if not all(torch.allclose(a, b, rtol=0.02, atol=0.02) for a, b in zip(got, expected[name, seed], strict=True)):
            return "other results"
    return None


def runs(dim: int) -> Iterator[tuple[str, tuple[dict, dict], int]]:
    for seed in SEEDS:
        for name, problem in problems(dim).items():
            yield name, problem, seed


@functools.cache
def problems(dim: int) -> dict[str, tuple[dict, dict]]:
    """Inputs and options."""
    torch.manual_seed(0)
    resets = make(700, batch=1, heads=2, dim=dim)
    resets["log_decay"][:, [350, 420, 600]] = -torch.inf
    packed = make_packed(*MIXED, heads=2, dim=dim, outside=0)
    packed = {name: x.nan_to_num() if x.is_floating_point() else x for name, x in packed.items()}
    scaled = make(450, batch=1, heads=2, dim=dim)
    wide = {}
    if dim == 256:  # two tiles of dO are in flight then
        wide["few columns of v"] = make(450, batch=1, heads=2, dim=dim, value_dim=128), {}
    return {
        "scalar": (make(450, batch=1, heads=3, dim=dim), {}),
        "both sides": (make(300, batch=1, heads=2, dim=dim, decay="constant"), dict(causal=False)),
        "none": (make(400, batch=1, heads=2, dim=dim, decay="none"), {}),
        "packed": (packed, dict(max_seqlen_q=300, max_seqlen_k=333)),
        "resets": (resets, {}),
        "scales of rows": (scaled, dict(scale=row_scales(scaled))),
        **wide,
    }


def results(direction: str, inputs: dict, options: dict, seed: int) -> list[torch.Tensor]:
    given = {name: x for name, x in inputs.items() if x is not None}
    leaves = {name: x.detach().requires_grad_() for name, x in given.items() if x.is_floating_point()}
    function = decay_attention_varlen if "cu_seqlens_q" in inputs else decay_attention
    with emulated(seed, programs=2):
        found = list(function(**inputs | leaves, **options, return_lse=True, backend="hopper"))
        if direction == "backward":
            torch.manual_seed(1)
            found = list(torch.autograd.grad(found[0], list(leaves.values()), torch.randn_like(found[0])))
    return [x.detach().float() for x in found]


# Calls, and calls that are left out


def site_of(frame: Any) -> Site:
    site = []
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(KERNELS):
            name = str(file.relative_to(KERNELS))
            site.append((name, frame.f_lineno))
            if name not in SHARED:
                break
        frame = frame.f_back
    return tuple(site)


def intercepted(decide: Callable[[Site], bool]) -> contextlib.ExitStack:
    """Calls of WAITS go through where `decide` returns True."""
    stack = contextlib.ExitStack()
    for owner, name in WAITS:
        original = getattr(owner, name)

        def call(*args, original=original, **kwargs):
            return original(*args, **kwargs) if decide(site_of(sys._getframe(1))) else None

        stack.enter_context(mock.patch.object(owner, name, call))
    return stack


def calls(run: Callable[[], Any], direction: str) -> set[Site]:
    found = collections.Counter()
    with intercepted(lambda site: found.update([site]) or True):
        run()
    return {site for site in found if site and site[-1][0].startswith(f"{direction}/")}


def without(left_out: Site) -> contextlib.ExitStack:
    return intercepted(lambda site: site != left_out)


def text(site: Site) -> str:
    return " < ".join(f"{file}:{line} {linecache.getline(str(KERNELS / file), line).strip()}" for file, line in site)


if __name__ == "__main__":
    main()
