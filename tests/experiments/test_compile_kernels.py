"""Checks of GPU kernels on any machine: they compile, fit, and, on sm_90, keep their products asynchronous."""

import json
import re

import pytest
from processes import run_python
from repository_files import EXPERIMENTS

SCRIPT = EXPERIMENTS / "tools/compile_kernels.py"
KERNELS = {
    "hopper": ["forward_kernel", "gradients_kernel"],
    "triton": ["forward_kernel", "key_gradients_kernel", "query_gradients_kernel", "gradients_kernel", "split_kernel"],
}


def compile_kernels(*options: str) -> str:
    """Output of the script in a process of its own: under the interpreter, which this one may use, nothing compiles."""
    return run_python(SCRIPT, *options, without="TRITON_INTERPRET")


@pytest.mark.slow
@pytest.mark.parametrize("backend", KERNELS)
def test_kernels_compile_for_sm90(backend):
    """One tile per kernel, direction and layout of sequences; CI compiles other head dimensions, too."""
    options = ["--head-dims", "64", "--decays", "scalar", "--paths", "TMA", "small", "packed", "narrow", "decode"]
    printed = compile_kernels("--backends", backend, *options)
    for kernel in KERNELS[backend]:
        assert re.search(rf"^sm_90 +{backend} +D64 .* {kernel} ", printed, re.MULTILINE), (kernel, printed)


@pytest.mark.slow
def test_decoding_fits_less_shared_memory(tmp_path):
    """64 KB on gfx942, 99 KB on sm_89, both less than sm_90 has."""
    path = tmp_path / "kernels.json"
    options = ["--head-dims", "128", "--decays", "none", "--paths", "decode", "--json", str(path)]
    compile_kernels("--targets", "gfx942", "sm_89", *options)
    found = json.loads(path.read_text())
    assert found["command"].startswith("python experiments/tools/compile_kernels.py --targets gfx942 sm_89")
    limits = {"gfx942": 64, "sm_89": 99}
    assert {row["target"] for row in found["kernels"] if row["kernel"] == "split_kernel"} == limits.keys()
    for row in found["kernels"]:
        assert row["registers"] > 0
        assert row["shared"] <= limits[row["target"]] << 10


@pytest.fixture
def script(monkeypatch):
    from tools import compile_kernels  # which imports the backends

    monkeypatch.setattr(compile_kernels, "provenance", lambda *_: {"commit": "abc"})
    return compile_kernels


def test_descriptors_of_two_layouts_share_no_register(script):
    one = "add.s64 \t%rd260, %rd223, -9223371899415822334;\nadd.s64 \t%rd261, %rd224, -9223371899415822334;\n"
    same = "add.s64 \t%rd262, %rd224, -9223371899415822332;\nadd.s64 \t%rd263, %rd224, 64;\n"
    other = "add.s64 \t%rd281, %rd224, -4611685949707911136;\n"
    assert not script.shares_an_address(one + same)
    assert not script.shares_an_address(one.replace("%rd224", "%rd225") + other)
    assert script.shares_an_address(one + other)


def test_memory_of_a_barrier_has_one_use(script):
    made = "add.s32 \t%r5, %r1, 200448;\n@%p4 mbarrier.init.shared::cta.b64 [%r5], 3;\nadd.s32 \t%r6, %r1, 200448;\n"
    waited = "add.s32 \t%r7, %r1, 200448;\nmbarrier.try_wait.parity.shared.b64 complete, [%r7], %r8;\n"
    stored = "@%p6 st.shared.b32 [ %r6 + 0 ], %r367;\n"
    after = "ld.shared.b32 \t%r368, [global_smem+200456];\n"
    assert not script.reuses_a_barrier(made + waited + after)
    assert not script.reuses_a_barrier(made + "mbarrier.inval.shared::cta.b64 [%r5];\n" + stored)
    assert script.reuses_a_barrier(made + waited + stored)
    assert script.reuses_a_barrier(made + "ld.shared.v2.b32 \t{%r8, %r9}, [global_smem+200452];\n")


@pytest.mark.parametrize("faults", [[], ["serialised"]])
def test_a_fault_is_the_exit_status(script, tmp_path, monkeypatch, faults):
    """Equal kernels share a row."""
    kernel = dict(target="sm_90", backend="triton", dim=64, decay="none", path="TMA", kernel="forward", registers=1,
                  spills=8, shared=0, faults=faults, notes=["n"])
    monkeypatch.setattr(script, "compiled", lambda *_: [kernel, kernel])
    monkeypatch.setattr(script.driver, "set_active", lambda _: None)
    assert script.main(["--json", str(tmp_path / "m.json")]) == bool(faults)
    assert json.loads((tmp_path / "m.json").read_text()) == {"commit": "abc", "kernels": [kernel]}
