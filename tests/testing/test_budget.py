"""The error budget accepts right results at every precision, and refuses every error that is planted here."""

import functools
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from judged_calls import PADDING, int32, make_inputs, make_packed_inputs
from pairwise import pairwise

from decayattn.problem import accumulator_dtype
from decayattn.testing import assert_within_budget, attention, formulas, verify_attention, verify_attention_varlen
from decayattn.testing import call as calls
from decayattn.testing.formulas import explicit_attention

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DECAYS = ("none", "number", "constant", "scalar", "resets", "growth")


def by_name(comparisons):
    return {comparison.name: comparison for comparison in comparisons}


def failed(comparisons):
    """Heads of the failed tensors, by name."""
    return {comparison.name: comparison.head for comparison in comparisons if not comparison.passed}


@pytest.fixture
def plant(monkeypatch):
    """plant(f): f edits the results of the tested call (and only those) in place."""

    def install(edit):
        run = attention.Call.run

        def faulty(call, *args):
            results = {name: x.clone() for name, x in run(call, *args).items()}
            edit(results)
            return results

        monkeypatch.setattr(attention.Call, "run", faulty)

    return install


# The hand-written formulas: if they were wrong, the budget would be as large as their error


@pytest.fixture
def evaluations(monkeypatch):
    """Compared tensors, by name: (oracle, error of eager, norms of A, A)."""
    seen = {}
    original = attention.Call.compare

    def record(call, name, x, x64, eager_error, size):
        seen[name] = x64, eager_error, call.distance(name, torch.zeros_like(size), size), size
        return original(call, name, x, x64, eager_error, size)

    monkeypatch.setattr(attention.Call, "compare", record)
    return seen


def assert_eager_equals_the_oracle(evaluations):
    """Compare in float64. A holds the scores' own rounding (module docstring); the rest is a few hundred additions"""
    for name, (_, error, size, _) in evaluations.items():
        assert (error <= 100 * torch.finfo(torch.float64).eps * size).all(), name


@pytest.mark.parametrize(("causal", "decay", "row_scale", "lengths", "window", "bias"), pairwise(
    [True, False], DECAYS, [False, True], [(23, 23), (9, 23), (23, 9)],
    [None, (3, 0), (0, 2), (5, 4), (-1, 3), (4, -1)], [None, "float", "bool"],
))
def test_explicit_formulas_equal_autograd(causal, decay, row_scale, lengths, window, bias, evaluations):
    rows, keys = lengths
    if not causal and rows > keys and decay not in ("none", "number", "constant"):
        rows, keys = keys, rows  # refused by decay_attention: rows before the first log-decay
    inputs = make_inputs(torch.float64, decay, row_scale, rows, keys) | {"sink": torch.randn(4).double()}
    inputs["bias"] = {
        None: None, "float": torch.randn(4, rows, keys).double(), "bool": torch.rand(2, 1, rows, keys) < 0.5,
    }[bias]
    verify_attention(**inputs, causal=causal, window_size=window, backend="reference")
    assert ("dbias" in evaluations) == (bias == "float")
    assert "dsink" in evaluations
    assert_eager_equals_the_oracle(evaluations)


@pytest.mark.parametrize(
    ("causal", "decay", "dtype"), pairwise([True, False], ["constant", "scalar", "resets"], DTYPES)
)
def test_accepts_sequences_cut_out_of_the_reference(dtype, decay, causal, evaluations):
    """The oracle cuts the sequences out, the tested reference is given where they lie."""
    options = dict(causal=causal, window_size=(5, 4), backend="reference")
    sink = torch.tensor([-2.0, 0.0, -math.inf, 3.0], dtype=accumulator_dtype(dtype))
    packed = make_packed_inputs(dtype, decay, True) | {"sink": sink}
    padded = make_inputs(dtype, decay, True) | PADDING | {"sink": sink, "bias": torch.randn(23, 23).to(sink)}
    for verify, inputs in ((verify_attention_varlen, packed), (verify_attention, padded)):
        for some in (inputs, inputs | {"sink": None}):
            assert_within_budget(verify(**some, **options))
            if dtype == torch.float64:
                assert_eager_equals_the_oracle(evaluations)


