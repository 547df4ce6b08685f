"""From a seed that fails to a smaller case that still fails: what does not matter is left out, thing by thing."""

from fuzz import loops
from fuzz.run import Case, check

DEFAULTS = {
    "mask": "none",
    "factor": 1.0,
    "penalties": (),
    "checkpoint": None,
    "asked": None,
    "only": None,
    "task": "whole",
}


def shrink(seed, mode):
    """The message of the smallest case that was found; None if the seed does not fail."""
    kept = []
    message = failure(seed, mode, kept)
    kind = kind_of(message)
    progress = message is not None
    while progress:
        progress = False
        for change in changes(case_of(seed, mode, kept)):
            smaller = failure(seed, mode, [*kept, change])
            if kind_of(smaller) == kind is not None:
                kept.append(change)
                message, progress = smaller, True
                break
    return message


def kind_of(message):
    """Wrong numbers, or the beginning of another complaint."""
    return message and ("numbers" if "relative error" in message.splitlines()[0] else message[:20])


def failure(seed, mode, applied):
    """What goes wrong, if something does; a case that is no legal loop any more does not count."""
    try:
        check(lambda: case_of(seed, mode, applied))
    except AssertionError as error:
        return str(error)
    except Exception:
        return None
    return None


def case_of(seed, mode, applied):
    case = Case(seed, mode)
    for change in applied:
        change(case)
    return case


def changes(case):
    """Functions that make the case simpler, the coarse ones first."""
    last = len(case.actions) - 1
    if last > 0:
        yield lambda case: case.actions.pop(0)
        yield lambda case: case.actions.pop()
    for s, step in enumerate(case.actions):
        for name in ("closure", "spoilt", "reloaded"):
            if getattr(step, name):
                yield lambda case, s=s, name=name: setattr(case.actions[s], name, False)
        for a, action in enumerate(step.body):
            if a > 0 or s == 0 or not isinstance(action, loops.Zero):  # a step needs its zero_grad
                yield lambda case, s=s, a=a: drop(case.actions[s], a)
    for s, step in enumerate(case.actions):
        for a, action in enumerate(step.body):
            for name, value in DEFAULTS.items():
                if isinstance(action, loops.Pass) and getattr(action, name) != value:
                    yield lambda case, s=s, a=a, n=name, v=value: setattr(case.actions[s].body[a], n, v)
    if case.averaging != (0.0, 1):
        yield lambda case: setattr(case, "averaging", (0.0, 1))
    if case.own_dampings:
        yield lambda case: setattr(case, "own_dampings", {})
    if case.reduction != "sum":
        yield lambda case: setattr(case, "reduction", "sum")
    if any(not p.requires_grad for p in case.net.model.parameters()):
        yield lambda case: case.net.model.requires_grad_(True)
    for name, module in case.net.model.named_modules():
        for attribute, value in {"style": "tanh", "in_place": None, "chained": False, "dilations": (1, 1)}.items():
            if getattr(module, attribute, value) != value:
                yield lambda case, n=name, a=attribute, v=value: setattr(case.net.model.get_submodule(n), a, v)
    for part in ("first", "second"):
        for place in reversed(range(len(getattr(case.net.model, part)))):
            yield lambda case, part=part, place=place: getattr(case.net.model, part).pop(place)


def drop(step, place):
    step.body = step.body[:place] + step.body[place + 1 :]
