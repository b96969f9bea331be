"""Texts in packages: every installed Python source, or the user's own; no package is on both sides of the split."""

import csv
import hashlib
import json
import platform
import site
import sysconfig
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

STANDARD_LIBRARY = "the standard library"
TRAINING, HELD_OUT = "training", "held out"
# copies of other packages, which may be on the other side
VENDORED = {"_vendor", "vendor", "vendored", "_vendored", "extern", "externals", "third_party", "__pycache__"}
_PACKAGES = {"site-packages", "dist-packages"}
# a text and its index, in one folder
_TEXT, _INDEX = "corpus.bin", "corpus.json"


@dataclass
class Package:
    """A distribution, the standard library, or an entry at the top of a folder: its files by their names."""

    name: str
    version: str | None = None
    files: dict[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Files:
    """The files of one side: where in the text they begin, and how long they are, int64."""

    begins: np.ndarray
    lengths: np.ndarray


@dataclass(frozen=True)
class Corpus:
    """A text of whole files, uint8, and which of them are on which side.

    `description` is what a result says of it: sha256 (of every file's side, package, name and bytes), bytes and files
    of each side, and of each package its name, version, side, bytes and files.
    """

    text: Tensor
    training: Files
    held_out: Files
    description: dict[str, Any]


def installed() -> list[Package]:
    """The standard library, and every installed distribution, with their Python sources. Whatever no distribution lists
    belongs to a package of its top folder's name."""
    library = Path(sysconfig.get_path("stdlib"))
    sources = (path for path in library.rglob("*.py") if path.is_file())  # not a link to nowhere
    own = [path for path in sources if not _PACKAGES & set(path.relative_to(library).parts)]
    found = {STANDARD_LIBRARY: _package(STANDARD_LIBRARY, platform.python_version(), library, own)}
    roots = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")} | {Path(p) for p in _site_packages()}
    for root in sorted(root.resolve() for root in roots if root.is_dir()):
        owners = _owners(root)
        for path in sorted(path for path in root.rglob("*.py") if path.is_file()):
            relative = path.relative_to(root).as_posix()
            top = relative.split("/")[0].removesuffix(".py")
            name, version = owners.get(relative, (top, None))
            found.setdefault(name, Package(name, version)).files.setdefault(relative, path)
    return list(found.values())


def _site_packages() -> list[str]:
    return site.getsitepackages() if hasattr(site, "getsitepackages") else []


def _owners(root: Path) -> dict[str, tuple[str, str]]:
    """Name and version of the distribution that lists a file, by its path below the root."""
    owners = {}
    for distribution in metadata.distributions(path=[str(root)]):
        name = distribution.metadata["Name"]
        if name:
            of = (name.lower().replace("_", "-"), distribution.version)
            # not distribution.files, which takes seconds for a package of ten thousand
            listed = csv.reader((distribution.read_text("RECORD") or "").splitlines())
            owners |= {row[0]: of for row in listed if row and row[0].endswith(".py")}
    return owners


def in_folder(path: Path) -> list[Package]:
    """The user's own: each file or folder at the top is a package, its files those that are not hidden.

    Raises ValueError unless it is a folder with two packages or more.
    """
    if not path.is_dir():
        raise ValueError(f"data: expected a folder, got {str(path)!r}")
    found = []
    for top in sorted(path.iterdir()):
        files = sorted(top.rglob("*")) if top.is_dir() else [top]
        shown = [f for f in files if f.is_file() and not any(p.startswith(".") for p in f.relative_to(path).parts)]
        if shown:
            found.append(_package(top.name, None, path, shown))
    if len(found) < 2:
        raise ValueError(
            f"data: expected at least two files or folders in {str(path)!r}, to train on one and to read another, "
            f"got {len(found)}"
        )
    return found


def _package(name: str, version: str | None, root: Path, files: Iterable[Path]) -> Package:
    return Package(name, version, {file.relative_to(root).as_posix(): file for file in sorted(files)})


def build(
    packages: Sequence[Package], folder: Path, *, held_out: float = 0.15, most_bytes: int | None = None
) -> Corpus:
    """Read the files and write them, with an index, to a folder that `load` reads.

    Left out are empty files, files that are copies of an earlier one, and copies of other packages (folders called
    _vendor and so on). Packages are held out in the order of their names' SHA-256, each that fits in the rest of the
    share `held_out` of all bytes; the largest ones, which do not, train. most_bytes: take packages, in the reverse of
    that order, two at least, until they have that many bytes.

    Raises ValueError where either side stays empty.
    """
    in_order = sorted(packages, key=lambda package: hashlib.sha256(package.name.encode()).digest())
    texts: dict[str, dict[str, bytes]] = {}
    seen: set[bytes] = set()
    with ThreadPoolExecutor(16) as pool:
        for package in reversed(in_order):
            names = [name for name in package.files if not VENDORED & set(name.split("/")[:-1])]
            contents = pool.map(lambda name, package=package: package.files[name].read_bytes(), names)
            texts[package.name] = kept = {}
            for name, content in zip(names, contents, strict=True):
                digest = hashlib.sha256(content).digest()
                if content and digest not in seen:
                    seen.add(digest)
                    kept[name] = content
            sizes = [_size(files) for files in texts.values() if files]
            if most_bytes is not None and len(sizes) > 1 and sum(sizes) >= most_bytes:
                break
    sides = _sides({package.name: _size(texts.get(package.name, {})) for package in in_order}, held_out)
    versions = {package.name: package.version for package in in_order}
    folder.mkdir(parents=True, exist_ok=True)
    rows, counts, begin, digest = {TRAINING: [], HELD_OUT: []}, [], 0, hashlib.sha256()
    with (folder / _TEXT).open("wb") as file:
        for name in sorted(sides):
            for path, content in texts[name].items():
                file.write(content)
                rows[sides[name]].append((begin, len(content)))
                begin += len(content)
                digest.update(repr((sides[name], name, path, hashlib.sha256(content).hexdigest())).encode())
            side, size, number = sides[name], _size(texts[name]), len(texts[name])
            counts.append({"name": name, "version": versions[name], "side": side, "bytes": size, "files": number})
    description = {"sha256": digest.hexdigest()}
    for side in (TRAINING, HELD_OUT):
        own = [package for package in counts if package["side"] == side]
        if not own:
            raise ValueError(f"data: there is nothing {side}; expected at least two packages of similar size")
        totals = {what: sum(package[what] for package in own) for what in ("bytes", "files")}
        description[side] = {"packages": len(own), **totals}
    (folder / _INDEX).write_text(json.dumps({"files": rows, "description": description | {"packages": counts}}))
    return load(folder)


def _size(files: dict[str, bytes]) -> int:
    return sum(map(len, files.values()))


def _sides(sizes: dict[str, int], held_out: float) -> dict[str, str]:
    """The side of every package that has bytes; sizes are in the order in which packages are held out."""
    sides, room = {}, held_out * sum(sizes.values())
    for name, size in sizes.items():
        if size:
            sides[name] = HELD_OUT if size <= room else TRAINING
            room -= size if size <= room else 0
    if sides and HELD_OUT not in sides.values():
        # two or three packages of one size: the smallest
        sides[min(sides, key=lambda name: sizes[name])] = HELD_OUT
    return sides


def load(folder: Path) -> Corpus:
    """A corpus that `build` wrote; its text stays on the disk until it is read."""
    index = json.loads((folder / _INDEX).read_text())
    text = torch.from_numpy(np.memmap(folder / _TEXT, dtype=np.uint8, mode="c"))
    sides = (np.array(index["files"][side], dtype=np.int64).reshape(-1, 2).T for side in (TRAINING, HELD_OUT))
    training, held_out = (Files(*side) for side in sides)
    return Corpus(text, training, held_out, index["description"])


class TrainingCrops:
    """Batches of crops (batch_size, context + 1), uint8, on the device of the text, each within one file.

    Every place of a file where a crop can begin is as likely as any other. Batch n is a pure function of (seed, n).

    Raises ValueError where no file is as long as a crop.
    """

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
    """Starts of up to `count` disjoint crops of `length` bytes of held-out files, up to per_file of each.

    First one of every file that is long enough, then a second one of those that have it, and so on. The order of files,
    and of a file's crops, depends only on the corpus and the length.

    Raises ValueError if there is none.
    """
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
