//! Systems without descriptors: the engine reads, shuffles, batches and packs there, and no
//! memory is shared between processes.
#![expect(unsafe_code, reason = "where there are mappings, these take an address")]

use std::convert::Infallible;
use std::io;
use std::marker::PhantomData;
use std::ptr::NonNull;

/// A file to be handed to another process, of which there are none here.
#[derive(Debug)]
pub struct OwnedFile(Infallible);

/// The same, borrowed.
#[derive(Clone, Copy, Debug)]
pub struct BorrowedFile<'a>(Infallible, PhantomData<&'a OwnedFile>);

/// Never called, for want of a file.
pub(crate) fn borrowed(file: &OwnedFile) -> BorrowedFile<'_> {
    match file.0 {}
}

fn unsupported<T>() -> io::Result<T> {
    let problem = "this system shares no memory between processes";
    Err(io::Error::new(io::ErrorKind::Unsupported, problem))
}

/// None: the error says so.
pub(crate) fn shared_file(_: &str, _: u64) -> io::Result<OwnedFile> {
    unsupported()
}

/// Never called, for want of shared memory: whether there is a process of this number.
pub(crate) fn is_alive(_: u32) -> bool {
    true
}

/// Never called, for want of a file.
pub(crate) fn fixed_len(file: BorrowedFile<'_>, _: u64) -> io::Result<(u64, bool)> {
    match file.0 {}
}

/// Never called, for want of a file.
pub(crate) fn mapped(file: BorrowedFile<'_>, _: usize) -> io::Result<NonNull<u8>> {
    match file.0 {}
}

/// None: the error says so.
pub(crate) fn anonymous(_: usize) -> io::Result<NonNull<u8>> {
    unsupported()
}

/// Never called, for want of a mapping.
///
/// # Safety
///
/// None is asked for here.
pub(crate) unsafe fn unmapped(_: NonNull<u8>, _: usize) -> io::Result<()> {
    Ok(())
}

/// Never called, for want of a mapping.
///
/// # Safety
///
/// None is asked for here.
pub(crate) unsafe fn give_back(_: NonNull<u8>, _: usize) {}

/// Not offered: workers there end when they find their connection closed.
///
/// # Errors
///
/// Always.
pub fn end_with(_: u32) -> io::Result<bool> {
    unsupported()
}
