"""Context parallelism: every result and gradient of several ranks against one process."""

import numpy as np
import pytest
import torch
from distributed_cases import Misplacing
from distributed_pool import DIED, Pool
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from decayattn import DecayFlashAttention
from decayattn.distributed import ContextParallel, collectives, context_parallel_attention, option_check, ulysses

POOLS = ["cpu_ranks", pytest.param("four_ranks", marks=pytest.mark.slow)]
# all in one process, which has the pool
pytestmark = pytest.mark.xdist_group("distributed")
# of values around 1 in float64, added up in another order
EXACT = 1e-12


@pytest.fixture(scope="module")
def four_ranks():
    with Pool(4) as started:
        yield started


@pytest.fixture
def pool(request):
    """Processes with gloo on the CPU."""
    return request.getfixturevalue(getattr(request, "param", "cpu_ranks"))


def assert_exact(of_ranks, bound=EXACT):
    """Errors by name, of every rank."""
    assert all(error <= bound for errors in of_ranks for error in errors.values()), of_ranks


# name → the modes, and the case
BOTH, HALO, HEADS = ("halo", "heads"), ("halo",), ("heads",)
CASES = {
    "a gate": (BOTH, {}),
    "no decay": (BOTH, dict(decay="none")),
    "constant": (BOTH, dict(decay="constant")),
    "growth": (BOTH, dict(decay="growth", mean=0.1)),
    "growing constant": (BOTH, dict(decay="constant", mean=0.01)),
    "resets": (BOTH, dict(resets=0.02)),
    "most tokens reset": (BOTH, dict(resets=0.6)),
    "masks for resets": (BOTH, dict(mean=-2e3)),
    "a constant that resets": (BOTH, dict(decay="constant", mean=-1e4)),
    "window": (BOTH, dict(options=dict(window_size=(30, 0)))),
    "window of the own key": (BOTH, dict(options=dict(window_size=(0, -1)))),
    "window without a decay": (BOTH, dict(decay="none", options=dict(window_size=(50, -1)))),
    "scales and sink": (BOTH, dict(row_scale=True, sink=True, options=dict(window_size=(40, 0)))),
    "a number for the scale": (BOTH, dict(options=dict(scale=-0.3))),
    "uneven": (BOTH, dict(lengths="uneven", resets=0.01)),
    "chunks": (BOTH, dict(lengths="chunk", length=109, sink=True)),
    "empty slices": (BOTH, dict(lengths="chunk", length=5, resets=0.2)),
    "no token": (BOTH, dict(length=0)),
    "multi-query": (BOTH, dict(kv_heads=1)),
    "multi-head": (BOTH, dict(kv_heads=4, dim=3)),
    "packed": (BOTH, dict(batch=1, cu_seqlens=[0, 3, 3, 50, 51, 99])),
    "packed and a tail": (BOTH, dict(batch=1, cu_seqlens=[2, 80], resets=0.02, sink=True)),
    "packed at the edges": (BOTH, dict(batch=1, cu_seqlens=[0, 25, 50, 100], row_scale=True)),
    "packed, cut at max_seqlen": (BOTH, dict(batch=1, cu_seqlens=[0, 60, 100], options=dict(max_seqlen=35))),
    "packed without a decay": (BOTH, dict(batch=1, cu_seqlens=[0, 60, 100], decay="none")),
    "packed, uneven, constant, window": (
        BOTH,
        dict(batch=1, cu_seqlens=[0, 17, 60, 99], decay="constant", lengths="uneven", options=dict(window_size=(20, 0)))
    ),
    "packed and no token of a sequence": (BOTH, dict(batch=1, cu_seqlens=[0], sink=True)),
    "not causal": (HEADS, dict(options=dict(causal=False))),
    "not causal, constant": (HEADS, dict(options=dict(causal=False), decay="constant", lengths="uneven")),
    "a gate per direction": (HEADS, dict(options=dict(causal=False), decay="directions", resets=0.02)),
    "packed gates": (HEADS, dict(options=dict(causal=False), decay="directions", batch=1, cu_seqlens=[2, 40, 41, 90])),
    "a window to both sides": (HEADS, dict(options=dict(causal=False, window_size=(9, 20)), kv_heads=1)),
    "repeated key heads": (HEADS, dict(heads=12, kv_heads=3, sink=True, decay="constant", spread=100.0)),
    "rows of many heads": (HEADS, dict(heads=8, kv_heads=2, row_scale=True, sink=True, spread=10.0)),
    "reach of a window": (HALO, dict(decay="none", options=dict(window_size=(30, 0), reach=30))),
    "reach over a window": (HALO, dict(options=dict(window_size=(30, 0), reach=70))),
    "short reach": (HALO, dict(mean=-30.0, options=dict(reach=5))),
    "reach, packed": (HALO, dict(mean=-30.0, options=dict(reach=5), batch=1, cu_seqlens=[0, 20, 55, 100])),
    "reach over everything": (HALO, dict(options=dict(reach=10**6), lengths="uneven")),
}


