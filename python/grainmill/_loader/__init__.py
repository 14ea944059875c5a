"""`DataLoader`: a sampler says which records come, operations say what becomes of them."""
