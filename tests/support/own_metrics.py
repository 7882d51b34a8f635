"""A metric of a user's own, as docs/add-a-metric.md has one; and a wrong one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

import goldfinch as gf


@gf.checked
class ClassF1(gf.OwnMetric):
    """F1 of one class, and the Brier score."""

    label: int = 0

    sum_names = ("found", "true", "predicted", "squares", "images")
    sum_ranges: ClassVar[Mapping[str, gf.SumRange]] = {
        "squares": gf.SumRange(high=2.0),
        "images": gf.SumRange(low=1.0, whole=True),
    }
    measures: ClassVar[Mapping[str, gf.Measure]] = {
        "class_f1": gf.Measure("F1 of one class"),
        "brier": gf.Measure("Brier score of my own", unit="", lower_is_better=True),
    }

    def sums(self, probabilities: Tensor, labels: Tensor) -> Mapping[str, float | Tensor]:
        true = labels == self.label
        predicted = probabilities.argmax(1) == self.label
        errors = probabilities.double().clone()
        errors[range(len(labels)), labels] -= 1
        return {
            "found": (true & predicted).sum(),
            "true": true.sum(),
            "predicted": predicted.sum(),
            "squares": errors.square().sum(),
            "images": len(labels),
        }

    def values(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        return {
            "class_f1": 200 * sums["found"] / (sums["true"] + sums["predicted"]),
            "brier": sums["squares"] / sums["images"],
        }


@gf.checked
class Wrong(gf.OwnMetric):
    """A metric with the mistake that ``kind`` names."""

    kind: str = ""

    sum_names = ("images",)
    measures: ClassVar[Mapping[str, gf.Measure]] = {"mine": gf.Measure("mine")}

    def sums(self, probabilities: Tensor, labels: Tensor) -> Mapping[str, Any]:
        if self.kind == "other sums":
            return {"images": 1, "more": 2}
        if self.kind == "no number":
            return {"images": probabilities}
        if self.kind == "not finite":
            return {"images": np.inf}
        if self.kind == "too many":
            return {"images": len(labels) + 1}
        if self.kind == "raises":
            return {"images": probabilities[len(labels)].sum()}
        if self.kind == "mean":
            return {"images": probabilities.max(1).values.mean()}
        if self.kind == "mean margin":
            first, second = probabilities.topk(2).values.unbind(1)
            return {"images": (first - second).mean()}
        return {"images": len(labels)}

    def values(self, sums: Mapping[str, float]) -> Mapping[str, Any]:
        if self.kind == "other values":
            return {"yours": 1.0}
        if self.kind == "no number of values":
            return {"mine": [1.0]}
        if self.kind == "undefined":
            return {"mine": float("nan")}
        if self.kind == "an array":
            return {"mine": np.float32(0.5) * np.ones(())}
        if self.kind == "no values":
            return super().values(sums)
        if self.kind == "raises later" and sums["images"] != 20:  # the trial has two images of ten classes
            raise KeyError("nothing")
        return {"mine": sums["images"]}