@pytest.mark.parametrize("pool", POOLS, indirect=True)
@pytest.mark.parametrize(("mode", "case"), [(mode, case) for case, (modes, _) in CASES.items() for mode in modes])
def test_ranks_match_one_process(pool, mode, case):
    found = pool.run("distributed_cases.compare", mode, **dict(length=100) | CASES[case][1])
    assert all({"out", "lse", "d_q", "d_k", "d_v"} <= errors.keys() for errors in found)
    assert_exact(found)


# Keys that are sent


@pytest.mark.parametrize("pool", POOLS, indirect=True)
@pytest.mark.parametrize("seen", [1.0, 0.5])  # in one call, and in two
@pytest.mark.parametrize(
    "case", [{}, dict(lengths="uneven", resets=0.02), dict(kv_heads=1, sink=True, row_scale=True), dict(kv_heads=4)]
)
def test_heads_that_fetch_less_than_others_see_no_zeros(pool, seen, case):
    assert_exact(pool.run("distributed_cases.random_halo", seen=seen, length=100, **case))


@pytest.mark.slow
@pytest.mark.parametrize(("pool", "case"), [
    ("cpu_ranks", dict(length=640, mean=-0.4, spread=8.0, heads=2, decay="constant", row_scale=True, sink=True)),
    ("four_ranks", dict(length=512, mean=-1.0, spread=8.0, resets=0.003, kv_heads=4, lengths="uneven")),
], indirect=["pool"])
def test_keys_that_cannot_matter_are_not_fetched(pool, interpreter, case):
    """Through the kernels, in Triton's interpreter."""
    errors, everyone = zip(*pool.run("distributed_cases.planned", batch=1, **case), strict=True)
    assert_exact(errors)
    assert all(other == everyone[0] for other in everyone)
    tokens = torch.tensor(everyone[0])
    assert tokens[0].max() == 0
    assert 0 < tokens.max() < case["length"] / 2
    assert len(tokens[-1].unique()) > 1  # heads have halos of their own


PLANNED = dict(length=1280, batch=1, mean=-1.0, backend="triton")


@pytest.mark.parametrize(("expected", "case"), [
    *(
        (rows, dict(decay=decay, options=dict(window_size=(window, 0))))
        for window, rows in ((2, [47, 3]), (20, [25, 25]), (25, [25, 25]), (26, [50]))
        for decay in ("none", "gate")
    ),
    pytest.param([576, 64], PLANNED, marks=pytest.mark.slow),
    pytest.param(
        [576, 64], PLANNED | dict(decay="constant", row_scale=True, sink=True, kv_heads=1), marks=pytest.mark.slow
    ),
])
def test_rows_that_see_only_their_slice_have_a_call(pool, interpreter, expected, case):
    """The first call has those rows, unless they are less than half. The number of other rows is rounded up to a part
    of the slice. With a plan, the first call skips keys by the plan's summaries."""
    errors, counted = zip(*pool.run("distributed_cases.calls", **dict(length=100) | case), strict=True)
    assert counted[1] == expected
    assert_exact(errors)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, dict(cu_seqlens=torch.tensor([0, 120, 640]), window_size=(200, 0))])
