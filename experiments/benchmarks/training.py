"""Tokens per second of training a 124 M decoder with several attentions, or on several GPUs; correct first. Usage::

    python experiments/benchmarks/training.py                        # all of it on a GPU: about 20 minutes
    python experiments/benchmarks/training.py --minutes 9 --compiled-lengths         # eager alone, as much as fits
    python experiments/benchmarks/training.py --lengths --head-dims 64               # then the rest, into the same file
    python experiments/benchmarks/training.py --strategies all       # on two GPUs: 7 runs of the toy LM, 18 minutes

Every variant steps on the same parameters and the same tokens. Its first step is held against float64 before it is
timed: loss and gradients may be off by twice the error of the eager reference in the same precision, plus eps. Steps
follow one another for --seconds. A setting (head dimension, length, eager or compiled) is done or not: --output keeps
those that are. attention_share is 1 − the time of the same step with v for attention and decay, over that of the step.

--strategies runs train_toy_lm.py as a user starts it, once per strategy: the same weights, bytes and total batch, its
gradients checked against one process first and last. "one again" repeats "one": atomic additions have no fixed order,
and the difference of the two is noise. Speeds are of the median step between validations, without the first stretch;
losses are differences of the mean training loss from that of one device.
"""

import argparse
import contextlib
import copy
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# in this process: the pool of processes that compiles for FlexAttention has hung for good (torch 2.11)
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from shared.options import above_zero
from shared.provenance import ROOT
from shared.workers import in_time
from toy_lm.model import NORM_EPS, Block, mean_loss

from benchmarks import harness, peers
from benchmarks.harness import Absent, Case, Run, Timings, in_layout, spread
from decayattn import DecayFlashAttention
from decayattn.backends import registry
from decayattn.nn import Rotary

OPTIONS = {
    "variants": (["all"], ["all"], "attentions", str),
    "head_dims": ([64, 128], [16], "head dimensions"),
    "lengths": ([8192, 2048, 32768], [70], "tokens of context, eager"),
    "compiled_lengths": ([8192], [], "tokens of context, compiled"),
    "tokens": (32768, 70, "tokens of a step: B = max(1, tokens // T)"),
    "layers": (12, 2, "layers"),
    "width": (768, 32, "width"),
    "vocabulary": (50_304, 64, "tokens"),
    "check_length": (1024, 70, "tokens of the first step that is held against float64"),
    "backend": ("auto", "triton", "our backend", registry.NAMES),
    "seconds": (0.5, 0.5, "time of one figure"),
    "minutes": (None, None, "begin no setting that would end later; None: all of them", above_zero),
    "rounds": (3, 3, "interleaved rounds"),
    "strategies": ([], [], "instead, the toy LM on several devices: all, or names of strategies", str),
    "devices": (max(1, torch.cuda.device_count()), 2, "GPUs, or processes on a CPU, of the strategies"),
    "more": (None, None, "further options of train_toy_lm.py, as in --more='--decay alibi'", str.split),
    "output": harness.output("benchmark_training.json"),
}
# options that all settings of a report share
SETUP = ("tokens", "layers", "width", "vocabulary", "check_length", "backend", "rounds", "seconds", "seed")
IDENTITY, BASELINE = "identity", "cudnn-rotary"


def check_options(options: argparse.Namespace, cuda: bool) -> Iterator[str]:
    for head_dim in options.head_dims:
        if options.width % head_dim or head_dim % 2:
            yield f"--head-dims: expected even divisors of the width, {options.width}, got {head_dim}"
    for option, known in (("variants", VARIANTS), ("strategies", STRATEGIES)):
        if getattr(options, option) == ["all"]:
            setattr(options, option, list(known))
        for name in set(getattr(options, option)) - known.keys():
            yield f"--{option}: expected all, or some of {', '.join(known)}, got {name}"
    if options.strategies and options.output == OPTIONS["output"][0]:
        options.output = ROOT / "results/benchmark_strategies.json"


