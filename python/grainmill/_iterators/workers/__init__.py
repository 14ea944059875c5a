"""Sequential stages in worker processes, each a share of the plan upstream."""
