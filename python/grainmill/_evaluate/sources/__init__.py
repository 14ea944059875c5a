"""What gives the elements or records at given indices: files, objects, caches, groups."""
