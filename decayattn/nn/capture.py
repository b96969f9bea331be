"""CapturedStep: one step of decoding as a CUDA graph, without Python between its launches."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from decayattn.nn.cache import DecayCache
from decayattn.validation import wrong_type


class CapturedStep:
    r"""A decoding step captured as a CUDA graph: no Python between its kernels.

    The function appends new tokens to caches, through layers with `cache=`, and returns tensors. It is captured after
    the prompt, and the step is then called like the function::

        step = CapturedStep(lambda token: model(token, caches).argmax(-1), caches, token)
        token = step(token)  # (B, 1)

    Inputs and outputs are in memory that the next call overwrites: clone outputs to keep them. Shapes are those of the
    capture; the lengths of the entries are on the device and change. `evict`, `crop`, `reorder` and longer calls
    between two steps are allowed. A cache that was emptied or reallocated (`reset`, `grow`, `select`) raises. Launches
    are sized for full buffers. The function follows the rules of CUDA graphs: no synchronisation and no new shapes.
    Random numbers of the default generator continue. On a CPU, which has no graphs, a step calls the function.

    Args:
        function: called as function(*inputs). Every call appends the same number of tokens to a cache, up to 128 with a
            window. On a GPU the constructor calls it three times and removes the tokens of these calls.
        caches: the caches that it appends to, filled with a prompt, with space for another call.
        inputs: tensors of the shapes, dtypes and device of all calls.

    Raises:
        TypeError, ValueError: for a bad argument, by name. A call raises for inputs of other shapes, dtypes or devices,
            and for tokens that do not fit in a cache.
        RuntimeError: in a call, for a cache that was emptied or reallocated.
    """

    def __init__(self, function: Callable[..., Any], caches: Sequence[DecayCache], *inputs: Tensor):
        if not callable(function):
            raise wrong_type("function", "a callable", function)
        self._caches = tuple(caches)
        for cache in self._caches:
            if not isinstance(cache, DecayCache):
                raise wrong_type("caches", "DecayCaches", cache)
            if cache.longest == 0:
                raise ValueError("caches: expected filled caches, got an empty one; run the prompt first")
        if not self._caches:
            raise ValueError("caches: expected at least one, got none")
        self._kinds = _kinds(inputs)
        self._function, self._inputs = function, tuple(x.clone() for x in inputs)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._buffers, self._tokens = [_buffers(cache) for cache in self._caches], [0] * len(self._caches)
        if not self._caches[0].keys.is_cuda:
            return
        with torch.cuda.device(self._caches[0].keys.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._run_trial()  # compiles, and makes lasting allocations
                self._tokens, _ = self._run_trial()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            _, self._outputs = self._run_trial(torch.cuda.graph(graph))
            self._graph = graph

    def __call__(self, *inputs: Tensor) -> Any:
        """Return the function's outputs for these inputs."""
        if (kinds := _kinds(inputs)) != self._kinds:
            raise ValueError(f"inputs: expected (shape, dtype, device) {self._kinds}, got {kinds}")
        if self._graph is None:
            return self._function(*inputs)
        for cache, buffers, tokens in zip(self._caches, self._buffers, self._tokens, strict=True):
            if _buffers(cache) != buffers or cache.longest == 0:
                raise RuntimeError(
                    "CapturedStep: a cache was emptied or reallocated (reset, grow, select); create a new CapturedStep"
                )
            cache._check_room("caches", tokens)
        for cache, tokens in zip(self._caches, self._tokens, strict=True):
            cache._move_out(tokens)
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        for cache, tokens in zip(self._caches, self._tokens, strict=True):
            cache.longest += tokens
        return self._outputs

    def _run_trial(self, context: Any = None) -> tuple[list[int], Any]:
        """(tokens appended to each cache, outputs) of one call; the caches keep their state."""
        with contextlib.ExitStack() as stack:
            for cache in self._caches:
                stack.enter_context(cache._trial())
            before = [cache.longest for cache in self._caches]
            with context or contextlib.nullcontext():
                outputs = self._function(*self._inputs)
            return [cache.longest - n for cache, n in zip(self._caches, before, strict=True)], outputs


def _kinds(inputs: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
    for x in inputs:
        if not isinstance(x, Tensor):
            raise wrong_type("inputs", "tensors", x)
    return [(x.shape, x.dtype, x.device) for x in inputs]


def _buffers(cache: DecayCache) -> tuple[int | None, ...]:
    return tuple(None if x is None else x.data_ptr() for x in (*cache._buffers(), *cache._unshifted))
