"""Backends of this machine, the choice for ordinary calls, and reasons against faster ones."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from decayattn.backends import registry
from decayattn.backends.runtime import interpreter
from decayattn.check.text import one_line, row, section, short
from decayattn.problem import AttentionProblem, Inputs


def missing_backends() -> dict[str, str]:
    """Kernel backends that cannot be imported, with the reasons."""
    missing = {}
    for name in registry.KERNELS:
        try:
            found = registry.load(name)
        except Exception as error:
            found = one_line(error)
        if isinstance(found, str):
            missing[name] = found
    return missing


def enable_interpreter(device: torch.device) -> None:
    """Make Triton interpret its kernels on a CPU, if possible. A program may request this before it imports Triton."""
    if device.type == "cpu" and "triton" not in sys.modules and interpreter.fails() is None:
        os.environ.setdefault("TRITON_INTERPRET", "1")


def unchecked_backends(device: torch.device, missing: dict[str, str]) -> dict[str, str]:
    """Kernel backends that cannot be judged here, with the reasons."""
    if (reason := interpreted_on_a_gpu(device)) is not None:
        return dict.fromkeys(registry.KERNELS, reason)
    unchecked = dict(missing)
    for name in registry.KERNELS:
        if name not in missing:
            broken = interpreter.fails() if (name, device.type) == ("triton", "cpu") else None
            # the interpreter takes no bfloat16, "hopper" only 16 bits
            reason = broken or registry.loaded(name).unavailable(torch.float16, device)
            unchecked |= {} if reason is None else {name: reason}
    return unchecked


def interpreted_on_a_gpu(device: torch.device) -> str | None:
    """Fault if a GPU's kernels would be interpreted, or None."""
    triton = sys.modules.get("triton")
    if device.type != "cuda" or triton is None or not triton.knobs.runtime.interpret:
        return None
    return "TRITON_INTERPRET is set: on a GPU, too, Triton would interpret its kernels instead of compiling them"


@dataclass(frozen=True)
class Choice:
    """Backend for an ordinary call, and reasons against faster ones."""

    call: str
    backend: str
    reasons: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class OrdinaryCall:
    name: str
    dtype: torch.dtype
    head_dim: int = 64
    query_length: int = 1024
    key_length: int = 1024
    bias: bool = False
    cache: bool = False  # one new token for a DecayCache

    def choose(self, device: torch.device) -> Choice:
        """Choice of "auto" for this call, causal and with a decay per token."""
        batch, heads = 2, 8
        q, k, v = (
            torch.empty(batch, length, heads, self.head_dim, dtype=self.dtype, device=device)
            for length in (self.query_length, self.key_length, self.key_length)
        )
        log_decay = torch.empty(batch, self.key_length, heads, device=device)
        bias = torch.empty(1, heads, 1, self.key_length, device=device) if self.bias else None
        problem = AttentionProblem.of(q, v, log_decay, None, True, bias=bias)
        inputs = Inputs(q, k, v, log_decay, bias=bias, scale=self.head_dim**-0.5)
        chosen: str = registry.select(problem, "auto")
        if chosen == "auto":
            chosen = "triton" if self.cache else registry.resolve(problem, "auto", inputs)
        names = (*registry.AUTOMATIC, "reference")
        reasons = [f"{name}: {self._why_not(name, problem, inputs)}" for name in names[: names.index(chosen)]]
        return Choice(self.name, chosen, tuple(reasons))

    def _why_not(self, name: str, problem: AttentionProblem, inputs: Inputs) -> str:
        """Reason why "auto" does not choose this backend, which is faster than its choice."""
        loaded = registry.load(name)
        if isinstance(loaded, str):
            return loaded
        if problem.device.type == "cpu" and name == "triton":
            return "on a CPU it can only be interpreted, which is for debugging"
        reason = registry.unavailable(problem, name)
        if reason is None and self.cache:
            return "every cache is decoded by the kernels of triton"
        return reason or loaded.unsupported(problem, inputs) or "it is slower for so few tokens"


def half(device: torch.device) -> torch.dtype:
    """The fast 16-bit dtype of a GPU: bfloat16 from capability 8.0 on, else float16."""
    old = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0)
    return torch.float16 if old else torch.bfloat16


def ordinary_calls(device: torch.device) -> list[OrdinaryCall]:
    dtype = half(device)
    name = short(dtype)
    return [
        OrdinaryCall(f"{name} D64", dtype),
        OrdinaryCall(f"{name} D128", dtype, 128),
        OrdinaryCall(f"{name} D256", dtype, 256),
        OrdinaryCall(f"{name} D64, T 256", dtype, 64, 256, 256),
        OrdinaryCall(f"{name} D64, with a bias", dtype, bias=True),
        OrdinaryCall("float32 D64", torch.float32),
        OrdinaryCall(f"{name} D64, 1 query of 4096 keys", dtype, 64, 1, 4096),
        OrdinaryCall(f"{name} D64, 1 token, DecayCache", dtype, 64, 1, 4096, cache=True),
    ]


def choices(device: torch.device) -> Iterator[Choice]:
    for call in ordinary_calls(device):
        try:
            yield call.choose(device)
        except Exception as error:
            yield Choice(call.name, "", error=one_line(error))


def report(device: torch.device, missing: dict[str, str]) -> list[str]:
    """Print the section and return the faults of the backends."""
    with section('The backend of backend="auto" (B2 H8, T 1024 unless said, causal, decay per token)'):
        wrong = []
        for name, reason in missing.items():
            row(f"{name} cannot be imported: {reason}")
            if importlib.util.find_spec("triton") is not None:
                wrong.append(f"backend {name} cannot be imported: {reason}")
        if (interpreted := interpreted_on_a_gpu(device)) is not None:
            wrong.append(interpreted)
        widths = (max(len(call.name) for call in ordinary_calls(device)), 9)
        before: tuple[str, ...] = ()
        errors: dict[str, str] = {}  # error: the first call that raised it
        for choice in choices(device):
            if choice.error is not None:
                row(choice.call, "ERROR", choice.error, widths=widths)
                errors.setdefault(choice.error, choice.call)
                continue
            same = choice.reasons and choice.reasons == before
            reasons = ["for the same reasons"] if same else [f"not {reason}" for reason in choice.reasons]
            first, *others = reasons or [""]
            row(choice.call, choice.backend, first, widths=widths)
            for reason in others:
                row("", "", reason, widths=widths)
            before = choice.reasons
    return wrong + [f'backend="auto", {call}: {error}' for error, call in errors.items()]
