//! Mistakes made on purpose, for `make sanitize` to show that the sanitizers see them. They run
//! only where the environment has `GRAINMILL_ILL`, and are undefined behaviour.
#![expect(unsafe_code, reason = "what is wrong here cannot be written without")]

use grainmill_core::batch::Arena;

fn wanted() -> bool {
    std::env::var_os("GRAINMILL_ILL").is_some()
}

#[test]
#[ignore = "a data race, for the thread sanitizer"]
fn slot_written_while_another_thread_returns_it() {
    if !wanted() {
        return;
    }
    let arena = Arena::with_poison(1 << 20, true);
    let slot = arena.slot(4_096).unwrap();
    let start = slot.as_ptr();
    let other = std::thread::spawn(move || drop(slot));
    // SAFETY: none, the other thread fills the slot with poison meanwhile.
    unsafe { start.write_volatile(1) };
    other.join().unwrap();
    assert!(arena.free_bytes() > 0);
}

#[test]
#[ignore = "a use after free, for the address sanitizer"]
fn slot_read_after_its_arena_has_freed_it() {
    if !wanted() {
        return;
    }
    let slot = Arena::new(0).slot(4_096).unwrap();
    let start = slot.as_ptr();
    drop(slot);
    // SAFETY: none, an arena that keeps nothing has freed it.
    assert_ne!(unsafe { start.read_volatile() }, 1);
}

#[test]
#[ignore = "a write past the end, for the address sanitizer"]
fn slot_written_past_its_end() {
    if !wanted() {
        return;
    }
    let slot = Arena::new(0).slot(4_096).unwrap();
    // SAFETY: none, a slot of 4,096 bytes is 4,160 with those for its alignment.
    unsafe { slot.as_ptr().wrapping_add(4_160).write_volatile(1) };
}
