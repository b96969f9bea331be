"""experiments/benchmark_strategies.py: what runs say, differences that show, runs that fail, going on."""

import json
from pathlib import Path

import benchmark_strategies
import pytest
import torch
from readme_tables import several_gpus
from readme_tables.learning import NOT_MEASURED
from readme_tables.results import Results
from test_report import ORIGIN

TEXT = b"abracadabra, " * 200


def run_folder(folder: Path, bits: list[float], milliseconds: list[float]) -> Path:
    """What train_toy_lm.py leaves, with made-up figures."""
    (folder / "logs/from_step_0").mkdir(parents=True)
    lines = ["step,train_bits,val_bits", *(f"{n},{x}," for n, x in enumerate(bits)), f"{len(bits)},,{bits[-1]}"]
    (folder / "logs/from_step_0/metrics.csv").write_text("\n".join(lines) + "\n")
    rows = [{"step": n, "milliseconds_per_step": x, "layers": []} for n, x in enumerate([None, *milliseconds])]
    (folder / "attention.json").write_text(json.dumps({"rows": rows}))
    summary = {"parameters": 1000, "strategy": "ddp", "devices": 2}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture
def result(tmp_path) -> dict:
    setup = {"devices": 2, "layers": 1, "width": 8, "context": 10, "batch_size": 4, "steps": 3}
    one = run_folder(tmp_path / "one", [8.0, 4.0, 2.0], [900.0, 10.0, 12.0, 11.0])
    two = run_folder(tmp_path / "two", [8.0, 4.3, 2.0], [900.0, 5.0, 5.5, 6.0])
    rows = [{"run": name} | benchmark_strategies.read_run(at) for name, at in (("one", one), ("ddp", two))]
    found = ORIGIN | {"setup": setup, "rows": rows}
    benchmark_strategies.compare(found)
    return found


def test_speeds_leave_the_first_stretch_out_and_losses_are_compared_step_by_step(result):
    one, two = result["rows"]
    assert one["milliseconds_per_step"] == 11.0
    assert one["tokens_per_second"] == pytest.approx(40 / 0.011)
    assert two["speed_over_one"] == 2.0
    assert two["difference"] == pytest.approx(0.1)
    assert two["largest_difference"] == pytest.approx(0.3)
    assert "2.00" in benchmark_strategies.table(result).splitlines()[2]
    assert len(benchmark_strategies.draw(result).axes) == 2


def test_the_table_of_the_page(result, tmp_path):
    results = Results(tmp_path)
    assert several_gpus.strategies(results) == [NOT_MEASURED]
    (tmp_path / several_gpus.STRATEGIES_FILE).write_text(json.dumps(result))
    assert "| ddp | 7 | 2.00 | 2.0000 | +0.1000 | 0.3000 |" in several_gpus.strategies(results)


def options(tmp_path: Path, *more: str) -> list[str]:
    text = tmp_path / "text"
    text.write_bytes(TEXT)
    return ["--commit", "abc", "--output", str(tmp_path / "found.json"), "--steps", "2", "--width", "8",
            f"--more=--data {text} --accelerator cpu --validation_crops 1 --gradient_check false", *more]


@pytest.fixture
def without_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.slow
@pytest.mark.usefixtures("without_gpu", "interpreter", "processes_that_meet")
def test_runs_are_made_once(tmp_path, capsys):
    argv = options(tmp_path, "--strategies", "one", "context, heads")
    assert benchmark_strategies.main(argv) == 0
    first = (tmp_path / "found.json").read_text()
    rows = json.loads(first)["rows"]
    assert [row["run"] for row in rows] == ["one", "context, heads"]
    assert [row["devices"] for row in rows] == [1, 2]
    assert abs(rows[1]["difference"]) < 1e-4
    assert benchmark_strategies.main(argv) == 0
    assert json.loads((tmp_path / "found.json").read_text())["rows"] == rows
    assert "validation bits" in capsys.readouterr().out


@pytest.mark.usefixtures("without_gpu")
def test_a_run_that_fails_is_told_and_not_kept(tmp_path, capsys):
    assert benchmark_strategies.main([*options(tmp_path, "--strategies", "one"), "--heads", "3"]) == 1
    assert "one: FAILED with status 2" in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text())["rows"] == []
