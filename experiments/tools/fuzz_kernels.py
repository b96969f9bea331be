"""Random calls of decay_attention on every kernel backend, held to the error budget. Usage::

    python experiments/tools/fuzz_kernels.py                               # 5,000 calls, as many processes as cores
    python experiments/tools/fuzz_kernels.py --seed 7 --minutes 30 --calls 100000
    python experiments/tools/fuzz_kernels.py --seed 7 --only 1234  # one call again, with the errors of all tensors

A call is drawn from its seed and number over the whole contract: dtypes, head dimensions, groups, lengths, decays with
growth, resets and a gate per direction, windows, sinks, scales, biases, packed and padded sequences, tolerances. Inputs
and gradients have random strides and alignments, large values, and NaN where no kernel may read (fuzzing/draws.py). The
exact result comes from the definition in float64 (fuzzing/oracle.py), the permitted error from the budget of
decayattn.testing.

Every failure is a line with the fault, and the command that repeats it. So is the largest error of a tensor that
passed, if it is more than 0.8 of its budget. The exit status is 1 if there is any failure.
Without a GPU the kernels run in Triton's interpreter, on lengths up to 70; calls in bfloat16 have float16 there.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from tqdm import tqdm

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

from shared import workers
from shared.options import parser_of

from tools.fuzzing import judge
from tools.fuzzing.draws import CALLS_PER_FAMILY, draw
from tools.fuzzing.summary import OPTIONS_OF_ALL, Summary
from tools.fuzzing.tensors import build

SCRIPT, NAMES = "experiments/tools/fuzz_kernels.py", ("seed", "longest", "family", "dims", "only", "backends")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPTIONS = OPTIONS_OF_ALL | {
    "calls": (5000, 100, "number of calls"), "longest": (1000, 70, "longest sequence; part of the draw"),
    "processes": (os.cpu_count(), 1, "processes, all on one GPU"),
    "limit": (300.0, 300.0, "seconds that a call may take, compiling included"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the fuzzer; the exit status is 1 if anything failed."""
    options = parse(sys.argv[1:] if argv is None else argv)
    arguments = (options.seed, options.longest, options.family, options.dims, options.backends)
    began = time.monotonic()
    if options.only is not None:
        numbers: Sequence[int] = [options.only]
        print(draw_here(options.only, *arguments[:-1]))
        results = ((number, fuzz(number, *arguments)[0]) for number in numbers)
    else:
        numbers = range(options.calls)
        families = [numbers[n : n + options.family] for n in range(0, len(numbers), options.family)]
        results = workers.calls(fuzz, arguments, families, options.processes, options.limit)
    summary = Summary(SCRIPT, options, NAMES)
    # a bar on a terminal, else a line a minute
    with tqdm(total=len(numbers), unit="call", mininterval=0.1 if sys.stderr.isatty() else 60) as progress:
        for number, result in results:
            if isinstance(result, Exception):  # the process died, took too long or raised
                kind = {"TimeoutError": "timeout", "ChildProcessError": "crash"}.get(type(result).__name__, "fuzzer")
                call = str(draw_here(number, *arguments[:-1]))
                result = {"call": call, "failures": [(kind, str(result))], "ratios": {}, "cannot_tell": []}
            for line in summary.add(number, result):
                progress.write(line, file=sys.stdout)
            progress.update()
            if options.minutes is not None and time.monotonic() - began > 60 * options.minutes:
                break
        results.close()  # ends the processes
    print(*summary.lines(len(numbers), time.monotonic() - began), sep="\n")
    return int(summary.failed > 0)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = parser_of(__doc__, OPTIONS, cuda)
    parser.add_argument("--dims", nargs=2, type=int, metavar=("D", "D_V"), help="these head dimensions in every call")
    parser.add_argument("--backends", nargs="+", choices=judge.BACKENDS, help="hopper: where it takes a call",
                        default=["triton", *["hopper"] * cuda, "reference"])
    return parser.parse_args(argv)


def draw_here(number: int, seed: int, longest: int, family: int = CALLS_PER_FAMILY, dims: Any = None) -> Any:
    return draw(seed, number, longest, torch.cuda.is_available(), family, dims)


def fuzz(
    number: int, seed: int, longest: int, family: int, dims: Sequence[int] | None, backends: list[str]
) -> tuple[dict[str, Any], bool]:
    """One call: its result, and True if this process can go on."""
    torch.set_num_threads(1)
    call = draw_here(number, seed, longest, family, dims)
    try:
        verdict = judge.judge(build(call, DEVICE), backends)
    except Exception as error:
        # of the fuzzer itself, or a GPU context that is lost
        verdict = judge.Verdict(failures=[("GPU context" if _is_lost() else "fuzzer", judge.described(error))])
    return {"call": str(call), **vars(verdict)}, not _is_lost()


def _is_lost() -> bool:
    """True if the GPU context of this process is unusable."""
    try:
        torch.cuda.synchronize()
    except Exception:
        return torch.cuda.is_available()
    return False


if __name__ == "__main__":
    sys.exit(main())
