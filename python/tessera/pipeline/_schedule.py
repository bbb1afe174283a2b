"""Schedules: for every stage the order in which it receives, computes and sends, as a table of actions.

They are those of the core; tessera/pipeline/schedule.h says how tables fit together.
"""

from __future__ import annotations

from tessera._core import PipelineShape as Shape
from tessera._core import StageAction as Action
from tessera._core import forward_table as forward_only
from tessera._core import live_bound, pipeline_schedules
from tessera._core import training_table as training

__all__ = ["SCHEDULES", "Action", "Shape", "forward_only", "live_bound", "training"]

SCHEDULES = tuple(pipeline_schedules())
