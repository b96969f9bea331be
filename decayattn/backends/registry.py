"""Which backend takes a problem. A backend refuses one with a reason, or launches forward and backward; no more."""

import functools
import importlib
import warnings
from types import ModuleType

import torch
from torch import Tensor

from decayattn.compatibility import assume_constant_result
from decayattn.problem import AttentionProblem

# kernel backends; each is a package with refusal(dtype, device), misfit(problem, q, k, v, scale), forward(...),
# backward(...), DETERMINISTIC, whether that backward repeats bit by bit, and pays(problem), whether no other one is
# known to be faster. What one's forward saves, another's backward can read
KERNELS = {"triton": "decayattn.backends.portable.backend", "hopper": "decayattn.backends.hopper.backend"}
# those that "auto" considers, fastest first where they pay
AUTOMATIC = ("hopper", "triton")
# those that have kernels for a few new rows over a cache of keys
DECODING = ("triton",)
NAMES = ("auto", "reference", *KERNELS)
_NOT_DETERMINISTIC = (
    "it has no deterministic backward, which torch.use_deterministic_algorithms asks for; 'triton' has one"
)


@functools.cache
def load(name: str) -> ModuleType | str:
    """The backend's package, or why it cannot be imported here. Triton is imported on this first use, not before."""
    try:
        return importlib.import_module(KERNELS[name])
    except ImportError as error:
        if error.name is None or not error.name.startswith("triton"):
            raise
        return f"{error}; PyTorch's builds for GPUs bring it, and for a CPU there is `pip install triton`"


def refusal(problem: AttentionProblem, name: str) -> str | None:
    """Why the kernel backend cannot take this problem; None if it can."""
    return _refusal(name, problem.dtype, problem.device)


# torch.compile cannot trace an import
@assume_constant_result
def _refusal(name: str, dtype: torch.dtype, device: torch.device) -> str | None:
    backend = load(name)
    return backend if isinstance(backend, str) else backend.refusal(dtype, device)


def check_name(name: str) -> str:
    """Refuse what is no backend's name."""
    if name not in NAMES:
        raise ValueError(f"backend: expected one of {', '.join(map(repr, NAMES))}, got {name!r}")
    return name


def select(problem: AttentionProblem, name: str, decoding: bool = False) -> str:
    """What runs: "reference", or the name to give to `resolve`; a kernel backend that cannot run here is a ValueError.

    Only what is known of a call before its tensors have addresses is asked: torch.compile traces through this.
    decoding: new rows over a cache of keys.
    """
    if check_name(name) == "reference" or problem.device.type == "meta":
        # meta tensors hold no numbers: what every backend returns has the same shapes and dtypes, and nothing runs
        return "reference"
    if name == "auto":
        # on a CPU the kernels can only be interpreted, which is for debugging: nobody gets that without naming it
        candidates = DECODING if decoding else AUTOMATIC
        candidates = candidates if problem.device.type == "cuda" else ()
        return name if any(refusal(problem, kernel) is None for kernel in candidates) else "reference"
    reason = refusal(problem, name)
    if reason is None and decoding and name not in DECODING:
        reason = "it has no kernels for new tokens over those in a cache; 'triton' has, and 'auto' takes them"
    if reason is not None:
        raise ValueError(f"backend: {name!r} cannot take this problem: {reason}")
    return name


def resolve(
    problem: AttentionProblem, name: str, q: Tensor, k: Tensor, v: Tensor, scale: Tensor | float,
    deterministic: bool = False,
) -> str:  # fmt: skip
    """The kernel backend that launches: the named one or an error; for "auto" the first that pays and takes these very
    tensors.

    deterministic asks for a backward that repeats bit by bit. Where PyTorch shall only warn of one that does not, a
    named backend runs, and warns.
    """
    if name == "auto":
        found = (
            kernel for kernel in AUTOMATIC
            if _pays(problem, kernel) and not _objection(problem, kernel, q, k, v, scale, deterministic)
        )  # fmt: skip
        return next(found)
    only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    reason = _objection(problem, name, q, k, v, scale, deterministic and not only_warn)
    if reason is not None:
        raise ValueError(f"backend: {name!r} cannot take this problem: {reason}")
    if deterministic and not load(name).DETERMINISTIC:
        warnings.warn(f"backend: {name!r}: {_NOT_DETERMINISTIC}", stacklevel=2)
    return name


def _pays(problem: AttentionProblem, name: str) -> bool:
    backend = load(name)
    return isinstance(backend, str) or backend.pays(problem)


def _objection(
    problem: AttentionProblem, name: str, q: Tensor, k: Tensor, v: Tensor, scale: Tensor | float, deterministic: bool
) -> str | None:
    reason = refusal(problem, name) or load(name).misfit(problem, q, k, v, scale)
    if reason is None and deterministic and not load(name).DETERMINISTIC:
        reason = _NOT_DETERMINISTIC
    return reason
