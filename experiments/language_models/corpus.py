"""Texts in packages: every installed Python source, or the user's own; no package is on both sides of the split."""

import hashlib
import site
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

STANDARD_LIBRARY = "the standard library"
TRAINING, HELD_OUT = "training", "held out"
# folders of copies of other packages, which may be on the other side
VENDORED = {"_vendor", "vendor", "vendored", "_vendored", "extern", "externals", "third_party", "__pycache__"}
_INSTALLED = {"site-packages", "dist-packages"}
_FILE = "corpus.pt"
# names of packages, with their files
Packages = Mapping[str, list[Path]]


@dataclass(frozen=True)
class Files:
    """The files of one side: where in the text they begin, and how long they are, int64."""

    begins: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True)
class Corpus:
    """A text of whole files, uint8, and which of them are on which side.

    description: sha256 (of every file's side, package and bytes), and bytes and files of each side and package.
    """

    text: Tensor
    training: Files
    held_out: Files
    description: dict[str, Any]


def installed() -> Packages:
    """Python sources: the standard library, and every file or folder at the top of where packages are installed."""
    own = _packages(Path(sysconfig.get_path("stdlib")), "*.py")
    found = {STANDARD_LIBRARY: [path for name, paths in own.items() if name not in _INSTALLED for path in paths]}
    roots = {Path(root).resolve() for root in (*site.getsitepackages(), sysconfig.get_path("purelib"))}
    for root in sorted(root for root in roots if root.is_dir()):
        for name, paths in _packages(root, "*.py").items():
            found.setdefault(name, []).extend(paths)
    return found


def in_folder(path: Path) -> Packages:
    """The user's own: each file or folder at the top is a package. Raises ValueError for fewer than two."""
    if not path.is_dir():
        raise ValueError(f"data: expected a folder, got {str(path)!r}")
    found = _packages(path, "*")
    if len(found) < 2:
        raise ValueError(
            f"data: expected at least two files or folders in {str(path)!r}, to train on one and to read another, "
            f"got {len(found)}"
        )
    return found


def _packages(root: Path, pattern: str) -> dict[str, list[Path]]:
    """Files by the entry at the top, without those that are hidden or copies of other packages."""
    found: dict[str, list[Path]] = {}
    for file in sorted(root.rglob(pattern)):
        parts = file.relative_to(root).parts
        if file.is_file() and not VENDORED & set(parts[:-1]) and not any(part.startswith(".") for part in parts):
            found.setdefault(parts[0].removesuffix(".py"), []).append(file)
    return found


def build(packages: Packages, folder: Path, *, held_out: float = 0.15, most_bytes: int | None = None) -> Corpus:
    """Read the files and write them to a folder that `load` reads.

    Left out are empty files, and copies of an earlier one. Packages are held out in the order of their names' SHA-256,
    each that fits in the rest of the share `held_out` of all bytes. most_bytes: take packages, in the reverse of that
    order, two at least, until they have that many bytes. Raises ValueError where either side stays empty.
    """
    in_order = sorted(packages, key=lambda name: hashlib.sha256(name.encode()).digest())
    texts: dict[str, list[bytes]] = {}
    sizes: dict[str, int] = {}
    seen = {hashlib.sha256(b"").digest()}
    for name in reversed(in_order):
        for content in (path.read_bytes() for path in packages[name]):
            digest = hashlib.sha256(content).digest()
            if digest not in seen:
                seen.add(digest)
                texts.setdefault(name, []).append(content)
                sizes[name] = sizes.get(name, 0) + len(content)
        if most_bytes is not None and len(texts) > 1 and sum(sizes.values()) >= most_bytes:
            break
    sides, room = {}, held_out * sum(sizes.values())
    for name in filter(texts.get, in_order):
        sides[name] = HELD_OUT if sizes[name] <= room else TRAINING
        room -= sizes[name] if sizes[name] <= room else 0
    if sides and HELD_OUT not in sides.values():  # two or three packages of one size: the smallest
        sides[min(sides, key=lambda name: sizes[name])] = HELD_OUT
    rows, counts, text, digest = {TRAINING: [], HELD_OUT: []}, [], bytearray(), hashlib.sha256()
    for name, side in sorted(sides.items()):
        for content in texts[name]:
            rows[side].append((len(text), len(content)))
            text += content
            digest.update(repr((side, name, hashlib.sha256(content).hexdigest())).encode())
        counts.append({"name": name, "side": side, "bytes": sizes[name], "files": len(texts[name])})
    description = {"sha256": digest.hexdigest()}
    for side in (TRAINING, HELD_OUT):
        own = [package for package in counts if package["side"] == side]
        if not own:
            raise ValueError(f"data: there is nothing {side}; expected at least two packages of similar size")
        totals = {key: sum(package[key] for package in own) for key in ("bytes", "files")}
        description[side] = {"packages": len(own), **totals}
    files = (Files(*np.array(rows[side], dtype=np.int64).T) for side in (TRAINING, HELD_OUT))
    corpus = Corpus(torch.frombuffer(text, dtype=torch.uint8), *files, description | {"packages": counts})
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(corpus, folder / _FILE)
    return corpus


def load(folder: Path) -> Corpus:
    """A corpus that `build` wrote; its text stays on the disk until it is read."""
    return torch.load(folder / _FILE, weights_only=False, mmap=True)


class TrainingCrops:
    """Batches of crops (batch_size, context + 1), uint8, each within one file, every place as likely as any other.
    Batch n is a pure function of (seed, n). Raises ValueError where no file is as long as a crop."""

    def __init__(self, corpus: Corpus, text: Tensor, context: int, batch_size: int, seed: int):
        self.text, self.context, self.batch_size, self.seed = text, context, batch_size, seed
        places = np.maximum(corpus.training.lengths - context, 0)
        self._ends, self._begins = np.cumsum(places), corpus.training.begins
        if not places.sum():
            raise ValueError(f"data: expected a training file of {context + 1} bytes or more, got none")

    def batch(self, step: int) -> Tensor:
        place = np.random.default_rng([self.seed, step]).integers(self._ends[-1], size=self.batch_size)
        file = np.searchsorted(self._ends, place, side="right")
        starts = self._begins[file] + place - np.where(file > 0, self._ends[file - 1], 0)
        return crops(self.text, starts, self.context + 1)


def held_out_starts(corpus: Corpus, length: int, count: int, per_file: int) -> np.ndarray:
    """Starts of up to `count` disjoint crops of `length` bytes of held-out files, up to per_file of each: one of every
    file, then a second one. Corpus and length alone determine the order. Raises ValueError if there is none."""
    random = np.random.default_rng(length)
    long = np.flatnonzero(corpus.held_out.lengths >= length)
    random.shuffle(long)
    by_round: list[list[int]] = [[] for _ in range(per_file)]
    for file in long:
        size, begin = corpus.held_out.lengths[file], corpus.held_out.begins[file]
        number = size // length
        slack = random.integers(size - number * length + 1)  # crops begin anywhere, not at a file's first byte
        chosen = random.permutation(number)[:per_file]
        for turn, at in enumerate(chosen):
            by_round[turn].append(int(begin + slack + at * length))
    starts = [start for turn in by_round for start in turn][:count]
    if not starts:
        raise ValueError(f"data: expected a held-out file of {length} bytes or more, got none; read shorter texts")
    return np.array(starts, dtype=np.int64)


def crops(text: Tensor, starts: np.ndarray, size: int) -> Tensor:
    """`size` bytes from every start, (len(starts), size)."""
    places = torch.from_numpy(np.asarray(starts)).to(text.device)[:, None] + torch.arange(size, device=text.device)
    return text[places]
