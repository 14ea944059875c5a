"""A pool of processes that run user functions: started at once, watched, and gone when told."""
