//! Which record comes next: arithmetic on indices, with no file, clock or thread.

mod column;
mod floor;
mod lanes;
pub mod mix;
mod orders;
pub mod permute;
mod remaining;
pub mod resolve;
pub mod seed;
mod stage;
mod tree;
pub mod window;

pub use column::Column;
pub use mix::{MixSchedule, RecentChoices};
pub use permute::Permutation;
pub use resolve::Resolver;
pub use tree::Tree;
