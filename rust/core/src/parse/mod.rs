//! Records to values: the wire format of protocol buffers, `tf.train.Example` messages in it, and JSON.
//!
//! Nothing here allocates by what a length in the input claims: values are counted first.

pub mod example;
mod integer;
pub mod json;
pub mod number;
#[cfg(target_arch = "x86_64")]
mod varint_shuffle;
pub mod wire;
