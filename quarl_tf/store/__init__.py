"""Paths and records of runs, flatbuffers and reports, and the progress of experiments."""
