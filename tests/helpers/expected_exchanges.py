"""Exchanges that are expected, in context parallelism: what every rank of a group computes and compares."""

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from distributed_cases import counted_calls, errors, lengths_of, make, parallel, part_of, whole

from decayattn.distributed import context_parallel_attention, fetching, two_calls


@contextlib.contextmanager
def expecting(calls, few):
    """Expect what `calls` calls in a row have in common, without any before; one part of `few` keys is few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_calls, "CALLS", calls)
        patch.setattr(two_calls, "_histories", {})
        patch.setattr(fetching, "FEW_KEYS", few)
        yield


def calls_in_turn(group, resets, length=100, few=fetching.FEW_KEYS, **case):
    """`calls` one after the other, of slices that reset at those tokens; what the second and later calls in a row have
    in common is expected."""
    ranks, found = dist.get_world_size(group), []
    lengths = lengths_of("equal", length, ranks)
    with expecting(2, few):
        for seed, tokens in enumerate(resets):
            inputs, d_out, d_lse = make(seed, length=length, **case)
            for token in tokens:
                inputs["log_decay"][:, token :: lengths[0]] = -math.inf
            expected = whole(inputs, d_out, d_lse, backend="reference")
            with counted_calls() as counted:
                computed, mine = parallel(group, inputs, d_out, d_lse, lengths, backend="reference")
            found.append((max(errors(computed, expected, mine).values()), counted))
    return found


def expected_by_some(group):
    """Errors of calls after one rank has forgotten those before, and then those after."""
    own, found = _slice_with_resets(group, 2, 47), []
    with expecting(2, few=2):
        for number in range(6):
            if number == 3 and dist.get_rank(group):
                two_calls.history(group).last.clear()
            try:
                context_parallel_attention(**own, group=group, backend="reference")
            except ValueError as error:
                found.append((number, str(error)))
    return found


def order_of_exchange_and_wait(group):
    """Order in the last of three calls that have everything in common, which the third one expects."""
    own, found = _slice_with_resets(group, 2, 47), []
    with expecting(2, few=2), pytest.MonkeyPatch.context() as patch:
        extend, on_host = two_calls.extend, fetching.on_host

        def waiting(x):
            numbers = on_host(x)
            return lambda: found.append("wait") or numbers()

        patch.setattr(two_calls, "extend", lambda *args: found.append("exchange") or extend(*args))
        patch.setattr(fetching, "on_host", waiting)
        for _ in range(3):
            context_parallel_attention(**own, group=group, backend="reference")
    return found


def calls_of_groups_that_overlap(group):
    """Number of calls that succeed when rank 0 calls with one rank first, and then with another one."""
    rank, groups = dist.get_rank(group), [dist.new_group(ranks) for ranks in ((0, 1), (0, 2))]
    succeeded = 0
    with expecting(2, few=2):
        for other, pair in enumerate(groups, 1):
            if rank in (0, other):
                own = _slice_with_resets(pair, 2, 47)
                for _ in range(4):
                    context_parallel_attention(**own, group=pair, backend="reference")
                    succeeded += 1
    for pair in groups:
        if rank in dist.get_process_group_ranks(pair):
            dist.destroy_process_group(pair)
    return succeeded


def _slice_with_resets(group, *tokens):
    """This rank's part of inputs whose slices of 50 tokens reset at those."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    inputs, _, _ = make(length=50 * ranks)
    for token in tokens:
        inputs["log_decay"][:, token::50] = -math.inf
    return {name: part_of(name, x, slice(rank * 50, (rank + 1) * 50)) for name, x in inputs.items()}


def few_keys(group, cases, wrong):
    """For every case, with nearly any number of keys few: the largest error, and tensors with other bits where that is
    wrongly expected."""
    ranks, found = dist.get_world_size(group), {}
    for name, case in cases.items():
        case = dict(length=100, options={}, lengths="equal", cu_seqlens=None) | case
        options, lengths, cu_seqlens = (case.pop(key) for key in ("options", "lengths", "cu_seqlens"))
        inputs, d_out, d_lse = make(**case)
        lengths = lengths_of(lengths, case["length"], ranks)
        if cu_seqlens is not None:
            cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32)
        expected = whole(inputs, d_out, d_lse, cu_seqlens, backend="reference", **options)
        with expecting(math.inf, few=0.1), pytest.MonkeyPatch.context() as patch:
            results = []
            for guess in (two_calls.Expected(), two_calls.Expected(*wrong)):
                patch.setattr(two_calls.History, "expected", lambda *_, guess=guess: guess)
                computed, mine = parallel(
                    group, inputs, d_out, d_lse, lengths, cu_seqlens=cu_seqlens, backend="reference", **options
                )
                results.append(computed)
        worst = max(errors(results[0], expected, mine).values())
        found[name] = worst, [key for key, x in results[0].items() if not torch.equal(x, results[1][key])]
    return found


def expected_on_gpus(group, means, backend):
    """`calls_in_turn` of kernels: with what is expected and without, for every mean decay: the largest difference of
    every result, over its largest number, and how many rows the calls have."""
    of_both = []
    for calls_before in (2, math.inf):
        of_means = []
        with expecting(calls_before, few=4):
            for mean in means:
                case = dict(length=4096, batch=1, dim=64, value_dim=64, dtype=torch.bfloat16, device="cuda")
                inputs, d_out, d_lse = make(mean=mean, **case)
                with counted_calls() as counted:
                    computed, _ = parallel(group, inputs, d_out, d_lse, [2048, 2048], backend=backend)
                of_means.append((computed, counted))
        of_both.append(of_means)
    everything = slice(None)
    return [
        (errors(early, late, everything), (counted_early, counted_late))
        for (early, counted_early), (late, counted_late) in zip(*of_both, strict=True)
    ]
