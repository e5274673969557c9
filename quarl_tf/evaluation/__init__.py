"""Play episodes with flatbuffers, and compare their returns, memory and time."""
