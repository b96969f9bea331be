"""README's tables and picture are what the JSON in results/ says, and JSON of unknown origin is refused."""

import json
import math
import shutil
import xml.etree.ElementTree
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
def results(tmp_path) -> Results:
    (tmp_path / "results").mkdir()
    (tmp_path / "results/benchmark_sustained.json").write_text(json.dumps(sustained()))
    return Results(tmp_path / "results")


@pytest.fixture
def copy(tmp_path) -> Path:
    """The pages and the results, to be changed."""
    shutil.copytree(ROOT / "results", tmp_path / "results")
    for name in report.PAGES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_pages_are_what_the_json_says(capsys):
    assert report.main(["--check"]) == 0, capsys.readouterr().out + "\nrun python experiments/report.py"


def test_a_figure_that_changed_is_seen_and_written(copy, capsys):
    path = copy / "results/train_cpu.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": 42.0}))
    assert report.main(["--check"], copy) == 1
    assert "+* 2 CPU cores: 0.9 M parameters, 600 steps in 42 s" in capsys.readouterr().out
    assert (copy / PAGE).read_text() == (ROOT / PAGE).read_text()
    assert report.main([], copy) == 0
    assert "in 42 s" in (copy / PAGE).read_text()
    assert report.main(["--check"], copy) == 0


def test_a_table_edited_by_hand_and_an_old_picture_are_seen(copy):
    page, picture = copy / PAGE, copy / "results" / "speed.svg"
    text = page.read_text()
    page.write_text(text.replace("bits per byte", "bits per bite"))
    assert report.main(["--check"], copy) == 1
    page.write_text(text)
    assert report.main(["--check"], copy) == 0
    picture.unlink()
    assert report.main(["--check"], copy) == 1


def test_a_table_that_nobody_knows_is_refused(copy, capsys):
    page = copy / PAGE
    page.write_text(page.read_text() + "<!-- table: nobody -->\n<!-- end -->\n")
    assert report.main([], copy) == 1
    assert "README.md: there is no table nobody" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["commit", "gpu", "torch", "triton", "command"])
def test_json_without_its_origin_is_refused(key, results):
    path = results.folder / report.SPEED_FILE
    path.write_text(json.dumps(sustained() | {key: None}))
    with pytest.raises(Refused, match=rf"results/benchmark_sustained\.json: lacks {key};"):
        report.attention(results)


def test_json_of_code_that_is_in_no_commit_is_refused(results):
    path = results.folder / report.SPEED_FILE
    path.write_text(json.dumps(sustained() | {"dirty": True}))
    with pytest.raises(Refused, match="differed from commit abc"):
        report.attention(results)
    path.write_text(json.dumps(sustained() | {"dirty": None}))  # a copy without git, whose commit was given
    report.attention(results)


def test_only_a_cpu_has_no_gpu(results):
    path = results.folder / "x.json"
    path.write_text(json.dumps(ORIGIN | {"gpu": None}))
    with pytest.raises(Refused, match="lacks gpu"):
        results.load("x.json", on_gpu=False)
    path.write_text(json.dumps({"provenance": ORIGIN | {"gpu": None, "torch": "2.13.0+cpu"}}))
    assert results.load("x.json", on_gpu=False)["commit"] == "abc"


def test_the_table_has_a_row_per_kernel_and_a_column_per_shape(results):
    lines = report.attention(results)
    assert lines[0] == "| forward / backward, H16 | D64 T2048 B16 | D128 T2048 B16 |"
    rows = dict(line.strip("| ").split(" | ", 1) for line in lines[2:-2])
    assert rows["**decayattn, decay and its gradient**"] == "**1.20 / 1.10** | **1.20 / 1.10**"
    assert rows["decayattn's Triton kernels, a constant per head and its gradient"] == "0.75 / 0.75 | 0.75 / 0.75"
    assert rows["cuDNN (PyTorch SDPA), no decay, TFLOP/s"] == "400 / 400 | 400 / 400"


