//! Records to values: the wire format of protocol buffers, and `tf.train.Example` messages in it.
//!
//! Nothing here allocates by what a length in the input claims: values are counted first.

pub mod example;
pub mod number;
pub mod wire;
