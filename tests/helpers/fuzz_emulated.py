"""Random calls on the Hopper kernels without a GPU (gluon_on_cpu): calls and oracle of fuzz_kernels.py. Usage::

* `python tests/helpers/fuzz_emulated.py --minutes 30`: about one call per second and core.
* `python tests/helpers/fuzz_emulated.py --seed 7 --only 1234`: one call again, with the errors of all tensors.

The calls are those that a GPU draws, in bfloat16, too, but shorter. Calls that the kernels refuse are left out. Races
and deadlocks are failures, as errors outside the budget are. Every failure is a line with the options that repeat it,
here and in fuzz_kernels.py on a GPU.
"""

import functools
import itertools
import os
import sys
import time
from collections.abc import Sequence

if __name__ == "__main__":  # before anything imports triton
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.append(os.path.join(os.path.dirname(__file__), "..", "..", "experiments"))

import torch
from hopper_problems import emulated
from tools.fuzzing import judge
from tools.fuzzing.draws import draw
from tools.fuzzing.summary import Summary, command, parser_of
from tools.fuzzing.tensors import build

NAMES = ("seed", "longest", "family", "dims", "only")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the calls; the exit status is 1 if anything failed."""
    parser = parser_of(__doc__, calls=1000, longest=200, family=20)
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="the first call")
    parser.add_argument("--dims", nargs=2, type=int, metavar=("D", "D_V"), help="these head dimensions in every call")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    again = functools.partial(command, "tests/helpers/fuzz_emulated.py", options, NAMES)
    began, summary = time.monotonic(), Summary(again, options.only is not None)
    numbers = itertools.count(options.first) if options.only is None else [options.only]
    for number in numbers:
        minutes = (time.monotonic() - began) / 60
        if summary.done == options.calls or (options.minutes is not None and minutes > options.minutes):
            break
        found = run(options.seed, number, options.longest, options.family, options.dims)
        if found is not None:
            call, verdict = found
            print("".join(f"{line}\n" for line in summary.add(number, {"call": call, **vars(verdict)})), end="")
            if summary.done % 100 == 0:
                print(f"{summary.done} calls, {60 * minutes:.0f} s, {summary.failed} failed", flush=True)
    print(summary.text(summary.done, time.monotonic() - began))
    return int(summary.failed > 0)


def run(
    seed: int, number: int, longest: int, family: int, dims: Sequence[int] | None = None
) -> tuple[str, judge.Verdict] | None:
    """(the call, its verdict); None where the kernels do not take it."""
    call = draw(seed, number, longest, True, family, dims)
    if call.family.dtype not in ("float16", "bfloat16"):
        return None
    with emulated(number):
        verdict = judge.judge(build(call, torch.device("cpu")), ["hopper"])
    return None if verdict.refused else (str(call), verdict)


if __name__ == "__main__":
    sys.exit(main())
