"""Where runs, flatbuffers and reports lie, what they record and what is done."""