def test_lost_probability_is_within_the_tolerance(pool, interpreter, options):
    case = dict(length=640, batch=1, mean=-0.14, heads=2, kv_heads=2)
    found = pool.run("distributed_cases.lost", 1e-3, options=options, **case)
    assert 0 < max(lost for lost, _ in found) <= 1e-3
    assert 0 < max(fetched for _, fetched in found) < 320


def test_halo_and_skipping_share_the_tolerance(pool, interpreter):
    assert max(pool.run("distributed_cases.lost_twice")) <= 1


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 256), (torch.float16, 2048)])
def test_gradients_of_repeated_heads_round_once(dtype, size):
    """The dtype has no value size + 1."""
    grad = torch.tensor([size, 1, 1, 1, 2, 3], dtype=dtype)[:, None].expand(2, 5, 6, 7)
    expected = torch.tensor([size + 2, 6], dtype=dtype)[:, None].expand(2, 5, 2, 7)
    x = torch.zeros_like(expected).requires_grad_()
    (found,) = torch.autograd.grad(ulysses._repeated(x, 6), x, grad)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_forward_and_a_backward_have_one_exchange_each_way(pool):
    case = dict(length=64, batch=2, heads=4, kv_heads=2, dim=16, value_dim=8, dtype=torch.bfloat16)
    halo = pool.run("distributed_cases.sent_bytes", "halo", **case)
    # k, v and the log-decays of two query heads, each filled up to a multiple of 16 bytes
    row, rows = 16 * 2 + 8 * 2 + (2 * 4 + 8), 2 * 32 * 2
    assert halo == [[rows * row, 0], [0, rows * row]]
    heads = pool.run("distributed_cases.sent_bytes", "heads", **case)
    # q, k, v and λ of the other rank's heads there; out and lse back; and their gradients the other way
    there, back = 2 * 16 * 2 + row, 2 * 8 * 2 + (2 * 4 + 8)
    assert heads == [[64 * there, 64 * back, 64 * back, 64 * there]] * 2


# Ranks that do not agree


@pytest.mark.parametrize("pool", POOLS, indirect=True)
@pytest.mark.parametrize(("name", "options", "of_last_rank"), [
    ("mode", {}, dict(mode="heads")),
    ("skip_tolerance", {}, dict(skip_tolerance=None)),
    ("window_size", dict(window_size=(8, 0)), dict(window_size=(9, 0))),
    ("scale", {}, dict(scale=0.5)),
    ("backend", {}, dict(backend="reference")),
    ("log_decay", {}, dict(log_decay=None)),
    ("sink", {}, dict(sink=torch.zeros(4))),
    ("requires_grad", dict(mode="heads", sink=torch.zeros(4)), dict(sink=torch.ones(4, requires_grad=True))),
    ("bias", dict(mode="heads", bias=torch.zeros(1)), dict(bias=torch.zeros(1, 1))),
    ("lengths", {}, dict(lengths="halved")),
])
def test_options_that_differ_are_named_on_every_rank(pool, name, options, of_last_rank):
    for error, _ in pool.outcomes("distributed_cases.call", options, of_last_rank, seconds=30):
        assert f"ValueError: {name}: expected the same on every rank" in error


PACKED = dict(cu_seqlens=torch.tensor([0, 24]))


@pytest.mark.parametrize(("options", "inputs", "others"), [
    (dict(mode="heads"), {}, [0, 0]),
    (dict(reach=3), {}, [0]),
    (dict(log_decay=None), {}, [0]),
    (dict(log_decay=None) | PACKED, dict(batch=1), [3, 0]),
    ({}, dict(decay="constant"), [5, 0]),
    ({}, {}, [8, 5, 0]),  # resets, and the plan
    (dict(backend="triton"), {}, [36, 5, 0]),  # summaries of slices, and the plan
])
def test_options_are_compared_before_any_other_collective(pool, interpreter, options, inputs, others):
    """Ranks that do not agree might wait for one another in it."""
    assert pool.run("distributed_cases.collective_sizes", options, **inputs) == [[32, *others]] * 2


