"""Replay flatbuffers and compare what they earn."""
