"""Act from a flatbuffer with NumPy and LiteRT alone, as on a board."""

from pathlib import Path

#: Three policies that come with the package, `<environment>/<algorithm>/s0/int8.tflite`.
POLICIES = Path(__file__).parent / "policies"
