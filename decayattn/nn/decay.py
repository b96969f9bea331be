"""Decay modules: they map the layer's input to the log-decay that decay_attention takes."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decayattn.dtensor import is_dtensor
from decayattn.nn.sharded_parameters import fill, local_part, own_heads, whole
from decayattn.problem import is_reset, without_autocast
from decayattn.validation import check_bool, check_half_lives, check_log_decays, check_positive_int


class Spared(nn.Module):
    """Base of modules with parameters that weight decay must spare: they carry `_no_weight_decay = True`.

    PyTorch drops a parameter's attributes when it copies a module, moves one from the meta device, or loads with
    assign=True. The mark is set again after each of these.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_mark_loaded)

    def _spared(self) -> Iterator[nn.Parameter]:
        """The parameters to mark."""
        return self.parameters()

    def _mark(self) -> None:
        for parameter in self._spared():
            parameter._no_weight_decay = True  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, (nn.Parameter, nn.Module)):
            self._mark()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # a copy, or torch.load of a whole module
        self._mark()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        self._mark()
        return self


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize < torch.float32.itemsize


def _refuse_16_bits(forward: Callable) -> Callable:
    """Wrap forward of a Decay to refuse 16-bit tensors of the module and its children.

    The check is in forward, not in a hook: FSDP gathers the parameters that it casts in hooks, and FSDP1 sets plain
    attributes.
    """

    @functools.wraps(forward)
    def checked(self: "Decay", *arguments: Any, **options: Any) -> Any:
        for path, module in self.named_modules():
            for name, value in chain(module._parameters.items(), module._buffers.items(), vars(module).items()):
                if isinstance(value, Tensor):
                    self._check_wide(f"{path}.{name}" if path else name, value)
        return forward(self, *arguments, **options)

    checked.refuses_16_bits = True  # type: ignore[attr-defined]
    return checked


class Decay(Spared):
    """Base of the decay modules: forward maps x (B, T, embed_dim) to log_decay (H,), (B, T, H) or (B, T, H, 2).

    log_decay is a natural logarithm in float32, or float64 for a float64 x. The parameters and buffers, and those of
    children, stay float32 under `.bfloat16()`, `.half()` and `.to(dtype)`, and if load_state_dict brings 16 bits; they
    follow `.double()`. If 16-bit parameters come in another way, forward raises: the logit of a slow head, near 7, has
    steps of 0.03 in bfloat16, and an error in λ adds up over tokens.
    """

    tensor_mesh: Any = None  # DeviceMesh of tensor parallelism, which shards the heads

    def __init__(self, num_heads: int):
        super().__init__()
        self.num_heads = check_positive_int("num_heads", num_heads)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not hasattr(cls.forward, "refuses_16_bits"):
            cls.forward = _refuse_16_bits(cls.forward)

    @torch.no_grad()
    def half_lives(self, x: Tensor) -> Tensor:
        """Half-life in tokens of every value of log_decay for x, in its shape: (H,) or (B, T, H).

        The half-life of a head over a text is that of its mean log_decay; see decayattn.nn.record_half_lives.
        """
        return half_life(self(x))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        # every conversion and move of a module (.to, .bfloat16, .cuda, .to_empty, share_memory, …) goes through here
        def at_least_float32(tensor: Tensor) -> Tensor:
            converted = fn(tensor)
            # from the original, which is not rounded
            return tensor.to(converted.device, torch.float32) if _is_narrow(converted) else converted

        return super()._apply(at_least_float32, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any, **options: Any) -> None:
        # assign=True would install the tensors themselves; the children read this dict, too
        for name, value in tuple(state_dict.items()):
            if name.startswith(prefix) and isinstance(value, Tensor) and _is_narrow(value):
                state_dict[name] = value.detach().float()
        super()._load_from_state_dict(state_dict, prefix, *rest, **options)

    def _wide(self, name: str) -> Tensor:
        """Tensor of this name, refused if it has 16 bits: a parametrization may return such a tensor."""
        return self._check_wide(name, getattr(self, name))

    def _check_wide(self, name: str, tensor: Tensor) -> Tensor:
        if _is_narrow(tensor):
            raise TypeError(
                f"{type(self).__name__}.{name}: expected float32 or float64, got {tensor.dtype}; its rounding errors "
                "add up over tokens: call float() on the decay module, or, if a mixed precision policy casts it, shard "
                "the layer by decayattn.nn.fully_shard_attention"
            )
        return tensor


