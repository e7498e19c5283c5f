"""What components show of θ: filters, a kernel, a sampling pattern, a map of weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from bltoolbox.bilevel.records import Theta
from bltoolbox.restoration.roles import Regularizer
from bltoolbox.restoration.variational import Variational


@dataclass(frozen=True)
class ParameterPictures:
    """Pictures of one role, with what they are."""

    role: str
    caption: str
    #: (N, C, H, W), of any scale.
    values: Tensor

    @property
    def shades(self) -> Tensor:
        """For drawing, in [0, 1]: black is 0, or the smallest value where some are negative; white is the largest."""
        least, most = self._ends
        return (self.values - least) / max(most - least, 1e-12)

    @property
    def scale(self) -> str:
        """What black and white mean."""
        least, most = self._ends
        return f"black {least:.3g}, white {most:.3g}"

    @property
    def _ends(self) -> tuple[float, float]:
        return min(0.0, float(self.values.min())), float(self.values.max())


def shown_parameters(problem: Variational, prepared: Mapping[str, Theta]) -> list[ParameterPictures]:
    """Pictures of θ, which is prepared by role; the regularizer's filters are drawn apart, with their potentials."""
    shown = []
    for role, component in problem.components.items():
        filters = isinstance(component, Regularizer) and _has_filters(component)
        if not filters and (pictures := component.pictures(prepared[role])) is not None:
            caption = component.caption or role.replace("_", " ").capitalize()
            shown.append(ParameterPictures(role, caption, pictures.detach().cpu().double()))
    return shown


def shown_filters(problem: Variational, prepared: Mapping[str, Theta]) -> Tensor | None:
    """The filters of the regularizer, if that is what it shows of θ."""
    regularizer = problem.regularizer
    return regularizer.pictures(prepared["regularizer"]) if _has_filters(regularizer) else None


def _has_filters(regularizer: Regularizer) -> bool:
    """Whether its pictures are filters, as its caption says unless it has another one."""
    return regularizer.caption == Regularizer.caption