def test_tokens_outside_of_sequences_may_be_anything():
    packed = make_packed_inputs(torch.float32, row_scale=True)
    for name, outside in (("q", [0, 20]), ("scale", [0, 22]), ("k", [21, 22]), ("v", [21]), ("log_decay", [22])):
        packed[name][outside] = math.nan
    assert_within_budget(verify_attention_varlen(**packed, backend="reference"))
    padded = make_inputs(torch.float32, row_scale=True) | PADDING
    padded["q"][0, :2], padded["q"][0, 12:], padded["scale"][0, 15] = math.nan, math.nan, math.nan
    padded["k"][0, :3], padded["v"][1, 9:], padded["log_decay"][0, [3, 20]] = math.nan, math.nan, math.nan
    padded["bias"] = torch.randn(2, 1, 23, 23)
    padded["bias"][0, :, :2], padded["bias"][0, :, :, 20:] = math.nan, math.nan
    assert_within_budget(verify_attention(**padded, backend="reference"))


MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode, functools.partial(torch.autocast, "cpu")]


@pytest.mark.parametrize("mode", MODES)
def test_gradients_and_modes_of_the_caller_change_nothing(mode):
    """A model's own tensors, in its training and in its evaluation."""
    sink, bias = torch.randn(4), torch.randn(23, 23)
    padded = make_inputs(torch.float32, row_scale=True) | PADDING | {"sink": sink, "bias": bias}
    padded |= {"grad_out": torch.randn(2, 23, 4, 8), "grad_lse": torch.randn(2, 4, 23)}
    packed = make_packed_inputs(torch.float32, row_scale=True) | {"sink": sink}

    def given(x):
        if not (isinstance(x, torch.Tensor) and x.is_floating_point()):
            return x
        return x.clone().requires_grad_()

    for verify, inputs in ((verify_attention, padded), (verify_attention_varlen, packed)):
        expected = verify(**inputs, backend="reference")
        with_gradients = {name: given(x) for name, x in inputs.items()}
        with mode():
            assert verify(**with_gradients, backend="reference") == expected
            assert verify(**inputs, backend="reference") == expected
        assert all(x.grad is None for x in with_gradients.values() if isinstance(x, torch.Tensor))


@given(rows=st.integers(0, 9), keys=st.integers(0, 9), causal=st.booleans(), decay=st.sampled_from(DECAYS))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_accepts_any_shape(rows, keys, causal, decay):
    if not causal and rows > keys and decay not in ("none", "number", "constant"):
        rows = keys
    inputs = make_inputs(torch.float32, decay, True, rows, keys) | dict(bias=torch.randn(2, 1, rows, keys))
    assert_within_budget(verify_attention(**inputs, causal=causal, sink=torch.randn(4), backend="reference"))


@pytest.mark.parametrize(("dtype", "decay"), pairwise(DTYPES, DECAYS))
def test_accepts_the_reference(dtype, decay):
    comparisons = verify_attention(**make_inputs(dtype, decay, row_scale=True), backend="reference")
    assert_within_budget(comparisons)
    expected = {"out", "lse", "dq", "dk", "dv", "dscale"} | (set() if decay in ("none", "number") else {"dlog_decay"})
    assert set(by_name(comparisons)) == expected


def test_a_dtype_below_the_inputs_is_outside_the_budget(plant):
    plant(lambda results: results.update({name: x.bfloat16().float() for name, x in results.items()}))
    comparisons = verify_attention(**make_inputs(torch.float32), backend="reference")
    assert not any(comparison.passed for comparison in comparisons)


