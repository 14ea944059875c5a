//! Sequences into bins: which bin each one goes to, and its cells into the row of that bin.
//!
//! [`RowFill`] decides for rows filled one after another, where sequences may be cut.
//! [`Bins`] decides, from lengths alone; [`Column`] holds one feature of all rows and copies.

mod best_fit;
mod bins;
mod column;
mod concat_split;
mod first_fit;

pub use bins::{Bins, Fit, Layout};
pub use column::{Column, Placement};
pub use concat_split::{Limits, Piece, RowFill, Taken};
