"""Choice of the backend for a problem. A backend only launches kernels or returns a reason why it cannot."""

import functools
import importlib
from collections.abc import Callable
from typing import Any, Protocol, cast, get_args

import torch
from torch import Tensor

from decayattn import reference
from decayattn.compatibility import assume_constant_result
from decayattn.problem import AttentionProblem, BackendName, GradientRequest, Gradients, Inputs, Precomputed, Saved

# kernel backends: modules that implement Backend
KERNELS = {"triton": "decayattn.backends.portable.backend", "hopper": "decayattn.backends.hopper.backend"}
# candidates of "auto", the fastest first among those that are profitable
AUTOMATIC: tuple[BackendName, ...] = ("hopper", "triton")
# kernel backends that are Decoders; a few new rows do not fill the tiles of "hopper"
DECODERS: tuple[BackendName, ...] = ("triton",)
NAMES = get_args(BackendName)


class Decoder(Protocol):
    """Backend that writes and reads a cache, as the functions of reference, which document the arguments."""

    @property
    def append(self) -> Callable[..., Tensor | None]: ...

    @property
    def decode(self) -> Callable[..., tuple[Tensor, Tensor]]: ...


class Backend(Protocol):
    """Interface of a kernel backend, which only launches.

    Autograd, the gradient of a sink and argument checks belong to the library. Under torch.use_deterministic_algorithms
    gradients repeat bit by bit.
    """

    def unavailable(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """Reason why these kernels cannot run for this dtype on this device, or None."""

    def unsupported(self, problem: AttentionProblem, inputs: Inputs) -> str | None:
        """Reason why these kernels cannot compute this problem with these very tensors, or None."""

    def is_profitable(self, problem: AttentionProblem) -> bool:
        """True if no other backend is known to be faster."""

    def forward(
        self, problem: AttentionProblem, inputs: Inputs, with_lse: bool = False, precomputed: Precomputed | None = None
    ) -> tuple[Tensor, Tensor | None, Saved]:
        """Return out, lse, and the tensors that any backend's backward reads.

        out is (B, T_q, H, D_v). lse is (B, H, T_q), and may be None if not requested; a row without a key has −inf,
        with or without a sink. With a sink, lse is always requested. Parts in `precomputed` need not be computed again.
        """

    def backward(
        self, problem: AttentionProblem, inputs: Inputs, out: Tensor, saved: Saved, d_out: Tensor,
        d_lse: Tensor | None, requested: GradientRequest, dq: Tensor | None = None,
    ) -> Gradients:
        """Return the gradients of q, k, v and a scale per row, and as requested of log_decay and bias.

        dq: buffer for the gradient of q, with a contiguous last dimension and any other strides.
        """


@functools.cache
def load(name: str) -> Any:
    """Return the Backend, or the reason, a str, why it cannot be imported here. This first use imports Triton."""
    try:
        return importlib.import_module(KERNELS[name])
    except ImportError as error:
        if error.name is None or not error.name.startswith("triton"):
            raise
        return f"{error}; install Triton: PyTorch's GPU builds include it, for a CPU run `pip install triton`"


# torch.compile cannot trace an import
@assume_constant_result
def unavailable(name: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Reason why the kernel backend cannot run for this dtype on the device, or None."""
    backend = load(name)
    return backend if isinstance(backend, str) else backend.unavailable(dtype, device)


def check_name(name: str) -> BackendName:
    """Raise for a name that is not a backend's."""
    if name not in NAMES:
        raise ValueError(f"backend: expected one of {', '.join(map(repr, NAMES))}, got {name!r}")
    return cast(BackendName, name)


def select(problem: AttentionProblem, name: str) -> BackendName:
    """Return "reference" or the name for `resolve`, from traceable properties; ValueError for one that cannot run."""
    name, kind = check_name(name), problem.device.type
    if name == "reference" or kind == "meta":
        # meta tensors hold no values: every backend returns the same shapes and dtypes, and nothing runs
        return "reference"
    if name == "auto":
        # on a CPU kernels run only in the interpreter, for debugging: that backend must be named
        candidates = AUTOMATIC if kind == "cuda" else ()
        runs = any(unavailable(kernel, problem.dtype, problem.device) is None for kernel in candidates)
        return name if runs else "reference"
    _refuse(name, unavailable(name, problem.dtype, problem.device))
    return name


def decoder(name: str, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Backend that appends to and reads caches for `name`, as `select` chooses."""
    name = check_name(name)
    if name == "auto":
        candidates = DECODERS if device.type == "cuda" else ()
        name = next((kernel for kernel in candidates if unavailable(kernel, dtype, device) is None), "reference")
    if name == "reference" or device.type == "meta":
        return reference
    reason = unavailable(name, dtype, device)
    if reason is None and name not in DECODERS:
        reason = f"it has no kernels for new tokens over a cache; pass 'auto' or {' or '.join(map(repr, DECODERS))}"
    _refuse(name, reason)
    return load(name)


def _refuse(name: str, reason: str | None) -> None:
    if reason is not None:
        raise ValueError(f"backend: {name!r} cannot take this problem: {reason}")


def resolve(problem: AttentionProblem, name: str, inputs: Inputs) -> Backend:
    """Return the named kernel backend, if it takes these tensors, or for "auto" the first profitable one that does."""
    for backend in _automatic(problem) if name == "auto" else ():
        if not backend.unsupported(problem, inputs):
            return backend
    _refuse(name, unavailable(name, problem.dtype, problem.device) or load(name).unsupported(problem, inputs))
    return load(name)


@functools.lru_cache(256)
def _automatic(problem: AttentionProblem) -> list[Backend]:
    """Candidates of "auto" that run here and that no other backend is known to beat."""
    available = [name for name in AUTOMATIC if unavailable(name, problem.dtype, problem.device) is None]
    return [x for x in map(load, available) if x.is_profitable(problem)]