def test_chunks_of_rows_and_pairs_change_nothing(monkeypatch, evaluations):
    inputs = make_inputs(torch.float32, "resets", True, rows=19, keys=23)
    inputs |= dict(window_size=(9, -1), bias=torch.randn(4, 19, 23), sink=torch.randn(4))
    assert_within_budget(verify_attention(**inputs, backend="reference"))
    whole = dict(evaluations)
    monkeypatch.setattr(formulas, "SCORES_AT_ONCE", 23 * 4)  # four rows of one head
    assert_within_budget(verify_attention(**inputs, backend="reference"))
    for name, (x64, _, _, size) in evaluations.items():
        torch.testing.assert_close(x64, whole[name][0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(size, whole[name][3], rtol=1e-12, atol=1e-12)


def test_strides_reach_the_tested_call(monkeypatch):
    inputs = make_inputs(torch.float32)
    inputs["q"] = inputs["q"].transpose(1, 2).contiguous().transpose(1, 2)
    seen = {}
    attend = calls.decay_attention

    def spy(*args, **options):
        if options["backend"] == "triton":
            seen["strides"] = options["q"].stride()
            options["backend"] = "reference"
        return attend(*args, **options)

    monkeypatch.setattr(calls, "decay_attention", spy)
    expanded = torch.randn(1, 1, 1, 8).expand(2, 23, 4, 8)
    assert_within_budget(verify_attention(**inputs, grad_out=expanded, backend="triton"))
    assert seen["strides"] == inputs["q"].stride() != inputs["q"].contiguous().stride()


def test_default_output_gradients_differ_from_queries(monkeypatch):
    """After the caller's manual_seed(0) they were the same numbers, and rounding errors of both were correlated."""
    torch.manual_seed(0)
    q, seen, run = torch.randn(2, 9, 3, 8), [], attention.Call.run
    monkeypatch.setattr(attention.Call, "run", lambda call, *rest: seen.append(call) or run(call, *rest))
    verify_attention(q, q, q, backend="reference")
    assert abs(torch.corrcoef(torch.stack([q.flatten(), seen[0].grad_out.flatten()]))[0, 1]) < 0.2


@pytest.mark.parametrize("shape", [(0, 1), (2, 0, 1), (0, 3)])
def test_accepts_a_broadcast_scale_of_no_rows(shape):
    q, k = torch.randn(2, 0, 3, 8), torch.randn(2, 5, 3, 8)
    assert_within_budget(verify_attention(q, k, k, scale=torch.ones(shape), backend="reference"))


def test_rows_that_see_nothing_pass_with_any_lse_gradient():
    inputs = make_inputs(torch.float32, "constant", rows=23, keys=9)
    grad_lse = torch.randn(2, 4, 23)
    grad_lse[..., 0], grad_lse[..., 1] = math.inf, math.nan
    assert_within_budget(verify_attention(**inputs, grad_lse=grad_lse, backend="reference"))


@pytest.mark.parametrize(("times", "seen", "passed"), [
    (0.9, attention.DRAWS[:1], True),
    (1.1, attention.DRAWS, True),
    (1.5, (*attention.DRAWS, *attention.MORE_DRAWS), True),
    (2.5, attention.DRAWS, False),
])
def test_values_slightly_over_budget_get_more_roundings(times, seen, passed, monkeypatch):
    """dsink is one value per head. Its budget is too small in 1 of 1000 cases with 16 roundings."""
    factors, draw, run, error = [], attention.Call.draw, attention.Call.run, 1e-3

    def drawn(call, factor):
        """Error of eager's dsink: `error` with the first of DRAWS, 1.2 times that with the others, and twice that with
        one of MORE_DRAWS."""
        factors.append(factor)
        off = {attention.DRAWS[0]: 1.0, attention.MORE_DRAWS[30]: 2.0}.get(factor, 1.2) * error
        return draw(call, factor) | {"dsink": call.oracle()["dsink"] + off}

    def tested(call, *args):
        return run(call, *args) | {"dsink": (call.oracle()["dsink"] + times * 2 * error).float()}

    monkeypatch.setattr(attention.Call, "draw", drawn)
    monkeypatch.setattr(attention.Call, "run", tested)
    inputs = make_inputs(torch.bfloat16) | {"sink": torch.randn(4)}
    found = by_name(verify_attention(**inputs, backend="reference"))["dsink"]
    assert found.budget == pytest.approx(2 * error * {1: 1.0, 16: 1.2}.get(len(seen), 2.0), rel=0.01)
    assert (tuple(factors), found.passed) == (seen, passed)


def test_draws_round_one_by_one():
    """Were the errors of some factors alike, their maximum would be that of fewer: fuzzed calls exceeded twice it."""
    torch.manual_seed(0)
    heads, tokens, dim = 256, 32, 16
    q, k, v, grad_out = (torch.randn(heads, tokens, dim).bfloat16().float() for _ in range(4))
    log_decay, scale, grad_lse = -0.05 * torch.rand(heads), torch.full((heads,), dim**-0.5), torch.zeros(heads, tokens)

    def rate_gradients(**rounding):
        arguments = q, k, v, log_decay, scale, True, grad_out * rounding.get("factor", 1.0), grad_lse
        return explicit_attention(*arguments, **rounding)["dlog_decay"] / rounding.get("factor", 1.0)

    exact = rate_gradients()
    errors = [rate_gradients(rounding=torch.bfloat16, factor=factor) - exact for factor in attention.DRAWS]
    correlations = torch.corrcoef(torch.stack(errors)).fill_diagonal_(0.0)
    assert correlations.max() < 0.45


def test_draws_that_overflow_are_ignored(plant, monkeypatch):
    """A factor may take float16 out of its range where eager is in it: it counts for the other tensors only."""
    draw = attention.Call.draw

    def drawn(call, factor):
        results = draw(call, factor)
        return results | ({"dq": results["dq"] * torch.inf, "dk": results["dk"] * 1.2} if factor > 1.5 else {})

    monkeypatch.setattr(attention.Call, "draw", drawn)
    plant(lambda results: (results["dq"].mul_(1.1), results["dk"].mul_(1.1)))
    found = by_name(verify_attention(**make_inputs(torch.float16), backend="reference"))
    assert found["dq"].budget < torch.inf
    assert not found["dq"].passed
    assert found["dk"].passed


@pytest.mark.parametrize(("verify", "make", "judged", "unknown", "leak"), [
    # key head 0 of batch entry 1: no judged query head reads it
    (verify_attention, make_inputs, [(0, 1), (1, 3)], (2, 0), (1, 5, 0, 0)),
    (verify_attention_varlen, make_packed_inputs, [(3, 0), (4, 2)], (5, 0), (0, 2, 1, 0)),  # sequence 0
])
def test_only_some_heads_are_judged(verify, make, judged, unknown, leak, plant):
    verify = functools.partial(verify, **make(torch.float32, "constant"), backend="reference")
    assert_within_budget(verify(heads=judged))
    with pytest.raises(ValueError, match=rf"heads: expected .*sequence.*got \[\({unknown[0]}, 0\)\]"):
        verify(heads=[unknown])
    plant(lambda results: results["dk"][leak].add_(1e-30))
    assert failed(verify(heads=judged)) == {"dk": (1, 0) if verify.func is verify_attention else (0, 1)}


# Planted errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv", "dlog_decay", "dscale"])
def test_refuses_nan_and_says_where(dtype, name, plant):
    def poison(results):
        results[name][(1, 3, 5) if name == "lse" else (1, 5, 1) if name in ("dk", "dv") else (1, 5, 3)] = math.nan

    plant(poison)
    comparisons = verify_attention(**make_inputs(dtype, row_scale=True), backend="reference")
    assert failed(comparisons) == {name: (1, 1) if name in ("dk", "dv") else (1, 3)}
    with pytest.raises(AssertionError, match=rf"{name} .*VIOLATED"):
        assert_within_budget(comparisons)


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.03), (torch.float16, 0.004), (torch.float32, 1e-4)])
@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv", "dlog_decay", "dscale", "dbias", "dsink"])
def test_refuses_one_scaled_head(dtype, error, name, plant):
    """Twice the errors of decayattn.testing's table, or less."""

    def scale(results):
        head = {"lse": (1, 0), "dbias": (0,), "dsink": (0,)}.get(name, (1, slice(None), 0))
        results[name][head] *= 1 + {"lse": 1e-5, "dsink": 2 * error}.get(name, error)

    plant(scale)
    inputs = make_inputs(dtype, row_scale=True) | {"bias": torch.randn(4, 23, 23), "sink": torch.ones(4)}
    comparisons = verify_attention(**inputs, backend="reference")
    assert {c.name: c.verdict for c in comparisons if c.verdict != "ok"} == {name: "wrong"}
    assert by_name(comparisons)[name].head == (0 if name in ("dbias", "dsink") else 1, 0)


