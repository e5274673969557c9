"""Train one run, resumable to the byte."""
