"""What a run does, as read from ``plans/``."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from cookbook.train_tiny.losses import LossWeights
from cookbook.train_tiny.sequences import Mix
from cookbook.train_tiny.spec import TINY

if TYPE_CHECKING:
    from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of training.

    Attributes:
        name: For the log.
        mix: What batches consist of.
        sparse: Whether attention sees selections only.
        index_topk: Positions that a selection has; fewer than are served teach on short contexts
            what long ones ask.
        at_least: Seconds that it lasts whatever it reaches.
        at_most: Seconds after which it ends.
        until: Smoothed accuracy on codes at which it ends in between.
        losses: Weights of the losses.
    """

    name: str
    mix: Mix
    sparse: bool = False
    index_topk: int = TINY.index_topk
    at_least: float = 0.0
    at_most: float = 1e9
    until: float = 2.0
    losses: LossWeights = dataclasses.field(default_factory=LossWeights)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run.

    Attributes:
        phases: In order; the last ends with the time.
        muon_lr: Peak of Muon's learning rate.
        adam_lr: Peak of Adam's.
        warm_up: Steps of linear warm-up.
        cool_down: Share of the time at whose end the rates have fallen linearly.
        final: Share of the peak that is left at the end.
        bias_speed: Step of the router's load-balancing bias.
    """

    phases: tuple[Phase, ...]
    muon_lr: float = 4e-3
    adam_lr: float = 3e-3
    warm_up: int = 100
    cool_down: float = 0.4
    final: float = 0.05
    bias_speed: float = 1e-3


def read_plan(path: Path) -> Plan:
    """Read a plan from JSON; the keys are those of the dataclasses."""
    values: dict[str, Any] = json.loads(path.read_text())
    phases = []
    for phase in values.pop("phases"):
        phase["mix"]["questions"] = tuple(phase["mix"]["questions"])
        phase["mix"] = Mix(**phase["mix"])
        phase["losses"] = LossWeights(**phase.get("losses", {}))
        phases.append(Phase(**phase))
    return Plan(phases=tuple(phases), **values)
