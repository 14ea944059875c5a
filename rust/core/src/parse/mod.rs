//! Records to values: the wire format of protocol buffers, `tf.train.Example` messages in it, and JSON.
//!
//! Nothing here allocates by what a length in the input claims: values are counted first.

pub mod example;
pub mod json;
pub mod number;
pub mod wire;