@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_a_budget_above_the_result_cannot_tell(factor, plant):
    """The first row sees one key, so its dq is 0, but for the rounding of an output gradient that is huge."""
    inputs = make_inputs(torch.float16, decay="none")
    grad_out = torch.randn(2, 23, 4, 8)
    grad_out[1, 0, 2] = 3e4
    plant(lambda results: results["dq"].mul_(factor))
    verify = functools.partial(verify_attention, **inputs, backend="reference")
    assert by_name(verify(grad_out=grad_out.half()))["dv"].verdict == "ok"
    comparisons = verify(grad_out=grad_out.half(), heads=[(1, 2)])
    found = by_name(comparisons)["dq"]
    assert (found.verdict, found.passed, found.head) == ("cannot tell", False, (1, 2))
    with pytest.raises(AssertionError, match=r"dq .*cannot tell"):
        assert_within_budget(comparisons)
    assert by_name(verify(grad_out=grad_out.clamp(max=1.0).half()))["dq"].verdict == "wrong"


def test_zero_results_are_judged(plant):
    """With one key per row dq and dk cancel, and with a huge sink all results are too small for the dtype."""
    added: list[float] = []
    plant(lambda results: results["dq"].add_(sum(added)))
    for dtype, options in itertools.product(DTYPES, ({"window_size": (0, 0)}, {"sink": torch.full((4,), 300.0)})):
        added.clear()
        inputs = make_inputs(dtype) | options
        assert_within_budget(verify_attention(**inputs, backend="reference"))
        added.append(1e-2)
        assert by_name(verify_attention(**inputs, backend="reference"))["dq"].verdict == "wrong"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("name", "at"), [
    ("dlog_decay", (1, 0, 2)), ("dlog_decay", (0, 11, 1)), ("dk", (0, 8, 1)), ("dv", (1, 3, 0)), ("out", (1, 3, 2)),
    ("dq", (0, 3, 2)), ("dscale", (0, 3, 2)), ("dbias", (2, 9, 8)), ("dsink", (1,)),
])
def test_zeros_by_contract_are_literal(dtype, name, at, plant):
    """A first λ, a reset, a key that no row sees, a row without a key, a pair that is hidden, a sink of −inf."""
    inputs = make_inputs(dtype, row_scale=True)
    inputs["log_decay"][:, [4, 11]] = -math.inf
    inputs["bias"] = torch.zeros(4, 23, 23)
    inputs["bias"][:, 3], inputs["bias"][..., 3], inputs["bias"][:, :, 8] = -math.inf, -math.inf, -math.inf
    inputs["sink"] = torch.tensor([0.0, -math.inf, 1.0, 2.0])
    assert_within_budget(verify_attention(**inputs, backend="reference"))
    plant(lambda results: results[name][at].fill_(1e-30))
    found = {c.name: c for c in verify_attention(**inputs, backend="reference") if c.verdict != "ok"}
    assert set(found) == {name}
    assert (found[name].verdict, found[name].budget) == ("wrong", 0.0)
    assert 0 < found[name].error < 1e-29