@pytest.mark.parametrize(("before", "said"), [(None, ""), ("0123456789", ", 0123456")])
@pytest.mark.parametrize(("name", "what", "causal"), report.MORE_SPEEDS)
def test_speeds_of_other_calls_have_tables_of_their_own(results, name, what, causal, before, said):
    first = report.attention(results)
    (results.folder / name).write_text(json.dumps(sustained(causal=causal) | {"before": before}))
    found = report.attention(results)
    assert found[: len(first)] == first
    assert found[len(first) + 1] == f"{what}{said} ([JSON](results/{name})):"
    assert found[len(first) + 3].startswith("| forward / backward, H16 |")


def test_kernels_of_others_come_from_the_file_that_has_them(results):
    """Against cuDNN in their own process; ours only from the first file. The picture has one process alone."""
    others = sustained()
    for row in others["rows"]:
        row["kernels"] |= {"fox": {"ratio_to_cudnn": 0.5}, "ours": {"ratio_to_cudnn": 9.0}}
    (results.folder / report.OTHERS_FILE).write_text(json.dumps(others))
    found = {(kernel, way): x for kernel, _, way, x in report.speed_picture(results).figures}
    assert found["fox", "forward"] == 0.5
    assert found["ours", "forward"] == 9.0
    assert "forward 9.00 to 9.00, backward 9.00 to 9.00" in "\n".join(report.pictures(results))
    said = "\n".join(report.attention(results))
    assert "sustained: calls back to back, at the power limit ([JSON](results/benchmark_sustained.json))" in said
    (results.folder / report.SPEED_FILE).write_text(json.dumps(sustained() | {"captured": True}))
    assert "back to back, replayed by CUDA graphs, at" in "\n".join(report.attention(results))
    assert "Forgetting Transformer: launched from Python, against" in "\n".join(report.attention(results))
    link = f"[JSON](results/{report.OTHERS_FILE})"
    assert f"Forgetting Transformer: against cuDNN in a process of its own ({link})" in said


@pytest.fixture(params=["runs", "rows"])
def extrapolation(results, request) -> Results:
    """With a length_extrapolation.json of one scheme and one of a decay per channel, as older calls wrote it or now."""
    columns = [
        {"begin": 0, "end": 1024, "bits": 1.0, "in_windows": 1.0, "standard_error": 0.0},
        {"begin": 1024, "end": 4096, "bits": 0.75, "in_windows": 0.875, "standard_error": 0.01},
    ]
    settings = {
        "layers": 1, "width": 16, "heads": 2, "context": 1024, "batch_size": 8, "steps": 1000, "learning_rate": 1e-3,
        "lengths": [4096], "crops": [7], "without_decay_up_to": 4096, "precision": "bfloat16",
    }
    bits = [2.0, 1.0, 0.75, 0.5]
    runs = [
        {"scheme": scheme, "seed": seed, "diverged": None, "parameters": 12_500_000,
         "reading": [{"length": 4096, "crops": 7, "columns": columns, "bits": [x + seed / 4 for x in bits]}]}
        for scheme, seeds in (("alibi", (0, 1)), ("per-channel", (0,))) for seed in seeds
    ]
    side = {"packages": 3, "bytes": 10, "files": 1}
    found = {"settings": settings, request.param: runs, "corpus": {"training": side, "held out": side}}
    found |= {"edges": {"4096": [0, 512, 1024, 2048, 4096]}}
    (results.folder / report.EXTRAPOLATION_FILE).write_text(json.dumps(ORIGIN | found))
    return results


def test_length_extrapolation_is_shown_where_measured(extrapolation):
    """The table of the JSON with its picture, and the source of its figures."""
    lines = report.extrapolation(extrapolation)
    assert lines[0].endswith("](results/length_extrapolation.png)")
    assert lines[2:5] == [
        "| bits per byte | 0–1k | 1k–4k | 1k–4k, ≤ 1k before |",
        "|---|---|---|---|",
        "| ALiBi | 1.000 (1.000–1.000) | 0.750 (0.750–0.750) | 0.875 (0.875–0.875) |",
    ]
    assert "12.5 M parameters, 8 MB of Python source at 1k bytes; 7 texts of 4k bytes read" in lines[-1]


