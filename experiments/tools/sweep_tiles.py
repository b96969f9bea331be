"""Measure tile shapes of the portable kernels, one kernel at a time, as the tables of portable/config.py list them.

    python experiments/tools/sweep_tiles.py --kernel FORWARD --head-dim 128 --tiles 64,64,4,3 128,128,8,3

A tile is block_m,block_n,num_warps,num_stages; each is measured with pointers and with TMA descriptors. Kernel times
come from the profiler, in interleaved rounds; the results are checked against the float64 oracle first. Needs a GPU.
"""

import dataclasses
import itertools
import statistics
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.harness import Case, interleaved
from shared.options import parser_of
from torch.profiler import ProfilerActivity, profile

from decayattn import decay_attention
from decayattn.backends.portable import config
from decayattn.testing import assert_within_budget, verify_attention

KERNELS = {"FORWARD": "forward_kernel", "KEY_GRADIENTS": "key_gradients", "QUERY_GRADIENTS": "query_gradients"}
TILES = ["64,64,4,3", "128,64,4,3", "128,128,8,2"]
OPTIONS = {
    "kernel": ("FORWARD", "FORWARD", "table of portable/config.py", KERNELS),
    "tiles": (TILES, TILES, "block_m,block_n,num_warps,num_stages", str),
    "dtype": ("bfloat16", "bfloat16", "dtype"), "head_dim": (128, 128, "D and D_v"), "rounds": (2, 2, "of all tiles"),
    "batch": (4, 4, "sequences"), "heads": (16, 16, "heads"), "length": (8192, 8192, "tokens"),
}


def main() -> None:
    options = parser_of(__doc__, OPTIONS, torch.cuda.is_available()).parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: it times kernels, so it needs a GPU")
    case = Case(options.batch, options.heads, options.length, options.head_dim, options.dtype, "scalar", -0.01)
    small = dataclasses.replace(case, batch=1, heads=2, length=515).inputs("cuda", 0)
    inputs, original = case.inputs("cuda", 0), getattr(config, options.kernel)
    tiles = [config.TileConfig(*map(int, tile.split(",")), descriptors)
             for tile, descriptors in itertools.product(options.tiles, (False, True))]
    times: dict[config.TileConfig, list[float]] = {tile: [] for tile in tiles}
    for tile in interleaved(tiles, options.rounds):
        if tile not in times:  # it failed
            continue
        everywhere = {field.name: (tile,) * 3 for field in dataclasses.fields(original)}
        with mock.patch.object(config, options.kernel, dataclasses.replace(original, **everywhere)):
            try:
                if not times[tile]:
                    assert_within_budget(verify_attention(**small, skip_tolerance=None, backend="triton"))
                times[tile].append(milliseconds(KERNELS[options.kernel], inputs))
            except Exception as error:  # a tile that does not fit the GPU is a result, not a failure of the sweep
                print(f"{tile}  {type(error).__name__}: {str(error).splitlines()[0][:80]}", flush=True)
                del times[tile]
    for tile, found in sorted(times.items(), key=lambda item: statistics.median(item[1])):
        print(f"{statistics.median(found):8.3f} ms  [{min(found):.3f}, {max(found):.3f}]  {tile}")


def milliseconds(name: str, inputs: dict[str, torch.Tensor], repetitions: int = 5) -> float:
    """Median time of the kernels with this name over a few calls, forward and backward."""
    leaves = {key: x.detach().requires_grad_() for key, x in inputs.items() if key != "grad_out"}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repetitions + 1):
            out = decay_attention(**leaves, skip_tolerance=None, backend="triton")
            torch.autograd.grad(out, list(leaves.values()), inputs["grad_out"])
        torch.cuda.synchronize()
    on_gpu = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return statistics.median(event.device_time for event in on_gpu if name in event.name) / 1e3


if __name__ == "__main__":
    main()
