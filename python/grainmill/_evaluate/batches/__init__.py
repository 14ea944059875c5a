"""Elements, records and columns stacked to batches."""
