"""Draw the figures of a report: pure functions from numbers to a `Figure`, without pyplot."""
