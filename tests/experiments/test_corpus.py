"""The text of the experiments: whole files, no package on both sides, crops within one file; position schemes."""

import itertools

import numpy as np
import pytest
import torch
from language_models import corpus as corpora
from language_models.corpus import HELD_OUT, STANDARD_LIBRARY, TRAINING, TrainingCrops, build, held_out_starts
from language_models.schemes import SCHEMES, attention_layer
from toy_lm.model import ByteLM, next_byte_loss, parameter_groups


@pytest.fixture
def packages(tmp_path) -> dict:
    """Eight of 5 files each, every byte of which names its file, and one as large as all of them."""
    for number in range(9):
        folder = tmp_path / "data" / f"package{number}"
        folder.mkdir(parents=True)
        for file in range(5):
            size = (100 + 37 * file) * (8 if number == 8 else 1)
            (folder / f"file{file}.py").write_bytes(bytes([10 * number + file]) * size)
    return corpora.in_folder(tmp_path / "data")


def contents(corpus, files) -> list[bytes]:
    return [bytes(corpus.text[b : b + n].tolist()) for b, n in zip(files.begins, files.lengths, strict=True)]


def test_files_are_whole_and_on_the_side_of_their_package(packages, tmp_path):
    written = build(packages, tmp_path / "corpus", held_out=0.2)
    corpus = corpora.load(tmp_path / "corpus")
    assert (written.text == corpus.text).all()
    assert written.description == corpus.description
    sides = {TRAINING: contents(corpus, corpus.training), HELD_OUT: contents(corpus, corpus.held_out)}
    expected = sorted(path.read_bytes() for paths in packages.values() for path in paths)
    assert sorted(sides[TRAINING] + sides[HELD_OUT]) == expected
    of_side = {side: {text[0] // 10 for text in texts} for side, texts in sides.items()}
    assert not of_side[TRAINING] & of_side[HELD_OUT]
    assert 8 in of_side[TRAINING]  # too large to be held out
    said = corpus.description
    for side, texts in sides.items():
        assert said[side] == {"packages": len(of_side[side]), "bytes": sum(map(len, texts)), "files": len(texts)}
    assert 0 < said[HELD_OUT]["bytes"] <= 0.2 * corpus.text.numel()
    assert {p["name"] for p in said["packages"]} == set(packages)


def test_hash_depends_on_texts_and_split(packages, tmp_path):
    def sha256(packages, **options) -> str:
        return build(packages, tmp_path / "corpus", **options).description["sha256"]

    first = sha256(packages)
    assert sha256(dict(reversed(packages.items()))) == first
    assert sha256(packages, held_out=0.3) != first
    path = packages["package3"][2]
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert sha256(packages) != first


def test_copies_and_vendored_packages_are_left_out(packages, tmp_path):
    """Else a held-out file might have been trained on."""
    whole = build(packages, tmp_path / "corpus").text.numel()
    for name in ("package0/_vendor/other.py", "package2/copy.py", "package4/_vendor/x/new.py"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"new" if path.name == "new.py" else packages["package1"][0].read_bytes())
    corpus = build(corpora.in_folder(tmp_path / "data"), tmp_path / "corpus")
    assert corpus.text.numel() == whole
    assert len(set(contents(corpus, corpus.training)) & set(contents(corpus, corpus.held_out))) == 0


def test_a_part_of_the_corpus_is_made_of_whole_packages(packages, tmp_path):
    whole = {p["name"]: p["bytes"] for p in build(packages, tmp_path / "corpus").description["packages"]}
    for most in (1, 2000, 9000, 10**9):
        corpus = build(packages, tmp_path / "corpus", most_bytes=most)
        sizes = {package["name"]: package["bytes"] for package in corpus.description["packages"]}
        assert sizes.items() <= whole.items()
        assert sum(sizes.values()) >= min(most, sum(whole.values()))
        assert len(sizes) == 2 or sum(sizes.values()) - max(sizes.values()) < most
        assert corpus.held_out.lengths.sum() > 0
    with pytest.raises(ValueError, match="there is nothing training"):
        build({"package0": packages["package0"]}, tmp_path / "corpus")


def test_crops_are_uniform_within_files(packages, tmp_path):
    corpus = build(packages, tmp_path / "corpus")
    crops = TrainingCrops(corpus, corpus.text, 127, 4096, seed=0)
    batch = crops.batch(0)
    assert batch.shape == (4096, 128)
    assert (batch == batch[:, :1]).all()  # files have one byte value each
    places = {int(corpus.text[b]): max(0, n - 127) for b, n in zip(*vars(corpus.training).values(), strict=True)}
    total, count = sum(places.values()), np.bincount(batch[:, 0].numpy(), minlength=90)
    for value, of_file in places.items():
        share = of_file / total
        assert abs(count[value] / 4096 - share) < 5 * (share / 4096) ** 0.5 + 1e-9
    assert (crops.batch(0) == batch).all()
    assert (crops.batch(1) != batch).any()
    assert (TrainingCrops(corpus, corpus.text, 127, 4096, seed=1).batch(0) != batch).any()
    with pytest.raises(ValueError, match="expected a training file of 5001 bytes or more, got none"):
        TrainingCrops(corpus, corpus.text, 5000, 1, seed=0)


def test_held_out_crops_do_not_overlap(packages, tmp_path):
    corpus = build(packages, tmp_path / "corpus", held_out=0.4)
    long = [(b, n) for b, n in zip(corpus.held_out.begins, corpus.held_out.lengths, strict=True) if n >= 60]
    starts = held_out_starts(corpus, 60, 10_000, 2)
    assert len(starts) == sum(min(2, n // 60) for _, n in long)
    for begin, length in long:
        own = sorted(s for s in starts if begin <= s < begin + length)
        assert all(s + 60 <= begin + length for s in own)
        assert all(b - a >= 60 for a, b in itertools.pairwise(own))
    some = held_out_starts(corpus, 60, len(long), 2)
    assert len({int(np.searchsorted(corpus.held_out.begins, s, side="right")) for s in some}) == len(long)
    with pytest.raises(ValueError, match="expected a held-out file of 9999 bytes or more"):
        held_out_starts(corpus, 9999, 1, 1)


def test_folder_entries_are_packages(packages, tmp_path):
    (tmp_path / "data" / "alone.txt").write_text("alone")
    (tmp_path / "data" / ".hidden").write_text("hidden")
    (tmp_path / "data" / "package1" / ".git").mkdir()
    (tmp_path / "data" / "package1" / ".git" / "x").write_text("hidden")
    found = corpora.in_folder(tmp_path / "data")
    assert found["alone.txt"] == [tmp_path / "data" / "alone.txt"]
    assert found["package1"] == [tmp_path / "data" / "package1" / f"file{n}.py" for n in range(5)]
    assert len(found) == 10
    with pytest.raises(ValueError, match="data: expected at least two files or folders"):
        corpora.in_folder(tmp_path / "data" / "package1" / ".git")
    with pytest.raises(ValueError, match="data: expected a folder, got"):
        corpora.in_folder(tmp_path / "nowhere")


def test_installed_sources_belong_to_one_package():
    found = corpora.installed()
    assert any(path.name == "heapq.py" for path in found[STANDARD_LIBRARY])
    assert not any("site-packages" in path.parts for path in found[STANDARD_LIBRARY])
    assert any(path.parts[-2:] == ("torch", "functional.py") for path in found["torch"])
    paths = [path for package in found.values() for path in package]
    assert len(paths) == len(set(paths))


def model(scheme: str) -> ByteLM:
    torch.manual_seed(0)
    return ByteLM(2, 32, 2, make_attention=lambda: attention_layer(scheme, 32, 2, "reference"))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes_start_alike_and_train_without_the_future(scheme):
    of = model(scheme)
    x = torch.randint(256, (2, 49), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    own = {name: p for name, p in of.named_parameters() if ".decay." in name}
    found = {name: p for name, p in of.named_parameters() if name not in own}
    if not SCHEMES[scheme].options:  # these have more weights
        expected = dict(model("none").named_parameters())
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    next_byte_loss(of, x).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in of.parameters())
    assert all(p.grad.any() for p in own.values())
    decayed, _ = parameter_groups(of, 0.1)
    assert not set(own.values()) & set(decayed["params"])
    y = x[:, :-1].clone()
    y[:, 30:] = 255 - y[:, 30:]
    with torch.no_grad():
        torch.testing.assert_close(of(x[:, :-1])[:, :30], of(y)[:, :30])
