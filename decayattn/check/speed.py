"""Time of the judged call, compared with PyTorch's scaled_dot_product_attention without a decay."""

import warnings

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

from decayattn import decay_attention
from decayattn.check.calls import Case


def measure(case: Case, device: str) -> list[str]:
    """Text on the forward, and on the forward with all gradients; the reason instead where memory is short."""
    q, k, v, log_decay = case.inputs(torch.device(device))
    leaves = {
        "decayattn": [x.requires_grad_() for x in (q, k, v, log_decay)],
        "SDPA": [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)],
    }

    def forward(name: str) -> Tensor:
        if name == "SDPA":
            q, k, v = leaves[name]
            return scaled_dot_product_attention(q, k, v, is_causal=True)
        return decay_attention(*leaves[name], skip_tolerance=None, return_lse=True)[0]

    def with_gradients(name: str) -> object:
        out = forward(name)
        return torch.autograd.grad(out, leaves[name], torch.ones_like(out))

    def milliseconds(call: object, name: str) -> float:
        timer = Timer("call(name)", globals={"call": call, "name": name})
        timer.timeit(3)  # compiles
        return 1e3 * timer.blocked_autorange(min_run_time=0.2).median

    parts = []
    with torch.cuda.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that SDPA does not choose
        try:
            for title, call in {"forward": forward, "with gradients": with_gradients}.items():
                ours, theirs = (milliseconds(call, name) for name in leaves)
                parts.append(f"{title} {ours:.3f} ms, {theirs / ours:.2f}x the speed of SDPA without decay")
        except torch.cuda.OutOfMemoryError as error:
            parts.append(f"not timed: {str(error).splitlines()[0]}")
    return parts