def measure(run: Run) -> None:
    """Every setting that is not in the report yet, as far as the minutes reach."""
    options = run.options
    if options.strategies:
        return measure_strategies(run)
    run.report["variants"] = {name: variant.label for name, variant in VARIANTS.items()}
    run.resume(**{name: getattr(options, name) for name in SETUP})
    settings = [
        Setting(options.layers, options.width, head_dim, options.vocabulary, max(1, options.tokens // length), length,
                compiled)
        for compiled, lengths in ((False, options.lengths), (True, options.compiled_lengths))
        for length in lengths for head_dim in options.head_dims
    ]
    known = {setting_of(row) for row in run.report["rows"]}
    for setting in in_time([s for s in settings if setting_of(s._asdict()) not in known], options.minutes):
        print(f"\n{setting}", flush=True)
        for part in ("missing", "checks"):  # of an earlier call that was cut off
            run.report[part] = [entry for entry in run.report[part] if entry["setting"] != str(setting)]
        models = Models(setting, options.backend, run.device, options.seed)
        passed = list(check(models, run))
        if run.timed:
            torch.cuda.empty_cache()
            with compiler(setting.compiled):
                found = list(rows(setting, *time_rounds(models, passed, run)))
            run.add(found, "{variant}", ("tokens_per_second", "ms", "attention_share", "peak_bytes"))
        run.save()


def setting_of(row: dict[str, Any]) -> tuple[int, int, bool]:
    return row["head_dim"], row["length"], row["compiled"]


class Setting(NamedTuple):
    """One training step: batch · length tokens, eager or compiled; 85 M of the 124 M parameters are in blocks."""

    layers: int
    width: int
    head_dim: int
    vocabulary: int
    batch: int
    length: int
    compiled: bool = False

    @property
    def heads(self) -> int:
        return self.width // self.head_dim

    def __str__(self) -> str:
        return f"D{self.head_dim} B{self.batch} T{self.length} {'compiled' if self.compiled else 'eager'}"


class Decoder(nn.Module):
    """The toy model's blocks, tied embeddings, no position embedding of its own. attention() makes the layer of a
    block, with the parameters of a DecayFlashAttention."""

    def __init__(self, setting: Setting, attention: Callable[[], nn.Module]):
        super().__init__()
        self.embedding = nn.Embedding(setting.vocabulary, setting.width)
        self.blocks = nn.ModuleList(Block(setting.width, attention()) for _ in range(setting.layers))
        self.norm = nn.RMSNorm(setting.width, eps=NORM_EPS)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy, in nats, of every next token of (B, T + 1)."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return self.loss(x, tokens[:, 1:])

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return mean_loss(F.linear(self.norm(x), self.embedding.weight), targets)


def ours(setting: Setting, backend: str, kind: str, skip_tolerance: str | None = "auto") -> nn.Module:
    return DecayFlashAttention(
        setting.width, setting.heads, decay="scalar" if kind == "decay" else "none", skip_tolerance=skip_tolerance,
        position=Rotary() if kind == "rotary" else None, backend=backend,
    )


class OtherAttention(nn.Module):
    """Projections, decay and position as ours of that kind has them, with another kernel between them.

    attend(q, k, v, log_decay): q, k, v (B, T, H, D), log_decay (B, T, H) or None -> (B, T, H, D).
    """

    def __init__(self, setting: Setting, attend: Callable[..., Tensor], kind: str = "none"):
        super().__init__()
        own = ours(setting, "reference", kind)
        self.in_proj, self.out_proj, self.decay, self.position = own.in_proj, own.out_proj, own.decay, own.position
        self.shape, self.attend = (setting.heads, setting.head_dim), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, self.shape) for part in self.in_proj(x).chunk(3, dim=-1))
        if self.position is not None:
            q, k = self.position(q, k)
        out = self.attend(q, k, v, None if self.decay is None else self.decay(x))
        return self.out_proj(out.flatten(-2))


