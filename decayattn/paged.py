"""Attention over a cache that a serving engine keeps in pages; inference only."""

from typing import Literal, overload

import torch
from torch import Tensor

from decayattn import normalize, reference, validation
from decayattn.backends import registry
from decayattn.problem import BackendName
from decayattn.validation import check_bool, check_count, check_counts, check_tensor, refuse_gradients


@overload
def decay_attention_paged(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, log_decay: Tensor | float | None = None, *, block_table: Tensor,
    cache_seqlens: Tensor, return_lse: Literal[False] = False, **options: object,
) -> Tensor: ...
@overload
def decay_attention_paged(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, log_decay: Tensor | float | None = None, *, block_table: Tensor,
    cache_seqlens: Tensor, return_lse: Literal[True], **options: object,
) -> tuple[Tensor, Tensor]: ...
@validation.hide_unknown  # type: ignore[misc]  # the overloads do not type the other options
def decay_attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    log_decay: Tensor | float | None = None,
    *,
    block_table: Tensor,
    cache_seqlens: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    alpha_pages: Tensor | None = None,
    first: Tensor | None = None,
    scale: Tensor | float | None = None,
    window_size: tuple[int, int] | None = None,
    sink: Tensor | None = None,
    max_seqlen: int | None = None,
    return_lse: bool = False,
    backend: BackendName = "auto",
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Causal attention of the last T tokens of every entry over a paged cache.

    Token t of entry b is in page block_table[b, t // P], slot t % P, as in vLLM and FlashAttention (paged attention,
    arXiv 2309.06180). Scores are those of decay_attention over the whole sequence::

        S_ij = s_i · q_i·k_j + (α_i − α_j)     α_t = Σ_{u ≤ t} λ_u

    With k and v, the T tokens are first written after the cache_seqlens tokens of their entry. Without, they are
    already in the pages, and cache_seqlens counts them. α of a decay per token is in pages, too. The caller owns the
    table: it provides pages and adds T to the lengths. A token beyond the last page of the table is not written and not
    visible, and its row is undefined. Page numbers after an entry's last token are not read. Those before it are read
    and must be valid, even if a window or `first` hides all of their tokens.

    Args:
        q: (B, T, H, D).
        k_pages, v_pages: (pages, P, H_kv, D) and (pages, P, H_kv, D_v) in the dtype of q; any strides.
        log_decay: None, a number or (H,): constant rates. With k, also (B, T, H): one per new token, natural logarithm,
            −inf to reset. The first λ of a sequence is not used.
        block_table: (B, blocks) int32.
        cache_seqlens: (B,) int32 or int64.
        k, v: (B, T, H_kv, D) and (B, T, H_kv, D_v), the new tokens.
        alpha_pages: (pages, P, H) float64, α of a decay per token. Calls with k write it; all calls read it.
        first: (B, H) int32, the first token that a head still sees. It holds for every row of a call without k.
            Required with alpha_pages, because resets move it; otherwise the default is 0.
        scale, window_size, sink, backend: as in decay_attention; a scale per row is (B, T, H). "hopper" has no kernels
            for paged caches.
        max_seqlen: upper bound on the lengths, new tokens included; sizes the launch. Default: the tokens that an entry
            has pages for. A smaller bound also saves the search for tokens without a page.
        return_lse: also return lse.
    Returns:
        out (B, T, H, D_v), or (out, lse) with lse (B, H, T). Rows before an entry's first token have out 0, lse −inf.

    Raises:
        TypeError, ValueError: for every bad argument, by name, before anything is written.
        RuntimeError: if an input requires a gradient; call it under torch.no_grad().
    """
    if unknown:
        validation.refuse_unknown(decay_attention_paged, unknown)
    _check_pages(q, k_pages, v_pages, block_table, cache_seqlens)
    if (k is None) != (v is None):
        raise ValueError("v: expected None without k" if v is not None else "v: expected a tensor with k, got None")
    new_k, new_v = (
        pages.new_empty(len(q), 0, *pages.shape[2:]) if x is None else x for x, pages in ((k, k_pages), (v, v_pages))
    )
    inputs, per_token, left = normalize.decoding(q, new_k, new_v, log_decay, scale, window_size, sink)
    check_bool("return_lse", return_lse)
    most = block_table.shape[1] * k_pages.shape[1]
    longest = most + q.shape[1] if max_seqlen is None else check_count("max_seqlen", max_seqlen)
    for name, new, pages in (("k", k, k_pages), ("v", v, v_pages)):
        if new is not None:
            shape = (*q.shape[:2], *pages.shape[2:])
            _check(name, new, q, q.dtype, f"the tokens of q and the heads of {name}_pages", shape)
    _check_decay(q, k_pages, k, per_token, inputs.log_decay, alpha_pages, first)
    refuse_gradients(q=q, k=k, v=v, k_pages=k_pages, v_pages=v_pages, log_decay=log_decay, scale=scale, sink=sink)
    decoder = registry.decoder(backend, q.dtype, q.device)
    lengths, tokens = cache_seqlens.to(torch.int32), q.shape[1]
    if k is not None and tokens and q.device.type != "meta":  # meta has nothing to write
        cache = reference.CacheBuffers(k_pages, v_pages, lengths, first, None, alpha_pages, block_table)
        seen = decoder.append(cache, new_k, new_v, per_token, None)
        lengths = lengths + tokens
    else:
        seen = None if first is None else first[..., None].expand(-1, -1, tokens)
    # with T = 1, rows are counted from the last token with a page; with T > 1 some tokens may lie beyond it
    beyond = None if tokens < 2 or longest <= most else (lengths - most).clamp(0, tokens)
    if beyond is not None:
        row_scale = None if inputs.row_scale is None else normalize.roll_left(inputs.row_scale, -beyond)
        inputs = inputs._replace(q=normalize.roll_left(q, -beyond), row_scale=row_scale)
        seen = None if seen is None else normalize.roll_left(seen.mT, -beyond).mT
    out, lse = decoder.decode(
        inputs._replace(k=k_pages, v=v_pages), lengths, alpha=alpha_pages, first=seen, left=left,
        longest=min(longest, most), block_table=block_table,
    )
    if beyond is not None:
        out, lse = normalize.roll_left(out, beyond), normalize.roll_left(lse.mT, beyond).mT
    return (out, lse) if return_lse else out


def _check_pages(q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, cache_seqlens: Tensor) -> None:
    for name, x, shape in (
        ("q", q, ("B", "T", "H", "D")), ("k_pages", k_pages, ("pages", "P", "H_kv", "D")),
        ("v_pages", v_pages, ("pages", "P", "H_kv", "D_v")), ("block_table", block_table, ("B", "blocks")),
    ):
        if check_tensor(name, x).ndim != len(shape):
            raise ValueError(f"{name}: expected shape ({', '.join(shape)}), got {tuple(x.shape)}")
    if 0 in k_pages.shape[:2]:
        raise ValueError(f"k_pages: expected at least one page with one token, got {tuple(k_pages.shape)}")
    _check("k_pages", k_pages, q, q.dtype, "the head dimension of q", (*k_pages.shape[:3], q.shape[3]))
    _check("v_pages", v_pages, q, q.dtype, "the pages and heads of k_pages", (*k_pages.shape[:3], v_pages.shape[3]))
    _check("block_table", block_table, q, torch.int32, "(B, blocks)", (len(q), max(1, block_table.shape[1])))
    check_counts("cache_seqlens", cache_seqlens, q.device, "(B,)", (len(q),))


def _check_decay(
    q: Tensor, k_pages: Tensor, k: Tensor | None, per_token: Tensor | None, rates: Tensor | None,
    alpha_pages: Tensor | None, first: Tensor | None,
) -> None:
    if per_token is not None and k is None:
        raise ValueError("log_decay: expected (H,) without k; for tokens already in the pages, pass alpha_pages")
    if per_token is not None and alpha_pages is None:
        raise ValueError("alpha_pages: expected a tensor with a log_decay per token, to store its running sum")
    if alpha_pages is not None:
        if rates is not None:
            raise ValueError("alpha_pages: expected None with a constant log_decay")
        if k is not None and per_token is None:
            raise ValueError("log_decay: expected one per new token, (B, T, H), with k and alpha_pages")
        if first is None:
            raise ValueError("first: expected (B, H) with alpha_pages, as resets move it; zeros if there were none")
        _check("alpha_pages", alpha_pages, q, torch.float64, "(pages, P, H)", (*k_pages.shape[:2], q.shape[2]))
    if first is not None:
        _check("first", first, q, torch.int32, "contiguous (B, H)", (len(q), q.shape[2]))
        if not first.is_contiguous():
            raise ValueError(f"first: expected contiguous (B, H), got strides {first.stride()}")


def _check(name: str, x: Tensor, q: Tensor, dtype: torch.dtype, expected: str, shape: tuple[int, ...]) -> None:
    check_tensor(name, x, q.device)
    if x.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}, got {x.dtype}")
    if x.shape != shape:
        raise ValueError(f"{name}: expected {expected}, {shape}, got {tuple(x.shape)}")
