//! The order of records: arithmetic on indices, without files, clocks or threads.

mod column;
mod floor;
mod groups;
mod lanes;
pub mod mix;
mod orders;
pub mod permute;
mod remaining;
pub mod resolve;
pub mod seed;
mod stage;
mod tree;
mod wide;
pub mod window;

pub use column::Column;
pub use mix::{MixSchedule, RecentChoices};
pub use permute::Permutation;
pub use resolve::Resolver;
pub use tree::Tree;