def test_picture_shows_figures_and_names_their_digest(results):
    (results.folder / report.OTHERS_FILE).write_text(json.dumps(sustained()))
    picture = report.speed_picture(results)
    assert sorted({x for _, _, _, x in picture.figures}) == [1.1, 1.2, 1.25]
    text = picture.svg()
    assert text == picture.svg()
    assert picture.digest in text
    assert "1.20" in [(element.text or "").strip() for element in xml.etree.ElementTree.fromstring(text).iter()]
    other = report.Picture(picture.title, [*picture.figures[:-1], [*picture.figures[-1][:3], 1.26]], picture.draw)
    assert other.digest not in text


@pytest.mark.parametrize("measured", [True, False])
def test_one_thread_has_columns_where_it_was_measured(measured, results):
    one_thread = {"one_thread_us": 400.0, "one_thread_us_range": [390.0, 410.0]} if measured else {}
    rows = [
        {"head_dim": 64, "peer": peer, "host_us": 800.0, "host_us_range": [700.0, 900.0]}
        for peer in ("decayattn auto", "decayattn auto, packed")
    ]
    rows[0] |= one_thread | {"graph_us": 26.4, "graph_us_range": [26.0, 27.0]}
    (results.folder / "benchmark_overhead.json").write_text(json.dumps(ORIGIN | {"rows": rows}))
    head, _, dense, packed, *_ = report.overhead(results)
    more = (" host, all in one thread, D64 (range) |", " 400 (390 to 410) |", " – |") if measured else ("", "", "")
    assert head == f"| µs per forward and backward | host, D64 (range) |{more[0]} GPU in a CUDA graph, D64 |"
    assert dense == f"| decayattn | 800 (700 to 900) |{more[1]} 26 |"
    assert packed == f"| decayattn, two packed sequences | 800 (700 to 900) |{more[2]} – |"


def test_a_page_says_that_nothing_is_measured_yet(copy):
    for name in ("recall.json", "benchmark_training.json", "benchmark_strategies.json"):
        (copy / "results" / name).unlink()
    assert report.main([], copy) == 0
    assert (copy / PAGE).read_text().count(report.NOT_MEASURED) == 3


def test_front_page_tells_ranges_of_its_tables():
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
    assert steps[1] in reasons
    assert f"At 32,768 tokens it is {steps[2]}" in reasons
    assert all(round(x) == 4 for x in ratios("attention that skips")[2])
    bits = [f"{float(cells[name][1].strip('*')):.2f}" for name in ('`decay="scalar"`, a forget gate', '`"alibi"`')]
    assert f"at {bits[0]} bits per byte. With fixed ALiBi it is {bits[1]}" in reasons


def test_recall_is_a_table_per_task(results):
    rows = [
        {"task": task, "mode": mode, "width": 64, "shapes": [[64, 4, 9], [64, 8, 1]], "learning_rates": [0.1, 0.2],
         "validation": [[[0.1, 0.1]] * 2, [[0.9, 0.9]] * 2], "test": [[[0.0, 0.0]] * 2, [[1.0, 0.5], [1.0, 0.7]]]}
        for task in ("forgetting", "recall") for mode in ("none", "scalar")
    ]
    (results.folder / "recall.json").write_text(json.dumps(ORIGIN | {"rows": rows, "setup": {"seeds": [0, 1]}}))
    lines = report.recall(results)
    assert lines[2] == "| recall: queries answered rightly, % | T64, 4 pairs | T64, 8 pairs |"
    assert lines[4] == "| d64, scalar decay (forget gate) | 100 | 60 (50–70) |"
    assert lines[5].startswith("| d64, no position")
    assert sum("forgetting: queries" in line for line in lines) == 1
    assert lines[-1].startswith("Mean of 2 seeds (range), NVIDIA H200, torch 2.11.0 (")


