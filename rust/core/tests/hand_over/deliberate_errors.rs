//! Deliberate memory errors, with which `make sanitize` shows that the sanitizers detect them. They
//! are undefined behaviour, and run only if the environment variable `GRAINMILL_DELIBERATE_ERRORS` is set.
#![expect(unsafe_code, reason = "deliberate memory errors")]

use grainmill_core::batch::Arena;

fn is_enabled() -> bool {
    std::env::var_os("GRAINMILL_DELIBERATE_ERRORS").is_some()
}

#[test]
#[ignore = "a data race, for the thread sanitizer"]
fn slot_written_while_another_thread_returns_it() {
    if !is_enabled() {
        return;
    }
    let arena = Arena::with_poison(1 << 20, true);
    let slot = arena.slot(4_096).unwrap();
    let start = slot.as_ptr();
    let other = std::thread::spawn(move || drop(slot));
    // SAFETY: none, the other thread fills the slot with poison at the same time.
    unsafe { start.write_volatile(1) };
    other.join().unwrap();
    assert!(arena.free_bytes() > 0);
}

#[test]
#[ignore = "a use after free, for the address sanitizer"]
fn slot_read_after_its_arena_has_freed_it() {
    if !is_enabled() {
        return;
    }
    let slot = Arena::new(0).slot(4_096).unwrap();
    let start = slot.as_ptr();
    drop(slot);
    // SAFETY: none, an arena that retains nothing has freed it.
    assert_ne!(unsafe { start.read_volatile() }, 1);
}

#[test]
#[ignore = "a write past the end, for the address sanitizer"]
fn slot_written_past_its_end() {
    if !is_enabled() {
        return;
    }
    let slot = Arena::new(0).slot(4_096).unwrap();
    // SAFETY: none, a slot of 4,096 bytes has 4,160 with its alignment.
    unsafe { slot.as_ptr().wrapping_add(4_160).write_volatile(1) };
}