def test_refuses_a_missing_minus_infinity_and_a_false_one(plant):
    inputs = make_inputs(torch.float32, "none", rows=23, keys=9)
    for row, value in ((0, -1e30), (20, -math.inf)):

        def misplace(results, row=row, value=value):
            results["lse"][0, 2, row] = value

        plant(misplace)
        lse = by_name(verify_attention(**inputs, backend="reference"))["lse"]
        assert not lse.passed
        assert lse.head == (0, 2)
        assert lse.error == math.inf


@pytest.mark.parametrize(("packed", "name"), [
    *itertools.product([False], ["out", "lse", "dq", "dk", "dv", "dlog_decay", "dscale"]),
    *itertools.product([True], ["out", "lse", "dk", "dlog_decay", "dscale"]),
])
def test_refuses_the_smallest_number_outside_of_the_sequences(name, packed, plant):
    inputs = make_packed_inputs(torch.float32, row_scale=True) if packed else make_inputs(torch.float32, row_scale=True)
    verify = verify_attention_varlen if packed else verify_attention
    at = 22 if name in ("dk", "dv", "dlog_decay") else 20  # of entry 0, and past the last sequence

    def leak(results):
        x = results[name][None] if name == "dscale" and packed else results[name]
        x[(0, 1, at) if name == "lse" else (0, at, 1)] = 1e-30

    plant(leak)
    comparisons = verify(**inputs, **({} if packed else PADDING), backend="reference")
    assert failed(comparisons) == {name: (-1 if packed else 0, 1)}


