"""Draw the figures of a report: pure functions from numbers to a figure.

Figures are `Figure` objects of their own: nothing is registered with pyplot, no window opens, and
a scheme has the same colour in every one of them.
"""
