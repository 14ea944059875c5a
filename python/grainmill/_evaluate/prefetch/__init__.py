"""Elements computed ahead of the consumer: blocks in order, by the caller, threads or processes."""
