"""What datasets and iterators show of themselves: texts, drawings, progress, statistics."""