@pytest.mark.parametrize("name", ["out", "dk", "dscale"])
def test_refuses_one_scaled_sequence_and_says_which(name, plant):
    """However little of all tokens it is: every sequence is judged on its own."""
    inputs = make_packed_inputs(torch.float32, row_scale=True)

    def scale(results):
        x = results[name] if name == "dscale" else results[name][0]
        x[0:3, 1] *= 1.0001

    plant(scale)
    assert failed(verify_attention_varlen(**inputs, backend="reference")) == {name: (0, 1)}


@pytest.mark.parametrize(("argument", "other"), [
    ("window_size", (4, 4)), ("window_size", (5, 3)), ("sink", None), ("seqused_k", int32(19, 8)),
    ("seqused_q", int32(13, 22)), ("leftpad_q", int32(1, 1)), ("leftpad_k", int32(4, 1)),
])
def test_refuses_another_argument(argument, other, monkeypatch):
    inputs = make_inputs(torch.bfloat16) | PADDING | dict(window_size=(5, 4), sink=torch.ones(4), causal=False)
    assert_within_budget(verify_attention(**inputs, backend="reference"))
    attend = calls.decay_attention

    def confused(*args, **options):
        # the oracle has one batch entry, and the heads of both on its head axis
        if options.get("seqused_q") is not None:
            options[argument] = other if other is not None else torch.zeros_like(options[argument])
        return attend(*args, **options)

    monkeypatch.setattr(calls, "decay_attention", confused)
    assert {"out", "lse", "dq"} <= failed(verify_attention(**inputs, backend="reference")).keys()


def _with(monkeypatch, edit_heads):
    """Let the tested call compute with edited formulas: explicit_attention as it accumulates, then `edit_heads`."""

    def run(call, backend, options):
        def evaluate(**heads):
            results = explicit_attention(**heads)
            return edit_heads(results, **heads) or results

        dtype = accumulator_dtype(call.problem.dtype)
        return {name: x.to(call.dtype_of(name)) for name, x in call.gather(evaluate, dtype).items()}

    monkeypatch.setattr(attention.Call, "run", run)


def large_logits(seed):
    """float32 with logits of hundreds. The error of P comes from the sum over D, and follows its order."""
    torch.manual_seed(seed)
    q, k = (4 * torch.randn(2, 20, 8, 165) for _ in range(2))
    return {"q": q, "k": k, "v": torch.randn(2, 20, 8, 32), "scale": 0.4, "causal": False}


def in_reverse(results, q, k, **heads):
    results = explicit_attention(**heads, q=q.flip(-1), k=k.flip(-1))
    return results | {name: results[name].flip(-1) for name in ("dq", "dk")}


def of_rounded_operands(results, q, k, **heads):
    """Operands of q·k with eight bits less than float32 (tf32 has thirteen less)."""
    return explicit_attention(**heads, q=_without_bits(q, 8), k=_without_bits(k, 8))


def one_value_for_all_keys(seed):
    """The sums over 1,500 keys have one sign, so they grow with every key, and later terms lose bits."""
    torch.manual_seed(seed)
    q, k = 0.3 * torch.randn(1, 40, 2, 16), torch.randn(1, 1500, 2, 16)
    return {"q": q, "k": k, "v": torch.randn(17).expand(1, 1500, 2, 17), "causal": False}


