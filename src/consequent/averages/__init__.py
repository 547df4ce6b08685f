"""Averages: inputs are looked at every T-th step, and ``.grad`` is multiplied by an inverse at each."""