def sdpa(setting: Setting, backend: str, kind: str) -> nn.Module:
    def attend(q: Tensor, k: Tensor, v: Tensor, log_decay: None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return OtherAttention(setting, attend, kind)


def other(setting: Setting, backend: str, kind: str, peer: peers.Peer) -> nn.Module:
    if not torch.cuda.is_available():
        raise Absent("needs a GPU")
    return OtherAttention(setting, _attend(setting, peer), kind)


@functools.lru_cache(maxsize=1)  # one for all layers
def _attend(setting: Setting, peer: peers.Peer) -> Callable[..., Tensor]:
    case = Case(1, setting.heads, setting.length, setting.head_dim, "bfloat16", "scalar", -0.01)
    kernel = peer.build(case, torch.device("cuda"))
    if peer.name.startswith("fox"):  # not traced: Inductor compiles its Triton kernels again, and fails
        kernel = torch.compiler.disable(kernel)
    return lambda *tensors: in_layout(kernel(*(in_layout(x, peer.layout) for x in tensors)), peer.layout)


class Variant(NamedTuple):
    """One attention. `kind`: "decay", "rotary", "none", or "identity" without attention, which is not checked.

    layer(setting, backend, kind), the backend being that of ours, makes it or raises Absent.
    """

    label: str
    kind: str
    layer: Callable[[Setting, str, str], nn.Module]


def _other(label: str, peer: peers.Peer) -> Variant:
    return Variant(label, "decay", functools.partial(other, peer=peer))


VARIANTS = {
    "ours": Variant("decayattn, decay", "decay", ours),
    "ours-whole": Variant("decayattn, decay, nothing skipped", "decay", functools.partial(ours, skip_tolerance=None)),
    "ours-rotary": Variant("decayattn, rotary, no decay", "rotary", ours),
    BASELINE: Variant("cuDNN (SDPA), rotary, no decay", "rotary", sdpa),
    "cudnn": Variant("cuDNN (SDPA), no position, no decay", "none", sdpa),
    "flex": _other("FlexAttention, decay", peers.OTHERS["flex-grad"]),
    "fla": _other("flash-linear-attention, decay", peers.OTHERS["fla"]),
    "fox": _other("Forgetting Transformer, decay", peers.OTHERS["fox"]),
    "fox-pruned": _other("Forgetting Transformer, decay, pruned", peers.PRUNED),
    IDENTITY: Variant("no attention (its output is v)", IDENTITY,
                      lambda setting, *_: OtherAttention(setting, lambda q, k, v, log_decay: v)),
}


class Models:
    """A decoder per variant, all of them on one set of parameters, and one optimiser; the rate is 0, so that every step
    of every variant does the same work on the same weights."""

    def __init__(self, setting: Setting, backend: str, device: str, seed: int):
        self.setting, self.backend, self.device = setting, backend, device
        torch.manual_seed(seed)
        self.base = Decoder(setting, lambda: ours(setting, "reference", "decay")).to(device)
        generator = torch.Generator(device).manual_seed(seed)
        shape = (setting.batch, setting.length + 1)
        self.tokens = torch.randint(setting.vocabulary, shape, generator=generator, device=device)
        self.optimizer = torch.optim.AdamW(self.base.parameters(), lr=0.0, fused=device == "cuda")

    def where(self, name: str) -> dict[str, Any]:
        """Place of a variant in a report."""
        return {"ours": name.startswith("ours"), "setting": str(self.setting), "variant": name}

    def decoder(self, name: str, length: int) -> Decoder:
        """The variant's own modules on the common parameters; raises Absent."""
        setting, variant = self.setting._replace(length=length), VARIANTS[name]
        return self.tied(lambda: variant.layer(setting, self.backend, variant.kind))

    def tied(self, attention: Callable[[], nn.Module]) -> Decoder:
        with torch.device(self.device):
            model = Decoder(self.setting, attention)
        model.load_state_dict(self.base.state_dict(keep_vars=True), strict=False, assign=True)
        return model

    def step(self, model: Decoder) -> Tensor:
        """Forward, backward and the optimiser's step; the loss."""
        with cudnn():
            with mixed(self.device):
                loss = model(self.tokens)
            loss.backward()
        self.optimizer.step()
        model.zero_grad()
        return loss.detach()


def cudnn() -> Any:
    """SDPA by cuDNN; on a CPU by the formula."""
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION if torch.cuda.is_available() else SDPBackend.MATH)


def mixed(device: str) -> Any:
    """bfloat16 autocast on a GPU; float32 elsewhere, where kernels are interpreted."""
    return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else contextlib.nullcontext()


# loss and gradients by parameter, in float64
Step = tuple[Tensor, dict[str, Tensor]]
_GROUPS = ("in_proj", "decay", "")  # of parameters, by what their names contain


