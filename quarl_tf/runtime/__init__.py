"""Act from a flatbuffer with NumPy and LiteRT alone, as on a board."""

from pathlib import Path

#: Three policies that come with the package, `<algorithm>-<environment>.tflite`.
POLICIES = Path(__file__).parent / "policies"
