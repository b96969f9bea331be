"""Training steps and generation of the official Forgetting Transformer "Pro" 760M, by its own code and ours. Usage::

    PYTHONPATH=THEIRS/src python experiments/benchmarks/fox.py              # on a GPU: about 6 minutes
    PYTHONPATH=THEIRS/src python experiments/benchmarks/fox.py --minutes 4  # as much as fits; the same command goes on

THEIRS is github.com/zhixuan-lin/forgetting-transformer, its kernel pruned at e⁻¹⁰. Ours is the DecayForCausalLM that
from_fox(config=) makes of its random weights; heads have half-lives of 4 to 1,024 tokens. Both have float32 weights,
bfloat16 autocast, fused AdamW with a rate of 0, and PyTorch's cross-entropy.

recomputed: a training step with gradient checkpointing, as theirs has it; eager: one that keeps activations; compiled:
that with torch.compile of every block and of the loss, their attention not traced. generation: a prompt, then greedy
tokens through the cache; the prefill of "ours, captured" includes the capture of its CUDA graph. peak_bytes are of the
variant alone. Cached logits are first held against float64, to twice the error of eager attention plus eps, and the
timed losses must agree within eps. Without a GPU theirs is absent, and ours is checked on a tiny model.
"""

import copy
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before transformers imports Triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from shared.options import above_zero
from shared.workers import in_time
from toy_lm.model import mean_loss

from benchmarks import harness, peers
from benchmarks.harness import Absent, Run, spread
from benchmarks.training import compiler, mixed
from decayattn import DecayFlashAttention
from decayattn.backends import registry
from decayattn.integrations.checkpoints import from_fox
from decayattn.integrations.transformers import DecayConfig, DecayForCausalLM, DecayModelCache
from decayattn.nn import CapturedStep, ScalarDecay

PARTS = ("recomputed", "generation", "eager", "compiled")
OPTIONS = {
    "recomputed": ([4096, 16384, 32768], [], "tokens of sequences in training steps"),
    "generation": ([4096, 16384, 32768], [], "tokens of prompts"),
    "batches": ([1, 8], [1], "prompts of a generation"),
    "eager": ([4096, 16384], [], "tokens of sequences in training steps that keep activations"),
    "compiled": ([16384], [], "the same, compiled"),
    "tokens": (16384, 80, "tokens of a training step: B = max(1, tokens // T)"),
    "new_tokens": (32, 4, "tokens after a prompt"),
    "model": ([24, 1536, 24, 50304], [1, 32, 2, 64], "layers, width, heads, vocabulary"),
    "checked": (512, 40, "tokens of the check"),
    "backend": ("auto", "triton", "our backend", registry.NAMES),
    "minutes": (None, None, "begin no setting that would end later; None: all of them", above_zero),
    "rounds": (2, 1, "interleaved rounds, after one that compiles"),
    "output": harness.output("benchmark_fox.json"),
}
# their configs/experiment/longcrawl64/forgetting_transformer/pro_760m_48b.yaml, and pruning
PRO = {
    "use_k_shift": True, "use_v_shift": True, "qk_norm": True, "use_output_gate": True, "use_output_norm": True,
    "hidden_ratio": 3.5, "log_pruning_tolerance": -10.0, "max_position_embeddings": None, "bos_token_id": None,
    "eos_token_id": None,
}
BY_ONE = 8  # checked tokens that come one by one
OURS, CAPTURED = "ours", "ours, captured"


class Variant(NamedTuple):
    name: str
    model: Any
    optimizer: torch.optim.Optimizer

    @property
    def where(self) -> dict[str, Any]:
        """Its place in a report."""
        return {"ours": self.name.startswith(OURS), "variant": self.name}


class Setting(NamedTuple):
    """One of PARTS with `batch` sequences."""

    part: str
    batch: int
    length: int


