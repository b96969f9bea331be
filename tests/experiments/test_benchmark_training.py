"""The benchmark of training steps: checks that can fail, one set of weights for all, rounds, rows, resuming."""

import dataclasses
import json
import sys

import benchmark_training
import pytest
import torch
from training_benchmark import measure, report, variants
from training_benchmark.measure import Models, Setting, Timed
from training_benchmark.model import OtherAttention, Size
from training_benchmark.variants import BASELINE, IDENTITY, VARIANTS, Absent, trained_half_lives

SIZE = Size(layers=2, width=16, head_dim=8, vocabulary=20)
SETTING = Setting(SIZE, batch=2, length=12, compiled=False)
SMALL = ["--layers", "1", "--width", "16", "--head-dims", "8", "--lengths", "20", "--tokens", "40"]
NAMES = ["ours", "cudnn", IDENTITY]


@pytest.fixture
def without_gpu(monkeypatch):
    """What a script does where there is none. It also keeps a test from writing where a GPU's results go."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def models():
    return Models(SETTING, "reference", "cpu", seed=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels on a CPU: needs Triton's interpreter")
def test_without_a_gpu_first_steps_are_checked(capsys):
    assert benchmark_training.main([*SMALL, "--backend", "triton"]) == 0
    said = capsys.readouterr().out
    for name in ("ours", "ours-trained", "ours-whole", "ours-rotary", "cudnn", BASELINE):
        assert f"  {name}: relative errors loss" in said
    for name in ("flex", "fla", "fox", "fox-pruned"):
        assert f"  {name}: absent: needs a GPU" in said


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_wrong_variant_is_named_and_gets_no_speed(is_ours, monkeypatch, capsys):
    """One whose values are a hundredth too large, which the loss hardly shows."""

    def attend(q, k, v, log_decay):
        return torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, 1.01 * v)), is_causal=True
        ).transpose(1, 2)

    wrong = dataclasses.replace(
        VARIANTS["cudnn"], ours=is_ours, layer=lambda size, backend, length: OtherAttention(size, attend)
    )
    monkeypatch.setitem(VARIANTS, "cudnn", wrong)
    assert benchmark_training.main([*SMALL, "--variants", "cudnn", "--backend", "reference"]) == int(is_ours)
    assert "cudnn: wrong: first step outside its error budget" in capsys.readouterr().out


def test_all_variants_have_the_same_weights(models):
    for name in ("ours", "cudnn", IDENTITY):
        model = models.decoder(VARIANTS[name], SETTING.length)
        shared = dict(models.base.named_parameters())
        assert all(parameter is shared[key] for key, parameter in model.named_parameters())
    trained = models.decoder(VARIANTS["ours-trained"], SETTING.length)
    own = {key for key, parameter in trained.named_parameters() if parameter is not shared[key]}
    assert own == {f"blocks.{n}.attention.decay.{part}" for n in range(2) for part in ("weight", "bias")}
    decays = [block.attention.decay for block in trained.blocks]
    lives = torch.stack([decay.half_lives(torch.randn(1, decay.embed_dim))[0] for decay in decays])
    torch.testing.assert_close(lives, torch.tensor(trained_half_lives(2, 2)), rtol=1e-4, atol=0)


def test_a_step_leaves_the_weights_as_they_are(models):
    model = models.decoder(VARIANTS["ours"], SETTING.length)
    before = [p.detach().clone() for p in model.parameters()]
    first, second = (float(models.step(model, VARIANTS["ours"])) for _ in range(2))
    assert first == second
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert models.optimizer.state  # it has stepped


def test_trained_half_lives_are_those_of_the_toy_model():
    source = json.loads(variants.TRAINED.read_text())["layers"]
    assert trained_half_lives(8, 8) == [
        pytest.approx(sorted(head["mean"] for head in layer)) for layer in source
    ]
    stretched = trained_half_lives(12, 12)
    assert [len(layer) for layer in stretched] == [12] * 12
    assert all(layer == sorted(layer) for layer in stretched)
    assert stretched[0][0] == pytest.approx(min(head["mean"] for head in source[0]))
    assert stretched[11][-1] == pytest.approx(max(head["mean"] for head in source[7]))
    assert len(trained_half_lives(1, 1)[0]) == 1


def test_rounds_go_there_and_back_and_one_that_fails_takes_no_other(models, monkeypatch):
    steps, real = [], Models.step

    def step(self, model, variant):
        steps.append(variant.name)
        if variant.name == "cudnn":
            raise torch.OutOfMemoryError("too much")
        return real(self, model, variant)

    def timer(seconds):
        assert seconds == 0.25

        def timed(call):
            call()
            return float(len(steps))

        return timed

    monkeypatch.setattr(Models, "step", step)
    monkeypatch.setattr(measure, "sustained_timer", timer)
    monkeypatch.setattr(measure.torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(measure.torch.cuda, "max_memory_allocated", lambda: 7)
    done = []
    timed, failed = measure.time_rounds(models, [VARIANTS[name] for name in NAMES], 2, 0.25, done.append)
    assert failed == {"cudnn": "OutOfMemoryError: too much"}
    assert steps == ["ours", "ours", "cudnn", IDENTITY, IDENTITY, "ours", IDENTITY, IDENTITY, "ours"]
    assert timed["ours"].rounds == [6.0, 9.0]
    assert (timed["ours"].peak_bytes, timed["ours"].loss > 0) == (7, True)


def made_up(length: int = 12, compiled: bool = False, head_dim: int = 8) -> list[dict]:
    setting = Setting(dataclasses.replace(SIZE, head_dim=head_dim), 2, length, compiled)
    timed = {"ours": Timed([4.0, 2.0, 3.0], 10**9, 3.0), BASELINE: Timed([6.0, 6.0, 6.0], 10**9, 3.0),
             IDENTITY: Timed([1.0, 1.0, 1.0], 10**9, 3.0)}
    return measure.rows(setting, timed)


def test_rows_have_speed_and_the_share_of_attention():
    ours, baseline, identity = made_up()
    assert (ours["ms"], ours["ms_range"], ours["tokens_per_second"]) == (3.0, [2.0, 4.0], 8000.0)
    assert ours["attention_share"] == pytest.approx(2 / 3)  # of 3/4, 1/2, 2/3
    assert (baseline["attention_share"], identity["attention_share"]) == (pytest.approx(5 / 6), 0.0)
    assert [line.split()[-3] for line in report.table(made_up()).splitlines()[1:]] == ["2.00", "1.00", "6.00"]


def test_a_report_is_drawn(tmp_path):
    rows = [row for length in (12, 24) for how in (False, True) for row in made_up(length, how)]
    path = tmp_path / "x.png"
    report.draw({"rows": rows, "gpu": "NVIDIA H200", "torch": "2.11.0"}).savefig(path)
    assert path.stat().st_size > 10_000


def test_settings_that_are_known_are_not_measured_again(tmp_path, monkeypatch):
    output = tmp_path / "training.json"
    options = benchmark_training.parse([*SMALL, "--lengths", "20", "24", "--variants", *NAMES], cuda=False)
    options.output, options.commit = output, "abc"
    measured = []

    def measure_one(setting, options, result, progress, device):
        measured.append(setting.length)
        result["rows"] += made_up(setting.length)
        result["missing"].append({"setting": str(setting), "variant": "fla", "ours": False, "kind": "absent",
                                  "reason": "no"})

    monkeypatch.setattr(benchmark_training, "measure_one", measure_one)
    for lengths in ([20], [20, 24]):
        options.lengths = lengths
        benchmark_training.run(options, benchmark_training.begin(options, []), "cpu")
    assert measured == [20, 24]
    assert len(json.loads(output.read_text())["missing"]) == 2
    options.seconds = 9.0
    with pytest.raises(SystemExit, match="has setup"):
        benchmark_training.begin(options, [])


def test_options_that_cannot_be_are_refused(capsys):
    for name, wrong in (("--head-dims", "5"), ("--seconds", "0"), ("--output", "x.json")):
        with pytest.raises(SystemExit):
            benchmark_training.parse([*SMALL, name, wrong], cuda=False)
        assert f"error: {name}" in capsys.readouterr().err


def test_a_peer_that_is_not_there_says_so(models, monkeypatch):
    monkeypatch.setattr(variants, "_needs_gpu", lambda: None)
    monkeypatch.setitem(sys.modules, "fla.ops.forgetting_attn.parallel", None)
    with pytest.raises(Absent, match="cannot be imported"):
        models.decoder(VARIANTS["fla"], SETTING.length)
