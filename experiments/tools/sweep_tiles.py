"""Measure tile shapes of the portable kernels, one kernel at a time: where the numbers in portable/config.py come from.

    python experiments/tools/sweep_tiles.py --kernel FORWARD --head-dim 128 --tiles 64,64,4,3 128,128,8,3

A tile is block_m,block_n,num_warps,num_stages; each is measured with pointers and with TMA descriptors. Kernel times
come from the profiler, in interleaved rounds; the results are checked against the float64 oracle first. Needs a GPU.
"""

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Callable
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from decayattn import decay_attention
from decayattn.backends.portable import config
from decayattn.backends.portable.config import TileConfig
from decayattn.testing import verify_attention

KERNELS = {"FORWARD": "forward_kernel", "KEY_GRADIENTS": "key_gradients", "QUERY_GRADIENTS": "query_gradients"}


def main() -> None:
    arguments = parse_arguments()
    dtype = getattr(torch, arguments.dtype)
    candidates = [
        TileConfig(*map(int, tile.split(",")), descriptors)
        for tile, descriptors in itertools.product(arguments.tiles, (False, True))
    ]
    inputs = random_inputs(arguments.batch, arguments.heads, arguments.length, arguments.head_dim, dtype)
    small = random_inputs(1, 2, 515, arguments.head_dim, dtype)
    times: dict[TileConfig, list[float]] = {}
    for round_number in range(arguments.rounds):
        for tile in candidates:
            if round_number > 0 and tile not in times:
                continue
            with tiles_replaced(arguments.kernel, tile):
                try:
                    if round_number == 0:
                        check(tile, small)
                    milliseconds = kernel_time(KERNELS[arguments.kernel], run_once(inputs))
                except Exception as error:  # a tile that does not fit the GPU is a result, not a failure of the sweep
                    print(f"{describe(tile)}  {type(error).__name__}: {str(error).splitlines()[0][:80]}", flush=True)
                    continue
            times.setdefault(tile, []).append(milliseconds)
    for tile, values in sorted(times.items(), key=lambda item: statistics.median(item[1])):
        print(f"{describe(tile)}  {statistics.median(values):8.3f} ms  [{min(values):.3f}, {max(values):.3f}]")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", choices=KERNELS, default="FORWARD")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tiles", nargs="+", default=["64,64,4,3", "128,64,4,3", "128,128,8,2"], metavar="M,N,W,S")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


def random_inputs(batch: int, heads: int, length: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and log_decay, λ uniform in [−0.02, 0]."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, length, heads, dim, device="cuda", dtype=dtype) for _ in range(3))
    decay_dtype = torch.promote_types(dtype, torch.float32)
    return [q, k, v, -0.02 * torch.rand(batch, length, heads, device="cuda", dtype=decay_dtype)]


def tiles_replaced(kernel: str, tile: TileConfig) -> mock._patch:
    """A context in which the kernel has this tile, whatever it is asked for."""
    original = getattr(config, kernel)
    changed = {field.name: (tile,) * 3 for field in dataclasses.fields(original)}
    return mock.patch.object(config, kernel, dataclasses.replace(original, **changed))


def check(tile: TileConfig, inputs: list[torch.Tensor]) -> None:
    failed = [c for c in verify_attention(*inputs, skip_tolerance=None, backend="triton") if not c.passed]
    if failed:
        raise ArithmeticError(f"outside the error budget: {failed[0]}")


def run_once(inputs: list[torch.Tensor]) -> Callable[[], None]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    grad_out = torch.randn_like(inputs[0])

    def run() -> None:
        torch.autograd.grad(decay_attention(*leaves, skip_tolerance=None, backend="triton"), leaves, grad_out)

    return run


def kernel_time(name: str, run: Callable[[], None], repetitions: int = 5) -> float:
    """Median milliseconds of the kernels with this name over a few runs."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repetitions):
            run()
        torch.cuda.synchronize()
    on_gpu = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return statistics.median(event.device_time for event in on_gpu if name in event.name) / 1e3


def describe(tile: TileConfig) -> str:
    shape = f"{tile.block_m} x {tile.block_n}, {tile.num_warps} warps, {tile.num_stages} stages"
    return f"{shape:36s} {'TMA' if tile.descriptors else 'ptr'}"


if __name__ == "__main__":
    main()
