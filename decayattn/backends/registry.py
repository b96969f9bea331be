"""Which backend takes a problem. A backend refuses one with a reason, or launches; no more."""

import functools
import importlib
import warnings
from typing import Protocol, cast, get_args

import torch
from torch import Tensor

from decayattn.compatibility import assume_constant_result
from decayattn.problem import AttentionProblem, BackendName, Gradients, Held, Inputs, KeyDecay, Prepared, Saved

# kernel backends, modules that fulfil Backend
KERNELS = {"triton": "decayattn.backends.portable.backend", "hopper": "decayattn.backends.hopper.backend"}
# those that "auto" considers, fastest first where they are profitable
AUTOMATIC: tuple[BackendName, ...] = ("hopper", "triton")
NAMES = get_args(BackendName)
_NOT_DETERMINISTIC = (
    "it has no deterministic backward, which torch.use_deterministic_algorithms asks for; 'triton' has one"
)


class Append(Protocol):
    """New tokens into a cache. reference.append says what the arguments are."""

    def __call__(
        self, held: Held, k: Tensor, v: Tensor, log_decay: Tensor | None, counted: Tensor | None
    ) -> Tensor | None: ...


class Decode(Protocol):
    """Attention of the last T_q tokens of every cache entry: out and lse. reference.decode says what the arguments are.
    """

    def __call__(
        self,
        inputs: Inputs,
        lengths: Tensor,
        *,
        alpha: Tensor | None = None,
        first: Tensor | None = None,
        left: int | None = None,
        longest: int | None = None,
        block_table: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class Decoder(Protocol):
    """What a cache is written and read by: reference, or a backend with kernels for it."""

    @property
    def append(self) -> Append: ...

    @property
    def decode(self) -> Decode: ...


class Backend(Protocol):
    """What a kernel backend is. It only launches: autograd, the gradient of a sink and the checks of arguments are
    the library's."""

    @property
    def DETERMINISTIC(self) -> bool:
        """Whether the backward repeats bit by bit."""

    @property
    def append(self) -> Append | None:
        """New tokens into a cache; None as decode."""

    @property
    def decode(self) -> Decode | None:
        """A few new rows over a cache of keys; None where it has no kernels for them."""

    def unavailable(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """Why these kernels cannot run for this dtype on this device; None if they can."""

    def unsupported(self, problem: AttentionProblem, inputs: Inputs) -> str | None:
        """Why these kernels cannot take this problem with these very tensors; None if they can."""

    def is_profitable(self, problem: AttentionProblem) -> bool:
        """Whether no other backend is known to be faster."""

    def decay_of_keys(self, problem: AttentionProblem, inputs: Inputs) -> KeyDecay:
        """For `forward`s of the same dense keys, with any queries."""

    def forward(
        self, problem: AttentionProblem, inputs: Inputs, with_lse: bool = False, prepared: Prepared | None = None
    ) -> tuple[Tensor, Tensor | None, Saved]:
        """out (B, T_q, H, D_v); lse (B, H, T_q), at least where it is asked for, −inf in a row without a key, sink or
        not; and what any backend's backward reads. With a sink, lse is asked for. What is prepared need not be made.
        """

    def backward(
        self,
        problem: AttentionProblem,
        inputs: Inputs,
        out: Tensor,
        saved: Saved,
        d_out: Tensor,
        d_lse: Tensor | None,
        decay_gradient: bool,
        bias_gradient: bool,
        dq: Tensor | None = None,
    ) -> Gradients:
        """Of q, k, v and a scale per row, and as asked for of log_decay and bias. dq: where that of q goes, with any
        strides but in the last dimension."""


@functools.cache
def load(name: str) -> Backend | str:
    """The backend, or why it cannot be imported here. Triton is imported on this first use, not before."""
    try:
        return cast(Backend, importlib.import_module(KERNELS[name]))
    except ImportError as error:
        if error.name is None or not error.name.startswith("triton"):
            raise
        return f"{error}; PyTorch's builds for GPUs bring it, and for a CPU there is `pip install triton`"


def loaded(name: str) -> Backend:
    """A backend that was found to be there."""
    return load(name)  # type: ignore[return-value]  # a cast would be a call more


def unavailable(problem: AttentionProblem, name: str) -> str | None:
    """Why the kernel backend cannot run for this problem's dtype on its device; None if it can."""
    return _unavailable(name, problem.dtype, problem.device)


# torch.compile cannot trace an import
@assume_constant_result
def _unavailable(name: str, dtype: torch.dtype, device: torch.device) -> str | None:
    backend = load(name)
    return backend if isinstance(backend, str) else backend.unavailable(dtype, device)


@assume_constant_result
def _decodes(name: str) -> bool:
    backend = load(name)
    return not isinstance(backend, str) and backend.decode is not None


def check_name(name: str) -> BackendName:
    """Refuse what is no backend's name."""
    if name not in NAMES:
        raise ValueError(f"backend: expected one of {', '.join(map(repr, NAMES))}, got {name!r}")
    return cast(BackendName, name)


def select(problem: AttentionProblem, name: str) -> BackendName:
    """What runs: "reference", or the name to give to `resolve`; a kernel backend that cannot run here is a ValueError.

    Only what is known of a call before its tensors have addresses is asked: torch.compile traces through this.
    """
    name = check_name(name)
    if name == "reference" or problem.device.type == "meta":
        # meta tensors hold no numbers: what every backend returns has the same shapes and dtypes, and nothing runs
        return "reference"
    if name == "auto":
        # on a CPU the kernels can only be interpreted, which is for debugging: it has to be named
        candidates = AUTOMATIC if problem.device.type == "cuda" else ()
        return name if any(unavailable(problem, kernel) is None for kernel in candidates) else "reference"
    _refuse(name, unavailable(problem, name))
    return name


def decoder(name: str, dtype: torch.dtype, device: torch.device) -> Decoder | None:
    """Who writes and reads a cache under this name, as `select` chooses; None is the reference."""
    name = check_name(name)
    if name == "reference" or device.type == "meta":
        return None
    if name == "auto":
        candidates = _decoding() if device.type == "cuda" else ()
        name = next((kernel for kernel in candidates if _unavailable(kernel, dtype, device) is None), "reference")
        return None if name == "reference" else cast(Decoder, loaded(name))
    reason = _unavailable(name, dtype, device)
    if reason is None and not _decodes(name):
        others = " and ".join(map(repr, _decoding()))
        reason = f"it has no kernels for new tokens over those in a cache; {others} has, and 'auto' takes them"
    _refuse(name, reason)
    return cast(Decoder, loaded(name))


def _refuse(name: str, reason: str | None) -> None:
    if reason is not None:
        raise ValueError(f"backend: {name!r} cannot take this problem: {reason}")


def _decoding() -> tuple[str, ...]:
    return tuple(name for name in AUTOMATIC if _decodes(name))


def resolve(problem: AttentionProblem, name: str, inputs: Inputs, deterministic: bool = False) -> str:
    """The kernel backend that launches: the named one or an error; for "auto" the first that is profitable and takes
    these very tensors.

    deterministic asks for a backward that repeats bit by bit. Where PyTorch shall only warn of one that does not, a
    named backend runs, and warns.
    """
    if name == "auto":
        for kernel in AUTOMATIC:
            if _is_profitable(problem, kernel) and not _objection(problem, kernel, inputs, deterministic):
                return kernel
    only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    _refuse(name, _objection(problem, name, inputs, deterministic and not only_warn))
    if deterministic and not loaded(name).DETERMINISTIC:
        warnings.warn(f"backend: {name!r}: {_NOT_DETERMINISTIC}", stacklevel=2)
    return name


def _is_profitable(problem: AttentionProblem, name: str) -> bool:
    backend = load(name)
    return isinstance(backend, str) or backend.is_profitable(problem)


def _objection(problem: AttentionProblem, name: str, inputs: Inputs, deterministic: bool) -> str | None:
    reason = unavailable(problem, name) or loaded(name).unsupported(problem, inputs)
    if reason is None and deterministic and not loaded(name).DETERMINISTIC:
        reason = _NOT_DETERMINISTIC
    return reason
