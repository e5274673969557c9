"""Export trained networks to flatbuffers."""
