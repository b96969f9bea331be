"""CapturedStep: one step of decoding as a CUDA graph, without Python between its launches."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from decayattn.nn.cache import DecayCache


class CapturedStep:
    r"""A decoding step that the host prepares once and the GPU repeats, where a small model waits for Python otherwise.

    The function appends new tokens to caches, through layers with `cache=`, and returns tensors. It is captured in a
    CUDA graph after the prompt, and called like the function from then on::

        caches = [layer.make_cache(batch_size, max_length) for layer in layers]
        token = model(prompt, caches).argmax(-1)[:, -1:]             # (B, 1)

        step = CapturedStep(lambda token: model(token, caches).argmax(-1), caches, token)
        for _ in range(1000):
            token = step(token)

    Every call reads its inputs from, and returns its outputs in, memory that the next call overwrites: clone what is
    kept longer. Sizes do not change from call to call; the lengths of the entries do, they are on the device. `evict`,
    `crop` and `reorder` between calls are fine; where a cache has new buffers since (`grow`, `select`), or has been
    emptied, a call raises an error. Launches are as large as max_length needs. What the function does besides is
    subject to what CUDA graphs allow (no waiting for the GPU, no new shapes; random numbers of the default generator
    go on from replay to replay).

    On a CPU, which has no graphs, the function is called as it is.

    Args:
        function: called as function(*inputs); it appends as many tokens to a cache in every call. On a GPU it is called
            three times here, and what it appends then is forgotten.
        caches: those that it appends to, with a prompt in them, and room for another call.
        inputs: tensors as those of the calls: shapes, dtypes, device.

    Raises:
        TypeError, ValueError: for a bad argument, by name; later, for inputs of other shapes, dtypes or devices, and
            where the tokens do not fit in a cache.
        RuntimeError: in a call, where a cache is not the one that was captured any more.
    """

    def __init__(self, function: Callable[..., Any], caches: Sequence[DecayCache], *inputs: Tensor):
        if not callable(function):
            raise TypeError(f"function: expected a callable, got {function!r} of type {type(function).__name__}")
        self._caches = tuple(caches)
        for cache in self._caches:
            if not isinstance(cache, DecayCache):
                raise TypeError(f"caches: expected DecayCaches, got {cache!r} of type {type(cache).__name__}")
            if cache.longest == 0:
                raise ValueError("caches: expected filled caches, got an empty one; run the prompt first")
        if not self._caches:
            raise ValueError("caches: expected at least one, got none")
        _check_tensors(inputs)
        self._function, self._inputs = function, tuple(x.clone() for x in inputs)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._buffers, self._tokens = [_buffers(cache) for cache in self._caches], [0] * len(self._caches)
        if self._caches[0].keys.is_cuda:
            self._capture()

    def __call__(self, *inputs: Tensor) -> Any:
        """What the function returns for these inputs."""
        _check_tensors(inputs)
        kinds = [(x.shape, x.dtype, x.device) for x in inputs]
        expected = [(x.shape, x.dtype, x.device) for x in self._inputs]
        if kinds != expected:
            raise ValueError(f"inputs: expected (shape, dtype, device) {expected}, got {kinds}")
        if self._graph is None:
            return self._function(*inputs)
        for cache, buffers, tokens in zip(self._caches, self._buffers, self._tokens, strict=True):
            if _buffers(cache) != buffers or cache.longest == 0:
                raise RuntimeError("CapturedStep: a cache has other buffers or lost its tokens: capture the step again")
            if cache.longest + tokens > cache.max_length:
                raise ValueError(
                    f"caches: {tokens} more tokens do not fit: one has max_length = {cache.max_length}, and its "
                    f"longest entry up to {cache.longest} tokens"
                )
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        for cache, tokens in zip(self._caches, self._tokens, strict=True):
            cache.longest += tokens
        return self._outputs

    def _capture(self) -> None:
        device = self._caches[0].keys.device
        with torch.cuda.device(device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._tried()  # compiles, and allocates what stays
                self._tokens, _ = self._tried()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            _, self._outputs = self._tried(torch.cuda.graph(graph))
            self._graph = graph

    def _tried(self, context: Any = None) -> tuple[list[int], Any]:
        """(tokens appended to each cache, outputs) of one call that leaves the caches as they were."""
        with contextlib.ExitStack() as stack:
            for cache in self._caches:
                stack.enter_context(cache._trial())
            before = [cache.longest for cache in self._caches]
            with context or contextlib.nullcontext():
                outputs = self._function(*self._inputs)
            return [cache.longest - n for cache, n in zip(self._caches, before, strict=True)], outputs


def _check_tensors(inputs: Sequence[object]) -> None:
    for x in inputs:
        if not isinstance(x, Tensor):
            raise TypeError(f"inputs: expected tensors, got {x!r} of type {type(x).__name__}")


def _buffers(cache: DecayCache) -> tuple[int | None, ...]:
    return tuple(None if x is None else x.data_ptr() for x in cache._held())
