"""Files that saved states are kept in, and what they say about the pipeline."""
