"""Which layers of a model are corrected now, and which are not and why."""

from torch import Tensor, nn

from consequent.capture.capture import Capture
from consequent.layers import joint_of, kind_of
from consequent.options.parameter_groups import Groups
from consequent.options.selection import Pattern, Selection, readable_name, select_layers

_REPLACED = (
    "replaced after attaching: add its parameters to the optimiser (add_param_group), or detach() and attach anew with "
    "an optimiser that has them"
)
_NOT_EXCHANGED = 'its inputs are not exchanged between ranks: at="backward" corrects it'


class Layers:
    """The layers of a model that a correction is for.

    Args:
        model: without a wrapper around it.
        include: which to correct; None: all that can be.
        exclude: which to leave out.

    Attributes:
        selection: of the model's layers, as it was looked at last.
    """

    def __init__(self, model: nn.Module, include: list[Pattern] | None, exclude: list[Pattern]) -> None:
        self.model = model
        self.include = include
        self.exclude = exclude
        self._leaves_out_joints = False  # whether modules of several products are not corrected
        self.selection = self._selected()

    def select_again(self, capture: Capture) -> None:
        """A layer may have been replaced, or frozen: watch what is to be corrected now."""
        self.selection = self._selected()
        capture.extend(self.selection.corrected)

    def leave_out_joints(self) -> None:
        """Modules with several products inside are not corrected from now on, once it is selected again."""
        self._leaves_out_joints = True

    def _selected(self) -> Selection:
        selection = select_layers(self.model, self.include, self.exclude)
        if self._leaves_out_joints:
            joint = [name for name, layer in selection.corrected.items() if joint_of(layer) is not None]
            for name in joint:
                del selection.corrected[name]
                selection.plain[name] = _NOT_EXCHANGED
            if joint and not selection.corrected:
                raise RuntimeError(
                    f"layer {joint[0]!r} has several products inside, whose inputs are not exchanged between ranks, "
                    'and there is no other layer to correct: attach with at="backward"'
                )
        return selection

    def plain(self, capture: Capture, groups: Groups, uncaptured: dict[str, str]) -> dict[str, str]:
        """The modules that keep their plain gradient, by name, and why.

        Args:
            capture: the layers that are watched.
            groups: of the optimisers.
            uncaptured: layers whose gradient comes from no product of theirs, and why.
        """
        present = {readable_name(name): module for name, module in self.model.named_modules()}
        reasons = dict(self.selection.plain)
        for name, layer in capture.layers.items():
            parameters = [p for unit in capture.units_of(layer) for p in unit]
            if name in present and present[name] is not layer:
                reasons[name] = _REPLACED
            if layer in capture.misbehaving:
                reasons[name] = capture.misbehaving[layer]
            elif name in uncaptured:
                reasons[name] = uncaptured[name]
            elif not any(parameter.requires_grad for parameter in parameters):
                reasons[name] = "frozen"
            elif not any(groups.owns(parameter) for parameter in parameters):
                reasons[name] = "not among the optimiser's parameters"
        return reasons


def weights_of(capture: Capture) -> dict[str, tuple[Tensor, int, int]]:
    """The weight of each layer, its groups, and the columns of its inputs; none where only its bias is trained."""
    found = {}
    for name, layer in capture.layers.items():
        weight, kind = capture.parameters_of(layer)[0], kind_of(layer)
        if kind is None:
            continue  # several products, which have no averages
        operation = kind.of(layer)
        found[name] = weight, operation.groups, operation.features if weight.requires_grad else 0
    return found
