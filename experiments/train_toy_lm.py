"""Train a small byte-level language model whose only position information is the decay of its attention.

    python experiments/train_toy_lm.py                     # no GPU: about 3 minutes on 2 cores
    python experiments/train_toy_lm.py --decay alibi-learned --data my_texts/
    python experiments/train_toy_lm.py --resume last

Exit status: 0 done; 1 a gradient left its error budget; 2 a wrong option; 130 interrupted, with a checkpoint to resume.
"""

import os
import sys

# before torch is imported: where other processes want the cores too, threads that spin while they wait take 5 to 10
# times as long (60 steps on 2 cores beside three busy processes: 120 to 160 s spinning, 14 to 26 s sleeping)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from toy_lm.config import OptionError, read_config, resolve


def main(arguments: list[str] | None = None) -> int:
    try:
        config = read_config(arguments)
        on_gpu = torch.cuda.is_available() and config.accelerator != "cpu"
        config = resolve(config, on_gpu)
        if not on_gpu:
            # without a GPU the gradient check runs the kernels in Triton's interpreter; Triton reads this when it is
            # imported, by Lightning for example, so nothing that may import it comes before this line
            os.environ.setdefault("TRITON_INTERPRET", "1")
        from toy_lm import run

        return run.run(config)
    except OptionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