def measure(run: Run) -> None:
    """Every setting that is not in the report yet, as far as the minutes reach."""
    options = run.options
    run.resume(**{name: getattr(options, name) for name in ("model", "new_tokens", "backend", "rounds", "seed")})
    run.report |= {"missing": [], "checks": []}
    settings = [
        Setting(part, batch, length) for part in PARTS for length in getattr(options, part)
        for batch in (options.batches if part == "generation" else [max(1, options.tokens // length)])
    ]
    done = {Setting(row["part"], row["batch"], row["length"]) for row in run.report["rows"]}
    todo = [setting for setting in settings if setting not in done] if run.timed else []
    passed = list(check(variants(run), run))
    for setting in in_time(todo, options.minutes):
        run.add(rows(setting, passed, run), "{part} B{batch} T{length}, {variant}",
                ("tokens_per_second", "prefill_ms", "peak_bytes"))


def variants(run: Run) -> list[Variant]:
    """Both models with the same weights; theirs may be absent."""
    (layers, width, heads, vocabulary), cuda = run.options.model, run.device == "cuda"
    sizes = {"vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers}
    config = DecayConfig(**sizes, num_attention_heads=heads, qk_norm="per_head", output_gate=True, output_norm=True,
                         kv_shift=True)
    torch.manual_seed(run.options.seed)
    models, state = {}, None
    with torch.device(run.device):
        with run.attempt(ours=False, variant="theirs"):
            models["theirs"] = their_model(num_heads=heads, **sizes)
            config, state = from_fox(models["theirs"].state_dict(), config=models["theirs"].config)
        config.backend = run.options.backend
        models[OURS] = DecayForCausalLM(config)
    if state is not None:
        models[OURS].load_state_dict(state)
    found = [Variant(name, model, torch.optim.AdamW(model.parameters(), lr=0.0, fused=cuda))
             for name, model in models.items()]
    return [*found, found[-1]._replace(name=CAPTURED)]


def their_model(**sizes: int) -> Any:
    """Their ForgettingTransformerForCausalLM, random; raises Absent."""
    if not torch.cuda.is_available():
        raise Absent("needs a GPU")
    package = "forgetting_transformer.model.forgetting_transformer"
    modeling = peers.imported(f"{package}.modeling_forgetting_transformer")
    kind, config = modeling.ForgettingTransformerForCausalLM, modeling.ForgettingTransformerConfig
    # changed in transformers 5: a dict of tied weights, an option that is gone, layers within a cache
    kind._tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}
    config.use_return_dict = True
    modeling.FgateDynamicCache.__bases__ = (type("Cache", (), {}),)
    # Inductor compiles its kernels again, and fails
    modeling.forgetting_attention = torch.compiler.disable(modeling.forgetting_attention)
    model = kind(config(**sizes, **PRO))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.attn.fgate_proj.bias.copy_(ScalarDecay(sizes["hidden_size"], sizes["num_heads"]).bias)
    return model


@torch.no_grad()
def check(found: list[Variant], run: Run) -> Iterator[Variant]:
    """The variants with right logits of the last tokens, which come one by one."""
    tokens = draw(run, 1, run.options.checked)
    reference = copy.deepcopy(found[-1].model)
    for layer in reference.modules():
        if isinstance(layer, DecayFlashAttention):
            layer.backend = "reference"
    with mixed(run.device):
        eager = reference(tokens, use_cache=False).logits[:, -BY_ONE:].double()
    exact = reference.double()(tokens, use_cache=False).logits[:, -BY_ONE:]
    eps = torch.finfo(torch.bfloat16 if run.device == "cuda" else torch.float32).eps
    budget = 2 * float((eager - exact).norm() / exact.norm()) + eps
    for variant in found:
        with run.attempt(**variant.where), mixed(run.device):
            logits, step = begin(variant, tokens[:, : 1 - BY_ONE], BY_ONE)
            logits = [logits.double(), *(step(new).double() for new in tokens[:, 1 - BY_ONE :].split(1, 1))]
            error = float((torch.stack(logits, 1) - exact).norm() / exact.norm())
            said = [f"logits: relative error {error:.1e} of {budget:.1e}"]
            if run.right(["logits"] * (not error <= budget), said, **variant.where):
                yield variant


def draw(run: Run, batch: int, length: int) -> Tensor:
    generator = torch.Generator(run.device).manual_seed(run.options.seed)
    return torch.randint(run.options.model[-1], (batch, length), generator=generator, device=run.device)


def begin(variant: Variant, prompt: Tensor, room: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The logits (B, V) after a prompt, and the function that appends a token (B, 1) and returns the next ones."""
    model, options = variant.model, {}
    if variant.name != "theirs":
        cache = DecayModelCache(model.config, prompt.shape[1] + room)
        options = {"past_key_values": cache, "logits_to_keep": 1}
    out = model(prompt, use_cache=True, **options)
    if variant.name == "theirs":  # which has made the logits of all tokens
        options = {"past_key_values": out.past_key_values}

    def step(token: Tensor) -> Tensor:
        return model(token, use_cache=True, **options).logits[:, -1]

    if variant.name == CAPTURED:
        return out.logits[:, -1], CapturedStep(step, [layer.cache for layer in cache.layers], prompt[:, -1:])
    return out.logits[:, -1], step


def rows(setting: Setting, passed: list[Variant], run: Run) -> Iterator[dict[str, Any]]:
    """A row per variant."""
    writes, compiled, count = setting.part == "generation", setting.part == "compiled", run.options.new_tokens
    tokens, peaks, losses = draw(run, setting.batch, setting.length + (not writes)), {}, {}
    loss_of = torch.compile(mean_loss, dynamic=False) if compiled else mean_loss
    chosen = {variant.name: variant for variant in passed if writes or variant.name != CAPTURED}
    for _, model, optimizer in chosen.values():
        optimizer.zero_grad()  # of a step that ran out of memory
        if setting.part == "recomputed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
        for layer in model.model.layers if compiled else ():
            layer.compile(dynamic=False)

    def step(name: str, model: Any, optimizer: torch.optim.Optimizer) -> None:
        with mixed(run.device):
            loss = loss_of(model(tokens[:, :-1], use_cache=False).logits, tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[name] = loss.detach()

    def write(logits: Tensor, append: Callable[[Tensor], Tensor]) -> None:
        for _ in range(count):
            logits = append(logits.argmax(-1, keepdim=True))

    def parts(variant: Variant) -> Iterator[tuple[str, Callable[[], Any]]]:
        states = 0 if writes or not variant.optimizer.state else 2  # of AdamW
        own = sum(p.nbytes for p in variant.model.parameters()) * (1 + states)
        others, begun = torch.cuda.memory_allocated() - own, []
        torch.cuda.reset_peak_memory_stats()
        if writes:
            with torch.no_grad(), mixed(run.device):
                yield "prefill_ms", lambda: begun.append(begin(variant, tokens, count))
                yield "ms", lambda: write(*begun.pop())
        else:
            yield "ms", functools.partial(step, *variant)
        peaks[variant.name] = torch.cuda.max_memory_allocated() - others

    torch.cuda.empty_cache()
    with compiler(compiled):
        timings = run.time(
            {name: functools.partial(parts, variant) for name, variant in chosen.items()},
            lambda call: harness.back_to_back(call, 1 if writes else 4), run.options.rounds + 1,
            {name: variant.where | {"setting": str(setting)} for name, variant in chosen.items()},
        )
    found = [float(losses[name]) for name, _ in timings if name in losses]
    if found and max(found) - min(found) > torch.finfo(torch.bfloat16).eps * min(found):
        return run.missing("wrong", f"different losses: {found}", setting=str(setting))
    for name in (name for name, part in timings if part == "ms"):
        row = setting._asdict() | {"variant": name, "peak_bytes": peaks[name]}
        for part in ("prefill_ms", "ms") if writes else ("ms",):
            row |= spread(timings[name, part][1:], part)
        speeds = [setting.batch * (count if writes else setting.length) / ms * 1e3 for ms in timings[name, "ms"][1:]]
        yield row | spread(speeds, "tokens_per_second")


if __name__ == "__main__":
    sys.exit(harness.main(sys.modules[__name__]))