def check(models: Models, run: Run) -> Iterator[str]:
    """The variants with a right first step, against float64. The errors of gradients are ‖g − g64‖ / ‖g64‖ over groups
    of parameters; the budget is twice the eager reference's in the same precision, plus its eps."""
    length = min(run.options.check_length, models.setting.length)
    tokens, precision = models.tokens[:1, : length + 1], mixed(models.device)
    eps = torch.finfo(torch.bfloat16 if models.device == "cuda" else torch.float32).eps
    known: dict[str, tuple[Step, dict[str, float]]] = {}
    for name in run.options.variants:
        kind, where = VARIANTS[name].kind, models.where(name)
        if kind == IDENTITY:
            yield name
            continue
        if kind not in known:
            eager = models.tied(functools.partial(ours, models.setting, "reference", kind))
            exact = first_step(copy.deepcopy(eager).double(), tokens, contextlib.nullcontext())
            of_eager = relative_errors(first_step(eager, tokens, precision), exact)
            known[kind] = exact, {group: 2 * x + eps for group, x in of_eager.items()}
        exact, budget = known[kind]
        with run.attempt(**where):
            with cudnn():
                errors = relative_errors(first_step(models.decoder(name, length), tokens, precision), exact)
            lines = [f"{group}: relative error {x:.1e} of {budget[group]:.1e}" for group, x in errors.items()]
            if run.right([group for group, x in errors.items() if not x <= budget[group]], lines, **where):
                yield name


def first_step(model: Decoder, tokens: Tensor, precision: Any) -> Step:
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
            off = nn.utils.get_total_norm([found[1][name] - exact[1][name] for name in names])
            errors[group or "all"] = float(off / nn.utils.get_total_norm([exact[1][name] for name in names]))
    return errors


@contextlib.contextmanager
def compiler(compiled: bool) -> Iterator[None]:
    """All variants share the code of a block, and each compiles it again, more often than the compiler expects. It
    raises where it would give up, and afterwards forgets."""
    import torch._dynamo  # it imports Triton, which reads its environment then

    limits = {"recompile_limit": 256, "accumulated_recompile_limit": 4096, "fail_on_recompile_limit_hit": compiled}
    try:
        with torch._dynamo.config.patch(**limits):
            yield
    finally:
        torch._dynamo.reset()


def time_rounds(models: Models, variants: Sequence[str], run: Run) -> tuple[Timings, dict[str, dict[str, Any]]]:
    """(milliseconds of a step, the most memory and the loss) of the variants that do not fail."""
    calls, first = {}, {}
    for name in variants:
        with run.attempt(**models.where(name)):
            model = models.decoder(name, models.setting.length)
            if models.setting.compiled:
                for block in model.blocks:  # compiled once for all layers
                    block.compile(dynamic=False)
                model.loss = torch.compile(model.loss, dynamic=False)
            step = functools.partial(models.step, model)
            step()  # compiles
            torch.cuda.reset_peak_memory_stats()
            loss = float(step())
            first[name] = {"peak_bytes": torch.cuda.max_memory_allocated(), "loss": loss}
            calls[name] = lambda step=step: [("step", step)]
        if name not in calls:  # out of memory, say
            models.base.zero_grad()
            torch.cuda.empty_cache()
    return run.time(calls, harness.sustained_timer(run.options.seconds)), first


