//! Which record comes next: arithmetic on indices, with no file, clock or thread.
