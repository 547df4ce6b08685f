"""From a seed that fails to a smaller case that still fails: what does not matter is left out, thing by thing."""

from dataclasses import MISSING, fields

from fuzz.run import Case, check

SETTINGS = {"damping": 1.0, "reduction": "sum", "refresh": 1, "second": set(), "excluded": (), "bound": None}
HOW = {"style": "tanh", "in_place": None, "chained": False}


def shrink(seed, mode):
    """The message of the smallest case that was found; None if the seed does not fail."""
    kept, message = [], failure(seed, mode)
    kind, progress = kind_of(message), message is not None
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
    """Wrong numbers, or the end of another complaint."""
    return message and ("numbers" if "relative error" in message.splitlines()[0] else message.splitlines()[0][-20:])


def failure(seed, mode, applied=()):
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
    if len(case.steps) > 1:
        yield lambda case: case.steps.pop(0)
        yield lambda case: case.steps.pop()
    for s, step in enumerate(case.steps):
        yield from simpler(step, lambda case, s=s: case.steps[s])
        for a in reversed(range(len(step.body))):
            yield lambda case, s=s, a=a: case.steps[s].body.pop(a)
    for s, step in enumerate(case.steps):
        for a, action in enumerate(step.body):
            yield from simpler(action, lambda case, s=s, a=a: case.steps[s].body[a])
    for name, value in SETTINGS.items():
        if getattr(case, name) != value:
            yield lambda case, name=name, value=value: setattr(case, name, value)
    if any(not p.requires_grad for p in case.net.model.parameters()):
        yield lambda case: case.net.model.requires_grad_(True)
    for name, module in case.net.model.named_modules():
        for key, value in HOW.items():
            if getattr(module, "how", {}).get(key, value) != value:
                yield lambda case, n=name, k=key, v=value: case.net.model.get_submodule(n).how.update({k: v})
    for part in ("first", "second"):
        for place in reversed(range(len(getattr(case.net.model, part, ())))):
            yield lambda case, part=part, place=place: getattr(case.net.model, part).pop(place)


def simpler(action, find):
    """Functions that set one of the action's fields to what it is by default."""
    for each in fields(action):
        if each.default is not MISSING and getattr(action, each.name) != each.default:
            yield lambda case, each=each: setattr(find(case), each.name, each.default)
