//! A producer of slots, and a consumer that passes each to several threads.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use grainmill_core::batch::{Arena, BorrowedSlot, RemoteSlots, Slot};

/// Tasks that are sent to the producer before the first slot is returned.
const NUM_INITIAL_TASKS: usize = 8;
/// Whole size classes, so that users see borrowed slots up to the last byte.
const BYTE_LENS: [usize; 3] = [512, 5_120, 73_728];
const POISON: u8 = 0xA5;

/// Fills `num_slots` slots, one for each task, and waits until all are returned.
///
/// `next_task` waits for a task, with the slots that were returned; `send` gets a slot, the byte it
/// is filled with, and the slots that were freed.
pub(crate) fn produce(
    num_slots: usize,
    mut next_task: impl FnMut() -> Vec<u64>,
    mut send: impl FnMut(&Slot, u8, Vec<u64>),
) {
    let arena = Arena::shared(true);
    let mut unreturned = HashMap::new();
    for number in 0..num_slots {
        for slot in next_task() {
            unreturned.remove(&slot);
        }
        let freed = if number % 97 == 96 { arena.trim(0) } else { Vec::new() };
        let mut slot = arena.slot(BYTE_LENS[number % 3]).unwrap();
        let found = slot.bytes()[0];
        assert!(found == 0 || found == POISON, "a free slot is not written");
        assert!(slot.bytes().iter().all(|&byte| byte == found), "a free slot is not written");
        let mark = u8::try_from(number % 150 + 1).unwrap();
        slot.bytes_mut().fill(mark);
        send(&slot, mark, freed);
        unreturned.insert(slot.shared_id().unwrap(), slot);
    }
    while !unreturned.is_empty() {
        for slot in next_task() {
            unreturned.remove(&slot);
        }
    }
    assert_eq!(arena.free_bytes(), arena.total_bytes(), "no slot is lost");
}

/// A message of the producer: a slot and its contents.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) slot: u64,
    pub(crate) mark: u8,
    pub(crate) freed: Vec<u64>,
}

/// Receives `num_slots` slots and passes each to several threads, any of which may drop it last.
///
/// `receive` waits for the next slot, and adds it to the remote slots if it is new; `send_task`
/// sends a task with the slots that were returned.
pub(crate) fn consume(
    num_slots: usize,
    mut receive: impl FnMut(&RemoteSlots) -> Message,
    mut send_task: impl FnMut(Vec<u64>),
) {
    let remote_slots = RemoteSlots::new(true);
    let users: Vec<_> = (1..=3).map(|user| start_user(user * 2)).collect();
    (0..NUM_INITIAL_TASKS).for_each(|_| send_task(Vec::new()));
    for _ in 0..num_slots {
        let message = receive(&remote_slots);
        for slot in message.freed {
            remote_slots.forget(slot);
        }
        let borrowed = Arc::new(remote_slots.borrow(message.slot).unwrap());
        for (user, _) in &users {
            user.send((Arc::clone(&borrowed), message.mark)).unwrap();
        }
        drop(borrowed);
        send_task(remote_slots.take_returned().0);
    }
    for (user, thread) in users {
        drop(user);
        thread.join().unwrap();
    }
    send_task(remote_slots.take_returned().0);
}

/// A thread that holds up to `max_held` slots, and checks each before it drops it.
fn start_user(max_held: usize) -> (Sender<(Arc<BorrowedSlot>, u8)>, JoinHandle<()>) {
    let (sender, receiver) = channel::<(Arc<BorrowedSlot>, u8)>();
    let user = move || {
        let mut held = VecDeque::new();
        for slot in receiver {
            held.push_back(slot);
            if held.len() > max_held
                && let Some((slot, mark)) = held.pop_front()
            {
                assert!(crate::bytes::all_are(&slot, mark), "a slot changed under its user");
            }
        }
        assert!(held.iter().all(|(slot, mark)| crate::bytes::all_are(slot, *mark)));
    };
    (sender, std::thread::spawn(user))
}