class ScalarDecay(Decay):
    r"""A forget gate per token and head, as in the Forgetting Transformer (Lin et al., arXiv 2503.02130).

    Computed in float32, or float64 for a float64 x, also under autocast::

        log_decay[b, t, h] = logsigmoid(x[b, t] · weight[h] + bias[h])

    With directions=2, log_decay is (B, T, H, 2): the gates of the keys before a row and of those after it. The two of a
    head are consecutive in weight (2 H, embed_dim) and bias (2 H,).

    Initially the weight is 0 and the biases give the heads half-lives. By default these are spaced evenly in the
    logarithm, and head 0 has the shortest. With a zero weight the half-lives are the requested ones at any scale of x.
    The weight learns from the first step on, because its gradient is x times that of the gate's logit.

    Args:
        embed_dim: width of x.
        num_heads: query heads H.
        initial_half_lives: initial half-lives in tokens. (shortest, longest): the heads are spread between them, and a
            single head gets their geometric mean. Or one number per head, a sequence or a tensor (H,).
        directions: 1, or 2 for a layer with causal=False; both gates of a head start with the same half-life.
        device, dtype: of the parameters, as in torch.nn; a dtype below float32 gives float32.

    Raises:
        TypeError, ValueError: for a bad argument, by name.
    """

    directions: int = 1  # a module that an older version pickled has none of its own

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        directions: int = 1,
        initial_half_lives: Sequence[float] | Tensor = (4.0, 1024.0),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(num_heads)
        self.embed_dim = check_positive_int("embed_dim", embed_dim)
        self.initial_half_lives = check_half_lives("initial_half_lives", initial_half_lives, self.num_heads)
        self.directions = check_positive_int("directions", directions)
        if self.directions > 2:
            raise ValueError(f"directions: expected 1 or 2, got {directions}")
        options: dict[str, Any] = {"device": device, "dtype": _parameter_dtype(dtype)}
        self.weight = nn.Parameter(torch.empty(num_heads * directions, embed_dim, **options))
        self.bias = nn.Parameter(torch.empty(num_heads * directions, **options))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset the weight to 0 and the biases to initial_half_lives."""
        self.weight.zero_()
        # b with logsigmoid(b) = λ: logit(exp(λ)) in a form that keeps its digits for λ near 0
        biases = [x - math.log(-math.expm1(x)) for x in spread_log_decays(self.initial_half_lives, self.num_heads)]
        fill(self.bias, [bias for bias in biases for _ in range(self.directions)])

    def forward(self, x: Tensor) -> Tensor:
        """log_decay (B, T, H) < 0, or (B, T, H, 2)."""
        return self._gates(x, local_part)

    forward.refuses_16_bits = True  # type: ignore[attr-defined]  # by _wide, in a third of the time of the wrapper

    @torch.no_grad()
    def half_lives(self, x: Tensor) -> Tensor:
        """Half-life in tokens of every gate for x, (B, T, H) or (B, T, H, 2).

        A collective if the parameters are sharded. Under tensor parallelism, the heads are this rank's.
        """
        gathered = is_dtensor(self.weight) and not is_dtensor(x)
        return half_life(self._gates(x, own_heads) if gathered else self(x))

    def _gates(self, x: Tensor, part: Callable[[Tensor, Any], Tensor]) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        with without_autocast(x.device):
            weight, bias = (part(self._wide(name), self.tensor_mesh).to(dtype) for name in ("weight", "bias"))
            gates = F.logsigmoid(F.linear(x.to(dtype), weight, bias))
        return gates if self.directions == 1 else gates.unflatten(-1, (-1, self.directions))

    def extra_repr(self) -> str:
        half_lives = ", ".join(f"{half_life:g}" for half_life in self.initial_half_lives)
        directions = f"directions={self.directions}, " if self.directions > 1 else ""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, {directions}initial_half_lives=({half_lives})"


class ConstantDecay(Decay):
    r"""One log-decay per head, the same for every token: γ_h, which adds |i − j|·γ_h to the scores.

    Build it with `ConstantDecay.alibi(num_heads)`, `.retnet(num_heads)` or `.from_values(values)`. Frozen values are a
    buffer. Learned ones are γ_h = sign_h · exp(log_rate_h) with a parameter log_rate. A step then changes a rate by a
    factor, so slow and fast heads learn alike, and no step turns decay into growth. A head that starts with growth (a
    value above 0) keeps growing. 0 has no logarithm and raises.

    Args:
        values: γ_h in natural logarithm, one finite number per query head: a sequence, or a tensor (H,). With a value
            below −746 a row of that head sees only its own token.
        learned: train the values.
        device, dtype: of the parameter or buffer, as in torch.nn; a dtype below float32 gives float32.

    Raises:
        TypeError, ValueError: for a bad argument, by name.
    """

    def __init__(
        self,
        values: Sequence[float] | Tensor,
        *,
        learned: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        numbers = check_log_decays("values", values, check_bool("learned", learned))
        super().__init__(len(numbers))
        self.initial_values = numbers
        self.learned = learned
        options: dict[str, Any] = {"device": device, "dtype": _parameter_dtype(dtype)}
        if learned:
            self.log_rate = nn.Parameter(torch.empty(self.num_heads, **options))
            self.register_buffer("sign", torch.empty(self.num_heads, **options))
        else:
            self.register_buffer("log_decay", torch.empty(self.num_heads, **options))
        self.reset_parameters()

    # the buffers; a module has one of them
    sign: Tensor
    log_decay: Tensor

    @classmethod
    def from_values(cls, values: Sequence[float] | Tensor, **options) -> "ConstantDecay":
        """Module with given log-decays, one per head; the options are those of the class."""
        return cls(values, **options)

    @classmethod
    def alibi(cls, num_heads: int, **options) -> "ConstantDecay":
        """Module with the slopes of ALiBi, see alibi_log_decay; the options are those of the class."""
        return cls(alibi_log_decay(num_heads), **options)

    @classmethod
    def retnet(cls, num_heads: int, **options) -> "ConstantDecay":
        """Module with the retention rates of RetNet, see retnet_log_decay; the options are those of the class."""
        return cls(retnet_log_decay(num_heads), **options)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset to the values that the module was built with."""
        if self.learned:
            fill(self.log_rate, [math.log(abs(value)) for value in self.initial_values])
            fill(self.sign, [math.copysign(1.0, value) for value in self.initial_values])
        else:
            fill(self.log_decay, self.initial_values)

    def forward(self, x: Tensor) -> Tensor:
        """log_decay (H,); only the dtype of x matters."""
        values = self._values(functools.partial(local_part, mesh=self.tensor_mesh))
        return values.to(torch.promote_types(x.dtype, torch.float32))

    forward.refuses_16_bits = True  # type: ignore[attr-defined]  # by _wide

    @torch.no_grad()
    def half_lives(self, x: Tensor | None = None) -> Tensor:
        """Half-lives in tokens of all heads, (H,), for any x; a collective if the values are sharded."""
        return half_life(self._values(whole))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, learned={self.learned}"

    def _values(self, part: Callable[[Tensor], Tensor]) -> Tensor:
        if not self.learned:
            return part(self._wide("log_decay"))
        # exp overflows float32 above 88.7, where its gradient would be NaN; −exp(88) is a reset, too
        return part(self._wide("sign")) * part(self._wide("log_rate")).clamp(max=88.0).exp()


