"""Consequentialism: what is attached to an optimiser and rewrites the gradients before each of its steps."""

from consequent.correction.attaching import attach
from consequent.correction.consequentialism import Consequentialism

__all__ = ["Consequentialism", "attach"]
