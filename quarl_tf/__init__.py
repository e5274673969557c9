"""Shrink reinforcement-learning policies and prove what that costs."""

__version__ = "0.1.0"
