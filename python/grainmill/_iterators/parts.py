"""Datasets that a stage opens while it runs, recorded as one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from grainmill._stats.numbering import numbered

if TYPE_CHECKING:
    from grainmill._evaluate.context import Context
    from grainmill._iterators.pipeline_job import OpenPlan
    from grainmill._iterators.stage import Stage
    from grainmill._plan.node import Node


def open_part(node: Node, output: Node, open_plan: OpenPlan, context: Context) -> Stage:
    """Opens a dataset of the stage that runs `node`.

    Args:
        node: The node whose datasets are recorded together.
        output: The dataset's last node.
        open_plan: Opens a plan.
        context: The context of `node`.
    """
    parts = context.recorder.parts(node)
    parts.opened(output, [(stage.number, stage.node) for stage in numbered(output)])
    return open_plan(output, dataclasses.replace(context, recorder=parts))
