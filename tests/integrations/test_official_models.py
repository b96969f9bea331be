"""Whole models of two other libraries, by their own code and kernels, against ours with their weights; on a GPU.

fla comes as flash-linear-attention. The Forgetting Transformer's code has no package: clone
github.com/zhixuan-lin/forgetting-transformer and put its src on PYTHONPATH.
"""

import importlib

import pytest
import torch

from decayattn.integrations.checkpoints import from_fla, from_fox

pytest.importorskip("transformers")
from decayattn.integrations.transformers import DecayForCausalLM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="their kernels need a GPU")
PRO = {
    "use_k_shift": True, "use_v_shift": True, "qk_norm": True, "use_output_gate": True, "use_output_norm": True,
    "hidden_ratio": 3.5,
}
# as published: one gain for all heads, and their kernel prunes
PUBLISHED = PRO | {"qk_norm_share_param_across_head": True, "log_pruning_tolerance": -10.0}
SMALL = {"hidden_size": 256, "num_heads": 4, "num_hidden_layers": 4}
SIZE_760M = {"hidden_size": 1536, "num_heads": 24, "num_hidden_layers": 24}
VOCABULARY, PROMPT, STEPS = 50304, 1024, 20


def official(library, options, monkeypatch):
    """Return a model of theirs with random weights, in float32."""
    name = "ForgettingTransformer"
    if library == "fox":
        package = "forgetting_transformer.model.forgetting_transformer."
        module = pytest.importorskip(package + "modeling_forgetting_transformer")
        Config = getattr(importlib.import_module(package + "configuration_forgetting_transformer"), name + "Config")
        Model = getattr(module, name + "ForCausalLM")
        # of an older transformers
        monkeypatch.setattr(Model, "_tied_weights_keys", {"lm_head.weight": "model.embeddings.weight"})
        monkeypatch.setattr(Config, "use_return_dict", True, raising=False)
        options = {"max_position_embeddings": None, "bos_token_id": None, "eos_token_id": None} | options
    else:
        module = pytest.importorskip("fla.models.forgetting_transformer")
        Config, Model = getattr(module, name + "Config"), getattr(module, name + "ForCausalLM")
    model = Model(Config(vocab_size=VOCABULARY, fuse_cross_entropy=False, **options)).cuda().eval()
    for parameter, p in model.named_parameters():
        if "norm" in parameter or parameter.endswith(("fgate_proj.bias", "f_proj.bias")):
            p.add_(0.2 * torch.randn_like(p) + (0.0 if "norm" in parameter else 3.0))
    return model


@torch.no_grad()
@pytest.mark.parametrize(("library", "options"), [
    ("fox", SMALL), ("fox", SMALL | PRO), ("fox", SIZE_760M | PUBLISHED), ("fla", SMALL),
    ("fla", SMALL | {"num_kv_heads": 2, "qk_norm": True, "use_output_gate": True}),
], ids=["fox", "fox-pro", "fox-760M", "fla", "fla-options"])
def test_logits_and_tokens_are_theirs_up_to_rounding(library, options, monkeypatch):
    """No logit is further from float64 than theirs; a token of ours is another one only if both are as likely."""
    theirs = official(library, options, monkeypatch)
    config, weights = (from_fox if library == "fox" else from_fla)(theirs.state_dict(), config=theirs.config)
    ours = DecayForCausalLM(config).cuda().eval()
    ours.load_state_dict(weights)
    tokens = torch.randint(0, VOCABULARY, (2, PROMPT), device="cuda")
    exact = ours.double()(tokens).logits
    ours.float()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for _ in range(STEPS):
            last = theirs(tokens, use_cache=False).logits[:, -1:]
            tokens = torch.cat([tokens, last.argmax(-1)], 1)
        expected = theirs(tokens, use_cache=False).logits.double()
        whole = ours(tokens).logits.double()
        steps, cache = [], None
        for piece in tokens.split([PROMPT] + [1] * STEPS, 1):
            output = ours(piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            steps.append(output.logits.double())
    errors = [float((x[:, :PROMPT] - exact).norm() / exact.norm()) for x in (expected, whole, steps[0])]
    print(f"{library}: relative errors of logits, theirs {errors[0]:.2e}, ours {errors[1]:.2e}")
    assert max(errors[1:]) <= 1.1 * errors[0]
    cached, expected, whole = torch.cat(steps, 1)[:, PROMPT - 1 :], expected[:, PROMPT - 1 :], whole[:, PROMPT - 1 :]
    for found in (whole, cached):
        largest_error = (found - expected).abs().amax(-1, keepdim=True)
        token = found.argmax(-1, keepdim=True)
        loss = expected.amax(-1, keepdim=True) - expected.gather(-1, token)
        equal = int((loss == 0).sum())
        print(f"    {equal} of {loss.numel()} tokens are equal; the largest difference of logits {loss.max():.2e}")
        assert (loss <= 2 * largest_error).all()
        assert equal >= 0.7 * loss.numel()
        assert float((found - expected).norm() / expected.norm()) < 3 * errors[0]
