//! Objects of S3, Google Cloud Storage and Azure, and files of HTTP servers, as a [`Storage`] of the
//! engine.
//!
//! A read is one blocking call for an exact range of bytes: many are in flight because many threads
//! of the engine call. The requests themselves run on a small runtime, one for each process, that
//! starts with the first (`client`). Failed requests are repeated until a deadline (`fetch`), and
//! blocks may be kept in a cache on a local disk (`block_cache`). Objects are written in parts
//! (`upload`). It knows no format of files.
//!
//! [`Storage`]: grainmill_core::io::storage::Storage

mod access;
mod aws_profile;
pub mod block_cache;
mod client;
mod fetch;
mod identity;
mod list;
mod list_names;
mod location;
mod object;
mod pending;
mod settings;
mod upload;

pub use identity::{ObjectIdentity, identities};
pub use list::list;
pub use location::is_url;
pub use object::Buckets;
pub use pending::{PendingRequest, longest_wait, pending_requests};
pub use settings::Settings;
pub use upload::{Upload, UploadControl, abort, remove};
