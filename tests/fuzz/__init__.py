"""A differential fuzzer: random networks in random training loops, beside a reference that shares nothing with them."""
