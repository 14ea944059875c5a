//! The layer `batch` through its public API.

use std::sync::Arc;

use grainmill_core::batch::{ALIGNMENT, Arena, copy_rows};
use grainmill_core::bytes::Bytes;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn copied_rows_match_concatenated_rows(
        row_len in prop_oneof![0..200_usize, 4000..40_000_usize],
        num_rows in 0..40_usize,
        first in any::<u8>(),
    ) {
        let elements: Vec<Vec<u8>> = (0..num_rows)
            .map(|row| (0..row_len).map(|at| first ^ u8::try_from((at * 31 + row * 7) % 256).unwrap()).collect())
            .collect();
        let rows: Vec<Bytes<'_>> = elements.iter().map(|row| row.as_slice().into()).collect();
        let mut slot = Arena::new(1 << 30).slot(row_len * num_rows).unwrap();
        copy_rows(&rows, row_len, slot.bytes_mut());
        prop_assert_eq!(slot.bytes(), elements.concat());
    }
}

#[test]
#[should_panic(expected = "rows do not fill `out`")]
fn rows_that_do_not_fill_the_slot_are_refused() {
    copy_rows(&[[1, 2].as_slice().into()], 2, &mut [0; 3][..]);
}

#[test]
fn slots_are_aligned_whatever_their_length() {
    let arena = Arena::new(1 << 30);
    for byte_len in [0, 1, 7, 513, 4097, 1_000_001] {
        let slot = arena.slot(byte_len).unwrap();
        assert_eq!(slot.as_ptr().addr() % ALIGNMENT, 0);
        assert_eq!(slot.bytes().len(), byte_len);
    }
}

#[test]
fn shared_slot_is_returned_by_its_last_owner() {
    let arena = Arena::new(1 << 30);
    let owner = Arc::new(arena.slot(10_000).unwrap());
    let other = Arc::clone(&owner);
    drop(owner);
    assert_eq!(arena.free_bytes(), 0);
    drop(other);
    assert!(arena.free_bytes() >= 10_000);
}

#[test]
fn bytes_of_slots_held_by_threads_never_change() {
    let arena = Arena::with_poison(1 << 20, true);
    std::thread::scope(|scope| {
        for thread in 0..4_u8 {
            let arena = &arena;
            scope.spawn(move || {
                let mut held = std::collections::VecDeque::new();
                for round in 0..500_usize {
                    let mut slot = arena.slot(600 + round % 5 * 900).unwrap();
                    let mark =
                        thread.wrapping_mul(61).wrapping_add(u8::try_from(round % 50).unwrap());
                    slot.bytes_mut().fill(mark);
                    held.push_back((slot, mark));
                    if held.len() > 5
                        && let Some((slot, mark)) = held.pop_front()
                    {
                        assert!(slot.bytes().iter().all(|&byte| byte == mark));
                    }
                }
            });
        }
    });
}
