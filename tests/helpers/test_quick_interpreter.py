"""The quick interpreter equals Triton's own bit by bit, except for sums of a scan."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository_files import ROOT

SCRIPT = """
import hashlib, json, sys
import torch
from decayattn import decay_attention_varlen
from decayattn.nn import DecayCache

if sys.argv[1] == "hurry":
    import quick_interpreter
    quick_interpreter.hurry()
digest, added_up = hashlib.sha256(), []
offsets = torch.tensor([0, 13, 40], dtype=torch.int32)
for dtype in (torch.float16, torch.float32, torch.float64):
    wide = torch.promote_types(dtype, torch.float32)
    for causal in (True, False):
        torch.manual_seed(0)
        q, k, v = (torch.randn(40, heads, 8).to(dtype).requires_grad_() for heads in (4, 2, 2))
        log_decay, scale, sink = -torch.rand(40, 4, dtype=wide), torch.rand(40, 4, dtype=wide), torch.randn(4).to(wide)
        log_decay[[5, 35], 0] = -torch.inf
        leaves = [q, k, v, scale.requires_grad_(), sink.requires_grad_(), log_decay.requires_grad_()]
        out, lse = decay_attention_varlen(
            q, k, v, log_decay, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=27, max_seqlen_k=27,
            scale=scale, sink=sink, window_size=(9, 0 if causal else 3), causal=causal, return_lse=True,
            backend="triton",
        )
        *grads, of_decay = torch.autograd.grad(out.double().square().sum() + lse.double().sin().sum(), leaves)
        for x in (out, lse, *grads):
            digest.update(x.detach().contiguous().numpy().tobytes())
        added_up += of_decay.flatten().tolist()
cache = DecayCache(2, 70, num_heads=4, num_kv_heads=2, head_dim=8)
for tokens in (60, 1, 3):
    q, k, v = (torch.randn(2, tokens, heads, 8) for heads in (4, 2, 2))
    digest.update(cache.attend(q, k, v, -torch.rand(2, tokens, 4), backend="triton").contiguous().numpy().tobytes())
print(json.dumps([digest.hexdigest(), added_up]))
"""


@pytest.mark.slow  # two processes that import torch
def test_results_equal_the_plain_interpreter(interpreter):
    path = os.pathsep.join([str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    (expected, expected_sums), (found, sums) = (
        json.loads(subprocess.check_output([sys.executable, "-c", SCRIPT, how], env=environment, timeout=300))
        for how in ("plain", "hurry")
    )
    assert found == expected
    assert sums == pytest.approx(expected_sums, rel=1e-4, abs=1e-5)