def key_by_key(results, q, k, v, scale, **heads):
    """An online softmax in float32 that adds one key after the other."""
    scores = scale[:, None, None] * (q @ k.mT)
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    weighted, row_sum = torch.zeros_like(results["out"]), torch.zeros_like(results["lse"][..., None])
    for key in range(k.shape[1]):
        weighted += p[..., key, None] * v[:, None, key]
        row_sum += p[..., key, None]
    lse = scores.amax(-1) + row_sum[..., 0].log()
    return results | {"out": weighted / row_sum, "lse": lse}


def one_output_gradient_for_all_rows(seed):
    inputs = one_value_for_all_keys(seed)
    v = torch.randn(1, 40, 2, 17)
    return inputs | {"q": inputs["k"], "k": inputs["q"], "v": v, "grad_out": inputs["v"]}


def row_by_row(results, q, k, scale, grad_out, **heads):
    p = (scale[:, None, None] * (q @ k.mT)).softmax(-1)
    results["dv"].zero_()
    for row in range(q.shape[1]):
        results["dv"] += p[:, row, :, None] * grad_out[:, row, None]


def of_rounded_values(results, v, **heads):
    """Values with eight bits less than float32: a larger error than that of any order of the keys."""
    return explicit_attention(**heads, v=_without_bits(v, 8))


@pytest.mark.parametrize(("make", "edit", "seed", "wrong"), [
    (large_logits, in_reverse, 3, set()),
    (large_logits, of_rounded_operands, 1, {"out", "lse", "dq", "dk", "dv"}),
    (one_value_for_all_keys, key_by_key, 1, set()),
    (one_value_for_all_keys, of_rounded_values, 0, {"out"}),
    (one_output_gradient_for_all_rows, row_by_row, 0, set()),
])
def test_any_order_of_a_sum_passes_and_fewer_bits_fail(make, edit, seed, wrong, monkeypatch):
    """Seeds of which the right results fail in one order of the sums."""
    _with(monkeypatch, edit)
    assert failed(verify_attention(**make(seed))).keys() == wrong


def strong_decay(seed):
    """Steps of 700 at nearly every token: β, the prefix of the decay, is 75,000, and scores have its rounding."""
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, 120, 1, 128, dtype=torch.float16) for _ in range(3))
    return {"q": q, "k": k, "v": v, "log_decay": -700.0 * (torch.rand(1, 120, 1) < 0.9)}


def by_columns(bits, results, q, k, v, log_decay, scale, grad_out, grad_lse, **heads):
    """dλ of a kernel that adds −β_j, and LSE before that, to the products of q and k, in float32 with `bits`
    bits less."""
    scale = scale[:, None, None]
    beta = (log_decay.cumsum(1)[:, None] / scale).float()
    seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()

    def p_of(scores):
        scores = _without_bits(scores, bits) if bits else scores
        return torch.where(seen, scale * scores, -math.inf)

    scores = p_of(q @ k.mT - beta)
    maximum = scores.amax(-1, keepdim=True)
    p = (scores - maximum).exp()
    out = (p.half().float() @ v / p.sum(-1, keepdim=True)).half().float()
    lse = maximum + p.sum(-1, keepdim=True).log()
    p = p_of((q @ k.mT - lse / scale) - beta).exp()
    delta = (grad_out * out).sum(-1) - grad_lse
    ds = (p * (grad_out @ v.mT - delta[..., None])).half().float()
    d_log_decay = (ds.sum(2) - ds.sum(1)).flip(1).cumsum(1).flip(1)
    d_log_decay[:, 0] = 0.0
    return results | {"dlog_decay": d_log_decay}


def large_scores_beside_a_sink(seed):
    """Every row has one key with a score of nearly 300, as the sink has, and the same gradient of its LSE."""
    torch.manual_seed(seed)
    direction = torch.nn.functional.normalize(torch.randn(1, 120, 1, 128), dim=-1)
    q, k = (15 * direction).bfloat16(), (20 * direction).bfloat16()  # not the same: odd squares are 1 modulo 8
    v, grad_out = torch.zeros(2, 1, 120, 1, 8).bfloat16()
    inputs = {"q": q, "k": k, "v": v, "grad_out": grad_out, "grad_lse": torch.ones(1, 1, 120), "scale": 1.0}
    return inputs | {"log_decay": -5 * torch.rand(1, 120, 1), "sink": torch.tensor([300.0])}


