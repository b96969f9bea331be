"""Tables and the picture of the pages follow from the JSON in results/; JSON of unknown origin raises."""

import json
import shutil
from pathlib import Path

import pytest
import report
from report import Refused, Results
from repository_files import ROOT

PAGE = "experiments/README.md"
ORIGIN = {
    "gpu": "NVIDIA H200", "torch": "2.11.0+cu130", "triton": "3.6.0", "cudnn": 91900, "commit": "abc", "dirty": False,
    "command": "python x.py", "date": "2026-11-23T00:00:00+00:00",
}


def sustained(causal: bool = True) -> dict:
    """A report of benchmarks/attention.py, with made-up figures."""
    rows = []
    for head_dim, length in ((64, 2048), (128, 2048)):
        for at, direction in enumerate(("forward", "backward")):
            speed = {"cudnn": 400, "ours": 480 - 40 * at, "ours, no decay": 500, "triton, constant": 300}
            kernels = {
                name: {"ms": 1.0, "ms_range": [0.9, 1.1], "tflops": x, "ratio_to_cudnn": x / 400}
                for name, x in speed.items()
            }
            shape = {"batch": 16, "length": length, "heads": 16, "head_dim": head_dim, "causal": causal}
            rows.append(shape | {"direction": direction, "kernels": kernels})
    return ORIGIN | {"rows": rows}


@pytest.fixture
def copy(tmp_path) -> Path:
    """The pages and the results, to be changed."""
    shutil.copytree(ROOT / "results", tmp_path / "results")
    for name in report.PAGES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def results(tmp_path) -> Results:
    """Results with made-up speeds."""
    (tmp_path / "results").mkdir()
    found = Results(tmp_path / "results")
    put(found, report.SPEED_FILE, **sustained())
    for name, _, causal in report.MORE_SPEEDS:
        put(found, name, **sustained(causal))
    return found


def put(results: Results, name: str, **figures) -> None:
    (results.folder / name).write_text(json.dumps(ORIGIN | figures))


def test_pages_equal_the_json(capsys):
    assert report.main(["--check"]) == 0, capsys.readouterr().out + "\nrun python experiments/report.py"


def test_changed_figure_is_reported_and_written(copy, capsys):
    path, picture = copy / "results/train_cpu.json", copy / "results" / report.PICTURE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": 42.0}))
    before = picture.read_text()
    picture.unlink()
    assert report.main(["--check"], copy) == 1
    printed = capsys.readouterr().out
    assert "+* 2 CPU cores: 0.9 M parameters, 600 steps in 42 s" in printed
    assert "speed.svg is not of the JSON" in printed
    assert (copy / PAGE).read_text() == (ROOT / PAGE).read_text()
    assert report.main([], copy) == 0
    assert "in 42 s" in (copy / PAGE).read_text()
    assert report.digest_of(report.bars_of(Results(copy / "results"))) in before
    assert report.main(["--check"], copy) == 0


def test_edited_and_unknown_tables_are_reported(copy, capsys):
    page, text = copy / PAGE, (copy / PAGE).read_text()
    page.write_text(text.replace("bits per byte", "bits per bite"))
    assert report.main(["--check"], copy) == 1
    (copy / "results/recall.json").rename(copy / "recall.json")
    assert report.main(["--check"], copy) == 1
    assert "results/recall.json: not found" in capsys.readouterr().err
    (copy / "recall.json").rename(copy / "results/recall.json")
    page.write_text(text + "<!-- table: unknown -->\n<!-- end -->\n")
    assert report.main([], copy) == 1
    assert "got table unknown" in capsys.readouterr().err


@pytest.mark.parametrize(("origin", "message"), [
    *(({key: None}, f"lacks {key};") for key in ("commit", "gpu", "torch", "triton", "command")),
    ({"dirty": True}, "the code differed from commit abc"),
])
def test_json_without_a_complete_origin_raises(origin, message, results):
    put(results, report.SPEED_FILE, **sustained() | origin)
    with pytest.raises(Refused, match=rf"results/benchmark_sustained\.json: .*{message}"):
        report.attention(results)


