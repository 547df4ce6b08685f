"""Experiments for consequent."""
