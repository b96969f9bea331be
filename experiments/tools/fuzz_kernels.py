"""Random calls of decay_attention on every kernel backend, held to the error budget. Usage::

    python experiments/tools/fuzz_kernels.py                               # 5,000 calls, as many processes as cores
    python experiments/tools/fuzz_kernels.py --seed 7 --minutes 30 --calls 100000
    python experiments/tools/fuzz_kernels.py --seed 7 --only 1234  # one call again, with the errors of all tensors

A call is drawn from its seed and number over the whole contract: dtypes, head dimensions, groups, lengths, decays with
growth and resets, windows, sinks, scales, biases, packed and padded sequences, tolerances. Inputs and gradients have
random strides and alignments, large values, and NaN where no kernel may read (fuzzing/draws.py). The exact result comes
from the definition in float64 (fuzzing/oracle.py), the permitted error from the budget of decayattn.testing.

Every failure is a line with the fault, and one that repeats it. The largest error of a tensor that passed is one, too,
if it is more than 0.8 of its budget. The exit status is 1 if there is any failure.
Without a GPU the kernels run in Triton's interpreter, on lengths up to 70; calls in bfloat16 have float16 there.
"""

import argparse
import functools
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

from tools.fuzzing import judge
from tools.fuzzing.draws import CALLS_PER_FAMILY, draw
from tools.fuzzing.summary import Summary
from tools.fuzzing.tensors import build

SCRIPT = "experiments/tools/fuzz_kernels.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the fuzzer; the exit status is 1 if anything failed."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv)
    numbers = list(range(options.calls))
    if options.only is not None:
        first = options.only // options.family * options.family if options.after_others else options.only
        numbers = list(range(first, options.only + 1))
    arguments = (options.seed, options.longest, options.family, options.dims, options.backends)
    began = time.monotonic()
    if options.only is not None:
        print(draw_here(options.only, *arguments[:-1]))
        results = ((number, fuzz(number, *arguments)[0]) for number in numbers)
    else:
        families = [numbers[n : n + options.family] for n in range(0, len(numbers), options.family)]
        results = workers.calls(fuzz, arguments, families, options.processes, options.limit)
    summary = Summary(functools.partial(command, options=options), options.only is not None)
    # a bar on a terminal, else a line a minute
    with tqdm(total=len(numbers), unit="call", mininterval=0.1 if sys.stderr.isatty() else 60) as progress:
        for number, result in results:
            for line in summary.add(number, outcome(number, result, options)):
                progress.write(line, file=sys.stdout)
            progress.update()
            if options.minutes is not None and time.monotonic() - began > 60 * options.minutes:
                break
        if options.only is None:
            results.close()  # ends the processes
    seconds = time.monotonic() - began
    print(summary.text(len(numbers), seconds))
    return int(bool(summary.failures))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--calls", type=int, default=5000 if cuda else 100, help="how many calls")
    option("--seed", type=int, default=0, help="what calls are drawn from, with their numbers")
    option("--only", type=int, metavar="NUMBER", help="this call only, in this process")
    option("--after-others", action="store_true", help="with --only: after the calls of its family that come before "
           "it, as in the whole run: for what only shows in a process that has done other things")
    option("--family", type=int, metavar="CALLS", default=CALLS_PER_FAMILY, help="calls that share what kernels are "
           "compiled for: more of them are faster and vary less; part of what is drawn from")
    option("--longest", type=int, default=1000 if cuda else 70, help="longest sequence; part of what is drawn from")
    option("--dims", nargs=2, type=int, metavar=("D", "D_V"), help="these head dimensions in every call")
    option("--processes", type=int, default=os.cpu_count() if cuda else 1, help="processes, all on one GPU")
    option("--backends", nargs="+", choices=judge.BACKENDS, help="default: triton, hopper where it takes a call, and "
           "in two of three calls auto or reference")
    option("--minutes", type=float, help="stop after so long")
    option("--limit", type=float, default=300.0, help="seconds that a call may take, compiling included")
    return parser.parse_args(argv)


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def draw_here(
    number: int, seed: int, longest: int, family: int = CALLS_PER_FAMILY, dims: Sequence[int] | None = None
) -> Any:
    return draw(seed, number, longest, torch.cuda.is_available(), family, dims)


def fuzz(
    number: int, seed: int, longest: int, family: int, dims: Sequence[int] | None, backends: list[str] | None
) -> tuple[dict[str, Any], bool]:
    """One call: its result, and whether this process can go on."""
    torch.set_num_threads(1)
    call = draw_here(number, seed, longest, family, dims)
    if backends is None:
        backends = ["triton", *["hopper"] * torch.cuda.is_available(), *[call.extra] * bool(call.extra)]
    began = time.monotonic()
    result: dict[str, Any] = {"call": str(call)}
    try:
        verdict = judge.judge(build(call, device()), backends)
    except Exception as error:
        # of the fuzzer itself, or a GPU context that is lost
        verdict = judge.Verdict(failures=[("GPU context" if _is_lost() else "fuzzer", judge.described(error))])
    result |= vars(verdict) | {"seconds": time.monotonic() - began}
    return result, not _is_lost()


def _is_lost() -> bool:
    """True if the GPU context of this process is no good any more."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


def outcome(number: int, result: dict[str, Any] | Exception, options: argparse.Namespace) -> dict[str, Any]:
    """A result; that of a call whose process died, took too long or raised is a failure."""
    if not isinstance(result, Exception):
        return result
    what = {"TimeoutError": "timeout", "ChildProcessError": "crash"}.get(type(result).__name__, "fuzzer")
    call = draw_here(number, options.seed, options.longest, options.family, options.dims)
    return {"call": str(call), "failures": [(what, str(result))], "ratios": {}, "cannot_tell": []}


def command(number: int, options: argparse.Namespace) -> str:
    """Command that repeats a call."""
    backends = f" --backends {' '.join(options.backends)}" if options.backends else ""
    shared = f" --family {options.family}" if options.family != CALLS_PER_FAMILY else ""
    if options.dims:
        shared += f" --dims {options.dims[0]} {options.dims[1]}"
    return f"python {SCRIPT} --seed {options.seed} --longest {options.longest}{shared} --only {number}{backends}"


if __name__ == "__main__":
    sys.exit(main())
