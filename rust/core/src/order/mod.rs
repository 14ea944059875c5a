//! Which record comes next: arithmetic on indices, with no file, clock or thread.

mod floor;
pub mod mix;
pub mod permute;
mod recent;
pub mod resolve;
pub mod seed;
mod stage;
pub mod window;

pub use mix::MixSchedule;
pub use permute::Permutation;
pub use resolve::{Column, Resolver, Tree};
