"""What a board installs: act from a flatbuffer, with NumPy and LiteRT."""
