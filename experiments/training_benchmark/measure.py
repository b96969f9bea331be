"""Right before fast: every variant's first step beside float64; then tokens per second, in interleaved rounds."""

import contextlib
import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from shared.peers import Absent, reason
from shared.timing import interleaved, sustained_timer
from torch import Tensor, nn

from training_benchmark.model import Decoder, Size
from training_benchmark.variants import IDENTITY, Variant, reference, set_half_lives, trained_half_lives


@dataclass(frozen=True)
class Setting:
    """One training step: batch · length tokens, eager or compiled."""

    size: Size
    batch: int
    length: int
    compiled: bool

    def __str__(self) -> str:
        how = "compiled" if self.compiled else "eager"
        return f"D{self.size.head_dim} B{self.batch} T{self.length} {how}"


class Models:
    """A decoder per variant, all of them on one set of parameters, and one optimiser; the rate is 0, so that every step
    of every variant does the same work on the same weights."""

    def __init__(self, setting: Setting, backend: str, device: str, seed: int):
        self.setting, self.backend, self.device = setting, backend, device
        torch.manual_seed(seed)
        self.base = Decoder(setting.size, lambda size: reference("decay", size)).to(device)
        generator = torch.Generator(device).manual_seed(seed)
        shape = (setting.batch, setting.length + 1)
        self.tokens = torch.randint(setting.size.vocabulary, shape, generator=generator, device=device)
        self.optimizer = torch.optim.AdamW(self.base.parameters(), lr=0.0, fused=device == "cuda")

    def decoder(self, variant: Variant, length: int) -> Decoder:
        """The variant's own modules on the common parameters; raises Absent."""
        return self._tied(lambda size: variant.layer(size, self.backend, length), variant.gates)

    def oracle(self, kind: str, gates: str) -> Decoder:
        """The eager reference of a kind on the common parameters."""
        return self._tied(lambda size: reference(kind, size), gates)

    def _tied(self, attention: Callable[[Size], nn.Module], gates: str) -> Decoder:
        with torch.device(self.device):
            model = Decoder(self.setting.size, attention)
        model.load_state_dict(self.base.state_dict(keep_vars=True), strict=False, assign=True)
        if gates == "trained":
            half_lives = trained_half_lives(self.setting.size.layers, self.setting.size.heads)
            for block, lives in zip(model.blocks, half_lives, strict=True):
                block.attention.decay = copy.deepcopy(block.attention.decay)
                set_half_lives(block.attention, lives)
        return model

    def step(self, model: Decoder, variant: Variant) -> Tensor:
        """Forward, backward and the optimiser's step; the loss."""
        with variant.around():
            with mixed(self.device):
                loss = model(self.tokens)
            loss.backward()
        self.optimizer.step()
        model.zero_grad()
        return loss.detach()


def mixed(device: str) -> Any:
    """bfloat16 autocast on a GPU; float32 elsewhere, where kernels are interpreted."""
    return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else contextlib.nullcontext()


# ----------------------------------------------------------------------------------------------------------- checks

# loss and gradients by parameter
Step = tuple[Tensor, dict[str, Tensor]]
_GROUPS = ("in_proj", "decay", "")  # of parameters, by what their names contain


def check(models: Models, variants: Sequence[Variant], length: int) -> Iterator[tuple[Variant, dict[str, Any]]]:
    """Loss and gradients of every variant's first step on the first `length` tokens, beside float64.

    The errors of gradients are ‖g − g64‖ / ‖g64‖ over groups of parameters. The budget is that of the library: twice
    the error of the eager reference in the same precision, plus eps of that precision.
    """
    tokens = models.tokens[:1, : length + 1]
    eps = torch.finfo(torch.bfloat16 if models.device == "cuda" else torch.float32).eps
    known: dict[tuple[str, str], tuple[Step, Step]] = {}
    for variant in variants:
        if variant.kind == IDENTITY:
            yield variant, {"passed": True}
            continue
        key = (variant.kind, variant.gates)
        if key not in known:
            eager = models.oracle(*key)
            exact = first_step(copy.deepcopy(eager).double(), tokens, contextlib.nullcontext())
            known[key] = exact, first_step(eager, tokens, mixed(models.device))
        exact, eager_found = known[key]
        try:
            with variant.around():
                found = first_step(models.decoder(variant, length), tokens, mixed(models.device))
        except Absent as error:
            yield variant, {"passed": False, "kind": "absent", "reason": str(error)}
            continue
        except Exception as error:  # one that fails must not take the others with it; ours fails the run
            yield variant, {"passed": False, "kind": "failed", "reason": reason(error)}
            continue
        errors, budget = relative_errors(found, exact), relative_errors(eager_found, exact)
        budget = {name: 2 * x + eps for name, x in budget.items()}
        passed = all(errors[name] <= budget[name] for name in errors)
        result = {"passed": passed, "errors": errors, "budget": budget}
        if not passed:
            result |= {"kind": "wrong", "reason": f"first step outside its error budget: {errors}, budget {budget}"}
        yield variant, result


