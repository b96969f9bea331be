"""experiments/simulate_context.py: the model, on figures of which the answer is known."""

import json
from dataclasses import replace

import pytest
import simulate_context
from context_benchmark.measure import ALONE
from readme_tables import several_gpus
from readme_tables.results import Results
from simulate_context import Measured, simulate
from test_report import ORIGIN

MB = 10**6
# two ranks, 2 MB of each token's row in all: 100 ms at 100 tokens, four times as much at 200
QUADRATIC = Measured(
    "none", "halo", "forward", 2, 32, [100, 200], [80.0, 310.0], [50 * MB, 100 * MB], [50 * MB, 100 * MB], [100, 200],
    [100.0, 400.0],
)
LINEAR = replace(QUADRATIC, decay="-0.1", ms=[52.0, 102.0], received=[2 * MB, 2 * MB], alone=[100.0, 200.0])


def test_without_a_decay_the_last_slice_sees_everything():
    row = simulate(QUADRATIC, 400, 4, bandwidth=1e9, network=1e8, node=8)
    assert row["exponent"] == pytest.approx(2)
    assert row["one_gpu_ms"] == pytest.approx(1600)
    assert row["compute_ms"] == pytest.approx(1600 * 7 / 16)
    assert row["bytes"] == pytest.approx(300 * MB)
    assert row["transfer_ms"] == pytest.approx(300)
    assert row["rest_ms"] == 0.0  # 80 ms are less than 75 of computing and 50 of transfer
    assert row["speed_over_one"] == pytest.approx(1600 / 1000)


def test_a_decay_divides_the_work_and_fetches_what_it_fetched():
    row = simulate(LINEAR, 400, 4, bandwidth=1e9, network=1e8, node=2)
    assert row["compute_ms"] == pytest.approx(100)
    assert row["bytes"] == 2 * MB
    assert row["transfer_ms"] == pytest.approx(20)  # by the network
    assert row["rest_ms"] == pytest.approx(0.0)  # 52 ms: 50 of computing, 2 of transfer
    assert replace(LINEAR, ms=[55.0, 105.0]).rest_ms(1e9) == pytest.approx(3)


def test_heads_are_dealt_out_or_not():
    heads = replace(QUADRATIC, mode="heads", received=[25 * MB, 50 * MB])
    row = simulate(heads, 400, 4, bandwidth=1e9, network=1e8, node=8)
    assert row["compute_ms"] == pytest.approx(400)
    assert row["bytes"] == pytest.approx(50 * MB / (200 / 4) * 400 * 3 / 16)
    assert simulate(heads, 400, 64, bandwidth=1e9, network=1e8, node=8)["ms"] is None
    assert "the heads are fewer" in simulate_context.table([simulate(heads, 400, 64, 1e9, 1e8, 8)])


def test_the_script(tmp_path, capsys):
    rows = []
    for length, ms in ((100, 100.0), (200, 400.0)):
        about = {"length": length, "decay": "none", "direction": "forward", "heads": 32, "everything": length * MB // 2}
        rows.append(about | {"mode": "halo", "ranks": 2, "ms": 0.8 * ms, "received": [0, length * MB // 2]})
        rows.append(about | {"mode": ALONE, "ranks": 1, "ms": ms, "received": None})
    measured = tmp_path / "measured.json"
    measured.write_text(json.dumps(ORIGIN | {"ranks": 2, "bandwidth": 1e9, "rows": rows}))
    argv = ["--measured", str(measured), "--output", str(tmp_path / "out.json"), "--length", "400", "--ranks", "4"]
    assert simulate_context.main(argv) == 0
    [row] = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["ms"] == pytest.approx(1000)
    assert "1000.00" in capsys.readouterr().out
    assert simulate_context.main(["--measured", str(tmp_path / "absent.json")]) == 2


def test_tables_of_the_page(tmp_path):
    results = Results(tmp_path)
    rows = [simulate(replace(x, direction=way), 400, 4, 1e9, 1e8, 8) for x in (QUADRATIC, LINEAR)
            for way in ("forward", "backward")]
    report = ORIGIN | {"length": 400, "bandwidth": 1e9, "network": 1e8, "node": 8, "measured_ranks": 2, "rows": rows}
    (tmp_path / several_gpus.SIMULATION_FILE).write_text(json.dumps(report))
    text = several_gpus.simulation(results)
    assert "| no decay, halo | 1,600 / 1,600 | 1,000 / 1,000 (2 / 2) |" in text
    assert any(line.startswith("| mean λ −0.1, halo | 400 / 400 | 102 / 102 (4 / 4) |") for line in text)

    about = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16", "length": 128, "decay": "-0.1"}
    rows = [about | {"mode": "halo", "direction": way, "speed_over_alone": 1.8, "received": [0, 5 * MB]}
            for way in ("forward", "backward")]
    checks = [{"errors": {"dq": {"over_budget": 0.5}, "dk": {"over_budget": None}}}]
    (tmp_path / several_gpus.CONTEXT_FILE).write_text(json.dumps(ORIGIN | {"ranks": 2, "rows": rows, "checks": checks}))
    text = several_gpus.context(results)
    assert "| mean λ −0.1, halo | 1.80 / 1.80 (5 / 5) |" in text
    assert "of 1 checked cases over its budget: 0.50" in text[-1]
