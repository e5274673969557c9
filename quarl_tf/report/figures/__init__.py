"""Draw the figures of a report, without pyplot."""
