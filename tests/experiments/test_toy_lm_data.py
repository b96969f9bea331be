"""The data of the training script: what is read, how it is split, and crops that depend on seed and step alone."""


import pytest
import torch
from toy_lm.data import TrainingBatches, ValidationBatches, load_text, standard_library


def as_bytes(text: torch.Tensor) -> bytes:
    return bytes(text.tolist())


def test_standard_library_is_large_sorted_and_its_own():
    files = standard_library()
    assert sum(file.stat().st_size for file in files) > 2_000_000
    assert files == sorted(files, key=lambda file: file.parts)
    assert not any({"site-packages", "dist-packages", "test", "tests"} & set(file.parts) for file in files)


def test_a_folder_is_split_by_file(tmp_path):
    names = [f"{number:02}" for number in range(40)]
    for name in names:
        (tmp_path / name).write_text(f"<{name}>" * 10)
    (tmp_path / ".hidden").write_text("hidden")
    training, validation = (as_bytes(text).decode() for text in load_text(str(tmp_path), context=8))
    assert [name for name in names if f"<{name}>" in validation] == ["19", "39"]
    assert [name for name in names if f"<{name}>" in training] == [n for n in names if n not in ("19", "39")]
    assert "hidden" not in training + validation


def test_the_last_of_a_few_files_validates(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text(name * 50)
    training, validation = load_text(str(tmp_path), context=8)
    assert as_bytes(training) == b"a" * 50 + b"\n" + b"b" * 50
    assert as_bytes(validation) == b"c" * 50


def test_the_end_of_a_single_file_validates(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(200)))
    training, validation = load_text(str(file), context=8)
    assert as_bytes(training) == bytes(range(190))
    assert as_bytes(validation) == bytes(range(190, 200))


def test_missing_empty_and_short_data_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"data: expected a file or a folder, got .*does not exist"):
        load_text(str(tmp_path / "nothing"), context=8)
    with pytest.raises(ValueError, match=r"data: the folder .* holds no files"):
        load_text(str(tmp_path), context=8)
    (tmp_path / "short").write_text("0123456789" * 10)
    with pytest.raises(ValueError, match=r"data: the validation part of .* has 5 bytes, expected at least 9"):
        load_text(str(tmp_path / "short"), context=8)
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match=r"data: the training part of .* has 0 bytes"):
        load_text(str(tmp_path / "empty"), context=8)


def test_training_crops_are_text_and_depend_on_seed_and_step():
    text = torch.arange(200, dtype=torch.uint8)
    batches = TrainingBatches(text, 16, 4, seed=3)
    first = batches.batch(5)
    assert first.shape == (4, 17)
    assert torch.equal(first.diff(dim=1), torch.ones(4, 16, dtype=torch.uint8))
    assert torch.equal(first, TrainingBatches(text, 16, 4, seed=3).batch(5))
    assert not torch.equal(first, batches.batch(6))
    assert not torch.equal(first, TrainingBatches(text, 16, 4, seed=4).batch(5))


def test_training_crops_reach_both_ends_of_the_text():
    text = torch.arange(20, dtype=torch.uint8)
    starts = TrainingBatches(text, 16, 400, seed=0).batch(0)[:, 0]
    assert set(starts.tolist()) == {0, 1, 2, 3}


def test_a_resumed_iteration_continues():
    text = torch.arange(200, dtype=torch.uint8)
    whole = iter(TrainingBatches(text, 16, 4, seed=3))
    for _ in range(7):
        next(whole)
    resumed = iter(TrainingBatches(text, 16, 4, seed=3, first_step=7))
    assert all(torch.equal(next(whole), next(resumed)) for _ in range(3))


def test_devices_share_a_batch():
    text = torch.arange(200, dtype=torch.uint8)
    shares = [TrainingBatches(text, 16, 6, seed=3, rank=rank, world=3).batch(2) for rank in range(3)]
    assert torch.equal(torch.cat(shares), TrainingBatches(text, 16, 6, seed=3).batch(2))


def test_validation_crops_are_fixed_spread_and_shared():
    text = torch.arange(200, dtype=torch.uint8)
    batches = ValidationBatches(text, 16, count=10, batch_size=4)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert len(batches) == 3
    starts = torch.cat(list(batches))[:, 0].tolist()
    assert (starts[0], starts[-1]) == (0, 200 - 17)
    shares = [ValidationBatches(text, 16, 10, 4, rank=rank, world=2) for rank in range(2)]
    assert sorted(b for share in shares for batch in share for b in batch[:, 0].tolist()) == starts
