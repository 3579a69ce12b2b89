"""Orbit: reinforcement learning of language models on a frozen low-precision base."""

__version__ = "0.1.0"
