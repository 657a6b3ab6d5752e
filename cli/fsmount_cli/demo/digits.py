"""The handwritten digits that ship with scikit-learn, as a tree of small files.

1,797 images of 8 x 8 pixels by 43 writers (E. Alpaydin, C. Kaynak, 1998, UCI repository). Each
becomes an `.npz` of two arrays and a JSON sidecar, in directories of a hundred.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

_PER_DIRECTORY = 100
_TEST_EVERY = 5


def write_tree(root: Path) -> int:
    """Write the tree below `root` and return the number of samples."""
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        split = "test" if number % _TEST_EVERY == 0 else "train"
        _write(_stem(root, number), image, int(label), {"split": split, "number": number})
    return len(digits.target)


def change_tree(root: Path) -> None:
    """Make another version: a directory of shifted images, a withdrawn sample, a note."""
    digits = load_digits()
    for number in range(1, _PER_DIRECTORY + 1):
        shifted = np.roll(digits.images[number], 1, axis=1)
        facts = {"split": "train", "number": number, "shifted": True}
        stem = root / "shifted" / f"{number:04d}"
        _write(stem, shifted, int(digits.target[number]), facts)
    _stem(root, 7).with_suffix(".npz").unlink()
    _stem(root, 7).with_suffix(".json").unlink()
    noted = _stem(root, 201).with_suffix(".json")
    noted.write_text(json.dumps({**json.loads(noted.read_text()), "note": "looks like a 7"}))


def _stem(root: Path, number: int) -> Path:
    return root / f"digits{number // _PER_DIRECTORY:02d}" / f"{number:04d}"


def _write(stem: Path, image: NDArray[np.float64], label: int, facts: dict[str, object]) -> None:
    stem.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        stem.with_suffix(".npz"), image=image.astype(np.float32), label=np.int64(label)
    )
    stem.with_suffix(".json").write_text(json.dumps({"label": label, **facts}))