def alibi_log_decay(num_heads: int) -> tuple[float, ...]:
    """−slope of every head, by the rule of ALiBi (Press et al., arXiv 2108.12409, and its published code).

    For a power of two the slopes are the geometric sequence 2^(−8/H), 2^(−16/H), …, 2^(−8). Otherwise they are those of
    the power of two below H, followed by every other slope, from the first, of the power of two above H. They depend on
    the number of ALL heads: under tensor parallelism apply the rule to all heads, then slice.
    """
    power = 1 << (check_positive_int("num_heads", num_heads).bit_length() - 1)
    below, above = ([-(2.0 ** (-8 * h / heads)) for h in range(1, heads + 1)] for heads in (power, 2 * power))
    return (*below, *above[::2][: num_heads - power])


def retnet_log_decay(num_heads: int) -> tuple[float, ...]:
    """log(1 − 2^(−5−h)) for h = 0 … num_heads − 1, the retention rates of RetNet (Sun et al., arXiv 2307.08621)."""
    return tuple(math.log1p(-(2.0 ** (-5 - h))) for h in range(check_positive_int("num_heads", num_heads)))


def half_life(log_decay: Tensor) -> Tensor:
    """Tokens after which this decay alone halves a weight: −ln 2 / log_decay.

    It is inf where nothing decays (λ ≥ 0), 0 at a reset, and NaN for a NaN.
    """
    half_lives = torch.where(log_decay >= 0, torch.inf, -math.log(2) / log_decay)
    return half_lives.masked_fill(is_reset(log_decay), 0.0)


def spread_log_decays(half_lives: Sequence[float], num_heads: int) -> list[float]:
    """λ of every head: of the given half-lives, or of a pair spread evenly in the logarithm."""
    if len(half_lives) != num_heads:
        shortest, longest = half_lives
        steps = [i / (num_heads - 1) for i in range(num_heads)] if num_heads > 1 else [0.5]
        half_lives = [shortest * (longest / shortest) ** step for step in steps]
    return [-math.log(2) / half_life for half_life in half_lives]


def _mark_loaded(module: Spared, _: object) -> None:
    module._mark()


def _parameter_dtype(dtype: torch.dtype | None) -> torch.dtype:
    return torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
