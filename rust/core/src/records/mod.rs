//! The bytes of records, by index.