def cut_off(bits, results, q, k, log_decay, scale, sink, grad_lse, **heads):
    """dsink of a kernel that truncates the sums of products and scores, to float32 with `bits` bits less. It rounds
    nothing else."""
    total = torch.zeros(1, len(q[0]), len(k[0]), dtype=torch.float64)
    alpha = log_decay.double().cumsum(1)
    products = [a.double() @ b.double().mT for a, b in zip(q.split(16, 2), k.split(16, 2), strict=True)]
    for some in (*products, -alpha[:, None].expand_as(total)):
        total = total + some
        step = torch.exp2(total.abs().log2().floor() - 23 + bits)
        total = (total / step).trunc() * step
    scores = total + alpha[..., None]
    lse = torch.where(torch.ones_like(scores).tril() > 0, scores, -math.inf).logsumexp(2)
    lse = torch.logaddexp(lse, sink.double()[:, None])
    return results | {"dsink": ((sink[:, None] - lse).exp() * grad_lse).sum(1).float()}


def one_row(seed):
    """Row of a few keys, with values so small that dS is P times the gradient of LSE. Uniform values: normal ones, and
    so their rounding, depend on torch's version."""
    torch.manual_seed(seed)
    q, k, v, grad_out = ((4 * torch.rand(1, rows, 1, 16) - 2).bfloat16() for rows in (1, 5, 5, 1))
    inputs = {"q": q, "k": k, "v": 1e-3 * v, "grad_out": grad_out, "grad_lse": torch.ones(1, 1, 1)}
    return inputs | {"log_decay": -0.1 * torch.rand(1, 5, 1)}


def from_rounded_p(bits, results, q, k, v, log_decay, scale, grad_lse, **heads):
    """dλ of a kernel that forms dS from P in bfloat16 less some bits, and rounds it."""
    decay = (log_decay.cumsum(1)[:, -1:] - log_decay.cumsum(1))[:, None]
    p = (scale[:, None, None] * (q @ k.mT) + decay).softmax(-1)
    p = _without_bits(p.bfloat16().float(), 16 + bits) if bits else p.bfloat16().float()
    ds = (p * grad_lse[..., None]).bfloat16().float()
    return results | {"dlog_decay": torch.nn.functional.pad(ds[:, 0, :-1].cumsum(1), (1, 0))}


def equal_keys(seed):
    """Scores of thousands, equal in every row: P is uniform."""
    torch.manual_seed(seed)
    q, key, v = 100 * torch.randn(1, 40, 1, 104), 16 * torch.randn(1, 1, 1, 104), torch.randn(1, 69, 1, 17)
    return {"q": q, "k": key.expand(1, 69, 1, 104), "v": v, "causal": False}


def rounded_in_the_edge_tile(bits, results, q, k, v, scale, **heads):
    """out of a kernel that fuses the scale in a full tile of 64 keys, and rounds the score in a partial tile."""
    products = q @ k.mT
    scores = scale[:, None, None].double() * products
    scores[..., 64:] = _without_bits(scale[:, None, None] * products[..., 64:], bits)
    return results | {"out": (scores.softmax(-1) @ v.double()).float()}


@pytest.mark.parametrize(("make", "compute", "precisions", "name", "seed"), [
    (strong_decay, by_columns, (0, 8), "dlog_decay", 2),
    (large_scores_beside_a_sink, cut_off, (0, 3), "dsink", 0),
    (one_row, from_rounded_p, (0, 3), "dlog_decay", 360),
    (equal_keys, rounded_in_the_edge_tile, (0, 8), "out", 0),
])
def test_roundings_that_kernels_have(make, compute, precisions, name, seed, monkeypatch):
    """Accepted, with seeds that need the draws for them; and refused where the kernel rounds to a few bits less."""
    for precision, passes in zip(precisions, (True, False), strict=True):
        _with(monkeypatch, functools.partial(compute, precision))
        assert by_name(verify_attention(**make(seed)))[name].passed == passes


def _without_bits(x, bits):
    """x rounded to a mantissa shorter by `bits`."""
    large = x * (2.0**bits + 1)  # Dekker's splitting
    return large - (large - x)


