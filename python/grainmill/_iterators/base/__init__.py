"""What sequential stages are made of: nodes, blocks, positions, cursors, checked states."""
