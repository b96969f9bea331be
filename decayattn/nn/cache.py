"""DecayCache: keys, values and decay of earlier tokens, for generation one token at a time."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from decayattn import normalize, reference, validation
from decayattn.backends import registry
from decayattn.compatibility import refuse_unless
from decayattn.functional import decay_attention
from decayattn.problem import RESET_BELOW, BackendName, Inputs, SkipTolerance, without_autocast
from decayattn.validation import check_counts, check_positive_int, check_tensor, refuse_gradients, wrong_type

# Tokens that a cache with a window holds besides those of the window. When older tokens move out, half of the slack
# stays, for `crop`; the other half fills before the next move. One copy of the window per 128 steps is 3 % of the bytes
# that the steps read.
_SLACK = 256
# Last tokens of a layer with kv_shift that keep their unshifted keys and values: `crop` needs those of the then last
# token. For heads of 64 channels they take the room of 64 more tokens.
_UNSHIFTED = 64
# tensors with a value per entry, and perhaps per head
_STATE = ("first", "lengths", "dropped", "_moved", "_written", "_log_evicted")


class DecayCache:
    r"""Keys, values and decay of the earlier tokens of an attention layer; inference only.

    New tokens of a batch entry follow its earlier ones. Their attention over all tokens equals the last rows of
    decay_attention for the whole sequence::

        S_ij = s_i · q_i·k_j + (α_i − α_j)     for the keys j ≤ i of i's segment

    α_t is the running sum of a decay per token. It is kept in float64 and never restarts, so that a difference of two
    is exact at any length. A constant decay needs only positions, and stores no α. The first log-decay of a sequence is
    never used. One below −746 is a reset: it counts as 0 in α, and hides all tokens before its own.

    DecayFlashAttention calls `attend` when it gets `cache=`. Entries may have different lengths, for which the host
    does not wait. It knows only an upper bound on them, `longest`, to which a call adds all its tokens, padding
    included.

    Without a window, no length may exceed max_length. If a call's tokens do not fit by `longest`, the call reads the
    lengths, which synchronises with the device, and raises if one is too large. `evict` makes space where the decay has
    made old tokens irrelevant, and `grow` allocates more; neither happens by itself. With a window (left, right),
    max_length bounds the buffers and not the sequence: full buffers drop the tokens that no later row sees. They hold
    up to left + 256 tokens; a longer call uses larger buffers while it runs. A max_length below left + 2 is a limit, as
    without a window.

    Attributes:
        keys, values: (B, room, H_kv, D) and (B, room, H_kv, D_v); beyond a length they may hold anything. room is
            max_length, at most left + 256 with a window, and 0 before the first tokens.
        alpha: (B, room, H) float64 from the first decay per token on, else None. Natural logarithm. The tokens of a
            head are contiguous in memory.
        first: (B, H) int32, the first token that is visible to a head: its last reset, or the first that `evict` left.
        lengths: (B,) int32 on the device, tokens in use; FlashAttention's seqused_k.
        dropped: (B,) int32, number of tokens before those in use that were evicted or moved out of the window.
        longest: upper bound on the lengths.

    Args:
        batch_size: B.
        max_length: tokens that an entry can hold.
        num_heads, num_kv_heads: query heads H; key heads H_kv, a divisor of H (default H).
        head_dim, value_dim: D and D_v (default D).
        window_size: (left, right) as in decay_attention, the widest window of any call.
        device, dtype: of the buffers. By default those of the first keys, which allocate the buffers.

    Raises:
        TypeError, ValueError: for a bad argument, by name.
    """

    _layer: int | None = None  # number of the layer of its tokens

    def __init__(
        self,
        batch_size: int,
        max_length: int,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int,
        value_dim: int | None = None,
        window_size: tuple[int, int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        self.batch_size = check_positive_int("batch_size", batch_size)
        self.max_length = check_positive_int("max_length", max_length)
        self.num_heads = check_positive_int("num_heads", num_heads)
        self.num_kv_heads = validation.check_kv_heads("num_kv_heads", num_kv_heads, "num_heads", self.num_heads)
        self.head_dim = check_positive_int("head_dim", head_dim)
        self.value_dim = check_positive_int("value_dim", head_dim if value_dim is None else value_dim)
        validation.check_window(window_size)
        self.window_size = window_size
        left, _ = normalize.window_of(window_size, True)
        self._left = None if left < 0 else left
        if dtype is not None:
            validation.check_dtype("dtype", dtype)
        self.longest = 0
        self._in_trial = False  # if True, launches are sized for full buffers
        is_known = device is not None and dtype is not None
        self._allocate(self._room if is_known else 0, device, dtype)
        # None until the first tokens
        self.device = None if device is None else self.keys.device
        self.dtype = dtype

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_layer": None}  # another process has other numbers

    def _allocate(self, tokens: int, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        batch, heads = (self.batch_size, tokens, self.num_kv_heads), (self.batch_size, self.num_heads)
        with torch.inference_mode(False):  # inference tensors cannot be written outside of the mode
            self.keys = torch.empty(*batch, self.head_dim, device=device, dtype=dtype)
            self.values = torch.empty(*batch, self.value_dim, device=device, dtype=dtype)
            self.alpha: Tensor | None = None
            self.first = torch.zeros(heads, device=device, dtype=torch.int32)
            # log Σ exp(−α_j) over the evicted tokens of the last segment
            self._log_evicted = torch.full(heads, -torch.inf, device=device, dtype=torch.float64)
            # _moved: value of `dropped` when tokens last moved out of the window. _written: positions, counted from the
            # start of the sequence, before the last one in _unshifted
            self.lengths, self.dropped, self._moved, self._written = torch.zeros(
                4, self.batch_size, device=device, dtype=torch.int32
            )
        # k and v before a shift, each (B, _UNSHIFTED, H_kv, ·); position p is in slot p % _UNSHIFTED
        self._unshifted: tuple[Tensor, ...] = ()
        # constant log-decays of the last `attend`, (H,) or 0; None before the first
        self._rates: Tensor | float | None = None

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | float | None = None,
        *,
        scale: Tensor | float | None = None,
        window_size: tuple[int, int] | None = None,
        sink: Tensor | None = None,
        new_lengths: Tensor | None = None,
        skip_tolerance: SkipTolerance = "auto",
        backend: BackendName = "auto",
        unshifted: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Append T tokens and return the causal attention of their queries over all tokens, (B, T, H, D_v).

        The first tokens of an empty cache go through decay_attention, in any backend, with skip_tolerance. Later calls
        read all keys that are visible to a row. "reference" is eager PyTorch. "triton" has decoding kernels, which
        "auto" takes on a GPU. "hopper" has none and raises.

        Args:
            q, k, v, log_decay, scale, window_size, sink, skip_tolerance, backend: as in decay_attention, for the T new
                tokens: a log_decay or scale per token covers only these. q, k and v have the dtype of the cache, also
                under autocast. A call's window must not be wider than the cache's.
            new_lengths: (B,) int32 or int64, number of valid new tokens in each entry (clamped to 0 … T). The others
                may hold any values, and later tokens overwrite them. Their outputs are undefined.
            unshifted: for a layer that mixes tokens with the one before: k and v before that. `last_unshifted` returns
                those of the last token.

        Raises:
            TypeError, ValueError: for every bad argument, by name, before anything changes, and if the tokens do not
                fit in max_length.
            RuntimeError: if an input requires a gradient; call it under torch.no_grad().
        """
        inputs, per_token, left = normalize.decoding(q, k, v, log_decay, scale, window_size, sink, skip_tolerance)
        if q.shape[1:3] != (k.shape[1], self.num_heads):
            raise ValueError(
                f"q: expected the tokens of k and the heads of the cache, (T, H) = {(k.shape[1], self.num_heads)}, "
                f"got {tuple(q.shape[1:3])}"
            )
        rates = inputs.log_decay
        for name, x, like in zip("kv", unshifted or (), (k, v), strict=False):
            if x.shape != like.shape or x.device != like.device:
                raise ValueError(f"unshifted: expected the shape and device of {name}, {tuple(like.shape)}, got others")
            refuse_gradients(unshifted=x)
        counted = self._check_tokens(k, v, per_token, new_lengths)
        refuse_gradients(q=q, log_decay=rates, scale=scale, sink=sink)
        if self._left is not None and (left is None or left > self._left):
            raise ValueError(
                f"window_size: expected one within the cache's, {self.window_size}, because older tokens leave it; "
                f"got {window_size}"
            )
        is_first = self.longest == 0
        # "hopper" cannot append
        decoder = registry.decoder("auto" if is_first and backend == "hopper" else backend, k.dtype, k.device)
        if is_first:
            with without_autocast(q.device):  # keeps the dtype of the cache, as for later tokens
                out = decay_attention(
                    q, k, v, rates if per_token is None else per_token, scale=scale, window_size=window_size,
                    sink=sink, seqused_q=counted, seqused_k=counted, skip_tolerance=skip_tolerance, backend=backend,
                )
        ends, first, replaced = self._append(decoder, k, v, per_token, counted, unshifted)
        if not is_first:
            longest = self.keys.shape[1] if self._in_trial else self.longest
            out, _ = decoder.decode(
                Inputs(q, self.keys, self.values, *inputs[3:]), ends, alpha=self.alpha, first=first, left=left,
                longest=longest,
            )
        self._restore_buffers(replaced)
        if not self._in_trial:  # a CUDA graph may overwrite its outputs
            self._rates = 0.0 if rates is None else rates
        return out

    def append(
        self, k: Tensor, v: Tensor, log_decay: Tensor | None = None, *, new_lengths: Tensor | None = None
    ) -> None:
        """Write T tokens after those of every entry, without attention.

        Args:
            k, v: (B, T, H_kv, D) and (B, T, H_kv, D_v) in the dtype of the cache.
            log_decay: (B, T, H) float32 or float64 for a decay per token. None for a constant decay, which `attend`
                takes, or none. All tokens of a cache have the same kind.
            new_lengths: as in `attend`; the errors, too.
        """
        counted = self._check_tokens(k, v, log_decay, new_lengths)
        _, _, replaced = self._append(registry.decoder("auto", k.dtype, k.device), k, v, log_decay, counted)
        self._restore_buffers(replaced)

    def last_unshifted(self) -> tuple[Tensor, ...]:
        """Unshifted k and v of each entry's last token, (B, 1, H_kv, ·), 0 if a query head sees none; () if empty."""
        if not self._unshifted and self.longest:
            raise ValueError("cache: expected tokens of a layer with kv_shift, got others; reset it, rerun the prompt")
        slot = (self.lengths + self.dropped - 1) % _UNSHIFTED
        sees = (self.first < self.lengths[:, None]).unflatten(1, (self.num_kv_heads, -1)).all(2)[..., None]
        entry = torch.arange(self.batch_size, device=self.device)
        return tuple(torch.where(sees, held[entry, slot], 0)[:, None] for held in self._unshifted)

    def _keep_unshifted(self, unshifted: tuple[Tensor, Tensor] | None, counted: Tensor | None) -> None:
        """Store unshifted k and v of tokens that `_append` has counted; only the last ones have room."""
        if unshifted is None:
            self._unshifted = ()
            return
        if not self._unshifted:
            with torch.inference_mode(False):
                self._unshifted = tuple(x.new_zeros(x.shape[0], _UNSHIFTED, *x.shape[2:]) for x in unshifted)
        tokens = unshifted[0].shape[1]
        back = torch.arange(min(tokens, _UNSHIFTED), 0, -1, device=self.device)  # tokens before the end
        index = (tokens if counted is None else counted[:, None]) - back.expand(self.batch_size, -1)
        ends = self.lengths + self.dropped
        entry, slot = torch.arange(self.batch_size, device=self.device)[:, None], (ends[:, None] - back) % _UNSHIFTED
        for held, new in zip(self._unshifted, unshifted, strict=True):
            own = torch.where((index < 0)[..., None, None], held[entry, slot], new[entry, index.clamp(min=0)].to(held))
            held[entry, slot] = own
        self._written.copy_(torch.maximum(self._written, ends))

    def grow(self, max_length: int) -> None:
        """Allocate new buffers for max_length tokens and copy the tokens; a window may need less."""
        max_length = check_positive_int("max_length", max_length)
        if max_length < self.longest:
            raise ValueError(f"max_length: expected at least the {self.longest} tokens held, got {max_length}")
        self.max_length = max_length
        if self.keys.shape[1] not in (0, self._room):
            self._resize(self._room)

    def _resize(self, tokens: int) -> None:
        with torch.inference_mode(False):
            keys, values = (x.new_empty(x.shape[0], tokens, *x.shape[2:]) for x in (self.keys, self.values))
        self._move_to(keys, values)

    def _move_to(self, keys: Tensor, values: Tensor, alpha: Tensor | None = None) -> None:
        """Copy the tokens into these buffers and use them. Without `alpha`, α gets a new buffer."""
        used, before = slice(0, self.longest), (self.keys, self.values, self.alpha)
        self.keys, self.values = keys, values
        self.alpha = None if self.alpha is None else self._new_alpha() if alpha is None else alpha
        for to, of in zip((self.keys, self.values, self.alpha), before, strict=True):
            if to is not None and of is not None:
                to[:, used] = of[:, used]

    def reset(self) -> None:
        """Remove every token; the buffers stay."""
        for state in (self.lengths, self.dropped, self._moved, self._written, self.first):
            state.zero_()
        self._log_evicted.fill_(-torch.inf)
        self.longest, self._rates = 0, None

    def reorder(self, index: Tensor) -> None:
        """Replace entry b by a copy of entry index[b], in place, as beam search needs it; index (B,) int32 or int64."""
        check_counts("index", index, self.device, "(B,)", (self.batch_size,), "the cache")
        index = index.to(self.lengths.device)  # before allocation, self.device is None
        used = [x[:, : self.longest] for x in (self.keys, self.values, self.alpha) if x is not None]
        for x in (*used, *(getattr(self, name) for name in _STATE), *self._unshifted):
            x.copy_(x.index_select(0, index))

    def select(self, index: Tensor) -> None:
        """Make a batch of the entries index (N,) int32 or int64, in that order, in new buffers; entries may repeat."""
        check_tensor("index", index, self.device, "the cache")
        if index.dtype not in (torch.int32, torch.int64) or index.ndim != 1:
            raise ValueError(f"index: expected (N,) int32 or int64, got {index.dtype} {tuple(index.shape)}")
        index = index.to(self.lengths.device)
        with torch.inference_mode(False):
            for name in ("keys", "values", *_STATE):
                setattr(self, name, getattr(self, name).index_select(0, index))
            self._unshifted = tuple(x.index_select(0, index) for x in self._unshifted)
            if self.alpha is not None:
                self.alpha = self.alpha[index]
        self.batch_size = len(index)

    def crop(self, tokens: int | Sequence[int] | Tensor) -> None:
        """Remove the last `tokens` tokens of every entry, or all of them if it has fewer.

        Pass one number for all entries, or one for each: a sequence, or a tensor (B,) of int32 or int64. The host does
        not read a tensor, so `longest` then stays. A reset among them is not undone, and tokens hidden by `evict` stay
        hidden. An entry without tokens is as after `reset`. With a window, the cache must still hold the tokens that
        the next row sees. After others have moved out, a crop can remove up to 128 tokens and those that came since
        (fewer if max_length is below left + 256). With tokens of a layer with kv_shift, the new last token must be one
        of the last 64 appended. More raises, on a GPU by an assertion on the device.
        """
        expected = f"tokens: expected 0 to the {self.longest} tokens held"
        is_one, removed, fewest = validation.is_integer(tokens), tokens, 0
        if isinstance(tokens, Tensor):
            check_counts("tokens", tokens, self.device, "(B,)", (self.batch_size,), "the cache")
            refuse_unless(((tokens >= 0) & (tokens <= self.longest)).all(), f"{expected}, got a tensor with others")
            removed = tokens.to(self.lengths.device)  # before allocation, self.device is None
        else:
            numbers: tuple[Any, ...] = tuple(tokens) if isinstance(tokens, (list, tuple)) else (tokens,)
            if not all(map(validation.is_integer, numbers)):
                raise wrong_type("tokens", "an int, or one for each entry", tokens)
            if not is_one and len(numbers) != self.batch_size:
                raise ValueError(f"tokens: expected a number for each of {self.batch_size} entries, got {len(numbers)}")
            if not all(0 <= number <= self.longest for number in numbers):
                raise ValueError(f"{expected}, got {tokens}")
            fewest = int(min(numbers))
            removed = fewest if is_one else torch.tensor(numbers, device=self.lengths.device)
        if self._left is not None:
            needed = max(self._left, 1)  # the newest token stays: the next α continues from its own
            first_needed = self.lengths + self.dropped - removed - needed
            refuse_unless(
                ((self._moved == 0) | (first_needed >= self._moved)).all(),
                "tokens: expected fewer, because the next row sees tokens that have moved out of the window; reset the "
                "cache and run the prompt again",
            )
        if self._unshifted:
            is_held = self._written - (self.lengths + self.dropped - removed) < _UNSHIFTED
            refuse_unless(
                ((self.lengths <= removed) | is_held).all(),
                f"tokens: expected fewer than {_UNSHIFTED}, or all, because kv_shift mixes the next token with the one "
                "before it, got more; reset the cache and run the prompt again",
            )
        self.lengths.sub_(removed).clamp_(min=0)
        self.longest -= fewest
        # a `first` beyond the length would also hide the next tokens
        torch.minimum(self.first, self.lengths[:, None], out=self.first)
        is_empty = self.lengths == 0
        for positions in (self.dropped, self._written):
            positions.masked_fill_(is_empty, 0)
        self._log_evicted.masked_fill_(is_empty[:, None], -torch.inf)

    @torch.no_grad()
    def evict(self, tolerance: float, score_bound: Tensor | float, log_decay: Tensor | float | None = None) -> Tensor:
        r"""Drop the oldest tokens that no later row can notice. Return a bound on the probability that a row lost.

        With |s q·k| ≤ S for every row and key, a row i has exp(LSE_i) ≥ exp(−S), because it sees itself. So the evicted
        tokens have at most this share of its probability::

            Σ_evicted P_ij  ≤  exp(2 S + α_i) Σ_evicted exp(−α_j)

        The bound never grows while log-decays are ≤ 0. It is at most the tolerance for every later row. The sum
        includes earlier evictions, and a reset sets it to 0. Outputs change by at most 2·tolerance·max |v|. A sink or a
        window only lowers the loss. Without a decay every token may matter, and all stay.

        A head hides as many of its oldest tokens as the tolerance allows; the newest one stays. Tokens that every head
        hides leave the buffers. Synchronises with the device to learn the new length.

        Args:
            tolerance: 0 < tolerance < 1.
            score_bound: S, a number or (H,). DecayFlashAttention.score_bound gives it for a layer with qk_norm.
            log_decay: the constant decay, a number or (H,). Default: that of the last `attend`. Required if the tokens
                came only through `append`.

        Returns:
            (B, H) float64, the bound. It exceeds the tolerance if an earlier eviction had a larger tolerance, if
            log-decays above 0 came after an earlier eviction, or if tokens were cropped.

        Raises:
            TypeError, ValueError: for a bad argument, by name, before anything changes. Bad values in a tensor on a GPU
                fail an assertion there.
        """
        validation.check_number("tolerance", tolerance, "a number between 0 and 1", lambda number: 0 < number < 1)
        score_bound = self._head_numbers("score_bound", score_bound, lowest=0.0)
        if log_decay is not None and self.alpha is not None:
            raise ValueError("log_decay: expected None, because the cache holds a decay per token")
        log_decay = self._rates if log_decay is None else log_decay
        if log_decay is None and self.alpha is None and self.longest > 0:
            raise ValueError(
                "log_decay: expected the constant decay, a number or (H,), because `append` does not store it; "
                "pass 0.0 if nothing decays"
            )
        # below −746 the bound is 0 anyway, and 0 · (−inf) would be NaN
        rates = self._head_numbers("log_decay", 0.0 if log_decay is None else log_decay).clamp(min=RESET_BELOW)
        if self.longest == 0:
            return torch.zeros_like(self._log_evicted)
        j = torch.arange(self.longest, device=self.device)[:, None]
        alpha = (self.dropped[:, None, None] + j) * rates if self.alpha is None else self.alpha[:, : self.longest]
        lengths, entry = self.lengths[:, None], torch.arange(self.batch_size, device=self.device)
        newest = torch.where(lengths > 0, alpha[entry, (self.lengths - 1).clamp(min=0)], 0.0)
        seen = (j >= self.first[:, None]) & (j < lengths[..., None])
        weights = torch.where(seen, newest[:, None] - alpha, -torch.inf).logcumsumexp(1)
        # logs of the bounds for the newest row: before, and after evicting all tokens up to j, non-decreasing in j
        before = self._log_evicted + newest + 2 * score_bound
        lost = torch.logaddexp((self._log_evicted + newest)[:, None], weights) + 2 * score_bound
        last = torch.minimum((lost <= math.log(tolerance)).sum(1), lengths - 1)  # the newest token stays
        first = torch.maximum(self.first, last.to(torch.int32))
        after = lost.gather(1, (first.long() - 1).clamp(min=0)[:, None])[:, 0]
        bound = torch.where(first > self.first, after, before)
        self._log_evicted.copy_(bound - 2 * score_bound - newest)
        self.first.copy_(first)
        # the newest token stays, even if `crop` has left it hidden: the next α continues from its own
        gone = torch.minimum(self.first.amin(1), (self.lengths - 1).clamp(min=0))
        self._drop(gone, int((self.lengths - gone).max()))
        return bound.exp()

    @property
    def _room(self) -> int:
        """Number of tokens that the buffers can hold."""
        return self.max_length if self._left is None else min(self.max_length, self._left + _SLACK)

    @property
    def _kept(self) -> int | None:
        """Number of tokens that stay when older ones move out; None if the buffers lack space for that and two more."""
        if self._left is None or self._room < self._left + 2:
            return None
        return self._left + (self._room - self._left) // 2

    def _restore_buffers(self, replaced: tuple[Tensor, Tensor, Tensor | None] | None) -> None:
        """Return to the buffers that `_append` replaced, because CUDA graphs may hold their addresses."""
        if replaced is not None:
            self._move_out()
            self._move_to(*replaced)

    def _move_out(self, tokens: float = math.inf) -> None:
        """Drop the tokens that no later row sees, except the slack, if that many new ones do not fit."""
        if self.longest + tokens <= self.keys.shape[1]:
            return
        assert self._kept is not None
        gone = (self.lengths - self._kept).clamp(min=0)
        self._drop(gone, min(self.longest, self._kept))
        self._moved.copy_(torch.where(gone > 0, self.dropped, self._moved))

    def _drop(self, gone: Tensor, longest: int) -> None:
        """Remove the first gone (B,) tokens of every entry. `longest` bounds the numbers of remaining tokens."""
        index = (torch.arange(longest, device=self.device) + gone[:, None]).clamp(max=self.longest - 1)
        entry = torch.arange(self.batch_size, device=self.device)[:, None]
        for buffer in (self.keys, self.values, self.alpha):
            if buffer is not None:
                buffer[:, :longest] = buffer[entry, index]
        self.first.sub_(gone[:, None]).clamp_(min=0)
        self.lengths.sub_(gone)
        self.dropped.add_(gone)
        self.longest = longest

    def __repr__(self) -> str:
        names = "batch_size", "max_length", "longest", "num_heads", "num_kv_heads", "head_dim", "value_dim"
        sizes = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        return f"{type(self).__name__}({sizes}, device={self.device and str(self.device)!r}, dtype={self.dtype})"

    def _check_tokens(
        self, k: Tensor, v: Tensor, log_decay: Tensor | None, new_lengths: Tensor | None
    ) -> Tensor | None:
        """Refuse tokens that cannot be appended. Return the number of valid ones in each entry, (B,) int32."""
        check_tensor("k", k, self.device, "the cache")
        device, dtype = k.device, k.dtype if self.dtype is None else self.dtype
        validation.check_dtype("k", dtype)
        for name, x, dim in (("k", k, self.head_dim), ("v", v, self.value_dim)):
            check_tensor(name, x, device, "the cache")
            if x.dtype != dtype:
                raise TypeError(
                    f"{name}: expected the dtype of the cache, {dtype}, got {x.dtype}; make one with dtype={x.dtype}"
                )
            if x.ndim != 4 or (x.shape[0], *x.shape[2:]) != (self.batch_size, self.num_kv_heads, dim):
                wanted = f"({self.batch_size}, T, {self.num_kv_heads}, {dim})"
                raise ValueError(f"{name}: expected the shape of the cache's tokens, {wanted}, got {tuple(x.shape)}")
        tokens = k.shape[1]
        validation.check_same("v", "number of tokens of k", tokens, v.shape[1])
        self._check_room("k", tokens)
        if log_decay is not None:
            check_tensor("log_decay", log_decay, device, "the cache")
            per_token = (self.batch_size, tokens, self.num_heads)
            if log_decay.dtype not in (torch.float32, torch.float64):
                raise TypeError(f"log_decay: expected float32 or float64, got {log_decay.dtype}")
            if log_decay.shape != per_token:
                raise ValueError(f"log_decay: expected (B, T, H) = {per_token}, got {tuple(log_decay.shape)}")
        if self.longest > 0 and (log_decay is not None) != (self.alpha is not None):
            expected, got = ("one per token", "none") if log_decay is None else ("none", "one per token")
            raise ValueError(f"log_decay: expected {expected}, as for tokens in the cache, got {got}; reset the cache")
        if new_lengths is not None:
            check_counts("new_lengths", new_lengths, device, "(B,)", (self.batch_size,), "the cache")
        refuse_gradients(k=k, v=v, log_decay=log_decay)
        return None if new_lengths is None else new_lengths.clamp(0, tokens).to(torch.int32)

    def _check_room(self, name: str, tokens: int) -> None:
        moves_out = self._kept is not None and not self._in_trial
        if moves_out or self._fits(tokens, self._room):
            return
        limit = f"max_length = {self.max_length}"
        if self._kept is not None:
            limit = f"room for {self._room - self._kept} new tokens per captured step"
        raise ValueError(
            f"{name}: expected tokens that fit, got {tokens} more: the cache has {limit}, and its longest entry up to "
            f"{self.longest} tokens; call grow, evict or reset"
        )

    def _fits(self, tokens: int, room: int) -> bool:
        """True if each entry has space for more tokens. Reads the lengths if their upper bound is not enough."""
        is_readable = not (self._in_trial or self.lengths.is_meta)
        if self.longest and self.longest + tokens > room and is_readable:
            self.longest = int(self.lengths.max())
        return self.longest + tokens <= room

    def _append(
        self, decoder: registry.Decoder, k: Tensor, v: Tensor, log_decay: Tensor | None, counted: Tensor | None,
        unshifted: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor | None] | None]:
        """Write checked tokens, `counted` of them valid. Return lengths as if all were, and first keys (B, H, T).

        Third, the buffers that larger ones replace during a long call, or None.
        """
        if self.keys.shape[1] == 0:  # the first keys
            self._allocate(self._room, k.device, k.dtype)
            self.device, self.dtype = k.device, k.dtype
        tokens, replaced = k.shape[1], None
        if tokens == 0:
            return self.lengths, self.first[..., None].expand(-1, -1, 0), None
        self._move_out(tokens)
        if self.longest + tokens > self.keys.shape[1]:
            replaced = self.keys, self.values, self.alpha
            self._resize(self.longest + tokens)
        if log_decay is None:
            self.alpha = None  # tokens before `reset` may have had a decay
        elif self.alpha is None:
            self.alpha = self._new_alpha()
        first = cast(Tensor, decoder.append(self._buffers(), k, v, log_decay, counted))
        ends = self.lengths if counted is None else self.lengths + tokens
        self.lengths.add_(tokens if counted is None else counted)
        self.longest += tokens
        self._keep_unshifted(unshifted, counted)
        return ends, first, replaced

    def _buffers(self) -> reference.CacheBuffers:
        return reference.CacheBuffers(self.keys, self.values, self.lengths, self.first, self._log_evicted, self.alpha)

    @contextlib.contextmanager
    def _trial(self) -> Iterator[None]:
        """Context manager that removes the tokens appended inside. Launches are sized for full buffers."""
        if self._kept is not None:
            self._move_out()  # a step needs space
        state, longest = [self.lengths, self.first, self._log_evicted, self._written, *self._unshifted], self.longest
        before = [x.clone() for x in state]
        self._in_trial = True
        try:
            yield
        finally:
            self._in_trial, self.longest = False, longest
            for x, value in zip(state, before, strict=True):
                x.copy_(value)

    def _new_alpha(self) -> Tensor:
        """Buffer (B, room, H) in which the tokens of a head are contiguous."""
        shape = (self.batch_size, self.num_heads, self.keys.shape[1])
        with torch.inference_mode(False):
            return torch.empty(*shape, device=self.device, dtype=torch.float64).transpose(1, 2)

    def _head_numbers(self, name: str, value: Tensor | float, lowest: float = -math.inf) -> Tensor:
        """A finite number, or a tensor (H,), as (H,) float64, checked to satisfy lowest ≤ x < inf."""
        expected = "" if lowest == -math.inf else f" of at least {lowest:g}"
        if isinstance(value, Tensor):
            check_tensor(name, value, self.device, "the cache")
            if value.shape != (self.num_heads,):
                raise ValueError(f"{name}: expected a number or (H,) = ({self.num_heads},), got {tuple(value.shape)}")
            # a NaN would stay in _log_evicted
            fits = (value >= lowest) & (value < math.inf)
            refuse_unless(fits.all(), f"{name}: expected finite numbers{expected}, got a tensor with others")
            return value.double()
        number = validation.check_number(
            name, value, f"a finite number{expected} or a tensor (H,)",
            lambda number: validation.is_finite(number) and number >= lowest,
        )
        return torch.full((self.num_heads,), number, device=self.device, dtype=torch.float64)
