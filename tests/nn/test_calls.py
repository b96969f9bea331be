"""Options of a call with those of the layer and with each other: each entry alone gives the same, or it raises."""

import itertools
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from cached_layers import EVERYTHING, GROUPED_PRO, HEADS, WIDTH, Resets, Rotary, by_hand
from cached_layers import build as build_layer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import decayattn.nn.attention
from decayattn import DecayFlashAttention, decay_attention
from decayattn.nn import ConstantDecay, ScalarDecay

LENGTHS = [7, 3, 0, 5]
LAYERS = {
    "plain": {}, "window and sink": {"window_size": (3, 1), "sink": True, "scale": 0.7},
    "not causal": {"causal": False, "kv_shift": True, "output_norm": True}, "pro": GROUPED_PRO,
    "rotary": {"position": Rotary(), "head_dim": 6, "scale": -1, "qk_norm": "per_head"},
    "one key head": {"num_kv_heads": 1, "value_dim": 7, "kv_shift": True, "scale": "learned", "sink": True},
    "everything": EVERYTHING,
}


class Own(nn.Module):
    """A user's decay, with growth in one head."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([-0.1, -0.2, -0.3, 0.1], dtype=torch.float64))

    def forward(self, x):
        return self.weight * x[..., :1].sigmoid()


class Shared(Resets):
    """One decay for all heads, (B, T, 1)."""

    def forward(self, x):
        return super().forward(x)[..., :1]


DECAYS = {
    "scalar": lambda: "scalar", "learned": lambda: ConstantDecay.alibi(HEADS, learned=True), "frozen": lambda: "retnet",
    "own": Own, "resets": Resets, "shared": Shared, "none": lambda: "none",
}
# what a call may be given besides x: log_decay (H,) or (B, T, H), and memory
NEW = ["own decay", "rates", "per token", "memory", "memory, rates", "memory, per token"]
CALLS = ["dense", "left", "right", "both", "packed", "resets", "cached", "cached left"]


def build(options: str, decay: str = "scalar", **more) -> DecayFlashAttention:
    torch.manual_seed(0)
    return build_layer(**{"backend": "auto", "decay": DECAYS[decay]()} | LAYERS[options] | more).cpu()


def entries(new: str, lengths: list[int] = LENGTHS) -> list[dict[str, Tensor]]:
    """Arguments of each entry of a batch by itself, without padding."""
    torch.manual_seed(1)
    rates = -torch.rand(HEADS).double()
    found = []
    for index, length in enumerate(lengths):
        entry = {"x": torch.randn(length, WIDTH).double()}
        if "memory" in new:
            length += 2 if len(set(lengths)) == 1 else (0, 4, 2, 1)[index]
            entry["memory"] = torch.randn(length, WIDTH).double()
        if "rates" in new:
            entry["log_decay"] = rates
        if "per token" in new:
            entry["log_decay"] = -torch.rand(length, HEADS).double()
        found.append({name: tensor.requires_grad_() for name, tensor in entry.items()})
    return found


def padded(tensors: list[Tensor], side: str, filling: float = math.nan) -> tuple[Tensor, Tensor]:
    """(B, T, ·) with this filling at padding, and its mask."""
    extra = 3 if side == "both" else 0
    total = max(map(len, tensors)) + extra
    rows, masks = [], []
    for tensor in tensors:
        before = {"right": 0, "left": total - len(tensor), "both": min(2, total - len(tensor))}[side]
        after = total - len(tensor) - before
        rows.append(F.pad(tensor, (0, 0, before, after), value=filling))
        masks.append(F.pad(torch.ones(len(tensor), dtype=torch.bool), (before, after)))
    return torch.stack(rows), torch.stack(masks)


def batched(given: list[dict[str, Tensor]], side: str, filling: float = math.nan) -> tuple[dict[str, Tensor], Tensor]:
    """Arguments of a call for all entries, and the mask of its rows; without padding if side is "dense"."""
    arguments = {}
    for name in given[0]:
        if given[0][name].ndim == 1:
            arguments[name] = given[0][name]
        else:
            to = "right" if side == "dense" else side
            arguments[name], mask = padded([entry[name] for entry in given], to, filling)
        if name == "x":
            rows = mask
        if side != "dense" and name in ("x", "memory"):
            arguments["padding_mask" if name == "x" else "memory_padding_mask"] = mask
    return arguments, rows


def pieces(given: list[dict[str, Tensor]], steps: list[list[int]]) -> list[list[dict[str, Tensor]]]:
    """The entries in steps of these lengths each."""
    starts = [0] * len(given)
    result = []
    for counts in steps:
        parts = zip(given, starts, counts, strict=True)
        result.append([
            {name: x if x.ndim == 1 else x[begin : begin + count] for name, x in entry.items()}
            for entry, begin, count in parts
        ])
        starts = [begin + count for begin, count in zip(starts, counts, strict=True)]
    return result


def assert_empty(layer: DecayFlashAttention, out: Tensor) -> None:
    """Outputs at padding, (N, WIDTH), are those of no attention at all."""
    assert torch.equal(out, layer.out_proj(out.new_zeros(layer.out_proj.in_features)).expand_as(out))


def run(layer: nn.Module, call: str, given: list[dict[str, Tensor]]) -> list[Tensor]:
    """Outputs of all entries by one call, or by several with a cache."""
    if call == "packed":
        offsets = torch.tensor([0, *(len(entry["x"]) for entry in given)]).cumsum(0)
        joined = {
            name: x if x.ndim == 1 else torch.cat([entry[name] for entry in given])[None]
            for name, x in given[0].items()
        }
        return list(layer(**joined, cu_seqlens=offsets)[0].split(offsets.diff().tolist()))
    if call.startswith("cached"):
        steps = [[4, 2, 0, 1], [1, 1, 0, 1], [2, 0, 0, 3]] if "left" in call else [[4] * 4, [1] * 4, [2] * 4]
        outs: list[list[Tensor]] = [[] for _ in given]
        with torch.no_grad():
            cache = layer.make_cache(len(given), 12)
            for part in pieces(given, steps):
                arguments, rows = batched(part, "left" if "left" in call else "dense")
                out = layer(**arguments, cache=cache)
                if "left" in call:
                    assert_empty(layer, out[~rows])
                for entry, y, mask in zip(outs, out, rows, strict=True):
                    entry.append(y[mask])
        return [torch.cat(parts) for parts in outs]
    side = call if call in ("left", "right", "both") else "dense"
    arguments, rows = batched(given, side)
    if call == "resets":
        arguments["resets"] = torch.arange(rows.shape[1]).expand(rows.shape) % 3 == 2
    out = layer(**arguments)
    if side != "dense":
        assert_empty(layer, out[~rows])
    return [y[mask] for y, mask in zip(out, rows, strict=True)]


def expected_refusal(layer: DecayFlashAttention, call: str, new: str) -> str | None:
    """The error of a combination, None if there is none."""
    if "memory" in new:
        if layer.position is not None:
            return "position: expected None with memory; use a layer without one"
        refused = {"packed": "cu_seqlens", "resets": "resets", "cached": "cache", "cached left": "cache"}.get(call)
        if refused is not None and (layer.causal or refused != "cache"):
            return f"{refused}, memory: expected at most one of them; "
    per_token = new == "per token" or (new == "own decay" and isinstance(layer.decay, Resets | Own | ScalarDecay))
    if call.startswith("cached") and not layer.causal:
        return "cache: expected a layer with causal=True"
    if call == "resets" and not per_token:
        return "resets: expected a decay per token"
    return None


@pytest.mark.parametrize(("new", "decay"), [
    *itertools.product(["own decay", "memory"], DECAYS),
    # a given decay takes the place of any module
    ("rates", "none"), ("per token", "learned"), ("memory, rates", "scalar"), ("memory, per token", "none"),
])
@pytest.mark.parametrize("options", LAYERS)
def test_calls_are_their_entries_or_raise(options, decay, new):
    """Outputs and gradients of parameters and of every input; NaN at padding."""
    layer = build(options, decay)
    for call in CALLS:
        ragged = call not in ("dense", "resets", "cached")
        given = entries(new, LENGTHS if ragged else [7] * 4)
        refusal = expected_refusal(layer, call, new)
        if refusal is not None:
            with pytest.raises(ValueError, match=refusal):
                run(layer, call, given)
            continue
        found = torch.cat(run(layer, call, given))
        resets = torch.arange(7) % 3 == 2 if call == "resets" else None
        wanted = torch.cat([by_hand(layer, **entry, resets=resets) for entry in given])
        torch.testing.assert_close(found, wanted)
        if call.startswith("cached"):
            continue
        inputs = dict.fromkeys([x for entry in given for x in entry.values()] + list(layer.parameters()))
        gradients = [
            torch.autograd.grad(out, list(inputs), torch.sin(torch.arange(out.numel())).view_as(out), allow_unused=True)
            for out in (found, wanted)
        ]
        for got, want in zip(*gradients, strict=True):
            assert (got is None) == (want is None)
            torch.testing.assert_close(got, want) if want is not None else None


@pytest.mark.parametrize(("how", "new"), [
    *(pytest.param("compiled", new, marks=pytest.mark.slow) for new in ("per token", "memory, rates")),
    *itertools.product(["checkpointed", "triton", "bfloat16", "autocast"], NEW),
])
def test_calls_compile_checkpoint_and_narrow(how, new, device, monkeypatch):
    """Outputs and gradients of a padded call are the eager ones, and no log-decay is rounded."""
    layer = build("pro", backend="reference").to(device)
    given = entries(new, [6, 4, 5])
    arguments, rows = batched(given, "left", filling=0.0)
    inputs = [*dict.fromkeys(x for entry in given for x in entry.values()), *layer.parameters()]
    spy = mock.Mock(wraps=decay_attention)

    def results(**options) -> list[Tensor]:
        call, names, narrow = layer, [*arguments], options.pop("narrow", None)
        values = [arguments[name].to(device) for name in names]
        if narrow is not None:
            values = [x.to(torch.float32 if name == "log_decay" else narrow) if x.is_floating_point() else x
                      for name, x in zip(names, values, strict=True)]
        out = options.pop("call", call)(**dict(zip(names, values, strict=True)), **options)[rows.to(device)]
        grad = torch.sin(torch.arange(out.numel(), device=device)).view_as(out).to(out.dtype)
        return [out, *(x for x in torch.autograd.grad(out, inputs, grad, allow_unused=True) if x is not None)]

    wanted, tolerance = results(), 1e-9
    if how == "compiled":
        torch.compiler.reset()
        found = results(call=torch.compile(layer, fullgraph=True, backend="aot_eager"))
    elif how == "checkpointed":
        found = results(call=lambda **options: checkpoint(layer, **options, use_reentrant=False))
    elif how == "triton":
        layer.backend = "triton"
        found = results()
    else:
        monkeypatch.setattr(decayattn.nn.attention, "decay_attention", spy)
        layer.to(torch.bfloat16 if how == "bfloat16" else torch.float32)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=how == "autocast"):
            found = results(narrow=torch.bfloat16 if how == "bfloat16" else torch.float32)
        tolerance = 0.05
        assert found[0].dtype == torch.bfloat16
        [call] = spy.call_args_list
        log_decay = call.args[3]
        assert log_decay.dtype == torch.float32
        if "log_decay" in arguments:
            assert torch.equal(log_decay, arguments["log_decay"].to(log_decay))
    for got, want in zip(found, wanted, strict=True):
        atol = tolerance * want.abs().max().item()
        torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=atol)


X, M, RATES = torch.zeros(2, 5, WIDTH), torch.zeros(2, 7, WIDTH), torch.zeros(HEADS)
MASK, MEMORY_MASK = torch.ones(2, 5, dtype=torch.bool), torch.ones(2, 7, dtype=torch.bool)
LONG = torch.arange(7) < torch.tensor([[4], [7]])


@pytest.mark.parametrize(("arguments", "message"), [
    ({"log_decay": RATES.bfloat16()}, r"log_decay: expected float32, got torch.bfloat16; .*FSDP2 casts"),
    ({"log_decay": RATES.double()}, r"log_decay: expected float32 \(or float64 with float64"),
    ({"log_decay": RATES.to("meta")}, "log_decay: expected the device of x, cpu, got meta"),
    *(
        ({"log_decay": torch.zeros(shape)}, r"log_decay: expected \(H,\) = \(4,\) or .* = \(2, 5, 4\)")
        for shape in [(), (5,), (2, 5, 1), (5, 4)]
    ),
    ({"memory": M, "log_decay": torch.zeros(2, 5, 4)}, r"log_decay: .* = \(2, 7, 4\), got \(2, 5, 4\)"),
    ({"memory": M[:1]}, "memory: expected the batch size of x, 2, got 1"),
    ({"memory": M[..., :8]}, r"memory: expected shape \(B, T, embed_dim = 12\), got \(2, 7, 8\)"),
    ({"memory": M.double()}, "memory: expected the dtype of x, torch.float32, got torch.float64"),
    ({"memory": M.to("meta")}, "memory: expected the device of x, cpu, got meta"),
    ({"memory_padding_mask": MASK}, "memory_padding_mask: expected only with memory"),
    ({"memory": M, "memory_padding_mask": MASK}, r"memory_padding_mask: expected shape .* \(2, 7\), got"),
    ({"memory": M, "padding_mask": MEMORY_MASK}, r"^padding_mask: expected shape .* \(2, 5\), got"),
    ({"memory": M, "memory_padding_mask": LONG ^ LONG.flip(1)}, "memory_padding_mask: expected in every row"),
    ({"memory": M, "new_lengths": torch.tensor([1, 2])}, "new_lengths: expected only with a cache"),
    ({"causal": False, "memory": M[:, :4]}, "causal: expected T_q <= T_k with causal=False and a log_decay per token"),
    ({"causal": False, "memory": M, "memory_padding_mask": LONG}, "at most as many tokens of x as of memory"),
    ({"decay": nn.AdaptiveAvgPool2d((1, HEADS)), "resets": MASK}, r"decay: .* with T = 5, got \(2, 1, 4\)"),
])
def test_errors_name_wrong_decays_and_memories(arguments, message):
    options = {name: arguments[name] for name in ("causal", "decay") if name in arguments}
    layer = DecayFlashAttention(WIDTH, HEADS, **options)
    with pytest.raises((TypeError, ValueError), match=message):
        layer(X, **{name: value for name, value in arguments.items() if name not in options})


def test_sequences_may_be_longer_than_the_memory():
    """Without a decay per token, not causal rows see all of it; causal ones see nothing before its first token."""
    x, memory = torch.randn(2, 7, WIDTH).double(), torch.randn(2, 4, WIDTH).double()
    for decay, causal in (("none", False), ("learned", False), ("scalar", True)):
        layer = build("plain", decay, causal=causal)
        entry = {"x": x[0], "memory": memory[0]}
        out = layer(x, memory=memory)
        torch.testing.assert_close(out[0], by_hand(layer, **entry))
        assert (out[:, :3] == 0).all() == causal
    torch.testing.assert_close(layer(x, memory=x), layer(x))