def test_complete_origins_load(results):
    put(results, "x.json", dirty=None)  # a copy without git, its commit given by hand
    assert results.load("x.json")["commit"] == "abc"
    (results.folder / "x.json").write_text(json.dumps({"provenance": ORIGIN | {"gpu": None, "torch": "2.13.0+cpu"}}))
    assert results.load("x.json")["gpu"] is None


def test_speed_tables_have_kernels_and_shapes(results):
    lines = report.attention(results)
    assert lines[0] == "| forward / backward, H16 | D64 T2048 B16 | D128 T2048 B16 |"
    rows = dict(line.strip("| ").split(" | ", 1) for line in lines[2 : lines.index("")])
    assert rows["**decayattn, decay and its gradient**"] == "**1.20 / 1.10** | **1.20 / 1.10**"
    assert rows["decayattn's Triton kernels, a constant per head and its gradient"] == "0.75 / 0.75 | 0.75 / 0.75"
    assert rows["cuDNN (PyTorch SDPA), no decay, TFLOP/s"] == "400 / 400 | 400 / 400"
    for name, title, _ in report.MORE_SPEEDS:
        at = lines.index(f"{title}, Triton {ORIGIN['triton']} ([JSON](results/{name})):")
        assert lines[at + 2].startswith("| forward / backward, H16 |")


def test_picture_has_the_figures_of_its_file(results):
    figures = sustained()
    for row in figures["rows"]:
        row["kernels"] |= {"fox": {"ratio_to_cudnn": 0.5}, "ours": {"ratio_to_cudnn": 9.0, "tflops": 1.0}}
    put(results, report.SPEED_FILE, **figures)
    bars = report.bars_of(results)
    found = {(kernel, way): x for kernel, _, way, x in bars}
    assert (found["fox", "forward"], found["ours", "forward"]) == (0.5, 9.0)
    assert "forward 9.00 to 9.00, backward 9.00 to 9.00" in "\n".join(report.pictures(results))
    text = report.svg(bars)
    assert text == report.svg(bars)
    assert report.digest_of(bars) in text
    assert "9.00" in text
    assert report.digest_of([*bars[:-1], [*bars[-1][:3], 1.26]]) not in text
    for captured, regime in ((False, ""), (True, ", replayed by CUDA graphs")):
        put(results, report.SPEED_FILE, **figures | {"captured": captured})
        lines = report.attention(results)
        assert any("0.50 / 0.50" in line for line in lines if line.startswith("| Forgetting Transformer"))
        said = lines[lines.index("") + 1]
        assert f"calls back to back{regime}, at the power limit ([JSON](results/{report.SPEED_FILE}))" in said


def test_front_page_quotes_ranges_of_its_tables():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    cells = {row[0]: row[1:] for line in page.splitlines() if line.startswith("| ")
             for row in [line.strip("| ").split(" | ")]}

    def ratios(start: str) -> list[list[float]]:
        [row] = [row for name, row in cells.items() if name.startswith(start)]
        return [list(map(float, cell.split(" / "))) for cell in row]

    reasons = " ".join(page[page.index("- **Fast.**") : page.index("```sh")].split())
    for direction in ("forward", "backward"):
        both = [x for cell in ratios(f"attention, {direction}") for x in cell]
        assert f"{min(both):.2f}–{max(both):.2f}× the {direction} speed" in reasons
    steps = [f"{min(both):.2f}–{max(both):.2f}×" for both in ratios("training step, × cuDNN with rotary")]
    assert all(round(x) == 4 for x in ratios("attention that skips")[2])
    read = report.bits_of(report.Results(ROOT / "results").load(report.EVIDENCE_FILE))
    bits = [f"{read[name, 16384, 65536, 'bits'][0]:.2f}" for name in ("scalar", "rotary", "alibi-learned")]
    evidence = "at {} bits per byte. With rotary embeddings it is {}, with learned ALiBi {} ".format(*bits)
    assert [x for x in (steps[1], f"At 32,768 tokens it is {steps[2]}", evidence) if x not in reasons] == []