@pytest.mark.parametrize("mode", BOTH)
def test_known_options_that_differ_are_named(pool, mode):
    pool.run("distributed_cases.disagree_later", mode, seconds=30)


def assert_others_end(outcomes, own_error):
    """The last rank has its own error, and the others name it."""
    *others, (own, _) = outcomes
    assert own_error in own
    raised = f"expected a call on every rank, got an error on rank {len(others)}"
    for error, _ in others:
        assert f"RuntimeError: context_parallel_attention: {raised}" in error


ON_META = torch.zeros(2, 12, 4, 16, dtype=torch.float64, device="meta")


@pytest.mark.parametrize(("of_last_rank", "error"), [
    (dict(mode="ring"), "ValueError: mode: expected 'halo' or 'heads', got 'ring'"),
    (dict(causal=False), "ValueError: causal: expected True with mode='halo'"),
    (dict(bias=torch.zeros(1)), "ValueError: bias: expected None with mode='halo'"),
    (dict(mode="heads", bias=torch.zeros(2, 1, 24)), "ValueError: bias: expected a tensor broadcastable to (B, H,"),
    (dict(seqused_k=torch.tensor([1, 2])), "ValueError: seqused_k: expected None with mode='halo'"),
    (dict(reach=-1), "ValueError: reach: expected at least 0, got -1"),
    (dict(reach=1, mode="heads"), "ValueError: reach: expected only with mode='halo'"),
    (dict(lengths=[6, 6]), "ValueError: lengths: expected the number of tokens of each of 2 ranks, with 12"),
    (dict(lengths="44"), "TypeError: lengths: expected a number of tokens for each rank, got '44'"),
    (dict(max_seqlen=4), "ValueError: max_seqlen: expected only with cu_seqlens"),
    (PACKED, "ValueError: q: expected shape (1, T, H, D) with cu_seqlens"),
    (dict(cu_seqlens=torch.tensor([0, 30, 24])), "ValueError: cu_seqlens: expected offsets that never fall"),
    (dict(softmax_scale=1.0), "TypeError: softmax_scale: unexpected keyword argument"),
    (dict(q=None), "TypeError: q: expected a torch.Tensor, got None"),
    (dict.fromkeys("qkv", ON_META) | dict(log_decay=-0.1), "ValueError: q: expected a device of the group"),
    (dict(mapped=True), "RuntimeError: context_parallel_attention: expected no transform of torch.func"),
    (dict(mode="heads", heads=3, kv_heads=3), "ValueError: mode: expected query heads in a multiple of the 2"),
])
def test_bad_arguments_on_one_rank_are_named_on_all(pool, of_last_rank, error):
    shape = {name: of_last_rank[name] for name in ("heads", "kv_heads") if name in of_last_rank}
    changed = {name: x for name, x in of_last_rank.items() if name not in shape}
    assert_others_end(pool.outcomes("distributed_cases.call", {}, changed, seconds=30, **shape), error)


def test_a_bad_group_is_refused(pool):
    for error, _ in pool.outcomes("distributed_cases.call", dict(group="world"), seconds=30):
        assert "TypeError: group: expected a torch.distributed.ProcessGroup" in error


A_RESET = torch.zeros(1, 4, dtype=torch.bool)


