//! A maker of slots, and the many users of the process that receives them.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use grainmill_core::batch::{Arena, BorrowedSlot, RemoteSlots, Slot};

/// Tasks that a maker has before the first of its slots comes back.
const AHEAD: usize = 8;
/// Whole size classes: lent slots are seen to their last byte.
const BYTE_LENS: [usize; 3] = [512, 5_120, 73_728];
const POISON: u8 = 0xA5;

/// Makes `num_slots` slots, one for each task, and waits until all are its own again.
///
/// `next_task` waits for the slots that came back; `show` gets a slot, what is in it, and the slots
/// that are gone.
pub(crate) fn make(
    num_slots: usize,
    mut next_task: impl FnMut() -> Vec<u64>,
    mut show: impl FnMut(&Slot, u8, Vec<u64>),
) {
    let arena = Arena::shared(true);
    let mut sent = HashMap::new();
    for number in 0..num_slots {
        for slot in next_task() {
            sent.remove(&slot);
        }
        let gone = if number % 97 == 96 { arena.trim(0) } else { Vec::new() };
        let mut slot = arena.slot(BYTE_LENS[number % 3]).unwrap();
        let found = slot.bytes()[0];
        assert!(found == 0 || found == POISON, "a slot that waits is not written");
        assert!(slot.bytes().iter().all(|&byte| byte == found), "a slot that waits is not written");
        let mark = u8::try_from(number % 150 + 1).unwrap();
        slot.bytes_mut().fill(mark);
        show(&slot, mark, gone);
        sent.insert(slot.shared_id().unwrap(), slot);
    }
    while !sent.is_empty() {
        for slot in next_task() {
            sent.remove(&slot);
        }
    }
    assert_eq!(arena.free_bytes(), arena.total_bytes(), "no slot is lost");
}

/// What a maker sends.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) slot: u64,
    pub(crate) mark: u8,
    pub(crate) gone: Vec<u64>,
}

/// Takes in `num_slots` slots and gives each to several threads, of which any may be the last.
///
/// `hear` waits for the next slot, which it adds to the known ones where it is new; `give` sends a task.
pub(crate) fn receive(
    num_slots: usize,
    mut hear: impl FnMut(&RemoteSlots) -> Made,
    mut give: impl FnMut(Vec<u64>),
) {
    let remote_slots = RemoteSlots::new(true);
    let users: Vec<_> = (1..=3).map(|user| start_user(user * 2)).collect();
    (0..AHEAD).for_each(|_| give(Vec::new()));
    for _ in 0..num_slots {
        let made = hear(&remote_slots);
        for slot in made.gone {
            remote_slots.forget(slot);
        }
        let lent = Arc::new(remote_slots.borrow(made.slot).unwrap());
        for (user, _) in &users {
            user.send((Arc::clone(&lent), made.mark)).unwrap();
        }
        drop(lent);
        give(remote_slots.take_returned().0);
    }
    for (user, thread) in users {
        drop(user);
        thread.join().unwrap();
    }
    give(remote_slots.take_returned().0);
}

/// A thread that holds `most` slots at a time, and looks at each before it lets go of it.
fn start_user(most: usize) -> (Sender<(Arc<BorrowedSlot>, u8)>, JoinHandle<()>) {
    let (sender, receiver) = channel::<(Arc<BorrowedSlot>, u8)>();
    let user = move || {
        let mut held = VecDeque::new();
        for lent in receiver {
            held.push_back(lent);
            if held.len() > most
                && let Some((lent, mark)) = held.pop_front()
            {
                assert!(crate::bytes::all_are(&lent, mark), "a slot changed under its user");
            }
        }
        assert!(held.iter().all(|(lent, mark)| crate::bytes::all_are(lent, *mark)));
    };
    (sender, std::thread::spawn(user))
}