def test_training_speed_is_relative_to_cudnn(results):
    about = {"head_dim": 64, "length": 8192, "compiled": False}
    rows = [
        about | {"variant": name, "tokens_per_second": speed, "attention_share": share}
        for name, speed, share in (("ours", 300e3, 0.25), ("cudnn-rotary", 200e3, 0.5), ("identity", 400e3, 0.0))
    ]
    missing = [{"variant": "fla", "setting": "D64", "kind": "absent"},
               {"variant": "fox", "setting": "D64 B4 T8192 eager", "kind": "failed"}]
    (results.folder / "benchmark_training.json").write_text(json.dumps(ORIGIN | {"rows": rows, "missing": missing}))
    said = report.training_speed(results)
    assert "| decayattn, decay | 300, 1.50 (25%) |" in said
    assert "| no attention (its output is v) | 400, 2.00 |" in said
    assert said[-1].endswith("Absent: fla. No speed: fox, D64 B4 T8192 eager: failed.")


def test_precision_shows_differences_and_gradients(results):
    rows = [{"run": "float32", "gradients": [{"step": 0, "runs": {"bfloat16": {"in_proj": 2e-3, "decay": 3e-3},
                                                                 "float32": "failed"}}]}]
    summary = [{"run": "float32", "loss": math.log(2), "difference": 0.0, "largest_difference": 0.0},
               {"run": "bfloat16", "loss": 2 * math.log(2), "difference": math.log(2), "largest_difference": 1.0}]
    labels = {"float32": "ours 32", "bfloat16": "ours 16", "fla": "theirs"}
    found = {"rows": rows, "summary": summary, "labels": labels, "missing": [{"run": "fla", "kind": "absent"}]}
    (results.folder / "training_precision.json").write_text(json.dumps(ORIGIN | found))
    said = report.precision(results)
    assert "| ours 32 | 1.0000 | 0.0000 | 0.0000 | – |" in said
    assert "| ours 16 | 2.0000 | 1.0000 | 1.4427 | 2.0e-03 / 3.0e-03 |" in said
    assert said[-1].endswith("Not there: theirs (absent).")


def test_several_gpus_have_tables(results):
    ways = ("forward", "backward")
    row = {"ranks": 4, "one_gpu_ms": 1600.0, "ms": 1000.0, "speed_over_one": 1.6}
    rows = [row | {"decay": decay, "mode": "halo", "direction": way} for decay in ("none", "-0.1") for way in ways]
    about = {"length": 400, "bandwidth": 1e9, "network": 1e8, "node": 8, "measured_ranks": 2, "rows": rows}
    (results.folder / "simulate_context.json").write_text(json.dumps(ORIGIN | about))
    text = report.simulation(results)
    assert "| no decay, halo | 1,600 / 1,600 | 1,000 / 1,000 (2 / 2) |" in text
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16", "length": 128, "decay": "-0.1"}
    rows = [shape | {"mode": "halo", "direction": way, "speed_over_alone": 1.8, "received": [0, 5_000_000]}
            for way in ways]
    checks = [{"errors": {"dq": {"over_budget": 0.5}, "dk": {"over_budget": None}}}]
    (results.folder / report.CONTEXT_FILE).write_text(json.dumps(ORIGIN | {"ranks": 2, "rows": rows, "checks": checks}))
    text = report.context(results)
    assert "| mean λ −0.1, halo | 1.80 / 1.80 (5 / 5) |" in text
    assert "of 1 checked cases over its budget: 0.50" in text[-1]
    run = {"run": "ddp", "tokens_per_second": 7000.0, "speed_over_one": 2.0, "validation_bits": {"bits": [2.0]},
           "difference": 0.1, "largest_difference": 0.3}
    setup = {"devices": 2, "layers": 1, "width": 8, "context": 10, "batch_size": 4, "steps": 3}
    (results.folder / "benchmark_strategies.json").write_text(json.dumps(ORIGIN | {"setup": setup, "rows": [run]}))
    assert "| ddp | 7 | 2.00 | 2.0000 | +0.1000 | 0.3000 |" in report.strategies(results)
