"""The paper's experiments: what is run, what is measured, what becomes of each of its statements."""