@pytest.mark.parametrize(("options", "of_last_rank", "refused"), [
    ({}, dict(x=torch.zeros(1, 4, 17)), "ValueError: x: expected shape (B, T, embed_dim = 16)"),
    ({}, dict(x=torch.zeros(1, 4, 16, dtype=torch.float64)), "RuntimeError: "),
    ({}, dict(x=torch.zeros(2, 4, 16)), "ValueError: q: expected the same on every rank"),
    ({}, dict(attn_mask=None), "TypeError: attn_mask: unexpected keyword"),
    (dict(decay="constant"), dict(resets=A_RESET), "ValueError: resets: expected"),
    ({}, dict(lengths=5), "TypeError: lengths: expected a number of tokens for each rank, got 5"),
    (dict(scale="learned"), dict(log_scale=torch.zeros(3)), "ValueError: scale: expected"),
    (dict(position=Misplacing()), {}, "ValueError: position: expected k back"),
    *((dict(qk_norm=True), dict(raises=name), "OutOfMemoryError") for name in ("in_proj", "decay", "q_norm")),
    # before, in and after the exchange of the tokens before the slices
    (dict(kv_shift=True), dict(raises="in_proj"), "OutOfMemoryError"),
    (dict(kv_shift=True), dict(x=torch.zeros(2, 4, 16)), "ValueError: kv_shift: expected the same on every rank"),
    (dict(kv_shift=True, position=Misplacing()), {}, "ValueError: position: expected k back"),
])
def test_layer_error_on_one_rank_ends_the_others(pool, options, of_last_rank, refused):
    found = pool.outcomes("distributed_cases.layer_call", of_last_rank, seconds=30, **options)
    if "expected the same on every rank" in refused:
        assert all(refused in error for error, _ in found)
    else:
        assert_others_end(found, refused)


@pytest.mark.parametrize(("where", "options", "inputs"), [
    ("distributed.ulysses.pack", dict(mode="heads"), {}),
    ("distributed.halo_exchange.row_bytes", dict(reach=3), {}),
    ("distributed.halo_exchange.row_bytes", dict(reach=3) | PACKED, dict(batch=1)),
    ("distributed.halo_plan._resets", {}, {}),
    ("distributed.halo_plan.is_reset", {}, dict(decay="constant")),
    ("distributed.halo_plan._sequence_at", PACKED, dict(batch=1)),
    ("backends.planning.halo_bound.summarise", dict(backend="triton"), {}),
    ("backends.planning.halo_bound.first_keys", dict(backend="triton"), {}),
])
def test_error_before_the_exchange_ends_the_others(pool, interpreter, where, options, inputs):
    """Before the ranks have compared their options, and after that."""
    case = dict(seconds=30) | inputs
    found = pool.outcomes("distributed_cases.failing_call", f"decayattn.{where}", options, **case)
    assert_others_end(found, "OutOfMemoryError: on one rank")


def test_equal_options_of_other_types_agree(pool):
    pool.run("distributed_cases.call", dict(reach=3), dict(reach=np.int64(3), lengths=np.full(2, 12)))


def test_fetched_tokens_raises_on_all_ranks_or_none(pool, interpreter):
    for error, _ in pool.outcomes("distributed_cases.would_fetch", dict(scale=0.5), seconds=30):
        assert "ValueError: scale: expected the same on every rank" in error
    refused = "TypeError: scale: expected None, a number or a tensor"
    assert_others_end(pool.outcomes("distributed_cases.would_fetch", dict(scale="x"), seconds=30), refused)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_others(interpreter):
    with Pool(2, seconds=20) as pool:
        (error, _), (died, _) = pool.outcomes("distributed_cases.die")
    assert "Traceback" in error
    assert died == DIED


@pytest.mark.parametrize("name", ["q", "log_decay", "scale", "sink", "bias", "cu_seqlens", "leftpad_k"])
def test_a_dtensor_is_named_and_ends_the_others(pool, name):
    case = dict(row_scale=True, sink=True, seconds=30)
    found = pool.outcomes("distributed_cases.pass_dtensor", name, **case)
    refused = f"TypeError: {name}: expected this rank's own tensor, got a DTensor; pass {name}.to_local()"
    assert_others_end(found, refused)
    assert ("its gradient is the sum of theirs" in found[1][0]) == (name not in ("q", "k", "v", "scale"))


def test_missing_groups_are_refused():
    q = torch.zeros(1, 2, 1, 4)
    with pytest.raises(ValueError, match=r"group: expected torch.distributed.init_process_group"):
        context_parallel_attention(q, q, q, group=None)
    with pytest.raises(RuntimeError, match="group: expected to live until the backward has run"):
        _ = collectives.Slices((1,), 0, lambda: None).group


