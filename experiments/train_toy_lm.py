"""Train a small byte-level language model whose only position information is the decay of its attention.

    python experiments/train_toy_lm.py                     # no GPU: 3 to 6 minutes on 2 cores
    python experiments/train_toy_lm.py --decay alibi-learned --data my_texts/
    python experiments/train_toy_lm.py --resume last
    python experiments/train_toy_lm.py --devices 2         # two GPUs, the batch shared between them
    python experiments/train_toy_lm.py --devices 2 --strategy fsdp    # or tensor, or context: experiments/README.md

Exit status: 0 done; 1 a gradient left its error budget; 2 a wrong option; 3 the machine: disk, memory, files, another
process of the run; 4 a loss or gradient is not finite; 5 an error of the program, with its traceback; 130 interrupted
and 143 terminated (SIGINT, SIGTERM): the line that says so tells how to resume.
"""

import os
import sys
import traceback
from typing import NoReturn

# before torch is imported: where other processes want the cores too, threads that spin while they wait take 5 to 10
# times as long (60 steps on 2 cores beside three busy processes: 120 to 160 s spinning, 14 to 26 s sleeping)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from toy_lm.config import BUG, ENVIRONMENT, INTERRUPTED, WRONG_OPTION, OptionError, read_config, resolve


def main(arguments: list[str] | None = None) -> int:
    try:
        config = read_config(arguments)
        gpus = torch.cuda.device_count() if torch.cuda.is_available() and config.accelerator != "cpu" else 0
        config = resolve(config, gpus)
        if not gpus:
            # without a GPU the gradient check runs the kernels in Triton's interpreter; Triton reads this when it is
            # imported, by Lightning for example, so nothing that may import it comes before this line
            os.environ.setdefault("TRITON_INTERPRET", "1")
        from toy_lm import run

        return run.run(config)
    except OptionError as error:
        return _failed(WRONG_OPTION, error)
    except KeyboardInterrupt:
        return _failed(INTERRUPTED, "interrupted")
    except Exception as error:
        if not _is_of_the_machine(error):
            raise
        return _failed(ENVIRONMENT, error)


def _is_of_the_machine(error: Exception) -> bool:
    """Whether disk, memory, files or another process is at fault, and no line of code."""
    distributed = (torch.distributed.DistError,) if torch.distributed.is_available() else ()
    if isinstance(error, (OSError, MemoryError, torch.OutOfMemoryError, *distributed)):
        return True
    # what the allocators of CUDA and of CPUs say in a plain RuntimeError
    said = ("out of memory", "can't allocate memory")
    return isinstance(error, RuntimeError) and any(words in str(error) for words in said)


def _failed(status: int, error: Exception | str) -> int:
    message = " ".join(str(error).split()) or type(error).__name__
    print(f"error: {message}", file=sys.stderr)
    return status


def exit_with_main() -> NoReturn:
    """main() as a process of its own. The status of an error of the program is not Python's, 1, which has a meaning."""
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        status = BUG
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # past the end of the interpreter: of processes that have used DDP over gloo, one in ten aborts there (torch
        # 2.13), and taking down a process group whose other processes are gone may take forever
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    exit_with_main()
