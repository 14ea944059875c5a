"""What a running pipeline records about itself, and the reports made of it."""
