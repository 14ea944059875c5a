//! What every system must do, tested with the implementation that is compiled.
#![expect(unsafe_code, reason = "mappings are unmapped by address")]

use std::os::fd::{AsFd, OwnedFd};

use super::{die_with_parent, discard_pages, fixed_len, map_file, shared_file, unmap};

fn file_of(byte_len: u64) -> OwnedFd {
    shared_file("tested", byte_len).unwrap()
}

#[test]
fn shared_files_are_zero_and_shared_by_all_mappings() {
    let file = file_of(10_000);
    let [ours, theirs] = [(), ()].map(|()| map_file(file.as_fd(), 10_000).unwrap());
    drop(file);
    assert_ne!(ours, theirs);
    for offset in [0, 9_999] {
        // SAFETY: two bytes of 10,000, and nothing else uses the mapping.
        assert_eq!(unsafe { theirs.as_ptr().wrapping_add(offset).read() }, 0);
        // SAFETY: as above.
        unsafe { ours.as_ptr().wrapping_add(offset).write(7) };
        // SAFETY: as above.
        assert_eq!(unsafe { theirs.as_ptr().wrapping_add(offset).read() }, 7);
    }
    for mapping in [ours, theirs] {
        // SAFETY: mapped above, and not used again.
        unsafe { unmap(mapping, 10_000) }.unwrap();
    }
}

#[test]
fn two_files_share_nothing() {
    let [a, b] = [(), ()].map(|()| map_file(file_of(64).as_fd(), 64).unwrap());
    // SAFETY: the first byte of 64.
    unsafe { a.as_ptr().write(7) };
    // SAFETY: the first byte of 64.
    assert_eq!(unsafe { b.as_ptr().read() }, 0);
    for mapping in [a, b] {
        // SAFETY: mapped above, and not used again.
        unsafe { unmap(mapping, 64) }.unwrap();
    }
}

#[test]
fn lengths_are_those_requested() {
    let file = file_of(10_000);
    assert_eq!(fixed_len(file.as_fd(), 10_000).unwrap(), (10_000, true));
    assert!(!fixed_len(file.as_fd(), 20_000).unwrap().1);
    assert!(!fixed_len(file.as_fd(), 1_000).unwrap().1);
}

#[test]
fn mapping_whose_pages_were_discarded_is_still_writable() {
    let start = map_file(file_of(10_000).as_fd(), 10_000).unwrap();
    // SAFETY: mapped above, and used by nothing else.
    unsafe { discard_pages(start, 10_000) };
    // SAFETY: a byte of the mapping.
    unsafe { start.as_ptr().write(7) };
    // SAFETY: a byte of the mapping.
    assert_eq!(unsafe { start.as_ptr().read() }, 7);
    // SAFETY: mapped above, and not used again.
    unsafe { unmap(start, 10_000) }.unwrap();
}

#[test]
fn other_processes_than_the_parent_are_rejected() {
    // The parent is the process that started the tests, never this process.
    assert!(!die_with_parent(std::process::id()).unwrap());
}
