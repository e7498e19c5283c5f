"""A metric as records carry it: its name, how its values are written, and which way is better. Without torch.

The code that measures a metric describes it in ``status.json`` and ``checks.jsonl``; readers need not know any metric.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

#: The name of a metric in the keys of a record, e.g. ``validation_psnr``.
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_LONGEST = 40


@dataclass(frozen=True)
class Metric:
    """How values of one metric are named, written and compared."""

    name: str
    label: str
    unit: str = ""
    #: Digits after the decimal point.
    digits: int = 4
    #: Whether higher is better.
    higher: bool = True

    @property
    def title(self) -> str:
        """For headings and axes: ``PSNR in dB``."""
        return f"{self.label} in {self.unit}" if self.unit else self.label

    def number(self, value: float | None, *, sign: bool = False) -> str:
        """A value without its unit; a dash if it is unknown."""
        if value is None or math.isnan(value):
            return "–"
        return f"{value:{'+' if sign else ''}.{self.digits}f}"

    def show(self, value: float | None, *, sign: bool = False) -> str:
        """A value with its unit."""
        text = self.number(value, sign=sign)
        return f"{text} {self.unit}" if self.unit and text != "–" else text

    def better(self, value: float, than: float) -> bool:
        """Whether a value is strictly better than another; NaN is worse than any number."""
        if math.isnan(value) or math.isnan(than):
            return not math.isnan(value)
        return value > than if self.higher else value < than

    def best(self, values: Iterable[float | None]) -> float | None:
        """The best of the values that are known."""
        numbers = [value for value in values if value is not None and not math.isnan(value)]
        return (max if self.higher else min)(numbers, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for records."""
        return {field.name: getattr(self, field.name) for field in fields(Metric)}

    @classmethod
    def parse(cls, data: Any) -> Self | None:
        """From a record, which may be damaged or come from someone else; None if it describes no metric."""
        try:
            metric = cls(**data)
        except TypeError:
            return None
        usable = (
            isinstance(metric.name, str)
            and _NAME.fullmatch(metric.name)
            and all(isinstance(text, str) and len(text) <= _LONGEST for text in (metric.label, metric.unit))
            and type(metric.digits) is int  # a boolean is one, too, but no precision
            and 0 <= metric.digits <= 9
            and isinstance(metric.higher, bool)
        )
        return metric if usable else None


#: The metric of records that describe none, as earlier versions wrote them.
UNDESCRIBED = Metric("psnr", "PSNR", "dB", 2)


def described(*records: Any) -> tuple[Metric, ...]:
    """The metrics that records describe under ``metrics`` or ``metric``, the deciding one first."""
    for record in records:
        entries = record.get("metrics", [record.get("metric")])
        metrics = [Metric.parse(entry) for entry in entries] if isinstance(entries, list) else []
        if readable := tuple(metric for metric in metrics if metric is not None):
            return readable
    return (UNDESCRIBED,)


def most_common(metrics: Sequence[Metric]) -> Metric:
    """The metric by which most runs chose, the first of those if there are several."""
    return max(metrics, key=metrics.count, default=UNDESCRIBED)
