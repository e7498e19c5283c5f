"""The trial of a line search: a step, and f with its bounds before and after it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bltoolbox.plugin import Status, Value


@dataclass(frozen=True)
class Trial:
    """A step to θ⁺ of length α, and f before and after it at accuracy ε."""

    theta: dict[str, Tensor]
    alpha: float
    tol: float
    before: Value
    after: Value
    #: The decrease of a linear f, and the part of it that the step must achieve.
    predicted: float
    promise: float
    #: Where to begin if no length is accepted: the longest that is not known to be too long.
    restart: float
    #: How often the accuracy was tightened, and how many lengths were tried.
    tightenings: int
    number: int

    @property
    def certified(self) -> bool:
        """Whether f decreases enough whatever the errors of both values."""
        return self.after.upper - self.before.lower <= -self.promise

    @property
    def plain(self) -> bool:
        """Whether the values decrease enough, regardless of their errors."""
        return self.after.value - self.before.value <= -self.promise

    @property
    def too_long(self) -> bool:
        """Whether f does not decrease enough whatever the errors of both values."""
        return self.after.lower - self.before.upper > -self.promise

    @property
    def barely(self) -> bool:
        """Whether the values decrease so little that a shorter step is easier to certify than this one.

        On a quadratic, steps that gain less than half of what is predicted are beyond the minimiser; if only errors
        four times smaller would do, the next shorter step gains more, and needs less accuracy.
        """
        decrease = self.before.value - self.after.value
        errors = self.after.upper - self.after.value + self.before.value - self.before.lower
        return decrease < self.predicted / 2 and decrease - self.promise < errors / 4

    @property
    def at_floor(self) -> bool:
        """Whether more accurate values cannot be computed."""
        stalled = Status.STALLED.name.lower()
        return stalled in self.before.short or stalled in self.after.short

    def metrics(self) -> dict[str, float | int | str]:
        """The decrease and what is known about it."""
        if not self.certified:
            decrease, kind = self.before.value - self.after.value, "plain"
        else:
            decrease = self.before.lower - self.after.upper
            kind = "certified" if self.before.certified and self.after.certified else "estimated"
        return {"decrease": decrease, "decrease_kind": kind, "certified": int(kind == "certified")}