def first_step(model: Decoder, tokens: Tensor, precision: Any) -> Step:
    """(loss, gradients by parameter), in float64."""
    parameters = dict(model.named_parameters())
    with precision:
        loss = model(tokens)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return loss.detach().double(), {name: x.double() for name, x in zip(parameters, gradients, strict=True)}


def relative_errors(found: Step, exact: Step) -> dict[str, float]:
    """|loss − loss64| / loss64, and of every group of gradients ‖g − g64‖ / ‖g64‖."""
    errors = {"loss": float((found[0] - exact[0]).abs() / exact[0])}
    for group in _GROUPS:
        names = [name for name in exact[1] if group in name]
        if names:
            off = torch.stack([(found[1][name] - exact[1][name]).norm() for name in names]).norm()
            errors[group or "all"] = float(off / torch.stack([exact[1][name].norm() for name in names]).norm())
    return errors


# ------------------------------------------------------------------------------------------------------------ clocks


@contextlib.contextmanager
def compiler(compiled: bool) -> Iterator[None]:
    """All variants share the code of a block, and each compiles it anew: more often than the compiler expects. It must
    not give up without a word, and afterwards forgets."""
    import torch._dynamo  # it imports Triton, which reads its environment then

    config = torch._dynamo.config
    limits = {"recompile_limit": 256, "accumulated_recompile_limit": 4096, "fail_on_recompile_limit_hit": compiled}
    try:
        with config.patch(**limits):
            yield
    finally:
        torch._dynamo.reset()


@dataclass
class Timed:
    """A variant in a setting: milliseconds of a step in every round, the most memory, the loss of its step."""

    rounds: list[float]
    peak_bytes: int
    loss: float


def time_rounds(
    models: Models, variants: Sequence[Variant], rounds: int, seconds: float, done: Callable[[str], None]
) -> tuple[dict[str, Timed], dict[str, str]]:
    """(timings by variant, reasons of those that failed)."""
    prepared: dict[str, tuple[Variant, Decoder]] = {}
    timed: dict[str, Timed] = {}
    failed: dict[str, str] = {}
    timer = sustained_timer(seconds)
    for variant in variants:
        try:
            model = models.decoder(variant, models.setting.length)
            if models.setting.compiled:
                model.compile_parts()
            models.step(model, variant)  # compiles
            torch.cuda.reset_peak_memory_stats()
            loss = float(models.step(model, variant))
            timed[variant.name] = Timed([], torch.cuda.max_memory_allocated(), loss)
            prepared[variant.name] = variant, model
        except Exception as error:  # out of memory, say: the others go on
            failed[variant.name] = reason(error)
            models.base.zero_grad()
            torch.cuda.empty_cache()
        done(f"prepared {variant.name}")
    for name in interleaved(prepared, rounds):
        variant, model = prepared[name]
        timed[name].rounds.append(timer(lambda model=model, variant=variant: models.step(model, variant)))
        done(f"timed {name}")
    return timed, failed


def rows(setting: Setting, timed: dict[str, Timed]) -> list[dict[str, Any]]:
    """A row per variant: speed, memory, and the share of the step that is gone without attention."""
    without = timed.get(IDENTITY)
    tokens = setting.batch * setting.length
    found = []
    for name, entry in timed.items():
        ms = statistics.median(entry.rounds)
        shares = [1 - a / b for a, b in zip(without.rounds, entry.rounds, strict=True)] if without else []
        found.append({
            "head_dim": setting.size.head_dim, "batch": setting.batch, "length": setting.length,
            "compiled": setting.compiled, "variant": name, "ms": ms, "ms_range": [min(entry.rounds), max(entry.rounds)],
            "tokens_per_second": tokens / ms * 1e3, "attention_share": statistics.median(shares) if shares else None,
            "peak_bytes": entry.peak_bytes, "loss": entry.loss,
        })
    return found
