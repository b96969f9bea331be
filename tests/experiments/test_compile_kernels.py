"""Checks of GPU kernels on any machine: they compile, fit, and, on sm_90, keep their products
asynchronous."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from repository_files import EXPERIMENTS
from tools import compile_matrix

SCRIPT = EXPERIMENTS / "tools/compile_kernels.py"
KERNELS = {
    "hopper": ["forward_kernel", "gradients_kernel"],
    "triton": ["forward_kernel", "key_gradients_kernel", "query_gradients_kernel", "gradients_kernel", "split_kernel"],
}


def compile_kernels(*options: str) -> subprocess.CompletedProcess:
    """The script in a process of its own: the interpreter, which this one may use, compiles nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], env=environment, capture_output=True, text=True, timeout=900,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", KERNELS)
def test_both_backends_compile_for_sm90(backend):
    """One tile per kernel, direction and way to lay out sequences; compile_matrix.py has other head dimensions."""
    options = ["--head-dims", "64", "--decays", "scalar", "--paths", "TMA", "small", "packed", "decode"]
    run = compile_kernels("--backends", backend, *options)
    assert run.returncode == 0, run.stdout + run.stderr
    for kernel in KERNELS[backend]:
        assert re.search(rf"^sm_90 +{backend} +D64 .* {kernel} ", run.stdout, re.MULTILINE), (kernel, run.stdout)


@pytest.mark.slow
def test_kernels_of_a_random_call():
    """One whose keys have a step between their numbers: tiles of two layouts, before they were copied."""
    run = compile_kernels("--backends", "triton", "--calls", "1", "--seed", "6699")
    assert run.returncode == 0, run.stdout + run.stderr
    kernels = re.findall(r"^sm_90 +triton +D25 +none +call 0 +(\w+) ", run.stdout, re.MULTILINE)
    assert kernels == ["forward_kernel", "row_terms_kernel", "gradients_kernel"]


@pytest.mark.slow
def test_decoding_fits_where_a_block_has_less_shared_memory(tmp_path):
    """64 KB on gfx942, 99 KB on sm_89, both less than sm_90 has."""
    path = tmp_path / "kernels.json"
    options = ["--head-dims", "128", "--decays", "none", "--paths", "decode", "--json", str(path)]
    run = compile_kernels("--targets", "gfx942", "sm_89", *options)
    assert run.returncode == 0, run.stdout + run.stderr
    kernels = json.loads(path.read_text())["kernels"]
    # over a contiguous cache, and over pages
    targets = [kernel["target"] for kernel in kernels if kernel["kernel"] == "split_kernel"]
    assert targets == ["gfx942", "gfx942", "sm_89", "sm_89"]
    for kernel in kernels:
        assert kernel["registers"] > 0
        assert kernel["shared"] <= {"gfx942": 64, "sm_89": 99}[kernel["target"]] << 10


def test_descriptors_of_two_layouts_share_no_register():
    from tools.compile_kernels import shares_an_address  # which imports the backends

    one = "add.s64 \t%rd260, %rd223, -9223371899415822334;\nadd.s64 \t%rd261, %rd224, -9223371899415822334;\n"
    same = "add.s64 \t%rd262, %rd224, -9223371899415822332;\nadd.s64 \t%rd263, %rd224, 64;\n"
    other = "add.s64 \t%rd281, %rd224, -4611685949707911136;\n"
    assert not shares_an_address(one + same)
    assert not shares_an_address(one.replace("%rd224", "%rd225") + other)
    assert shares_an_address(one + other)


def test_memory_of_a_barrier_is_for_nothing_else():
    from tools.compile_kernels import reuses_a_barrier

    made = "add.s32 \t%r5, %r1, 200448;\n@%p4 mbarrier.init.shared::cta.b64 [%r5], 3;\nadd.s32 \t%r6, %r1, 200448;\n"
    waited = "add.s32 \t%r7, %r1, 200448;\nmbarrier.try_wait.parity.shared.b64 complete, [%r7], %r8;\n"
    stored = "@%p6 st.shared.b32 [ %r6 + 0 ], %r367;\n"
    beside = "ld.shared.b32 \t%r368, [global_smem+200456];\n"
    assert not reuses_a_barrier(made + waited + beside)
    assert not reuses_a_barrier(made + "mbarrier.inval.shared::cta.b64 [%r5];\n" + stored)
    assert reuses_a_barrier(made + waited + stored)
    assert reuses_a_barrier(made + "ld.shared.v2.b32 \t{%r8, %r9}, [global_smem+200452];\n")


