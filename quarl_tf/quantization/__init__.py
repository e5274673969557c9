"""Quantisers: the affine mathematics and what applies it to networks."""
