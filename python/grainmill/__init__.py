"""Files of records in, batches for training out: deterministic, resumable, fast."""
