//! Elements into rows of a slot.
