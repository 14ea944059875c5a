//! The bytes of records, by index.

pub mod riegeli;