@pytest.mark.parametrize(("backends", "types"), [
    ("cpu:gloo,cuda:gloo", ("cpu", "cuda")), ("cuda:nccl", ("cuda",)), ("cpu:gloo,cuda:nccl", ("cuda",)),
    ("cuda:nccl,xpu:nccl,cpu:nccl", ("cpu", "cuda", "xpu")),
])
def test_ranks_compare_options_in_one_backend(monkeypatch, backends, types):
    """Tensors of another device raise, and the waiting ranks raise there, too."""
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda _: backends)
    check = option_check.OptionCheck(None, torch.zeros(1, device="meta"))
    assert (check.device_types, check.device.type) == (types, types[0])


# In a program


@pytest.mark.slow
@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_keeps_the_bits_of_gradients(pool, mode, reentrant):
    assert all(pool.run("distributed_cases.checkpointed", mode, reentrant))


@pytest.mark.parametrize(("function", "arguments", "refused"), [
    ("differentiate_twice", ["halo"], "once_differentiable"),
    ("differentiate_twice", ["heads"], "once_differentiable"),
    ("change_in_place", [], "modified by an inplace operation"),  # the backward reads the result
    ("compiled", [True], "torch.compile cannot trace it"),
])
def test_unsupported_uses_are_refused(pool, function, arguments, refused):
    for error, _ in pool.outcomes(f"distributed_cases.{function}", *arguments, seconds=60):
        assert refused in error


def test_compiled_code_leaves_the_call_to_eager_code(pool):
    assert pool.run("distributed_cases.compiled", False) == [0.0, 0.0]


@pytest.mark.parametrize("mode", BOTH)
def test_destroyed_groups_are_freed(pool, mode):
    """Threads of gloo that end after Python abort the process."""
    assert pool.run("distributed_cases.is_group_freed", mode) == [True, True]


@pytest.mark.parametrize("pool", POOLS, indirect=True)
@pytest.mark.parametrize(("mode", "case"), [
    ("halo", {}),
    ("heads", dict(causal=False)),
    ("halo", dict(decay="constant", window_size=(20, 0), sink=True, scale="learned", lengths="uneven")),
    ("halo", dict(packed=True, lengths="uneven")),
    ("heads", dict(packed=True, sink=True)),
    ("halo", dict(given="BTH", lengths="uneven")),
    ("heads", dict(given="H", decay="none", packed=True)),
    ("halo", dict(kv_shift=True, output_norm=True, lengths="uneven")),
    ("halo", dict(kv_shift=True, packed=True, lengths="uneven")),
    ("heads", dict(kv_shift=True, bias=True, decay="none", length=1, lengths="chunks")),
])
def test_a_layer_with_a_context_matches_one_without(pool, mode, case):
    found = pool.run("distributed_cases.layer_errors", mode, **case)
    assert_exact(found, 1e-11)
    assert all(len(errors) > 5 for errors in found)


def test_layer_with_a_context_refuses_padding_caches_and_memory():
    layer = DecayFlashAttention(8, 2)
    layer.context = ContextParallel(None, lengths=[4])
    x = torch.zeros(1, 4, 8)
    with pytest.raises(ValueError, match="padding_mask: expected None where the layer has a context"):
        layer(x, padding_mask=torch.ones(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="context: expected None with memory; use a layer without one"):
        layer(x, memory=x)
    with torch.no_grad(), pytest.raises(ValueError, match="cache: expected None where the layer has a context"):
        layer(x, cache=layer.make_cache(1, 8))


# Constants of calls on their device


def test_constants_of_cuda_graphs_stay_alive(monkeypatch):
    device, numbers = torch.device("cuda", 0), (1, 2, 3)
    monkeypatch.setattr(collectives, "_constant", lambda numbers, device: torch.tensor(numbers))
    monkeypatch.setattr(collectives, "_graph_constants", {})
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        same = collectives.on_device(numbers, device) is collectives.on_device(numbers, device)
        assert same == capturing


def test_constants_of_a_dispatch_mode_are_not_cached():
    with FakeTensorMode():
        fake = collectives.on_device((7, 5, 3), torch.device("cpu"))
    assert isinstance(fake, FakeTensor)
    assert collectives.on_device((7, 5, 3), torch.device("cpu")).tolist() == [7, 5, 3]
