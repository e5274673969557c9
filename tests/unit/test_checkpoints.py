"""A loaded checkpoint is the newest undamaged one, exactly as it was saved."""

from pathlib import Path

import numpy as np
import pytest
from samples import refused

from quarl_tf.training import checkpoint

RANDOM = np.random.default_rng(0)
#: Arrays larger than what is read at once, a scalar, an empty one, and bytes.
ARRAYS = {
    "variable/0": RANDOM.normal(size=2000),
    "best/kernel:0": RANDOM.normal(size=(100, 100)).astype(np.float32),
    "count": np.array(7.5),
    "nothing": np.zeros((0, 3), np.float32),
    "frames": RANDOM.integers(0, 256, (4, 4), np.uint8),
}
DTYPES = {name: array.dtype for name, array in ARRAYS.items()} | {"step": np.dtype(int)}
STATE = {
    "step": 20,
    "best": [float("-inf"), 0],
    "generator": np.random.default_rng(3).bit_generator.state,
}


def save(folder: Path, step: int) -> None:
    """Save a checkpoint that contains its step."""
    checkpoint.save(folder, step, {**ARRAYS, "step": np.array(step)}, {**STATE, "step": step})


def loaded(folder: Path) -> int:
    """Load the newest good checkpoint, check its content, and return its step."""
    arrays, state = checkpoint.load_newest(folder)
    step = int(state["step"])
    assert state == {**STATE, "step": step}
    np.testing.assert_equal(arrays, {**ARRAYS, "step": np.array(step)})
    assert {name: array.dtype for name, array in arrays.items()} == DTYPES
    return step


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with checkpoints of steps 10 and 20."""
    save(tmp_path, 10)
    save(tmp_path, 20)
    return tmp_path


def test_the_newest_two_are_kept_and_loaded_as_they_were_saved(tmp_path: Path) -> None:
    assert checkpoint.load_newest(tmp_path) is None
    assert checkpoint.load_newest(tmp_path / "nowhere") is None
    for step in (900, 1000, 99_999, 100_000, 2_000_000_000):
        save(tmp_path, step)
        assert loaded(tmp_path) == step
    assert len(list(tmp_path.iterdir())) == 2
    newest = max(tmp_path.iterdir())
    # What kill -9 in the middle of a save leaves.
    (tmp_path / ".003000000000.npz.abc.tmp").write_bytes(newest.read_bytes()[:1000])
    assert loaded(tmp_path) == 2_000_000_000
    newest.unlink()
    assert loaded(tmp_path) == 100_000


def test_what_is_damaged_is_passed_over(folder: Path) -> None:
    newest = max(folder.iterdir())
    content = newest.read_bytes()

    def loaded_with(newest_content: bytes) -> int:
        newest.write_bytes(newest_content)
        return loaded(folder)

    def flipped(position: int, bit: int) -> bytes:
        damaged = bytearray(content)
        damaged[position] ^= 1 << bit
        return bytes(damaged)

    ends = [0, 1, 3, *range(4, len(content), 997), *range(len(content) - 200, len(content))]
    foreign = [b"\x00" * 5000, b"not an archive", b"PK\x05\x06" + b"\x00" * 18]
    for damaged in [*(content[:end] for end in ends), *foreign]:
        assert loaded_with(damaged) == 10
    second, directory = content.index(b"best/kernel:0.npy"), content.index(b"PK\x01\x02")
    # The headers of the first member and of the second, the archive's directory, and numbers.
    headers = [*range(200), *range(second - 30, second + 150), *range(directory, len(content))]
    # Zip archives have bits that mean nothing, dates for example.
    assert {loaded_with(flipped(position, position % 8)) for position in headers} == {10, 20}
    numbers = range(500, second - 30, 499)
    assert {loaded_with(flipped(position, 4)) for position in numbers} == {10}


def test_closed_and_damaged_ones_do_not_take_the_place_of_good_ones(folder: Path) -> None:
    unreadable = folder / "000000000030.npz"
    unreadable.mkdir()
    assert "cannot be opened (Is a directory)" in refused(checkpoint.load_newest, folder)
    unreadable.rmdir()
    assert loaded(folder) == 20
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-30])
    for step in (5, 8):
        save(folder, step)
        assert loaded(folder) == step
    assert sorted(path.stem.lstrip("0") for path in folder.iterdir()) == ["5", "8"]
