//! Sequences into bins.