def rows(setting: Setting, timings: Timings, first: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row per variant: speed, memory, and the share of the step that is gone without attention."""
    without, tokens = timings.get((IDENTITY, "step")), setting.batch * setting.length
    for (name, _), rounds in timings.items():
        shares = [1 - a / b for a, b in zip(without, rounds, strict=True)] if without else []
        yield spread(rounds) | first[name] | {
            "head_dim": setting.head_dim, "batch": setting.batch, "length": setting.length,
            "compiled": setting.compiled, "variant": name,
            "tokens_per_second": tokens / statistics.median(rounds) * 1e3,
            "attention_share": statistics.median(shares) if shares else None,
        }


# options of train_toy_lm.py for each run; "one" runs have one device
STRATEGIES = {
    "one": [],
    "one again": [],
    "ddp": ["--strategy", "ddp"],
    "fsdp": ["--strategy", "fsdp"],
    "tensor": ["--strategy", "tensor"],
    "context, halo": ["--strategy", "context", "--context_mode", "halo"],
    "context, heads": ["--strategy", "context", "--context_mode", "heads"],
}
# so large that a step waits for the GPU and not for Python: with a batch of 16 and width 512, a step took 60 ms on one
# GPU, and 58 on two
TOY_ON_GPU = {"layers": 8, "width": 768, "heads": 12, "context": 2048, "batch_size": 64, "steps": 160}
TOY_ON_CPU = {"layers": 1, "width": 32, "heads": 2, "context": 32, "batch_size": 4, "steps": 12}
# bytes of the gradient check: the script's own 512 take a minute at either end of a run on a GPU
_CHECKED = 256
_LIMIT = 600  # seconds of a run


def measure_strategies(run: Run) -> None:
    """Every run that is not in the report yet, as far as the minutes reach."""
    options = run.options
    sizes = TOY_ON_GPU if run.device == "cuda" else TOY_ON_CPU
    setup = {"devices": options.devices, **sizes, "more": options.more or []}
    run.resume(**setup)
    done = {row["run"] for row in run.report["rows"]}
    for name in in_time([name for name in options.strategies if name not in done], options.minutes):
        begun = time.monotonic()
        run.report["missing"] = [entry for entry in run.report["missing"] if entry["run"] != name]
        with tempfile.TemporaryDirectory() as folder, run.attempt(run=name):
            found = train(name, setup, Path(folder, "run"))
            run.report["rows"].append({"run": name, "seconds": round(time.monotonic() - begun, 1)} | found)
        compare(run.report)
        run.save()
    columns = ("tokens_per_second", "speed_over_one", "difference", "largest_difference")
    print(harness.table(run.report["rows"], "{run}", columns))


def train(name: str, setup: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The figures of one training; raises if it fails."""
    sizes = [word for size in TOY_ON_GPU for word in (f"--{size}", str(setup[size]))]
    devices = 1 if name.startswith("one") else setup["devices"]
    command = [
        sys.executable, str(ROOT / "experiments/train_toy_lm.py"), "--run", str(folder), "--devices", str(devices),
        *STRATEGIES[name], *sizes, "--validate_every", str(max(1, setup["steps"] // 6)),
        "--gradient_check", str(_CHECKED), *setup["more"],
    ]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_LIMIT, check=False
    )
    if done.returncode:
        print(done.stdout[-3000:])
        raise RuntimeError(f"train_toy_lm.py ended with status {done.returncode}")
    return read_run(folder)


def read_run(folder: Path) -> dict[str, Any]:
    """Figures of a run's folder."""
    from toy_lm.figures import read_log

    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    found = {key: summary[key] for key in ("parameters", "strategy", "devices")}
    for key, metric in (("train_bits", "train_bits"), ("validation_bits", "val_bits")):
        found[key] = dict(zip(("steps", "bits"), read_log(folder, metric), strict=True))
    validations, starts = found["validation_bits"]["steps"], zip(*read_log(folder, "seconds"), strict=True)
    stretches = [
        round(1e3 * (end - begin) / (last - first), 3)
        for (first, begin), (last, end) in itertools.pairwise(starts)
        if not any(first <= step < last for step in validations)
    ]
    return found | {"milliseconds_per_step": statistics.median(stretches[1:] or stretches), "stretches": stretches}


def compare(result: dict[str, Any]) -> None:
    """Add speeds, and differences to one device, to all rows."""
    setup, rows = result["setup"], result["rows"]
    one = next((row for row in rows if row["run"] == "one"), None)
    for row in rows:
        row["tokens_per_second"] = setup["batch_size"] * setup["context"] / (row["milliseconds_per_step"] / 1e3)
        if one is not None:
            row["speed_over_one"] = one["milliseconds_per_step"] / row["milliseconds_per_step"]
            apart = [a - b for a, b in zip(row["train_bits"]["bits"], one["train_bits"]["bits"], strict=True)]
            row |= {"difference": statistics.fmean(apart), "largest_difference": max(map(abs, apart))}


if __name__ == "__main__":
    sys.exit(harness.main(sys.modules[__name__]))