def test_context_has_dashes_where_no_speed_is(results):
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16", "length": 128, "decay": "-0.1"}
    rows = [shape | {"mode": "halo", "direction": way, "speed_over_alone": speed, "received": [0, 5_000_000]}
            for way, speed in zip(report.WAYS, (1.8, None), strict=True)]
    checks = [{"errors": {"dq": {"over_budget": 0.5}, "dk": {"over_budget": None}}}]
    put(results, report.CONTEXT_FILE, ranks=2, rows=rows, checks=checks)
    text = report.context(results)
    assert "| mean λ −0.1, halo | 1.80 / – (5.00 / 5.00) |" in text
    assert "of 1 checked cases over its budget: 0.50" in text[-1]


def test_evidence_has_losses_and_needles(results):
    needles = [{"length": length, "texts": 3, "found": [0.1, 0.2, 0.3, 0.4, 1.0], "bits": [4.0, 3.0, 2.0, 1.0, 0.5]}
               for length in (4096, 16384)]
    columns = [{"begin": 0, "end": 4096, "bits": 1.0, "in_windows": 1.0},
               {"begin": 4096, "end": 16384, "bits": 0.9, "in_windows": 0.95}]
    reading = [{"length": 16384, "crops": 3, "bits": [1.0], "columns": columns}]
    runs = [{"scheme": name, "seed": 0, "parameters": size, "reading": reading, "needles": needles}
            for name, size in (("scalar", 85_000_000), ("pro", 92_000_000))]
    sides = {"held out": {"packages": 2}, "training": {"packages": 5}}
    settings = {"context": 4096, "lengths": [16384], "steps": 10, "batch_size": 2}
    put(results, report.EVIDENCE_FILE, rows=runs, corpus=sides, settings=settings)
    lines = report.BLOCKS["evidence"](results)
    assert lines[0].endswith("](results/evidence_121m.png)")
    assert "| Pro block of FoX | 1.000 | 0.900 | 0.950 |" in lines
    assert "| 16k, Pro block of FoX | 10% (4.00) | 20% (3.00) | 30% (2.00) | 40% (1.00) | 100% (0.50) |" in lines
    assert any(line.startswith("One seed. 85.0 to 92.0 M parameters") for line in lines)


def test_official_model_is_compared_by_setting(results):
    def row(part, batch, variant, speed, **more):
        return {"part": part, "batch": batch, "length": 4096, "variant": variant, "tokens_per_second": speed,
                "peak_bytes": 20e9, **more}

    rows = [row("recomputed", 4, "theirs", 40_000.0), row("recomputed", 4, "ours", 50_000.0),
            row("compiled", 4, "ours", 45_000.0), row("generation", 8, "theirs", 20.0, prefill_ms=100.0),
            row("generation", 8, "ours, captured", 90.0, prefill_ms=60.0)]
    put(results, report.FOX_FILE, rows=rows, missing=[{"variant": "theirs", "kind": "failed", "reason": "memory"}])
    lines = report.fox(results)
    assert lines[0] == "| tokens per second, × theirs, memory | theirs | ours | ours, captured |"
    assert lines[2:5] == [
        "| training, activations recomputed, B4 T4096 | 40,000, 20 GB | 50,000, 1.25×, 20 GB | – |",
        "| training, compiled, B4 T4096 | – | 45,000, 20 GB | – |",
        "| generation (ms of the prompt), B8 T4096 | 20.0 (100 ms), 20 GB | – | 90.0 (60.0 ms), 4.50×, 20 GB |",
    ]
    assert lines[-1].endswith("No speed: theirs: failed.")