# Versions of Triton beside one another


def compiled(version, kernel, decay="scalar", spills=0, **values):
    of_call = {"triton": version, "target": "sm_90", "backend": "triton", "dim": 64, "decay": decay, "path": "TMA"}
    found = {"kernel": kernel, "registers": 40, "spills": spills, "shared": 2048, "faults": [], "notes": []}
    return of_call | found | values


def test_the_table_has_the_most_that_a_kernel_needs():
    kernels = [
        compiled("3.6.0", "forward_kernel"),
        compiled("3.6.0", "forward_kernel", "none", spills=8, registers=36),
        compiled("3.9.0", "forward_kernel", shared=1000),
        compiled("3.9.0", "decode_kernel"),
    ]
    _, _, forward, decode = compile_matrix.table(kernels, ["3.6.0", "3.9.0"]).splitlines()
    assert [cell.strip() for cell in forward.split("|")[4:8]] == ["forward_kernel", "TMA", "40 · 8 · 2", "40 · 0 · 1"]
    assert [cell.strip() for cell in decode.split("|")[4:8]] == ["decode_kernel", "TMA", "", "40 · 0 · 2"]


def test_what_is_written_has_a_line_per_kernel(tmp_path):
    kernels = [compiled("3.6.0", "forward_kernel", spills=spills) for spills in (4, 12)]
    kernels[1]["notes"] = ["spills more than 8 B"]
    path = tmp_path / "matrix.json"
    compile_matrix.write(path, {"commit": "abc"}, kernels)
    written = json.loads(path.read_text())
    assert (written["versions"], written["provenance"]) == (["3.6.0"], {"commit": "abc"})
    (row,) = written["kernels"]
    assert (row["spills"], row["notes"]) == (12, ["spills more than 8 B"])


def test_every_version_is_compiled_with_itself(tmp_path, monkeypatch, capsys):
    """A version that has been installed is first on the path, and a fault of one of them is the exit status."""
    runs = []

    def run(command, env=None, **options):
        if "pip" in command:
            folder = Path(command[command.index("--target") + 1]) / "triton"
            folder.mkdir(parents=True)
            (folder / "__init__.py").touch()
            return None
        runs.append((env["PYTHONPATH"].split(os.pathsep)[0], command[command.index("--targets") + 1]))
        fault = ["serialised"] if "3.7.1" in runs[-1][0] and runs[-1][1] == "sm_90" else []
        kernel = compiled(None, "forward_kernel", target=runs[-1][1], faults=fault)
        del kernel["triton"]
        Path(command[command.index("--json") + 1]).write_text(json.dumps({"kernels": [kernel]}))
        return subprocess.CompletedProcess(command, int(bool(fault)))

    monkeypatch.setattr(compile_matrix.subprocess, "run", run)
    monkeypatch.setattr(compile_matrix, "provenance", lambda *_: {})
    for versions, status in ((["3.6.0"], 0), (["3.6.0", "3.7.1"], 1)):
        runs.clear()
        options = ["--short", "--folder", str(tmp_path), "--json", str(tmp_path / "m.json"), "--versions", *versions]
        monkeypatch.setattr(sys, "argv", ["compile_matrix.py", *options])
        assert compile_matrix.main() == status
        folders = [str(tmp_path / f"triton-{version}") for version in versions]
        # several at once: in any order
        assert sorted(runs) == sorted(
            (folder, target)
            for folder, version in zip(folders, versions, strict=True) for target, _ in compile_matrix.short(version)
        )
    assert "fault: triton 3.7.1: sm_90, triton, 64, forward_kernel, TMA: serialised" in capsys.readouterr().out
