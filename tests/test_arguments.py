"""Arguments of a call: every bad one raises by name, with the expected and the given value."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from judged_calls import int32

from decayattn import DecayFlashAttention, decay_attention, decay_attention_varlen, visited_fraction

INF = math.inf


dense_arguments = partial(dict, q=torch.zeros(2, 5, 4, 8), k=torch.zeros(2, 6, 2, 8), v=torch.zeros(2, 6, 2, 7))
packed_arguments = partial(
    dict, q=torch.zeros(5, 4, 8), k=torch.zeros(6, 2, 8), v=torch.zeros(6, 2, 7), max_seqlen_q=3, max_seqlen_k=3,
    cu_seqlens_q=int32(0, 2, 5), cu_seqlens_k=int32(0, 3, 6),
)
ON_DEVICE = torch.zeros(1, 4, 1, 8, device="cuda" if torch.cuda.is_available() else "cpu")
fraction_arguments = partial(dict, q=ON_DEVICE, k=ON_DEVICE, log_decay=-1.0)
META = {"device": "meta"}
# decay_attention's tensors, log-decay, scale and names
TENSORS = [
    ({"q": [1.0]}, TypeError, r"^q: expected a torch.Tensor, got \[1.0\] of type list"),
    ({"k": torch.zeros(6, 2, 8)}, ValueError, r"^k: expected 4 dimensions \(batch, sequence.*got \(6, 2, 8\)"),
    ({"q": torch.zeros(2, 5, 4, 8).int()}, TypeError, r"^q: expected float16, bfloat16, float32 or .*got torch.int32"),
    ({"q": torch.zeros(2, 5, 4, 8).to_sparse()}, TypeError, r"^q: expected a dense tensor, got .*torch.sparse_coo"),
    ({"k": torch.zeros(2, 6, 2, 8).half()}, TypeError, r"^k: expected the dtype of q, torch.float32, got .*float16"),
    ({"v": torch.zeros(2, 6, 2, 7, **META)}, ValueError, r"^v: expected the device of q, cpu, got meta"),
    ({"k": torch.zeros(3, 6, 2, 8)}, ValueError, r"^k: expected the batch size of q, 2, got 3"),
    ({"v": torch.zeros(2, 9, 2, 7)}, ValueError, r"^v: expected the sequence length of k, 6, got 9"),
    ({"v": torch.zeros(2, 6, 4, 7)}, ValueError, r"^v: expected the number of heads of k, 2, got 4"),
    ({"k": torch.zeros(2, 6, 2, 9)}, ValueError, r"^k: expected the head dimension of q, 8, got 9"),
    ({"k": torch.zeros(2, 6, 3, 8), "v": torch.zeros(2, 6, 3, 7)}, ValueError, r"^k: expected heads .*, got 3 for 4"),
    ({"q": torch.zeros(2, 5, 4, 257), "k": torch.zeros(2, 6, 2, 257)}, ValueError, r"^q: .* from 1 to 256, got 257"),
    ({"v": torch.zeros(2, 6, 2, 0)}, ValueError, r"^v: expected a head dimension from 1 to 256, got 0"),
    ({"causal": 1}, TypeError, r"^causal: expected a bool, got 1 of type int"),
    (
        {"causal": False, "q": torch.zeros(2, 8, 4, 8), "log_decay": torch.zeros(2, 6, 4)},
        ValueError,
        r"^causal: expected T_q <= T_k with causal=False and a log_decay.*first 2 query rows.*T_q = 8, T_k = 6",
    ),
    ({"log_decay": math.nan}, ValueError, r"^log_decay: expected a finite number or -inf, got nan"),
    ({"log_decay": INF}, ValueError, r"^log_decay: expected a finite number or -inf, got inf"),
    ({"log_decay": 1e39}, ValueError, r"^log_decay: expected a finite number or -inf, got 1e\+39 \(q: torch.float32"),
    ({"log_decay": True}, TypeError, r"^log_decay: expected None, a number or a tensor, got True of type bool"),
    ({"log_decay": torch.zeros(4).bfloat16()}, TypeError, r"^log_decay: expected float32, got .*bfloat16.*\.float\(\)"),
    ({"log_decay": torch.zeros(4).double()}, TypeError, r"^log_decay: expected .* \(or float64 with float64 q, k, v\)"),
    ({"scale": 1e39}, ValueError, r"^scale: expected a finite number, got 1e\+39 \(q: torch.float32\)"),
    ({"scale": torch.ones(4).double()}, TypeError, r"^scale: expected float32, bfloat16 or .*got torch.float64"),
    ({"scale": torch.ones(4, **META)}, ValueError, r"^scale: expected the device of q, cpu, got meta"),
    ({"scale": torch.ones(6, 4)}, ValueError, r"^scale: .* to \(B, T_q, H\) = \(2, 5, 4\), got shape \(6, 4\)"),
    ({"backend": "flash"}, ValueError, r"^backend: expected one of 'auto', 'reference'.*, got 'flash'"),
]
# of both functions
COMMON = [
    ({"window_size": 3}, TypeError, r"^window_size: expected None or a pair \(left, right\), got 3 of type int"),
    ({"window_size": (np.bool_(1), 0)}, TypeError, r"^window_size: expected two ints, got \(np.True_, 0\)"),
    ({"log_decay": np.zeros(4)}, TypeError, r"^log_decay: expected None, a number or a tensor, got array.*numpy"),
    ({"window_size": (3, -2)}, ValueError, r"^window_size: expected numbers of tokens, or -1 .*got \(3, -2\)"),
    ({"sink": 0.5}, TypeError, r"^sink: expected None or a tensor, got 0.5 of type float"),
    ({"sink": torch.zeros(4).to(torch.float8_e4m3fn)}, TypeError, r"^sink: expected float32, .*got torch.float8_e4m"),
    ({"sink": torch.zeros(2)}, ValueError, r"^sink: expected one logit per head, \(H,\) = \(4,\), got \(2,\)"),
]
TOLERANCES = [
    ({"skip_tolerance": value}, error, rf"^skip_tolerance: expected 'auto', None or a number .*0 and 1.*{message}")
    for value, error, message in (
        ("none", ValueError, "got 'none'"), (0.0, ValueError, "got 0.0"), (1, ValueError, "got 1"),
        (math.nan, ValueError, "got nan"), (True, TypeError, "got True of type bool"),
    )
]
# of padded sequences
LENGTHS = [
    ({name: value}, error, rf"^{name}: {message}")
    for name in ("seqused_q", "seqused_k", "leftpad_q", "leftpad_k")
    for value, error, message in (
        ([1, 2], TypeError, r"expected a torch.Tensor, got \[1, 2\] of type list"),
        (torch.zeros(2).short(), TypeError, r"expected int32 or int64, got torch.int16"),
        (torch.zeros(2, device="meta").int(), ValueError, r"expected the device of q, cpu, got meta"),
        (torch.zeros(3).int(), ValueError, r"expected shape \(B,\) = \(2,\), got \(3,\)"),
    )
]
BIASES = [
    ({"bias": 1.0}, TypeError, r"^bias: expected None or a tensor, got 1.0 of type float"),
    ({"bias": torch.zeros(5, 6).int()}, TypeError, r"^bias: expected bool, float32, .*got torch.int32"),
    ({"bias": torch.zeros(2, 5, 6)}, ValueError, r"^bias: .*\(B, H, T_q, T_k\) = \(2, 4, 5, 6\), got .*\(2, 5, 6\)"),
]
# of packed sequences
OFFSETS = [
    ({name: value}, error, rf"^{name}: {message}")
    for name in ("cu_seqlens_q", "cu_seqlens_k")
    for value, error, message in (
        ([0, 2, 5], TypeError, r"expected a torch.Tensor, got \[0, 2, 5\] of type list"),
        (torch.zeros(3), TypeError, r"expected int32 or int64, got torch.float32"),
        (torch.zeros(3, device="meta").int(), ValueError, r"expected the device of q, cpu, got meta"),
        (torch.zeros(3, 1).int(), ValueError, r"expected shape \(sequences \+ 1,\), got \(3, 1\)"),
        (int32(3, 2, 3), ValueError, r"expected offsets that never fall, got others; from lengths, use"),
    )
]
BOUNDS = [
    ({name: value}, error, rf"^{name}: {message}")
    for name in ("max_seqlen_q", "max_seqlen_k")
    for value, error, message in (
        (3.0, TypeError, r"expected an int, got 3.0 of type float"),
        (torch.tensor(5), TypeError, r"expected an int, got tensor\(5\) of type torch.Tensor"),  # it may be on a GPU
        (-1, ValueError, r"expected at least 0, got -1"),
    )
]
PACKED_TENSORS = [
    ({"cu_seqlens_k": int32(0, 6)}, ValueError, r"^cu_seqlens_k: .* the shape of cu_seqlens_q, \(3,\), got \(2,\)"),
    ({"q": torch.zeros(1, 5, 4, 8)}, ValueError, r"^q: expected 3 dimensions \(tokens, .*got \(1, 5, 4, 8\)"),
    ({"scale": torch.zeros(6, 4)}, ValueError, r"^scale: .*\(total_q, H\) = \(5, 4\), got shape \(6, 4\)"),
]
REFUSALS = [
    (call, arguments, *refusal)
    for call, arguments, refusals in (
        (decay_attention, dense_arguments, TENSORS + COMMON + TOLERANCES + LENGTHS + BIASES),
        (decay_attention_varlen, packed_arguments, COMMON + TOLERANCES + OFFSETS + BOUNDS + PACKED_TENSORS),
        (visited_fraction, fraction_arguments, TOLERANCES),
    )
    for refusal in refusals
]


@pytest.mark.parametrize(
    ("call", "arguments", "changes", "error", "message"), REFUSALS,
    ids=[f"{call.__name__}-{message[1:40]}" for call, _, _, _, message in REFUSALS],
)
def test_errors_name_bad_arguments(call, arguments, changes, error, message):
    call(**arguments())  # good without the change
    with pytest.raises(error, match=message):
        call(**arguments(**changes))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_errors_name_nested_and_mkldnn_tensors():
    x = torch.zeros(2, 5, 4, 8)
    others = [torch.nested.nested_tensor(list(x), layout=layout) for layout in (torch.strided, torch.jagged)]
    if torch.backends.mkldnn.is_available():
        others.append(x.to_mkldnn())
    for other in others:
        for name in "qkv":
            with pytest.raises(TypeError, match=f"^{name}: expected a dense tensor, got"):
                decay_attention(**dict(q=x, k=x, v=x) | {name: other})
    for name in ("log_decay", "scale", "bias", "sink"):
        with pytest.raises(TypeError, match=f"^{name}: expected a dense tensor, got one of layout torch.sparse_coo"):
            decay_attention(x, x, x, **{name: torch.zeros(4).to_sparse()})


# Numbers that a dtype does not have


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rates_below_the_dtype_reset(dtype):
    q, k, v = torch.randn(3, 2, 5, 4, 8, dtype=dtype)
    expected = decay_attention(q, k, v, -1e9)
    torch.testing.assert_close(expected, v)  # a row has its own token alone
    assert torch.equal(decay_attention(q, k, v, torch.tensor(-INF, dtype=dtype)), expected)
    for number in (-1e39, torch.finfo(torch.float64).min, -(10**400), np.float16(-1e4), -INF, np.float32(-INF)):
        assert torch.equal(decay_attention(q, k, v, number), expected)


def test_scales_reach_the_largest_number_of_the_dtype():
    q = torch.zeros(1, 2, 1, 8)
    for number in (torch.finfo(torch.float32).max, np.float16(0.5), np.float32(0.5), np.int64(2), 10**30):
        assert decay_attention(q, q, q, scale=number).isfinite().all()
    assert decay_attention(*3 * [q.double()], scale=1e39).isfinite().all()
    with pytest.raises(ValueError, match=r"^scale: expected a finite number, got inf"):
        decay_attention(q, q, q, scale=np.float16(INF))
    with pytest.raises(ValueError, match=r"^scale: expected a finite number, 'learned' or None, got 1000"):
        DecayFlashAttention(8, 1, scale=10**400)


@pytest.mark.parametrize("longest", [2**31, 2**40, 2**64])
def test_bounds_of_lengths_may_exceed_32_bits(longest):
    given = packed_arguments(**{name: torch.randn_like(x) for name, x in packed_arguments().items() if name in "qkv"})
    lengths = dict(max_seqlen_q=longest, max_seqlen_k=longest)
    assert torch.equal(decay_attention_varlen(**given | lengths), decay_attention_varlen(**given))
    layer, x, cu_seqlens = DecayFlashAttention(8, 1), torch.randn(1, 5, 8), int32(0, 2, 5)
    assert torch.equal(layer(x, cu_seqlens=cu_seqlens, max_seqlen=longest), layer(x, cu_seqlens=cu_seqlens))
