//! The bytes of records, by index.

pub mod array_record;
pub mod riegeli;
